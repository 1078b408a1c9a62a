"""Prediction: one loop and one command for all tasks."""

import io
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self

import torch
from PIL import Image
from torch import Tensor, nn

from ..data.images import (
    ImageFiles,
    decode_image,
    decompression_bomb_limit,
    describe_image_error,
    display_name,
    printable,
    unique_names,
)
from ..data.inputs import ImageInput, ImageInputs
from ..utils.atomic import atomic_text_writer, atomic_write_png, disk_full_errors, json_list_writer, make_output_dir
from ..utils.validation import require
from .config import ClassPredictOptions, CommandOptions, DrawingPredictOptions, fill_options
from .evaluator import EvalData, Evaluator
from .outputs import check_output_file, check_output_folder
from .results import CLASS_WRITERS, Prediction, Result
from .setup import resolve_device

if TYPE_CHECKING:
    from .task import Task

PREDICTIONS_JSON = "predictions.json"


@dataclass
class Predictor(ABC, Generic[Result]):
    """A model that is ready to use; calling it predicts images.

    Attributes:
        model: In evaluation mode; where it is, images are predicted.
        name: What the model is called.
        config: The configuration of its run, or of the model if there is no run.
    """

    model: nn.Module
    name: str
    config: Any

    # The task's options of `predict`.
    options_class: ClassVar[type[CommandOptions]]
    # Images with more pixels are refused; None = Pillow's limit.
    max_pixels: ClassVar[int | None] = None

    def __call__(self, images: ImageInput | Iterable[ImageInput], **options: Any) -> Any:
        """Predict images, as `inlinevit predict` does.

        Args:
            images: A path, a PIL image, an array (height, width, channels), a tensor (channels, height, width), a list
                of these, a folder, or a glob pattern. Arrays and tensors may also be (height, width); their numbers are
                uint8, uint16, or floats from 0 to 1.
            **options: The task's options of `predict`, such as top, threshold or batch_size.

        Returns:
            The Prediction of one image; of a list, a folder or a pattern, a list of predictions in its order. Each
            holds its image: use `stream` for more images than fit into memory.

        Raises:
            OSError: The file of a single image does not exist.
            TypeError: Something is not an image, or there is no such option.
            ValueError: A single image cannot be used, or an option has a wrong value. In a list, a folder or a pattern,
                images that cannot be used have an `error` instead of a `result`.
        """
        inputs = ImageInputs(images)
        predictions = list(predict(self, inputs, self._make_options(options), self.device))
        if not inputs.is_single:
            return predictions
        (only,) = predictions
        if only.error is not None:
            is_missing = isinstance(images, str | os.PathLike) and not os.path.exists(images)
            raise FileNotFoundError(only.error) if is_missing else ValueError(only.error)
        return only

    def stream(self, images: ImageInput | Iterable[ImageInput], **options: Any) -> Iterator[Prediction[Result]]:
        """Predict images one batch after the other, without keeping them.

        Args:
            images: See `__call__`.
            **options: See `__call__`.

        Returns:
            An iterator of a prediction for each image; those that cannot be used have an `error`.
        """
        return predict(self, ImageInputs(images), self._make_options(options), self.device)

    def to(self, device: torch.device | str) -> Self:
        """Move the model to a device, such as cuda, and return this predictor."""
        self.model.to(resolve_device(str(device)))
        return self

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        parameter = next(self.model.parameters(), None)
        return torch.device("cpu") if parameter is None else parameter.device

    @property
    def transform(self) -> "InputTransform":
        """From an image, of any kind that the predictor takes, to the input of the model, without the batch."""
        return InputTransform(self.mode, self.max_pixels, self.to_tensor)

    @property
    @abstractmethod
    def classes(self) -> list[str]:
        """The names of the classes, by index."""

    @property
    @abstractmethod
    def to_tensor(self) -> Callable[[Image.Image], Tensor]:
        """From an image in the colour mode of this predictor to the input of the model, without the batch."""

    @property
    def mode(self) -> str:
        """Pillow's name of the colour mode that images are converted to."""
        return "RGB"

    def _make_options(self, given: Mapping[str, Any]) -> CommandOptions:
        """Return the options of a call."""
        kind = self.options_class
        refused = [name for name in given if name in kind.command_only]
        if refused:
            raise TypeError(
                f"{refused[0]} is not an option of a call: inlinevit.load takes what concerns the model, and results "
                "are returned, not written"
            )
        return fill_options(kind, given, [one.name for one in fields(kind) if one.name not in kind.command_only])

    @abstractmethod
    def predict_images(self, images: list[Image.Image], options: Any, device: torch.device) -> list[Result | None]:
        """Return the results of some images; None where the model's output is not finite.

        Args:
            images: In the colour mode of this predictor; one at a time, unless the options have a batch_size.
            options: The task's options of `predict`.
            device: Where the model is.
        """

    @abstractmethod
    def make_evaluator(self, data: EvalData, options: Any) -> Evaluator:
        """Return the evaluator of this model on some data, with the options of `eval`; refuse data that do not fit."""

    def description(self, options: Any) -> str:
        """Return what is evaluated, for the title of tables."""
        return self.name

    def settings(self, options: Any) -> dict[str, Any]:
        """Return fields of evaluation.json that say how the model was evaluated."""
        return {}

    def check_memory(self, batch_size: int) -> None:
        """Refuse batches that do not fit into memory."""


