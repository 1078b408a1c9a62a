"""Prediction: one loop and one command for all tasks."""

import io
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self

import torch
from accelerate import InitProcessGroupKwargs
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
from ..data.pixels import AnyImage, PixelFormat
from ..models.hub import fetch_source
from ..utils.atomic import atomic_text_writer, atomic_write_png, is_stream
from ..utils.validation import require
from .config import (
    ClassPredictOptions,
    CommandOptions,
    DrawingPredictOptions,
    PixelOptions,
    PredictOptions,
    fill_options,
)
from .distributed import run_local_main_first, run_on_all, run_on_main
from .evaluator import EvalData, Evaluator
from .exported import ImageSizeError
from .exported_model import ExportedModel
from .exported_run import check_exported_device
from .outputs import check_output_file, check_output_folder
from .prediction_files import PartialResults, image_ids, job_settings
from .progress import job_progress
from .results import CLASS_WRITERS, Prediction, Result, class_record
from .runs import task_of
from .setup import make_accelerator, resolve_device

if TYPE_CHECKING:
    from .task import Task

PREDICTIONS_JSON = "predictions.json"
# How long a process waits for the others, which may have slower devices or larger images.
LONGEST_WAIT = timedelta(days=30)
RESUME = "run the same command again to predict the other images"


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
    max_pixels: int | None = field(default=None, kw_only=True)

    def __call__(self, images: ImageInput | Iterable[ImageInput], **options: Any) -> Any:
        """Predict images, as `inlinevit predict` does.

        Args:
            images: A path, a PIL image, an array (height, width, channels), a tensor (channels, height, width), a list
                of these, a folder, or a glob pattern. Arrays and tensors may also be (height, width); docs/images.md
                says what their values mean.
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
        chosen = resolve_device(str(device))
        if isinstance(self.model, ExportedModel):
            check_exported_device(self.model.file, chosen.type)
        self.model.to(chosen)
        return self

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        parameter = next(self.model.parameters(), None)
        return torch.device("cpu") if parameter is None else parameter.device

    @property
    def transform(self) -> "InputTransform":
        """From an image, of any kind that the predictor takes, to the input of the model, without the batch."""
        return InputTransform(self.pixel_format, self.max_pixels, self.to_tensor)

    @property
    @abstractmethod
    def classes(self) -> list[str]:
        """The names of the classes, by index."""

    @property
    @abstractmethod
    def to_tensor(self) -> Callable[[AnyImage], Tensor]:
        """From a converted image to the input of the model, without the batch."""

    @property
    def pixel_format(self) -> PixelFormat:
        """The bands and values of images that the model gets."""
        return PixelFormat()

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
    def predict_images(self, images: list[AnyImage], options: Any, device: torch.device) -> list[Result | None]:
        """Return the results of some images; None where the model's output is not finite.

        Args:
            images: In the pixel format of this predictor; one at a time, unless the options have a batch_size.
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
        pixel_format: The bands and values that images are converted to.
        max_pixels: Images with more pixels are refused; None = Pillow's limit.
        to_tensor: From a converted image to the input.
    """

    pixel_format: PixelFormat
    max_pixels: int | None
    to_tensor: Callable[[AnyImage], Tensor]

    def __call__(self, image: ImageInput) -> Tensor:
        """Return the input for one image: a path, a PIL image, an array or a tensor.

        Raises:
            ValueError: It cannot be used.
        """
        inputs = ImageInputs(image)
        require(inputs.is_single, "transform takes one image: call it for each")
        (read,) = read_images(inputs, self.pixel_format, self.max_pixels)
        if read.image is None:
            raise ValueError(read.error)
        return self.to_tensor(read.image)


class DrawingPredictor(Predictor[Result]):
    """A predictor whose results are drawn."""

    # How the file of each drawing ends, by the key of the JSON object that names it.
    drawing_suffixes: ClassVar[dict[str, str]]

    @abstractmethod
    def render(self, image: AnyImage, result: Result) -> Rendering:
        """Draw a result on its image; arguments as they are in a Prediction."""


def read_images(
    files: ImageFiles, pixel_format: PixelFormat, max_pixels: int | None = None
) -> Iterator[Prediction[Any]]:
    """Read images one after the other; those that cannot be used have an error. See Predictor for the arguments."""
    for index in range(len(files)):
        name = files.name(index)
        try:
            with decompression_bomb_limit(max_pixels), files.open(index) as opened:
                prediction = Prediction[Any](name, decode_image(opened, pixel_format))
        # A damaged file can make Pillow raise anything.
        except Exception as error:
            prediction = Prediction(name, error=describe_image_error(name, error))
        yield prediction


def batch_size_of(options: CommandOptions) -> int:
    """Return how many images are predicted at a time."""
    return options.batch_size if isinstance(options, ClassPredictOptions) else 1


@torch.no_grad()
def predict(
    predictor: Predictor[Result],
    files: ImageFiles,
    options: CommandOptions,
    device: torch.device | str | None = None,
) -> Iterator[Prediction[Result]]:
    """Predict images one after the other, as they are read, on a device or, if it is None, on that of the options."""
    chosen = resolve_device(options.device) if device is None else torch.device(device)
    batch_size = batch_size_of(options)
    predictor.check_memory(min(batch_size, len(files)))
    predictor.model.to(chosen)
    pixel_format, max_pixels = override_pixels(predictor, options.data)
    images = read_images(files, pixel_format, max_pixels)
    while batch := list(islice(images, batch_size)):
        readable = [one.image for one in batch if one.image is not None]
        try:
            results = iter(predictor.predict_images(readable, options, chosen) if readable else [])
        except ImageSizeError as error:
            # Inputs of a batch have one size.
            for one in batch:
                one.error = one.error or f"{one.file} is not predicted: {error}"
        for one in batch:
            if one.error is None:
                one.result = next(results)
                if one.result is None:
                    one.error = f"{one.file} gives NaN or infinite values: check the model's weights"
            yield one


def override_pixels(predictor: Predictor[Any], options: PixelOptions) -> tuple[PixelFormat, int | None]:
    """Return the bands and values that a predictor gets, and its pixel limit, with options in place of the run's."""
    own = predictor.pixel_format
    bands = own.bands if options.bands is None else tuple(options.bands)
    values: Any = own.range if options.range is None else options.range
    pixel_format = replace(own, bands=bands, range=tuple(values) if isinstance(values, list) else values)
    return pixel_format, predictor.max_pixels if options.max_pixels is None else options.max_pixels


