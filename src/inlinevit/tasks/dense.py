"""What tasks with masks have in common: transforms of images along with masks, and evaluation one image at a time.

All random numbers come from torch's generator, so that a sample drawn again with its seed is the same.
"""

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms import v2
from torchvision.tv_tensors import Mask, wrap

from ..data.loader import EvalLoader
from .backbone import MEAN_COLOR


def resize_mask(mask: Tensor, size: list[int]) -> Tensor:
    """Resize masks (…, height, width) to a height and width: each pixel is one of those before."""
    # InterpolationMode.NEAREST would shift masks by half a pixel against images.
    resized = v2.functional.resize_image(mask.as_subclass(Tensor)[None], size, v2.InterpolationMode.NEAREST_EXACT)[0]
    return wrap(resized, like=mask) if isinstance(mask, Mask) else resized


class RandomCrop(v2.Transform):
    """Crop a square at random. An image that is narrower or lower than the square stays so wide or high.

    Args:
        size: Side of the square.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        """Draw the crop."""
        return {"crop": self.draw(*v2.query_size(flat_inputs))}

    def draw(self, height: int, width: int) -> list[int]:
        """Return top, left, height and width of a crop."""
        lengths = (height, width)
        size = [min(self.size, length) for length in lengths]
        corner = [int(torch.randint(length - kept + 1, ())) for length, kept in zip(lengths, size, strict=True)]
        return corner + size

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        """Crop one part of a sample."""
        return v2.functional.crop(inpt, *params["crop"])


class PadToSize(v2.Transform):
    """Pad an image to a square, on the right and below: images with the mean colour, masks with a value.

    Args:
        size: Side of the square; the image is not larger.
        mask_fill: The value.
    """

    def __init__(self, size: int, mask_fill: int) -> None:
        super().__init__()
        self.size, self.mask_fill = size, mask_fill

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        """Compute the padding."""
        height, width = v2.query_size(flat_inputs)
        return {"padding": [0, 0, self.size - width, self.size - height]}

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        """Pad one part of a sample."""
        fill = self.mask_fill if isinstance(inpt, Mask) else MEAN_COLOR
        return v2.functional.pad(inpt, params["padding"], fill=fill)


class IndexedSamples(Dataset[Any]):
    """Samples that a function reads.

    Args:
        length: How many there are.
        read: From an index to a sample.
    """

    def __init__(self, length: int, read: Callable[[int], Any]) -> None:
        self.length, self.read = length, read

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.read(index)


def make_single_loader(
    length: int, read: Callable[[int], Any], *, workers: int, process: int, processes: int
) -> EvalLoader:
    """Return a loader of single samples for evaluation; over all processes, every sample comes once.

    Args:
        length: How many samples there are.
        read: From an index to a sample.
        workers: Data workers.
        process: This process.
        processes: How many there are.
    """
    samples = IndexedSamples(length, read)
    return EvalLoader(samples, 1, workers=workers, collate=itemgetter(0), process=process, processes=processes)