@dataclass
class Rendering:
    """How a prediction is shown.

    Attributes:
        drawings: Images to write, by the key of the JSON object that names their file.
        record: Further fields of the JSON object.
        summary: One line for the terminal, without the name of the file.
    """

    drawings: dict[str, Image.Image]
    record: dict[str, Any]
    summary: str


@dataclass(frozen=True)
class InputTransform:
    """From an image to the input of a model; without the model, so that data workers can have it.

    Attributes:
        mode: The colour mode that images are converted to.
        max_pixels: Images with more pixels are refused; None = Pillow's limit.
        to_tensor: From an image in that mode to the input.
    """

    mode: str
    max_pixels: int | None
    to_tensor: Callable[[Image.Image], Tensor]

    def __call__(self, image: ImageInput) -> Tensor:
        """Return the input for one image: a path, a PIL image, an array or a tensor.

        Raises:
            ValueError: It cannot be used.
        """
        inputs = ImageInputs(image)
        require(inputs.is_single, "transform takes one image: call it for each")
        (read,) = read_images(inputs, self.mode, self.max_pixels)
        if read.image is None:
            raise ValueError(read.error)
        return self.to_tensor(read.image)


class DrawingPredictor(Predictor[Result]):
    """A predictor whose results are drawn."""

    # How the file of each drawing ends, by the key of the JSON object that names it.
    drawing_suffixes: ClassVar[dict[str, str]]

    @abstractmethod
    def render(self, image: Image.Image, result: Result) -> Rendering:
        """Draw a result on its image; arguments as they are in a Prediction."""


def read_images(files: ImageFiles, mode: str, max_pixels: int | None = None) -> Iterator[Prediction[Any]]:
    """Read images one after the other; those that cannot be used have an error. See Predictor for the arguments."""
    for index in range(len(files)):
        name = files.name(index)
        try:
            with decompression_bomb_limit(max_pixels), files.open(index) as opened:
                prediction = Prediction[Any](name, decode_image(opened, mode))
        # A damaged file can make Pillow raise anything.
        except Exception as error:
            prediction = Prediction(name, error=describe_image_error(name, error))
        yield prediction


