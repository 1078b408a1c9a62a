"""Prediction: one loop and one command for all tasks."""

import io
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic

import torch
from PIL import Image
from torch import nn

from ..data.images import (
    ImageFiles,
    decode_image,
    decompression_bomb_limit,
    describe_image_error,
    display_name,
    printable,
    unique_names,
)
from ..data.pixels import AnyImage, PixelFormat
from ..utils.atomic import atomic_text_writer, atomic_write_png, disk_full_errors, json_list_writer, make_output_dir
from .config import ClassPredictOptions, CommandOptions, DrawingPredictOptions, PixelOptions
from .evaluator import EvalData, Evaluator
from .outputs import check_output_file, check_output_folder
from .results import CLASS_WRITERS, Prediction, Result
from .setup import resolve_device

if TYPE_CHECKING:
    from .task import Task

PREDICTIONS_JSON = "predictions.json"


@dataclass
class Predictor(ABC, Generic[Result]):
    """A model that is ready to use.

    Attributes:
        model: In evaluation mode, on the CPU.
        name: What the model is called.
    """

    model: nn.Module
    name: str

    # Images with more pixels are refused; None = Pillow's limit.
    max_pixels: int | None = field(default=None, kw_only=True)
    # The bands and values of images that the model gets.
    pixels: PixelFormat = field(default=PixelFormat(), kw_only=True)

    @property
    def mode(self) -> PixelFormat:
        """How images are converted."""
        return self.pixels

    @abstractmethod
    def predict_images(self, images: list[AnyImage], options: Any, device: torch.device) -> list[Result | None]:
        """Return the results of some images; None where the model's output is not finite.

        Args:
            images: In the mode of this predictor; one at a time, unless the options have a batch_size.
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


class DrawingPredictor(Predictor[Result]):
    """A predictor whose results are drawn."""

    # How the file of each drawing ends, by the key of the JSON object that names it.
    drawing_suffixes: ClassVar[dict[str, str]]

    @abstractmethod
    def render(self, image: AnyImage, result: Result) -> Rendering:
        """Draw a result on its image; arguments as they are in a Prediction."""


def read_images(files: ImageFiles, mode: str | PixelFormat, max_pixels: int | None = None) -> Iterator[Prediction[Any]]:
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
    mode, max_pixels = override_pixels(predictor, options.data)
    images = read_images(files, mode, max_pixels)
    while batch := list(islice(images, batch_size)):
        readable = [one.image for one in batch if one.image is not None]
        results = iter(predictor.predict_images(readable, options, chosen) if readable else [])
        for one in batch:
            if one.error is None:
                one.result = next(results)
                if one.result is None:
                    one.error = f"{one.file} gives NaN or infinite values: check the model's weights"
            yield one


def override_pixels(predictor: Predictor[Any], options: PixelOptions) -> tuple[PixelFormat, int | None]:
    """Return the bands and values that a predictor gets, and its pixel limit, with options in place of the run's."""
    bands = predictor.mode.bands if options.bands is None else tuple(options.bands)
    values: Any = predictor.mode.range if options.range is None else options.range
    mode = replace(predictor.mode, bands=bands, range=tuple(values) if isinstance(values, list) else values)
    return mode, predictor.max_pixels if options.max_pixels is None else options.max_pixels


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
