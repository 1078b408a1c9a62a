"""Evaluation: one loop and one command for all tasks."""

import csv
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from accelerate import Accelerator
from torch import nn

from ..models.hub import fetch_source
from ..utils.atomic import atomic_text_writer, atomic_write_bytes, finite, make_output_dir
from ..utils.console import new_console
from ..utils.validation import require
from .config import EvalOptions
from .distributed import run_local_main_first
from .outputs import check_output_folder
from .progress import job_progress
from .records import ImageRecorder, ImageRecords
from .results import percent, print_evaluation
from .setup import check_precision, make_accelerator, resolve_device
from .state import unsharded

if TYPE_CHECKING:
    from ..report import Section
    from .predictor import Predictor
    from .task import Task

EVALUATION_JSON = "evaluation.json"
PER_CLASS_CSV = "per_class.csv"
PREDICTIONS_CSV = "predictions.csv"
EVALUATION_HTML = "evaluation.html"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Evaluation(ABC):
    """The result of an evaluation. Metrics are from 0 to 1, in classification percent; NaN where nothing is counted.

    Attributes:
        images: How many images were evaluated.
        records: The single images, if the evaluator has a recorder.
    """

    # The heading of each metric in the printed table; all are shares.
    headings: ClassVar[dict[str, str]] = {}
    # How the worst images are chosen, for evaluation.html.
    worst_caption: ClassVar[str] = ""

    images: int
    records: ImageRecords | None = None

    @abstractmethod
    def numbers(self) -> dict[str, float]:
        """Return the metrics that are one number each, by name."""

    def tables(self) -> list[list[dict[str, str]]]:
        """Return the tables to print, each as a list of rows: the text of each cell by heading."""
        numbers = self.numbers()
        return [[{heading: percent(numbers[name]) for name, heading in self.headings.items()}]]

    @abstractmethod
    def class_scores(self) -> tuple[Sequence[str], Mapping[str, Sequence[float]]]:
        """Return the names of the classes, and their scores by heading; the first heading ranks the classes."""

    @abstractmethod
    def per_class(self) -> list[dict[str, Any]]:
        """Return the rows of per_class.csv, one for each class; None where there is no value."""

    def details(self) -> dict[str, Any]:
        """Return further fields of evaluation.json."""
        return {}

    def sections(self) -> list["Section"]:
        """Return further sections of evaluation.html."""
        return []

    def save_files(self, folder: Path) -> None:  # noqa: B027
        """Write further files into a folder that exists; Task.eval_files names them."""


class Evaluator(ABC):
    """Runs a model on the batches of one data set, and accumulates metrics.

    Attributes:
        device: Where the model is; set by reset().
        recorder: If it is set, update() adds each image to it.
    """

    device: torch.device
    recorder: ImageRecorder | None = None

    @abstractmethod
    def loader(self, process: int, processes: int) -> Iterable[Any]:
        """Return the batches of one process; over all processes, every image comes once."""

    def reset(self, device: torch.device) -> None:
        """Start from nothing, for a model on this device."""
        self.device = device

    @abstractmethod
    def update(self, model: nn.Module, batch: Any) -> None:
        """Run the model on a batch and add the outcome; called without gradients, under autocast."""

    @abstractmethod
    def compute(self, accelerator: Accelerator) -> Any:
        """Return the Evaluation over all processes, the same on each; all of them call this."""


@dataclass
class EvalData:
    """Data to evaluate on, opened.

    Attributes:
        config: The task's data config.
        source: The images with their annotations.
        location: What to call the data.
        files: Files that are read: results must not replace them.
        folders: Folders of images: results must not be written into them.
    """

    config: Any
    source: Any
    location: str
    files: Sequence[str | Path] = ()
    folders: Sequence[Path] = ()