@torch.no_grad()
def predict(
    predictor: Predictor[Result],
    files: ImageFiles,
    options: CommandOptions,
    device: torch.device | str | None = None,
) -> Iterator[Prediction[Result]]:
    """Predict images one after the other, as they are read, on a device or, if it is None, on that of the options."""
    chosen = resolve_device(options.device) if device is None else torch.device(device)
    batch_size = options.batch_size if isinstance(options, ClassPredictOptions) else 1
    predictor.check_memory(min(batch_size, len(files)))
    predictor.model.to(chosen)
    images = read_images(files, predictor.mode, predictor.max_pixels)
    while batch := list(islice(images, batch_size)):
        readable = [one.image for one in batch if one.image is not None]
        results = iter(predictor.predict_images(readable, options, chosen) if readable else [])
        for one in batch:
            if one.error is None:
                one.result = next(results)
                if one.result is None:
                    one.error = f"{one.file} gives NaN or infinite values: check the model's weights"
            yield one


def predict_command(task: type["Task"], model: str, images: Sequence[str], options: CommandOptions) -> int:
    """Run `predict`: print the results, or draw them.

    Returns:
        The exit code: 1 if an image could not be used, else 0.
    """
    device = resolve_device(options.device)
    files = ImageFiles(images)
    inputs = [*(path for path, _ in files.files), *([options.checkpoint] if options.checkpoint else [])]
    output: Path | None = None
    if isinstance(options, DrawingPredictOptions):
        output = check_output_folder(options.output, [PREDICTIONS_JSON], inputs=inputs)
    elif not isinstance(options, ClassPredictOptions):
        raise TypeError(f"{type(options).__name__} is not derived from ClassPredictOptions or DrawingPredictOptions")
    elif options.output is not None:
        output = check_output_file(options.output, inputs)
    # Programs expect UTF-8; on a terminal, letters that it does not know are escaped.
    for_programs = isinstance(options, ClassPredictOptions) and options.format != "table"
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace", encoding="utf-8" if for_programs else None)
    predictor = task.load_predictor(model, options)
    failures: list[str] = []
    predictions = _report_errors(predict(predictor, files, options, device), failures)
    if isinstance(options, ClassPredictOptions):
        # csv writes its own line endings.
        with nullcontext(sys.stdout) if output is None else atomic_text_writer(output, newline="") as stream:
            CLASS_WRITERS[options.format](predictions, stream)
    elif isinstance(predictor, DrawingPredictor):
        _write_drawings(predictor, files, predictions, Path(options.output))
    else:
        raise TypeError(f"{type(predictor).__name__} draws nothing: derive it from DrawingPredictor")
    return 1 if failures else 0


def _report_errors(predictions: Iterable[Prediction[Result]], failures: list[str]) -> Iterator[Prediction[Result]]:
    """Pass on predictions; errors are collected, and reported on stderr in one line each."""
    for prediction in predictions:
        if prediction.error is not None:
            failures.append(prediction.file)
            print(printable(prediction.error), file=sys.stderr)
        yield prediction


def _write_drawings(
    predictor: DrawingPredictor[Any], files: ImageFiles, predictions: Iterable[Prediction[Any]], folder: Path
) -> None:
    """Write drawings and predictions.json into a folder."""
    make_output_dir(folder)
    suffixes = predictor.drawing_suffixes
    names = unique_names(files, folder, list(suffixes.values()))
    with disk_full_errors(folder), json_list_writer(folder / PREDICTIONS_JSON) as write:
        for prediction, name in zip(predictions, names, strict=True):
            if prediction.image is None or prediction.result is None:
                write({"file": prediction.file, "error": prediction.error})
                continue
            shown = predictor.render(prediction.image, prediction.result)
            for key, image in shown.drawings.items():
                atomic_write_png(folder / f"{name}{suffixes[key]}", image)
            print(printable(f"{prediction.file}: {shown.summary}"))
            width, height = prediction.image.size
            drawn = {key: display_name(f"{name}{suffixes[key]}") for key in shown.drawings}
            write({"file": prediction.file, "width": width, "height": height, **drawn, **shown.record})