def predict_command(task: type["Task"], model: str, images: Sequence[str], options: PredictOptions) -> int:
    """Run `predict`: print the results, or write them to a file or a folder, by one process or several.

    Returns:
        The exit code: 1 if an image could not be used, else 0.
    """
    # Processes that have finished their images wait for the others.
    timeout = InitProcessGroupKwargs(timeout=LONGEST_WAIT)
    accelerator = make_accelerator("no", kwargs_handlers=[timeout])
    require(
        options.device is None or accelerator.num_processes == 1,
        "--device chooses the device of one process, but there are several: leave it out",
    )
    device = accelerator.device if options.device is None else resolve_device(options.device)
    published, model = model, run_local_main_first(accelerator, lambda: fetch_source(model))
    files, output = run_on_main(accelerator, lambda: _open_files(model, images, options))
    format = options.chosen_format() if isinstance(options, ClassPredictOptions) else "records"
    is_printed = output is None or is_stream(output)
    _check_output_format(options, format, is_printed=is_printed, processes=accelerator.num_processes)
    # Programs expect UTF-8; on a terminal, letters that it does not know are escaped.
    if isinstance(sys.stdout, io.TextIOWrapper):
        is_for_people = format in ("table", "records")
        sys.stdout.reconfigure(errors="backslashreplace", encoding=None if is_for_people else "utf-8")
    predictor = run_local_main_first(accelerator, lambda: task.load_predictor(model, options))
    if is_printed:
        return _print_predictions(predictor, files, options, device, format, output)
    assert output is not None
    job = PredictionJob(predictor, files, options, PartialResults(output))
    with ExitStack() as stack:

        def start() -> Plan:
            settings = job_settings(task_of(task.config_class), model, predictor.model, options)
            facts = {"model": published, "images": len(files)}
            stack.enter_context(job.partial.open(settings, facts, start_over=options.resume == "never"))
            return job.make_plan()

        plan = run_on_main(accelerator, start)
        try:
            part = job.write_part(plan, device, accelerator.process_index, accelerator.num_processes)
        except KeyboardInterrupt:
            if accelerator.is_main_process:
                print(f"results so far are kept in {job.partial.folder}: {RESUME}", file=sys.stderr)
            raise
        parts = run_on_all(accelerator, lambda: part)
        errors = run_on_main(accelerator, lambda: job.partial.merge(plan.ids, format, parts))
    if accelerator.num_processes > 1:
        accelerator.end_training()
    return 1 if errors else 0


def _open_files(model: str, images: Sequence[str], options: PredictOptions) -> tuple[ImageFiles, Path | None]:
    """Return the images, and the file for their results, if there is to be one; refuse one that must not be written."""
    files = ImageFiles(images)
    inputs = [*(path for path, _ in files.files), model, *([options.checkpoint] if options.checkpoint else [])]
    if isinstance(options, DrawingPredictOptions):
        return files, check_output_folder(options.output, [PREDICTIONS_JSON], inputs=inputs) / PREDICTIONS_JSON
    if not isinstance(options, ClassPredictOptions):
        raise TypeError(f"{type(options).__name__} is not derived from ClassPredictOptions or DrawingPredictOptions")
    return files, None if options.output is None else check_output_file(options.output, inputs)


