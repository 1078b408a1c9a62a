"""What detection and segmentation have in common: a task with a model on a backbone, transforms of images along with
masks, and evaluation one image at a time.

All random numbers come from torch's generator, so that a sample drawn again with its seed is the same.
"""

from abc import abstractmethod
from collections.abc import Iterable
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torchvision.transforms import v2
from torchvision.tv_tensors import Mask, wrap

from ..data.loader import EvalLoader
from ..engine.evaluator import Evaluator
from ..engine.task import Task
from ..models.factory import check_model_name
from .backbone import MEAN_COLOR
from .describe import describe_start
from .pixels import make_pixel_format, resolve_pixels


def resize_mask(mask: Tensor, size: list[int]) -> Tensor:
    """Resize masks (…, height, width) to a height and width: each pixel is one of those before."""
    # InterpolationMode.NEAREST would shift masks by half a pixel against images.
    resized = v2.functional.resize_image(mask.as_subclass(Tensor)[None], size, v2.InterpolationMode.NEAREST_EXACT)[0]
    return wrap(resized, like=mask) if isinstance(mask, Mask) else resized


class RandomCrop(v2.Transform):
    """Crop a square of side `size` at random. A narrower or lower image keeps its width or height."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        """Draw the crop."""
        return {"crop": self.draw(*v2.query_size(flat_inputs))}

    def draw(self, *lengths: int) -> list[int]:
        """Return top, left, height and width of a crop of an image with this height and width."""
        size = [min(self.size, length) for length in lengths]
        corner = [int(torch.randint(length - kept + 1, ())) for length, kept in zip(lengths, size, strict=True)]
        return corner + size

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        """Crop one part of a sample."""
        return v2.functional.crop(inpt, *params["crop"])


class PadToSize(v2.Transform):
    """Pad an image to a square of side `size`, on the right and below: images with a colour, masks with a value.

    torchvision's RandomCrop would pad on all sides.
    """

    def __init__(self, size: int, mask_fill: int, color: list[int] = MEAN_COLOR) -> None:
        super().__init__()
        self.size, self.mask_fill, self.color = size, mask_fill, color

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        """Compute the padding."""
        height, width = v2.query_size(flat_inputs)
        return {"padding": [0, 0, self.size - width, self.size - height]}

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        """Pad one part of a sample."""
        fill = self.mask_fill if isinstance(inpt, Mask) else self.color
        return v2.functional.pad(inpt, params["padding"], fill=fill)


class DenseTask(Task):
    """A task whose model is built on a backbone; its sources have `open_image` and `pixel_format`."""

    train_source: Any
    eval_source: Any
    num_classes: int

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        check_model_name(config.model.backbone)

    def resolve_inputs(self) -> None:
        """Find range, mean and std in the training images where the config leaves them open, and write them to it."""
        data, channels, source = self.config.data, self.config.model.in_chans, self.train_source
        resolve_pixels(data, channels, len(source), source.open_image)
        source.pixel_format = make_pixel_format(data, channels)

    def describe(self) -> str:
        model = self.config.model
        name = f"{model.arch} on {model.backbone} for {self.num_classes} classes"
        return describe_start(name, self.config, self.train_source, self.eval_source)


class SingleImageEvaluator(Evaluator):
    """Evaluates one image at a time: the result is the same for any number of processes.

    Args:
        source: The images.
        workers: Data workers.
    """

    def __init__(self, source: Any, workers: int) -> None:
        self.source, self.workers = source, workers

    def loader(self, process: int, processes: int) -> Iterable[Any]:
        """See Evaluator.loader: the samples of this evaluator, one after the other."""
        single = itemgetter(0)
        return EvalLoader(self, 1, workers=self.workers, collate=single, process=process, processes=processes)

    def __len__(self) -> int:
        return len(self.source)

    @abstractmethod
    def __getitem__(self, index: int) -> Any:
        """Read a sample, for update()."""
