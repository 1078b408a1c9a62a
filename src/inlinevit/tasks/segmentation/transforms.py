"""Augmentation of training images, with their label maps.

All random numbers come from torch's generator, so that a sample drawn again with its seed is the same.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torchvision.transforms import v2
from torchvision.tv_tensors import Mask

from ..backbone import MEAN_COLOR
from ..dense import PadToSize, RandomCrop, resize_mask
from .config import SegmentationAugmentConfig
from .labels import IGNORED

# An image (channels, height, width) and its label map (height, width), both of bytes.
Sample = tuple[Tensor, Tensor]
Transform = Callable[[Tensor, Tensor], Sample]

# How often a crop with too much of one class is drawn again.
REDRAWS = 10
# As in mmsegmentation, which adds up to 32 of 255 to the brightness, where torchvision multiplies; its hue has 180
# steps and is moved by up to 18.
PHOTOMETRIC: dict[str, tuple[float, float]] = {
    "brightness": (1 - 32 / 255, 1 + 32 / 255),
    "contrast": (0.5, 1.5),
    "saturation": (0.5, 1.5),
    "hue": (-18 / 180, 18 / 180),
}


def training_transform(augment: SegmentationAugmentConfig, color: list[int] = MEAN_COLOR) -> Transform:
    """Return the augmentation of a training image and its label map: tv_tensors to tensors; padding has a colour."""
    steps: list[Any] = [
        RandomScale(augment.min_size, augment.scale),
        BalancedRandomCrop(augment.crop_size, augment.cat_max_ratio),
        v2.RandomHorizontalFlip(augment.hflip),
    ]
    if augment.photometric_distortion:
        steps += [PhotometricDistort(**PHOTOMETRIC)]
    # Last, so that the padding keeps its colour.
    return v2.Compose([*steps, PadToSize(augment.crop_size, IGNORED, color), v2.ToPureTensor()])


def scaled_size(height: int, width: int, min_size: int | None, factor: float = 1.0) -> list[int]:
    """Return the height and width of an image with its shorter side resized to `min_size`, if given, times a factor."""
    if min_size is not None:
        factor *= min_size / min(height, width)
    return [max(1, round(factor * side)) for side in (height, width)]


def resize_image(image: Tensor, size: Sequence[int]) -> Tensor:
    """Resize images (…, channels, height, width) to a height and width: the same way in training and in use."""
    return v2.functional.resize(image, list(size), v2.InterpolationMode.BILINEAR, antialias=True)


class RandomScale(v2.Transform):
    """Resize the shorter side of an image to `min_size`, if given, times a random factor in a range of scales."""

    def __init__(self, min_size: int | None, scales: tuple[float, float]) -> None:
        super().__init__()
        self.min_size, self.scales = min_size, scales

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        """Draw the new size."""
        least, largest = self.scales
        factor = least + (largest - least) * float(torch.rand(()))
        height, width = v2.query_size(flat_inputs)
        return {"size": scaled_size(height, width, self.min_size, factor)}

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        """Resize the image or its label map."""
        resize = resize_mask if isinstance(inpt, Mask) else resize_image
        return resize(inpt, params["size"])


class BalancedRandomCrop(RandomCrop):
    """Crop a square at random in which no class has more than `cat_max_ratio` of the pixels that count, if found."""

    def __init__(self, size: int, cat_max_ratio: float) -> None:
        super().__init__(size)
        self.cat_max_ratio = cat_max_ratio

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        """Draw the crop."""
        (labels,) = (part for part in flat_inputs if isinstance(part, Mask))
        height, width = labels.shape
        crop = self.draw(height, width)
        for _ in range(REDRAWS if self.cat_max_ratio < 1 and crop[2:] != [height, width] else 0):
            if self.is_balanced(v2.functional.crop(labels, *crop)):
                break
            crop = self.draw(height, width)
        return {"crop": crop}

    def is_balanced(self, labels: Tensor) -> bool:
        """Return whether some pixels count, and no class has too large a share of them."""
        counts = torch.bincount(labels.as_subclass(Tensor).flatten(), minlength=IGNORED + 1)[:IGNORED]
        return 0 < int(counts.max()) <= self.cat_max_ratio * int(counts.sum())


class PhotometricDistort(v2.RandomPhotometricDistort):
    """Vary brightness, contrast, saturation and hue, without permuting the channels, as torchvision does."""

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        """Draw the distortion."""
        return {**super().make_params(flat_inputs), "channel_permutation": None}
