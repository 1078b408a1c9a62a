"""How training images are varied, label maps along with them.

All that is random comes from torch's generator, so that a sample drawn again with its seed is the same.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torchvision.transforms import v2
from torchvision.tv_tensors import Image, Mask, wrap

from ..backbone import MEAN_COLOUR
from .config import SegmentationAugmentConfig
from .labels import IGNORED

# An image (3, height, width) and its label map (height, width), both of bytes.
Sample = tuple[Tensor, Tensor]
Transform = Callable[[Tensor, Tensor], Sample]

# How often a cut with too much of one class is drawn again.
REDRAWS = 10
# As mmsegmentation has it. It adds up to 32 of 255 to the brightness, where torchvision multiplies; its hue has 180
# steps and is moved by up to 18.
PHOTOMETRIC: dict[str, tuple[float, float]] = {
    "brightness": (1 - 32 / 255, 1 + 32 / 255),
    "contrast": (0.5, 1.5),
    "saturation": (0.5, 1.5),
    "hue": (-18 / 180, 18 / 180),
}


def training_transform(augment: SegmentationAugmentConfig) -> Transform:
    """How a training image and its label map are varied: (Image, Mask) to (Image, Mask).

    Args:
        augment: What to do.
    """
    steps: list[Any] = [
        RandomScale(augment.min_size, augment.scale),
        RandomCrop(augment.crop_size, augment.cat_max_ratio),
        v2.RandomHorizontalFlip(augment.hflip),
    ]
    if augment.photometric_distortion:
        steps += [PhotometricDistort(**PHOTOMETRIC)]
    # Last, so that what is around images keeps its colour.
    return v2.Compose([*steps, PadToSize(augment.crop_size)])


def scaled_size(height: int, width: int, min_size: int | None, factor: float = 1.0) -> list[int]:
    """Height and width of an image whose shorter side is brought to a length, and that is then scaled by a factor.

    Args:
        height: Of the image.
        width: Of the image.
        min_size: The length; None = as it is.
        factor: The factor.
    """
    if min_size is not None:
        factor *= min_size / min(height, width)
    return [max(1, round(factor * side)) for side in (height, width)]


def resize_image(image: Tensor, size: Sequence[int]) -> Tensor:
    """Resize images (…, 3, height, width) to a height and width: the same way in training and in use."""
    return v2.functional.resize(image, list(size), v2.InterpolationMode.BILINEAR, antialias=True)


def resize_labels(labels: Tensor, size: Sequence[int]) -> Tensor:
    """Resize label maps (…, height, width) to a height and width: each pixel is one of those before."""
    # The usual choice of the nearest pixel moves label maps by half a pixel against images.
    resized = v2.functional.resize_image(
        labels.as_subclass(Tensor).unsqueeze(-3), list(size), v2.InterpolationMode.NEAREST_EXACT
    ).squeeze(-3)
    return wrap(resized, like=labels) if isinstance(labels, Mask) else resized


class RandomScale(v2.Transform):
    """Bring the shorter side of an image to a length, times a random factor.

    Args:
        min_size: The length; None = as it is.
        scales: The least and the largest factor.
    """

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
        resize = resize_labels if isinstance(inpt, Mask) else resize_image
        return resize(inpt, params["size"])


class RandomCrop(v2.Transform):
    """Cut out a square anywhere in the image, with no more than a share of one class, if there is one.

    An image that is narrower or lower than the square is left so wide or high.

    Args:
        side: Side of the square.
        cat_max_ratio: Largest share of a class in the pixels that count; 1 = any.
    """

    def __init__(self, side: int, cat_max_ratio: float) -> None:
        super().__init__()
        self.side, self.cat_max_ratio = side, cat_max_ratio

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        """Draw the place of the cut."""
        (labels,) = (part for part in flat_inputs if isinstance(part, Mask))
        cut = self.draw(labels)
        for _ in range(REDRAWS if self.cat_max_ratio < 1 and cut[2:] != list(labels.shape) else 0):
            if self.is_mixed(v2.functional.crop(labels, *cut)):
                break
            cut = self.draw(labels)
        return {"cut": cut}

    def draw(self, labels: Tensor) -> list[int]:
        """Top, left, height and width of a cut."""
        size = [min(self.side, length) for length in labels.shape]
        corner = [int(torch.randint(length - kept + 1, ())) for length, kept in zip(labels.shape, size, strict=True)]
        return corner + size

    def is_mixed(self, labels: Tensor) -> bool:
        """Whether no class has too large a share of the pixels that count, and some do."""
        counts = torch.bincount(labels.as_subclass(Tensor).flatten(), minlength=IGNORED + 1)[:IGNORED]
        return 0 < int(counts.max()) <= self.cat_max_ratio * int(counts.sum())

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        """Cut the image or its label map."""
        return v2.functional.crop(inpt, *params["cut"])


class PhotometricDistort(v2.RandomPhotometricDistort):
    """Vary brightness, contrast, saturation and hue, but never exchange red, green and blue, as torchvision does."""

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        """Draw what to do."""
        return {**super().make_params(flat_inputs), "channel_permutation": None}


class PadToSize(v2.Transform):
    """Make an image a square: on the right and below, it gets the mean colour, and pixels that do not count.

    Args:
        side: Side of the square; the image is no larger.
    """

    def __init__(self, side: int) -> None:
        super().__init__()
        self.side = side

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        """How much is to be filled up."""
        height, width = v2.query_size(flat_inputs)
        return {"padding": [0, 0, self.side - width, self.side - height]}

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        """Fill up the image or its label map."""
        return v2.functional.pad(inpt, params["padding"], fill=IGNORED if isinstance(inpt, Mask) else MEAN_COLOUR)


def as_tv_tensors(image: Tensor, labels: Tensor) -> Sample:
    """A sample in the types by which torchvision knows what to do with its parts."""
    return Image(image), Mask(labels)


def as_tensors(image: Tensor, labels: Tensor) -> Sample:
    """A sample in plain tensors."""
    return image.as_subclass(Tensor), labels.as_subclass(Tensor)
