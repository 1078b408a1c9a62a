"""Where the pixels of a streamed image come from."""

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ..models._inline_vit import as_image


@runtime_checkable
class ImageSource(Protocol):
    """An image of any size that is read by rows, already normalised as the model expects it.

    A source may also have a `fingerprint`, a string that identifies its pixels: runs can only be resumed with one.
    """

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) in pixels."""
        ...

    @property
    def channels(self) -> int:
        """Number of channels."""
        ...

    def rows(self, top: int, bottom: int) -> Tensor:
        """Return the rows from `top` to before `bottom`: (channels, bottom - top, width), float32 on the CPU.

        Rows are read from top to bottom, each of them once: a call begins where the one before ended.
        """
        ...


class TensorSource:
    """An image that is a tensor.

    Args:
        image: (1, channels, height, width), normalised.
    """

    def __init__(self, image: Tensor) -> None:
        self.image = image

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) in pixels."""
        return self.image.shape[3], self.image.shape[2]

    @property
    def channels(self) -> int:
        """Number of channels."""
        return self.image.shape[1]

    def rows(self, top: int, bottom: int) -> Tensor:
        """See ImageSource.rows."""
        return self.image[0, :, top:bottom]


class PaddedSource:
    """An image with zeros below and on the right.

    Args:
        source: The image.
        size: (width, height) with the padding.
    """

    def __init__(self, source: ImageSource, size: tuple[int, int]) -> None:
        self.source, self.size = source, size

    @property
    def channels(self) -> int:
        """Number of channels."""
        return self.source.channels

    def rows(self, top: int, bottom: int) -> Tensor:
        """See ImageSource.rows."""
        width, height = self.source.size
        first, last = min(top, height), min(bottom, height)
        padded = torch.zeros(self.channels, bottom - top, self.size[0])
        if first < last:
            rows = self.source.rows(first, last)
            check_rows(rows, (self.channels, last - first, width))
            padded[:, : last - first, :width] = rows
        return padded


def check_rows(rows: Tensor, expected: tuple[int, int, int]) -> None:
    """Raise ValueError for rows of a source that are not float32, or of another shape (channels, rows, width)."""
    if tuple(rows.shape) != expected or rows.dtype != torch.float32:
        raise ValueError(
            f"the image source should give float32 rows of shape {expected}, but it gave {rows.dtype} of shape "
            f"{tuple(rows.shape)}"
        )


def make_source(image: Tensor | ImageSource, channels: int) -> ImageSource:
    """Return a source of the rows of an image, or raise ValueError if it does not fit the model."""
    source: ImageSource
    if isinstance(image, Tensor):
        as_image(image, channels)
        if image.shape[0] != 1:
            raise ValueError(
                f"one image is streamed at a time, but the batch has {image.shape[0]}: pass image[i : i + 1]"
            )
        source = TensorSource(image.detach().to("cpu", torch.float32))
    elif isinstance(image, ImageSource):
        source = image
    else:
        raise ValueError(
            f"expected a tensor (1, channels, height, width) or an ImageSource, but got {type(image).__name__}"
        )
    if source.channels != channels:
        raise ValueError(f"the image has {source.channels} channels, but the model takes {channels}")
    if min(source.size) < 1:
        raise ValueError(f"the image has {source.size[0]} × {source.size[1]} pixels: there is nothing to compute")
    return source
