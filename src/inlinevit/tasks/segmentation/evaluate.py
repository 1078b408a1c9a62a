"""How well a model labels pixels: from images to numbers, tables and files."""

import csv
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text
from torch import nn

from ...data.images import printable
from ...engine.outputs import check_output_folder
from ...engine.setup import make_eval_accelerator
from ...engine.state import unsharded
from ...utils.atomic import atomic_text_writer, atomic_write_bytes, finite, make_output_dir
from ...utils.validation import require
from .ade import AdeSource, open_ade
from .config import InferenceConfig, InferenceOptions, SegmentationDataConfig, SegmentationDataOptions
from .dataset import make_eval_loader
from .inference import MeanStd, described, label
from .labels import LabelMap, open_labels
from .metrics import SegmentationEvaluation, count_pixels
from .predictor import SegmentationPredictor, load_segmenter

# Up to so many classes, the table has all of them; otherwise, so many of the worst and of the best.
MOST_LISTED = 20
CLASSES_SHOWN = 5
# What the command writes.
OUTPUTS = ("evaluation.json", "per_class.csv", "confusion.png")


def evaluate(
    model: nn.Module,
    source: AdeSource,
    config: SegmentationDataConfig,
    inference: InferenceConfig,
    mean_std: MeanStd,
    accelerator: Accelerator,
    *,
    show_progress: bool = False,
) -> SegmentationEvaluation:
    """Evaluate a model on all images, each counted once whatever the number of processes.

    Images are seen one at a time, and pixels are counted in whole numbers: the outcome is the same for any number of
    processes.

    Args:
        model: In evaluation mode, on the accelerator's device; its classes are those of the source.
        source: The images.
        config: How the images are read.
        inference: How the model looks at them.
        mean_std: What its images are normalised by.
        accelerator: The processes; all of them call this, and get the same.
        show_progress: Show a bar.
    """
    batches: Iterable[Any] = make_eval_loader(source, config, accelerator.process_index, accelerator.num_processes)
    if show_progress:
        batches = track(batches, "evaluating", console=Console(stderr=True), disable=not accelerator.is_main_process)
    # The bare model: DistributedDataParallel would wait for processes whose share is smaller.
    bare = accelerator.unwrap_model(model)
    device, classes = accelerator.device, len(source.labels.classes)
    confusion = torch.zeros(classes, classes, dtype=torch.int64, device=device)
    with unsharded(bare):
        for _, image, truth in batches:
            with accelerator.autocast():
                answer = label(bare, image, inference, mean_std, device)
            confusion += count_pixels(truth.to(device), answer, classes)
    return SegmentationEvaluation(accelerator.reduce(confusion, "sum").cpu(), len(source))


def evaluate_command(
    run: str,
    data: SegmentationDataOptions,
    inference: InferenceOptions,
    checkpoint: str | None = None,
    output: str | None = None,
    precision: Literal["no", "bf16", "fp16"] = "no",
) -> None:
    """Tell how well a model labels pixels.

    Args:
        run: The folder of a training run.
        data: The images and their label maps; what is not said is as in the training run.
        inference: How the model looks at them.
        checkpoint: "best" or a checkpoint of the run; null = the final weights.
        output: Folder for evaluation.json, per_class.csv and confusion.png.
        precision: Half precision for what can bear it.
    """
    accelerator = make_eval_accelerator(precision)
    if output is not None:
        check_output_folder(output, OUTPUTS, inputs=[checkpoint] if checkpoint else [])
    segmenter = load_segmenter(run, checkpoint=checkpoint)
    chosen = data.applied_to(segmenter.config.data, SegmentationDataConfig())
    source = open_ade(chosen, evaluation_labels(segmenter, chosen, is_named=data.labels is not None), training=False)
    seen = inference.applied_to(segmenter.config.inference)
    if output is not None:
        labels_file = [] if chosen.labels is None else [chosen.labels]
        folders = [source.images_folder, source.masks_folder]
        make_output_dir(check_output_folder(output, OUTPUTS, inputs=labels_file, image_folders=folders))
    outcome = evaluate(
        segmenter.model.to(accelerator.device),
        source,
        chosen,
        seen,
        segmenter.mean_std,
        accelerator,
        show_progress=True,
    )
    if accelerator.is_main_process:
        print_tables(outcome, source.labels, [segmenter.name, described(seen), str(source.images_folder)])
        if output is not None:
            facts = {"run": run, "checkpoint": checkpoint, "data": str(source.images_folder), "inference": vars(seen)}
            save_evaluation(outcome, source.labels, facts, Path(output))
            Console(stderr=True).print(f"results are in {output}", markup=False, highlight=False)
    accelerator.end_training()