def evaluate_model(
    model: nn.Module,
    evaluator: Evaluator,
    accelerator: Accelerator,
    *,
    device: torch.device | None = None,
    show_progress: bool = False,
) -> Any:
    """Evaluate a model on all images, each counted once whatever the number of processes.

    Args:
        model: In evaluation mode, on the device; it may be wrapped for training in several processes.
        evaluator: Data and metrics.
        accelerator: The processes; all of them call this, and get the same Evaluation.
        device: Where to compute; None = the accelerator's device.
        show_progress: Show progress and time left on stderr.
    """
    # Without DistributedDataParallel, which would wait for processes that have fewer batches.
    model = accelerator.unwrap_model(model)
    device = accelerator.device if device is None else device
    batches = evaluator.loader(accelerator.process_index, accelerator.num_processes)
    evaluator.reset(device)
    dtype = DTYPES.get(accelerator.mixed_precision)
    is_quiet = not (show_progress and accelerator.is_main_process)
    bar = job_progress("evaluating", len(batches) if isinstance(batches, Sized) else None, "batches", disable=is_quiet)
    with bar as advance, torch.no_grad(), unsharded(model):
        for batch in batches:
            with torch.autocast(device.type, dtype, enabled=dtype is not None):
                evaluator.update(model, batch)
            advance()
    evaluation = evaluator.compute(accelerator)
    if evaluator.recorder is not None:
        evaluation.records = evaluator.recorder.gather()
    return evaluation


def eval_command(task: type["Task"], model: str | None, options: EvalOptions) -> None:
    """Run `eval`: print tables and, with an output folder, write the files of `save_evaluation`."""
    accelerator = make_accelerator(options.precision)
    published, model = model, run_local_main_first(accelerator, lambda: None if model is None else fetch_source(model))
    run = task.find_run(model, options)
    require(
        options.device is None or accelerator.num_processes == 1,
        "--device chooses the device of one process, but there are several: leave it out",
    )
    device = accelerator.device if options.device is None else resolve_device(options.device)
    check_precision("precision", options.precision, device)
    default: Any = task.config_class()
    config = options.data.applied_to(None if run is None else run.config.data, default.data)
    data = task.open_eval_data(config, run, options)
    if options.output is not None:
        names = (EVALUATION_JSON, PER_CLASS_CSV, PREDICTIONS_CSV, EVALUATION_HTML, *task.eval_files(options))
        inputs = [*data.files, *([options.checkpoint] if options.checkpoint else [])]
        check_output_folder(options.output, names, inputs=inputs, image_folders=data.folders)
    predictor: Predictor[Any] = run_local_main_first(accelerator, lambda: task.load_predictor(model, options))
    evaluator = predictor.make_evaluator(data, options)
    predictor.check_memory(min(config.batch_size, len(data.source)))
    if options.output is not None:
        make_output_dir(Path(options.output))
        evaluator.recorder = ImageRecorder()
    evaluation = evaluate_model(predictor.model.to(device), evaluator, accelerator, device=device, show_progress=True)
    if accelerator.is_main_process:
        title = f"{predictor.description(options)}, {data.location}"
        print_evaluation(title, evaluation)
        if options.output is not None:
            facts = {"model": published, "checkpoint": options.checkpoint, "data": data.location}
            save_evaluation(evaluation, title, facts | predictor.settings(options), Path(options.output))
            new_console(stderr=True).print(f"results are in {options.output}", markup=False, highlight=False)
    accelerator.end_training()


def save_evaluation(evaluation: Evaluation, title: str, facts: dict[str, Any], folder: Path) -> None:
    """Write the files of an evaluation.

    These are evaluation.json with the facts of what was evaluated, per_class.csv, the task's further files and, if the
    single images were recorded, predictions.csv and evaluation.html under a title.
    """
    numbers, rows = finite(evaluation.numbers()), evaluation.per_class()
    content = {**facts, **numbers, "images": evaluation.images, "per_class": rows, **evaluation.details()}
    atomic_write_bytes(folder / EVALUATION_JSON, json.dumps(content).encode())
    write_rows(folder / PER_CLASS_CSV, list(rows[0]), (row.values() for row in rows))
    evaluation.save_files(folder)
    if evaluation.records is not None:
        # Imported here: matplotlib is slow to import, and training draws nothing.
        from .evaluation_page import write_page

        columns, images = evaluation.records.columns, evaluation.records.rows
        blank = [""] * len(columns)
        lines = ([row.file, *(row.values or blank), row.error] for row in images)
        write_rows(folder / PREDICTIONS_CSV, ["file", *columns, "error"], lines)
        write_page(evaluation, title, folder / EVALUATION_HTML)


def write_rows(path: Path, headings: Sequence[str], rows: Iterable[Iterable[Any]]) -> None:
    """Write a CSV file."""
    with atomic_text_writer(path, newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(headings)
        writer.writerows(rows)
