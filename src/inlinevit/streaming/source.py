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