def _check_output_format(options: PredictOptions, format: str, *, is_printed: bool, processes: int) -> None:
    """Refuse a format that does not fit the output, before the model is loaded."""
    remedy = "name a file for the results with --output"
    if is_printed:
        require(processes == 1, f"several processes cannot print their results together: {remedy}")
        require(options.resume == "auto", f"--resume never has no effect on results that are printed: {remedy}")
        require(format != "parquet", f"Parquet cannot be printed: {remedy}, or choose another --format")
    if format == "parquet" and find_spec("pyarrow") is None:
        raise ValueError("Parquet needs pyarrow: pip install 'inlinevit[data]', or choose --format csv or jsonl")


def _print_predictions(
    predictor: Predictor[Any],
    files: ImageFiles,
    options: PredictOptions,
    device: torch.device,
    format: str,
    output: Path | None,
) -> int:
    """Print class predictions, or write them to a stream such as /dev/stdout; see predict_command."""
    failures: list[str] = []
    # Results that are printed one by one show the progress themselves.
    disable = format != "table" and sys.stdout.isatty()

    def reported() -> Iterator[Prediction[Any]]:
        with job_progress("predicting", len(files), "images", disable=disable) as advance:
            for prediction in predict(predictor, files, options, device):
                if prediction.error is not None:
                    failures.append(prediction.file)
                    print(printable(prediction.error), file=sys.stderr)
                yield prediction
                advance()

    with nullcontext(sys.stdout) if output is None else atomic_text_writer(output, newline="") as stream:
        CLASS_WRITERS[format](reported(), stream)
    return 1 if failures else 0


@dataclass
class Plan:
    """What is to be predicted, decided by the main process.

    Attributes:
        ids: The ids of all images.
        names: The names of their drawings; "" for tasks that draw nothing.
        batches: Indices of the images that have no result yet, by batch.
    """

    ids: list[str]
    names: list[str]
    batches: list[list[int]]


@dataclass
class PredictionJob:
    """Predictions that are written to files.

    Attributes:
        predictor: The model.
        files: All images.
        options: The options of `predict`.
        partial: The results so far.
    """

    predictor: Predictor[Any]
    files: ImageFiles
    options: PredictOptions
    partial: PartialResults

    def make_plan(self) -> Plan:
        """Find what is to be predicted; the partial results are open."""
        suffixes: list[str] = []
        names = [""] * len(self.files)
        folder = self.partial.output.parent
        if isinstance(self.options, DrawingPredictOptions):
            if not isinstance(self.predictor, DrawingPredictor):
                raise TypeError(f"{type(self.predictor).__name__} draws nothing: derive it from DrawingPredictor")
            suffixes = list(self.predictor.drawing_suffixes.values())
            names = unique_names(self.files, folder, suffixes)
        ids, lines = image_ids(self.files, names), self.partial.lines()

        def is_done(index: int) -> bool:
            line = lines.get(ids[index])
            if line is None:
                return False
            return line.is_error or all((folder / f"{names[index]}{suffix}").exists() for suffix in suffixes)

        # Batches do not depend on what is done and on the processes, so that all digits of the results are the same.
        size = batch_size_of(self.options)
        indices = range(len(ids))
        batches = [list(indices[first : first + size]) for first in range(0, len(ids), size)]
        unfinished = [batch for batch in batches if not all(is_done(index) for index in batch)]
        if lines:
            count = len(ids) - sum(map(len, unfinished))
            print(f"resuming: {count} of {len(ids)} images are done ({self.partial.folder})", file=sys.stderr)
        return Plan(ids, names, unfinished)

    def write_part(self, plan: Plan, device: torch.device, process: int = 0, processes: int = 1) -> str:
        """Predict the images of one process, and write its part of the results.

        Args:
            plan: What is to be predicted, the same in all processes.
            device: Where to compute.
            process: The number of this process.
            processes: How many there are.

        Returns:
            The name of the part.
        """
        indices = [index for batch in plan.batches[process::processes] for index in batch]
        what = "predicting" if processes == 1 else f"predicting, process {process} of {processes}"
        with (
            self.partial.write_part(process) as (part, write),
            job_progress(what, len(indices), "images", disable=process > 0) as advance,
        ):
            predictions = predict(self.predictor, self.files.subset(indices), self.options, device)
            for index, prediction in zip(indices, predictions, strict=True):
                if prediction.error is not None:
                    print(printable(prediction.error), file=sys.stderr)
                write(plan.ids[index], self.make_record(prediction, plan.names[index]))
                advance()
        return part

    def make_record(self, prediction: Prediction[Any], name: str) -> dict[str, Any]:
        """Return the JSON object of an image; if there is something to draw, draw it, and print a line."""
        if not isinstance(self.predictor, DrawingPredictor) or prediction.image is None or prediction.result is None:
            return class_record(prediction)
        suffixes = self.predictor.drawing_suffixes
        shown = self.predictor.render(prediction.image, prediction.result)
        for key, image in shown.drawings.items():
            atomic_write_png(self.partial.output.parent / f"{name}{suffixes[key]}", image)
        print(printable(f"{prediction.file}: {shown.summary}"))
        width, height = prediction.image.size
        drawn = {key: display_name(f"{name}{suffixes[key]}") for key in shown.drawings}
        return {"file": prediction.file, "width": width, "height": height, **drawn, **shown.record}
