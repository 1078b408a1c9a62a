"""How training images are varied, boxes and masks along with them.

All that is random comes from torch's generator, so that a sample drawn again with its seed is the same.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torchvision.ops import masks_to_boxes
from torchvision.transforms import v2
from torchvision.tv_tensors import BoundingBoxes, Image, Mask

from ..backbone import MEAN_COLOUR
from .config import DetectionAugmentConfig

# An image (3, height, width) of bytes and its objects: boxes (objects, 4), labels (objects,), masks (objects, height,
# width).
Sample = tuple[Tensor, dict[str, Tensor]]
Transform = Callable[[Tensor, dict[str, Tensor]], Sample]


def training_transform(augment: DetectionAugmentConfig) -> Transform:
    """How a training image and its objects are varied.

    Args:
        augment: What to do.
    """
    steps: list[Any] = [v2.RandomHorizontalFlip(augment.hflip)]
    if augment.scale_jitter is None:
        steps += [ShortestSide(augment.min_sizes, augment.max_size)]
    else:
        steps += [LargeScaleJitter(augment.jitter_size, augment.scale_jitter), keep_visible]
    return v2.Compose(steps)


def resize(part: Any, size: list[int]) -> Any:
    """Resize the image, the boxes or the masks of a sample to (height, width), as evaluation does it."""
    if isinstance(part, Mask):
        # The usual choice of the nearest pixel moves masks by half a pixel against images and boxes.
        return Mask(v2.functional.resize_image(part.as_subclass(Tensor), size, v2.InterpolationMode.NEAREST_EXACT))
    # torchvision's detector resizes without antialiasing.
    return v2.functional.resize(part, size, antialias=False)


class ShortestSide(v2.RandomShortestSize):
    """Resize an image so that its shorter side has one of some lengths, and its longer one none above a limit."""

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        """Resize one part of a sample."""
        return resize(inpt, params["size"])


class LargeScaleJitter(v2.Transform):
    """Scale an image that fits into a square by a random factor; then cut out a square, or fill it up.

    Where the image is larger, the cut is anywhere in it; where it is smaller, it is in the upper left corner. Boxes
    are cut as well, but objects that are no longer seen stay: see `keep_visible`.

    Args:
        side: Side of the square.
        scales: The least and the largest factor.
    """

    def __init__(self, side: int, scales: tuple[float, float]) -> None:
        super().__init__()
        self.min_size, self.scales = side, scales

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        """Draw the size of the scaled image and the place of the cut."""
        height, width = v2.query_size(flat_inputs)
        least, largest = self.scales
        factor = self.min_size / max(height, width) * (least + (largest - least) * float(torch.rand(())))
        size = [max(1, int(factor * height)), max(1, int(factor * width))]
        cut = [min(self.min_size, length) for length in size]
        corner = [int(torch.randint(length - kept + 1, ())) for length, kept in zip(size, cut, strict=True)]
        return {"size": size, "cut": corner + cut, "padding": [0, 0, self.min_size - cut[1], self.min_size - cut[0]]}

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        """Scale, cut and fill one part of a sample."""
        scaled = resize(inpt, params["size"])
        cut = v2.functional.crop(scaled, *params["cut"])
        return v2.functional.pad(cut, params["padding"], fill=MEAN_COLOUR if isinstance(inpt, Image) else 0)


def keep_visible(image: Tensor, target: dict[str, Tensor]) -> Sample:
    """The objects whose masks have pixels, with boxes around these."""
    masks = target["masks"]
    seen = masks.flatten(1).any(1).bool()
    kept = {name: values[seen] for name, values in target.items()}
    boxes = masks_to_boxes(kept["masks"])
    # COCO's boxes end behind the last pixel.
    boxes[:, 2:] += 1
    return image, {**kept, "boxes": boxes}


def paste_objects(below: Sample, above: Sample, chosen: Tensor) -> Sample:
    """Paste objects of one image into another, at the same place.

    Where they come to lie, objects below are hidden; what is hidden or beyond the image altogether is gone. The boxes
    are those of the masks.

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
    """A sample in the types by which torchvision knows what to do with its parts."""
    boxes = BoundingBoxes(target["boxes"], format="XYXY", canvas_size=tuple(image.shape[1:]))
    return Image(image), {**target, "boxes": boxes, "masks": Mask(target["masks"])}


def as_tensors(image: Tensor, target: dict[str, Tensor]) -> Sample:
    """A sample in plain tensors."""
    return image.as_subclass(Tensor), {name: values.as_subclass(Tensor) for name, values in target.items()}
