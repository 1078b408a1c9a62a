"""Augmentation of training images, with their boxes and masks.

All random numbers come from torch's generator, so that a sample drawn again with its seed is the same.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torchvision.ops import masks_to_boxes
from torchvision.transforms import v2
from torchvision.tv_tensors import BoundingBoxes, Image, Mask

from ..backbone import MEAN_COLOR
from ..dense import PadToSize, RandomCrop, resize_mask
from .config import DetectionAugmentConfig

# An image (channels, height, width) of bytes and its objects: boxes (objects, 4), labels (objects,), masks
# (objects, height, width).
Sample = tuple[Tensor, dict[str, Tensor]]
Transform = Callable[[Tensor, dict[str, Tensor]], Sample]


def training_transform(augment: DetectionAugmentConfig, color: list[int] = MEAN_COLOR) -> Transform:
    """Return the augmentation of a training image and its objects, with padding of a colour: tv_tensors to tensors."""
    steps: list[Any] = [v2.RandomHorizontalFlip(augment.hflip)]
    if augment.scale_jitter is None:
        steps += [ShortestSide(augment.min_sizes, augment.max_size)]
    else:
        side = augment.jitter_size
        padding = PadToSize(side, 0, color)
        steps += [ScaleJitter((side, side), augment.scale_jitter), RandomCrop(side), padding, keep_visible]
    return v2.Compose([*steps, v2.ToPureTensor()])


class DetectorResize(v2.Transform):
    """Resize the image, the boxes and the masks of a sample to params["size"], as evaluation resizes images."""

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        """Resize one part of a sample; torchvision's detector resizes without antialiasing."""
        size = params["size"]
        return resize_mask(inpt, size) if isinstance(inpt, Mask) else v2.functional.resize(inpt, size, antialias=False)


class ShortestSide(DetectorResize, v2.RandomShortestSize):
    """Resize an image so that its shorter side has one of some lengths, and its longer one none above a limit."""


class ScaleJitter(DetectorResize, v2.ScaleJitter):
    """Fit an image into a square, times a random factor."""

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        """Draw the new size; a narrow strip keeps one pixel."""
        return {"size": [max(1, side) for side in super().make_params(flat_inputs)["size"]]}


def keep_visible(image: Tensor, target: dict[str, Tensor]) -> Sample:
    """Keep the objects whose masks have pixels, with boxes around these."""
    masks = target["masks"]
    visible = masks.flatten(1).any(1).bool()
    kept = {name: values[visible] for name, values in target.items()}
    boxes = masks_to_boxes(kept["masks"])
    # COCO's boxes end behind the last pixel.
    boxes[:, 2:] += 1
    return image, {**kept, "boxes": boxes}


def paste_objects(below: Sample, above: Sample, chosen: Tensor) -> Sample:
    """Paste objects of one image into another, at the same place.

    Objects below are hidden where others are pasted; objects without a visible pixel are dropped. The boxes are those
    of the masks.

    Args:
        below: The image that gets the objects, and its own ones.
        above: The image that they come from, of any size, and its objects.
        chosen: Indices of the objects to paste, (pasted,).
    """
    image, target = below[0].clone(), below[1]
    source, objects = above
    height, width = (min(sizes) for sizes in zip(image.shape[1:], source.shape[1:], strict=True))
    pasted = target["masks"].new_zeros(len(chosen), *image.shape[1:])
    pasted[:, :height, :width] = objects["masks"][chosen, :height, :width]
    covered = pasted.any(0).bool()
    image[:, covered] = source[:, :height, :width][:, covered[:height, :width]]
    masks = torch.cat([target["masks"] * ~covered, pasted])
    labels = torch.cat([target["labels"], objects["labels"][chosen]])
    return keep_visible(image, {"boxes": masks.new_zeros(len(masks), 4), "labels": labels, "masks": masks})


def as_tv_tensors(image: Tensor, target: dict[str, Tensor]) -> Sample:
    """Convert a sample to tv_tensors, which torchvision transforms by their type."""
    boxes = BoundingBoxes(target["boxes"], format="XYXY", canvas_size=tuple(image.shape[1:]))
    return Image(image), {**target, "boxes": boxes, "masks": Mask(target["masks"])}
