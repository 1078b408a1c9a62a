"""How well a detector finds objects: from images to COCO's numbers, tables and files."""

import csv
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text
from torch import nn

from ...data.images import printable
from ...engine.outputs import check_output_folder
from ...engine.runs import run_config
from ...engine.setup import make_eval_accelerator
from ...engine.state import unsharded
from ...utils.atomic import atomic_text_writer, atomic_write_bytes, finite, make_output_dir
from ...utils.validation import require
from .coco import Category, CocoSource, Record, open_coco
from .config import DetectionConfig, DetectionDataConfig, DetectionDataOptions
from .dataset import make_eval_loader
from .metrics import (
    NUMBERS,
    PARTS,
    CategoryPrecision,
    DetectionEvaluation,
    coco_metrics,
    detect,
    only,
    read_results,
    to_results,
)
from .predictor import load_detector

CLASSES_SHOWN = 5
NAMES_SHOWN = 3
# What the command writes, and for each kind of results.
OUTPUTS = ("evaluation.json", "per_class.csv")
RESULTS = "results_{}.json"


def evaluate(
    model: nn.Module,
    source: CocoSource,
    config: DetectionDataConfig,
    accelerator: Accelerator,
    *,
    show_progress: bool = False,
) -> DetectionEvaluation:
    """Evaluate a detector on all images, each counted once whatever the number of processes.

    Args:
        model: In evaluation mode, on the accelerator's device; its labels are those of the source.
        source: The images.
        config: How the images are read.
        accelerator: The processes; all of them call this, and get the same.
        show_progress: Show a bar.
    """
    results = collect_results(model, source, config, accelerator, show_progress=show_progress)
    return measure(source, results, accelerator)


def collect_results(
    model: nn.Module,
    source: CocoSource,
    config: DetectionDataConfig,
    accelerator: Accelerator,
    *,
    categories: Sequence[Category] | None = None,
    show_progress: bool = False,
) -> list[Record]:
    """What a detector finds, in COCO's results format, in the order of the images.

    The list is the same for any number of processes: images are seen one at a time.

    Args:
        model: In evaluation mode, on the accelerator's device.
        source: The images.
        config: How the images are read.
        accelerator: The processes; all of them call this, and get the same.
        categories: What the model's labels 1, 2, … mean; None = the source's categories.
        show_progress: Show a bar.
    """
    categories = source.categories if categories is None else categories
    batches: Iterable[Any] = make_eval_loader(source, config, accelerator.process_index, accelerator.num_processes)
    if show_progress:
        batches = track(batches, "evaluating", console=Console(stderr=True), disable=not accelerator.is_main_process)
    # The bare model: DistributedDataParallel would wait for processes whose share is smaller.
    bare = accelerator.unwrap_model(model)
    found: list[tuple[int, list[Record]]] = []
    with unsharded(bare):
        for index, image in batches:
            with accelerator.autocast():
                answer = detect(bare, image.to(accelerator.device, non_blocking=True))
            height, width = image.shape[-2:]
            found.append((index, to_results(answer, source.images[index]["id"], (height, width), categories)))
    by_image = sorted(gather_object(found), key=lambda one: one[0])
    return [result for _, results in by_image for result in results]


def measure(source: CocoSource, results: list[Record], accelerator: Accelerator) -> DetectionEvaluation:
    """COCO's numbers: computed by one process, which takes minutes for all of COCO, and told to the others."""
    outcome = [coco_metrics(source.ground_truth(), results) if accelerator.is_main_process else None]
    (told,) = broadcast_object_list(outcome)
    return told


def match_categories(known: Sequence[Category], source: CocoSource) -> list[Category]:
    """The categories of a source in the order of a model's labels. They are matched by name.

    Args:
        known: The model's categories, by label.
        source: The images and their categories, whose ids may be others.
    """
    ours, theirs = [category.name for category in known], [category.name for category in source.categories]
    twice = [name for name in theirs if theirs.count(name) > 1]
    require(not twice, f"{source.file} has two categories called {twice[0] if twice else ''}: rename one of them")
    missing = {
        "the model does not know {} of the images": [name for name in theirs if name not in ours],
        "the images do not have {} of the model": [name for name in ours if name not in theirs],
    }
    problems = [text.format(_shown(names)) for text, names in missing.items() if names]
    require(
        not problems,
        f"{' and '.join(problems)}: name images with the same categories with --data.path or --data.eval_annotations, "
        "or another run",
    )
    by_name = {category.name: category for category in source.categories}
    return [by_name[name] for name in ours]


def _shown(names: list[str]) -> str:
    shown = ", ".join(names[:NAMES_SHOWN]) + (", …" if len(names) > NAMES_SHOWN else "")
    return f"{len(names)} {'category' if len(names) == 1 else 'categories'} ({shown})"


