"""Where the pixels of a streamed image come from."""

from typing import Protocol, runtime_checkable

from torch import Tensor


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
