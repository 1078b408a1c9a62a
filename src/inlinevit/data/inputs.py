"""Images that a caller gives in Python: files, folders and patterns, and images in memory."""

import os
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from ..utils.validation import require
from .images import ImageFiles, expand_argument, is_pattern
from .pixels import AnyImage, BandArray

ImageInput: TypeAlias = str | os.PathLike[str] | Image.Image | NDArray[Any] | Tensor
KINDS = (str, os.PathLike, Image.Image, np.ndarray, Tensor)
EXPECTED = "give a path, a PIL image, an array (height, width, channels) or a tensor (channels, height, width)"
# Red, green, blue and alpha.
MOST_COLOURS = 4


class ImageInputs(ImageFiles):
    """Images that a caller gives, in their order; a file that is given twice is there twice.

    Args:
        images: One image or several: paths of files and folders, glob patterns, PIL images, arrays, tensors.

    Attributes:
        is_single: Whether it is one image, as opposed to a list, a folder or a pattern.

    Raises:
        TypeError: Something is none of these.
    """

    def __init__(self, images: ImageInput | Iterable[ImageInput]) -> None:
        is_one = isinstance(images, KINDS)
        path = os.fspath(images) if isinstance(images, str | os.PathLike) else ""
        self.is_single = is_one and not (os.path.isdir(path) or is_pattern(path))
        given: list[Any] = [images] if is_one else _as_list(images)
        self.files = []
        self.in_memory: dict[int, Any] = {}
        for place, one in enumerate(given):
            name = "the image" if is_one else f"images[{place}]"
            if not isinstance(one, KINDS):
                raise TypeError(f"{name} is of type {type(one).__name__}: {EXPECTED}")
            if isinstance(one, str | os.PathLike):
                self.files += expand_argument(os.fspath(one))
            else:
                self.in_memory[len(self.files)] = one
                self.files.append((name, ""))

    def subset(self, indices: Iterable[int]) -> "ImageInputs":
        """See ImageFiles.subset."""
        chosen = ImageInputs([])
        for index in indices:
            if index in self.in_memory:
                chosen.in_memory[len(chosen.files)] = self.in_memory[index]
            chosen.files.append(self.files[index])
        return chosen

    def open(self, index: int) -> AbstractContextManager[AnyImage]:
        """See ImageFiles.open; images of the caller's stay open."""
        if index in self.in_memory:
            return nullcontext(to_image(self.in_memory[index]))
        return super().open(index)


def _as_list(images: Any) -> list[Any]:
    if isinstance(images, bytes | dict) or not isinstance(images, Iterable):
        raise TypeError(f"the image is of type {type(images).__name__}: {EXPECTED}, or a list of them")
    return list(images)


def to_image(image: Any) -> AnyImage:
    """Return an image in memory as the readers of files return theirs.

    Args:
        image: An image of Pillow's, which is returned as it is, an array (height, width, bands) or a tensor (bands,
            height, width), both also (height, width), of integers or floats; docs/images.md says what they mean.

    Raises:
        ValueError: It has another shape or type.
    """
    if isinstance(image, Image.Image):
        return image
    shape, values = tuple(image.shape), image
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        values = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
        values = np.moveaxis(values, 0, -1) if values.ndim == 3 else values
    # Many bands and few rows are the axes of an array in a tensor, or the other way round.
    axes = shape if isinstance(image, Tensor) else shape[::-1]
    is_swapped = len(axes) == 3 and axes[2] <= MOST_COLOURS < axes[0]
    require(
        values.ndim in (2, 3) and values.size > 0 and not is_swapped,
        f"its shape is {shape}: arrays are (height, width, bands), tensors are (bands, height, width); give several "
        "images as a list",
    )
    return BandArray(values)
