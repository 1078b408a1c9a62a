"""How well a model tells classes apart: from images to numbers, tables and files."""

import csv
import json
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from accelerate import Accelerator
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from ...data.images import printable
from ...engine.outputs import check_output_folder
from ...engine.setup import make_eval_accelerator
from ...engine.state import unsharded
from ...utils.atomic import atomic_text_writer, atomic_write_bytes, finite, make_output_dir
from ...utils.memory import require_memory_for_images
from ...utils.validation import require
from .config import ClassificationDataOptions, DataConfig
from .dataset import UnreadableCounter, make_eval_loader
from .metrics import Evaluation, EvaluationMetrics
from .predictor import ClassificationPredictor, check_name_or_run, load_classifier, run_config
from .shards import ShardSource
from .sources import FolderSource, ImageSource, TarSource, open_part
from .transforms import InputSpec, evaluation_transform

CLASSES_SHOWN = 5
NAMES_SHOWN = 3
# What the command writes.
OUTPUTS = ("evaluation.json", "per_class.csv", "confusion.png")
# Prefixes of data that have a root.
ROOTED = ("torch", "hfds", "wds")


@torch.no_grad()
def evaluate(
    model: nn.Module,
    source: ImageSource | ShardSource,
    spec: InputSpec,
    config: DataConfig,
    accelerator: Accelerator,
    num_classes: int,
    *,
    labels: Sequence[int] | None = None,
    show_progress: bool = False,
) -> Evaluation:
    """Evaluate a model on all images, each counted once whatever the number of processes.

    Args:
        model: In evaluation mode, on the accelerator's device.
        source: The images.
        spec: What the model wants to see.
        config: How the images are read.
        accelerator: The processes; all of them call this, and get the same.
        num_classes: Width of the model's head.
        labels: For each class of the source, that of the model; None = they are the same.
        show_progress: Show a bar.
    """
    batches: Iterable[Any] = make_eval_loader(
        source,
        evaluation_transform(spec),
        spec.mode,
        num_classes if labels is None else len(labels),
        config,
        accelerator.process_index,
        accelerator.num_processes,
    )
    if show_progress:
        batches = track(batches, "evaluating", console=Console(stderr=True), disable=not accelerator.is_main_process)
    usable = drop_unreadable(batches, UnreadableCounter(config.max_unreadable), labels)
    metrics = EvaluationMetrics(num_classes, accelerator.device)
    # The bare model: DistributedDataParallel would wait for processes whose share is smaller.
    bare = accelerator.unwrap_model(model)
    with unsharded(bare):
        for images, truth in usable:
            with accelerator.autocast():
                logits = bare(images.to(accelerator.device, non_blocking=True)).float()
            metrics.update(logits, truth.to(accelerator.device))
    return metrics.compute()