def evaluate_command(
    run: str | None,
    data: DetectionDataOptions,
    checkpoint: str | None = None,
    output: str | None = None,
    precision: Literal["no", "bf16", "fp16"] = "no",
    results: list[str] | None = None,
) -> None:
    """Tell how well a detector finds objects.

    Args:
        run: The folder of a training run; null = none, if results and their data are named.
        data: The images; those of the training run, if no others are named.
        checkpoint: "best" or a checkpoint of the run; null = the final weights.
        output: Folder for evaluation.json, per_class.csv and, of a model, its results in COCO's format:
            results_bbox.json and results_segm.json.
        precision: Half precision for what can bear it.
        results: Evaluate what is stored in these files, in COCO's results format, instead of a model; boxes and masks
            may be in files of their own.
    """
    require(run is not None or bool(results), "name the folder of a training run, or results with --results")
    without_model = "results are evaluated without a model: leave out --{}, or --results"
    require(not results or checkpoint is None, without_model.format("checkpoint"))
    require(not results or precision == "no", without_model.format("precision"))
    require(not results or data.workers is None, without_model.format("data.workers"))
    accelerator = make_eval_accelerator(precision)
    chosen = evaluation_data(run, data)
    source = open_coco(chosen, training=False)
    if output is not None:
        names = OUTPUTS if results else (*OUTPUTS, *(RESULTS.format(iou_type) for iou_type in PARTS.values()))
        inputs = [str(source.file), *(results or []), *([checkpoint] if checkpoint else [])]
        check_output_folder(output, names, inputs=inputs)
    if results:
        title, found = ", ".join(results), read_results(results, source.ground_truth())
    else:
        assert run is not None
        detector = load_detector(run, checkpoint=checkpoint)
        categories = match_categories(detector.categories, source)
        if output is not None:
            make_output_dir(Path(output))
        title, found = (
            f"{detector.name}, {detector.config.min_size} pixels, {source.file}",
            collect_results(
                detector.model.to(accelerator.device),
                source,
                chosen,
                accelerator,
                categories=categories,
                show_progress=True,
            ),
        )
    outcome = measure(source, found, accelerator)
    if accelerator.is_main_process:
        print_tables(outcome, title)
        if output is not None:
            facts = {"run": run, "checkpoint": checkpoint, "results": results, "data": str(source.file)}
            save_evaluation(outcome, facts, Path(output))
            if not results:
                save_results(found, Path(output))
            Console(stderr=True).print(f"results are in {output}", markup=False, highlight=False)
    accelerator.end_training()


def evaluation_data(run: str | None, options: DetectionDataOptions) -> DetectionDataConfig:
    """The images to evaluate on: those of a run, but for what is said of them, unless others are named."""
    data = options.applied_to(None if run is None else run_config(DetectionConfig, run).data, DetectionDataConfig())
    unused = [name for name in ("path", "eval_split") if name in options.overrides()]
    require(
        not unused or data.eval_annotations is None or data.eval_folder is None,
        f"data.{' and data.'.join(unused)} would not be used, because data.eval_annotations and data.eval_folder name "
        "the files: leave out one or the other",
    )
    return data


def print_tables(outcome: DetectionEvaluation, title: str) -> None:
    """Show COCO's numbers in percent, then the categories that are found worst and best."""
    console = Console()
    console.print(Text(f"{title}, {outcome.images} images"))
    parts = {"boxes": outcome.box, "masks": outcome.mask}
    for names in (NUMBERS[:6], NUMBERS[6:]):
        table = Table("%")
        for name in names:
            table.add_column(name, justify="right")
        for part, numbers in parts.items():
            if numbers is not None:
                table.add_row(part, *(_percent(numbers[name]) for name in names))
        console.print(table)
    # By masks where there are any, because they tell more.
    part = "box" if outcome.mask is None else "mask"
    ranked = sorted(
        ((vars(one)[part], one) for one in outcome.per_class if not math.isnan(vars(one)[part])),
        key=lambda pair: pair[0],
    )
    table = Table(title=f"categories, AP of {'masks' if part == 'mask' else 'boxes'}")
    for heading in ("worst", "%", "best", "%"):
        table.add_column(heading, justify="right" if heading == "%" else "left")
    for (low, poor), (high, good) in zip(ranked[:CLASSES_SHOWN], ranked[::-1][:CLASSES_SHOWN], strict=True):
        table.add_row(
            Text(printable(poor.category.name)), _percent(low), Text(printable(good.category.name)), _percent(high)
        )
    console.print(table)


def _percent(share: float) -> str:
    return "–" if math.isnan(share) else f"{100 * share:.1f}"


def save_evaluation(outcome: DetectionEvaluation, facts: dict[str, Any], folder: Path) -> None:
    """Write evaluation.json and per_class.csv.

    Args:
        outcome: The evaluation.
        facts: What else evaluation.json is to tell.
        folder: Where they go; it exists.
    """
    rows = [_row(one) for one in outcome.per_class]
    content = {**facts, **finite(outcome.numbers()), "images": outcome.images, "per_class": rows}
    atomic_write_bytes(folder / "evaluation.json", json.dumps(content).encode())
    with atomic_text_writer(folder / "per_class.csv", newline="") as stream:
        writer = csv.DictWriter(stream, ["id", "name", "objects", "box_AP", "mask_AP"])
        writer.writeheader()
        writer.writerows(rows)


def _row(one: CategoryPrecision) -> Record:
    """What files tell of a category; None where there is no number."""
    precisions = {"box_AP": one.box, "mask_AP": one.mask}
    known = finite({name: math.nan if value is None else value for name, value in precisions.items()})
    return {**asdict(one.category), "objects": one.objects, **known}


def save_results(results: list[Record], folder: Path) -> None:
    """Write COCO's results, of boxes and of masks in a file each: in one, pycocotools takes sizes of masks from boxes.

    Args:
        results: What a detector has found.
        folder: Where they go; it exists.
    """
    for part, iou_type in PARTS.items():
        atomic_write_bytes(folder / RESULTS.format(iou_type), json.dumps(only(part, results)).encode())