def evaluation_labels(
    segmenter: SegmentationPredictor, data: SegmentationDataConfig, *, is_named: bool = False
) -> LabelMap:
    """What the values in the data's label maps mean: the model's classes, in its order.

    Args:
        segmenter: The model; its own labels are taken, unless the data have a file of others.
        data: The data.
        is_named: Whether the user has named the file of labels: then it is read, even if the run had the same one.
    """
    if not is_named and data.labels == segmenter.config.data.labels:
        return segmenter.labels
    labels = open_labels(data, None)
    ours, theirs = ([kind.name for kind in one.classes] for one in (segmenter.labels, labels))
    require(
        ours == theirs,
        f"{data.labels} has other classes than the model, or has them in another order ({_shown(theirs)} in place of "
        f"{_shown(ours)}): write one with the model's classes, or evaluate another run",
    )
    return labels


def _shown(names: list[str]) -> str:
    return ", ".join(names[:CLASSES_SHOWN]) + (", …" if len(names) > CLASSES_SHOWN else "")


def print_tables(outcome: SegmentationEvaluation, labels: LabelMap, title: list[str]) -> None:
    """Show the numbers in percent, then those of the classes: all, or the worst and the best if there are many.

    Args:
        outcome: The evaluation.
        labels: The classes.
        title: What was evaluated, in parts.
    """
    console = Console()
    console.print(Text(f"{', '.join(title)}, {outcome.images} images"), soft_wrap=True)
    table = Table()
    numbers = outcome.numbers()
    for heading in ("mIoU %", "mAcc %", "pixel accuracy %"):
        table.add_column(heading, justify="right")
    table.add_row(*(_percent(numbers[name]) for name in ("miou", "macc", "pixel_accuracy")))
    console.print(table)
    names = [kind.name for kind in labels.classes]
    rows = list(zip(outcome.class_iou().tolist(), outcome.class_accuracy().tolist(), names, strict=True))
    if len(rows) <= MOST_LISTED:
        table = Table("class")
        for heading in ("IoU %", "accuracy %"):
            table.add_column(heading, justify="right")
        for iou, accuracy, name in rows:
            table.add_row(Text(printable(name)), _percent(iou), _percent(accuracy))
    else:
        ranked = sorted((iou, name) for iou, _, name in rows if not math.isnan(iou))
        table = Table(title="classes, IoU")
        for heading in ("worst", "%", "best", "%"):
            table.add_column(heading, justify="right" if heading == "%" else "left")
        for (low, poor), (high, good) in zip(ranked[:CLASSES_SHOWN], ranked[::-1][:CLASSES_SHOWN], strict=True):
            table.add_row(Text(printable(poor)), _percent(low), Text(printable(good)), _percent(high))
    console.print(table)


def _percent(share: float) -> str:
    return "–" if math.isnan(share) else f"{100 * share:.2f}"


def save_evaluation(outcome: SegmentationEvaluation, labels: LabelMap, facts: dict[str, Any], folder: Path) -> None:
    """Write evaluation.json, per_class.csv and confusion.png.

    Args:
        outcome: The evaluation.
        labels: The classes.
        facts: What else evaluation.json is to tell.
        folder: Where they go; it exists.
    """
    # Here, because matplotlib takes its time and training needs no pictures.
    from ..classification.visualize import draw_confusion

    names = [kind.name for kind in labels.classes]
    columns = zip(
        names,
        outcome.confusion.sum(dim=1).tolist(),
        outcome.confusion.sum(dim=0).tolist(),
        outcome.class_iou().tolist(),
        outcome.class_accuracy().tolist(),
        strict=True,
    )
    rows = [
        {"name": name, "pixels": true, "predicted": predicted, **finite({"iou": iou, "accuracy": accuracy})}
        for name, true, predicted, iou, accuracy in columns
    ]
    content = {
        **facts,
        **finite(outcome.numbers()),
        "images": outcome.images,
        "per_class": rows,
        "confusion": outcome.confusion.tolist(),
    }
    atomic_write_bytes(folder / "evaluation.json", json.dumps(content).encode())
    with atomic_text_writer(folder / "per_class.csv", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    draw_confusion(outcome.confusion, names, folder / "confusion.png", unit="pixels")