def drop_unreadable(
    batches: Iterable[tuple[Tensor, Tensor, list[str]]], problems: UnreadableCounter, labels: Sequence[int] | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches without the images that could not be read, under the model's labels."""
    own = None if labels is None else torch.tensor(labels)
    for images, truth, names in batches:
        problems.check(names)
        is_usable = truth >= 0
        if is_usable.any():
            truth = truth[is_usable]
            yield images[is_usable], truth if own is None else own[truth]


def match_classes(classes: Sequence[str] | None, classifier: ClassificationPredictor) -> list[int] | None:
    """For each class of some images, which one of a model's it is.

    Args:
        classes: What the images' classes are called, by label; None = not known, so their labels are taken as they are.
        classifier: The model. Its classes may be known by WordNet ids and by words. If no name is known to it and there
            are as many as it has, the order decides.
    """
    if classes is None:
        return None
    known = {name: index for index, name in enumerate(classifier.readable_classes())}
    known |= {name: index for index, name in enumerate(classifier.classes or [])}
    unknown = [name for name in classes if name not in known]
    if not unknown:
        return [known[name] for name in classes]
    if len(unknown) == len(classes) == classifier.num_classes:
        if classifier.classes is not None:
            warnings.warn(
                f"the model knows other names than {', '.join(unknown[:NAMES_SHOWN])}, …: classes are matched by their "
                "order",
                stacklevel=2,
            )
        return list(range(len(classes)))
    shown = ", ".join(unknown[:NAMES_SHOWN]) + (", …" if len(unknown) > NAMES_SHOWN else "")
    raise ValueError(
        f"the model does not know {len(unknown)} of the {len(classes)} classes of the images ({shown}): name images of "
        f"its {classifier.num_classes} classes with --data.path or --data.eval_path, or another model"
    )


def evaluate_command(
    model: str,
    data: ClassificationDataOptions,
    checkpoint: str | None = None,
    img_size: int | None = None,
    crop_pct: float | None = None,
    output: str | None = None,
    precision: Literal["no", "bf16", "fp16"] = "no",
) -> None:
    """Tell how well a model tells classes apart.

    Args:
        model: The folder of a training run, or the name of a model of ours or of timm's.
        data: The images; those of the training run, if none are named.
        checkpoint: With a name, the file of its weights (default: the published ones); with a run, "best" or a
            checkpoint (default: the final weights).
        img_size: Side of the images that the model sees; null = what it was trained for.
        crop_pct: Share of an image's side that the model sees; null = what it was trained for.
        output: Folder for evaluation.json, per_class.csv and confusion.png.
        precision: Half precision for what can bear it.
    """
    check_name_or_run(model)
    accelerator = make_eval_accelerator(precision)
    chosen = evaluation_data(model, data)
    source = open_part(chosen, training=False)
    if output is not None:
        places = places_of(source)
        inputs = [*places.files, *([checkpoint] if checkpoint else [])]
        check_output_folder(output, OUTPUTS, inputs=inputs, image_folders=places.folders)
    with accelerator.main_process_first():
        classifier = load_classifier(model, checkpoint=checkpoint, img_size=img_size, crop_pct=crop_pct)
    labels = match_classes(source.classes, classifier)
    check_batch_memory(classifier.spec, chosen.batch_size, len(source))
    if output is not None:
        make_output_dir(Path(output))
    outcome = evaluate(
        classifier.model.to(accelerator.device),
        source,
        classifier.spec,
        chosen,
        accelerator,
        classifier.num_classes,
        labels=labels,
        show_progress=True,
    )
    if accelerator.is_main_process:
        _print_tables(outcome, classifier)
        if output is not None:
            facts = {
                "model": model,
                "checkpoint": checkpoint,
                "data": chosen.path,
                "img_size": classifier.spec.size,
            }
            save_evaluation(outcome, classifier, facts, Path(output))
            Console(stderr=True).print(f"results are in {output}", markup=False, highlight=False)
    accelerator.end_training()


def evaluation_data(model: str, options: ClassificationDataOptions) -> DataConfig:
    """The images to evaluate on, as a set that stands for itself: its classes are matched by name.

    Args:
        model: The folder of a run, whose images they are, except for what is said of them; or the name of a model.
        options: What the user has said.
    """
    run = run_config(model)
    data = options.applied_to(None if run is None else run.data, DataConfig())
    path = data.eval_path or data.path
    require(
        options.root is None or path.partition("/")[0] in ROOTED,
        f"data.root is for data whose name begins with {'/, '.join(ROOTED)}/, not for {path}: leave it out",
    )
    return replace(data, path=path, eval_path=path)


class Places(NamedTuple):
    """Where images lie.

    Attributes:
        files: Files that hold several images.
        folders: Folders of class folders.
    """

    files: list[str]
    folders: list[Path]


def places_of(source: ImageSource | ShardSource) -> Places:
    """Where the images of a source lie, as far as it is known: results must not go there."""
    if isinstance(source, ShardSource):
        return Places([str(shard) for shard in source.shards], [])
    if isinstance(source, TarSource):
        return Places([str(source.file)], [])
    if isinstance(source, FolderSource):
        # The folder of an image is its class; what lies beside that would become a class, too.
        parents = {os.path.dirname(os.path.dirname(os.path.abspath(file))) for file, _ in source.files}
        return Places([], [Path(os.path.commonpath(parents))])
    inner = getattr(source, "source", None)
    return Places([], []) if inner is None else places_of(inner)


def check_batch_memory(spec: InputSpec, batch_size: int, images: int) -> None:
    """Refuse batches that do not fit into memory.

    Args:
        spec: What the model wants to see.
        batch_size: Images in a batch.
        images: How many there are.
    """
    count = min(batch_size, images)
    remedy = "choose a smaller batch_size" if count > 1 else "choose a smaller img_size"
    require_memory_for_images(count, len(spec.mean), spec.size, spec.size, remedy)


def _print_tables(outcome: Evaluation, classifier: ClassificationPredictor) -> None:
    console = Console()
    table = Table(title=Text(f"{classifier.name}, {classifier.spec.size} × {classifier.spec.size} pixels"))
    for heading in ("top-1 %", "top-5 %", "calibration error %", "loss", "images"):
        table.add_column(heading, justify="right")
    numbers = [f"{outcome.top1:.2f}", f"{outcome.top5:.2f}", f"{outcome.calibration_error:.2f}", f"{outcome.loss:.4f}"]
    table.add_row(*numbers, f"{outcome.images}")
    console.print(table)
    names = classifier.readable_classes()
    ranked = sorted((share, index) for index, share in enumerate(outcome.per_class) if share is not None)
    table = Table(title="classes")
    for heading in ("worst", "%", "best", "%"):
        table.add_column(heading, justify="right" if heading == "%" else "left")
    worst, best = ranked[:CLASSES_SHOWN], ranked[::-1][:CLASSES_SHOWN]
    for (low, poor), (high, good) in zip(worst, best, strict=True):
        table.add_row(Text(printable(names[poor])), f"{low:.1f}", Text(printable(names[good])), f"{high:.1f}")
    console.print(table)


def save_evaluation(
    outcome: Evaluation, classifier: ClassificationPredictor, facts: dict[str, Any], folder: Path
) -> None:
    """Write evaluation.json, per_class.csv and confusion.png.

    Args:
        outcome: The evaluation.
        classifier: The model.
        facts: What else evaluation.json is to tell.
        folder: Where they go; it exists.
    """
    # Here, because matplotlib takes its time and training needs no pictures.
    from .visualize import draw_confusion

    names = classifier.readable_classes()
    content = {
        **facts,
        **finite(outcome.numbers()),
        "images": outcome.images,
        "classes": classifier.classes,
        "per_class": outcome.per_class,
        "confusion": outcome.confusion.tolist(),
    }
    atomic_write_bytes(folder / "evaluation.json", json.dumps(content).encode())
    with atomic_text_writer(folder / "per_class.csv", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["index", "class", "images", "right", "accuracy"])
        images, right = outcome.confusion.sum(dim=1).tolist(), outcome.confusion.diagonal().tolist()
        writer.writerows(zip(range(len(names)), names, images, right, outcome.per_class, strict=True))
    draw_confusion(outcome.confusion, names, folder / "confusion.png")
