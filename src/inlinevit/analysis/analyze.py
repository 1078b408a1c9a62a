"""`inlinevit analyze`: confusion, locality, masking and maps of models, and a report."""

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from timm.models import get_pretrained_cfg
from torch import Tensor, nn

from ..engine.config import MOST_IMAGES
from ..engine.outputs import check_output_folder
from ..engine.runs import has_config, open_run
from ..engine.setup import resolve_device
from ..layers import BaseAttention
from ..layers.registry import attention_name
from ..models.factory import parse_model
from ..models.hub import fetch_source
from ..report import STYLES, Block, Report, Section, Table, Text
from ..tasks.classification.config import (
    ClassificationConfig,
    ClassificationDataConfig,
    ClassificationDataOptions,
    ModelConfig,
)
from ..tasks.classification.dataset import UnreadableCounter, drop_unreadable, make_eval_loader
from ..tasks.classification.model import build_model
from ..tasks.classification.predictor import (
    ClassificationPredictor,
    check_batch_memory,
    find_classification_run,
    load_classifier,
)
from ..tasks.classification.shards import ShardSource
from ..tasks.classification.sources import ImageSource, open_source, source_paths, take_subset
from ..tasks.classification.transforms import InputSpec, evaluation_transform, input_spec
from ..utils.atomic import make_output_dir
from ..utils.console import new_console
from ..utils.validation import Range, check_value, require
from .confusion import DELTA, EPSILON, measure_confusion
from .locality import measure_locality
from .map_plots import View
from .maps import attention_maps
from .masking import measure_masking
from .sections import Analysis, analysis_sections

# Output files, besides the figures.
OUTPUTS = ("analysis.html", "analysis.json")
# Side lengths of hidden neighbourhoods; those that would hide the smallest feature map are left out.
SIDES = (3, 5, 7)
# Queries whose maps are plotted, by image. Two queries of one image show what their maps have in common.
VIEWS = (((0.5, 0.5), (0.3, 0.3)), ((0.5, 0.5),))
UNTRAINED = "The weights are random: this shows an architecture before any training."


@dataclass
class Subject:
    """A model to analyze.

    Attributes:
        label: Name in the report.
        attention: Name of its attention.
        model: In evaluation mode, on its device.
        spec: Its input.
        num_classes: Number of its classes.
        labels: For each class of the images, that of the model; None = they are the same.
        no_accuracy: Why its accuracy on the images is meaningless; "" if it is not.
    """

    label: str
    attention: str
    model: nn.Module
    spec: InputSpec
    num_classes: int
    labels: Sequence[int] | None = None
    no_accuracy: str = ""


@dataclass
class AnalysisSettings:
    """How many images an analysis takes, and what counts as confused.

    Attributes:
        images: Images for locality and masking.
        confusion_images: Images for confusion, which compares all pairs of queries.
        batch_size: Images per batch.
        epsilon: See Confusion.
        delta: See Confusion.
    """

    images: int = 64
    confusion_images: int = 8
    batch_size: int = 16
    epsilon: float = EPSILON
    delta: float = DELTA

    def __post_init__(self) -> None:
        for name in ("images", "confusion_images", "batch_size"):
            check_value(name, vars(self)[name], int, Range(1, MOST_IMAGES))
        for name in ("epsilon", "delta"):
            check_value(name, vars(self)[name], float, Range(0, 2))


def analyze(
    subject: Subject, source: ImageSource | ShardSource, settings: AnalysisSettings, console: Console
) -> Analysis:
    """Analyze a model on an evenly spaced subset of labelled images, and show the progress on a console."""
    model = subject.model

    def batches(count: int, what: str) -> Iterator[tuple[Tensor, Tensor]]:
        subset = take_subset(source, count)
        return prepared_batches(subject, subset, settings.batch_size, f"{subject.label}: {what}", console)

    confusion_images = (images for images, _ in batches(settings.confusion_images, "confusion"))
    confusion = measure_confusion(model, confusion_images, epsilon=settings.epsilon, delta=settings.delta)
    highest = 0

    def locality_images() -> Iterator[Tensor]:
        nonlocal highest
        for images, labels in batches(settings.images, "locality"):
            highest = max(highest, int(labels.max()))
            yield images

    locality = measure_locality(model, locality_images())
    views = views_of(subject, batches(len(VIEWS), "maps"))
    found = Analysis(subject.label, subject.attention, confusion, locality, views, no_masking=subject.no_accuracy)
    smallest = min((min(layer.size) for layer in locality), default=0)
    sides = tuple(side for side in SIDES if side < smallest)
    if len(locality) < len(confusion.layers):
        found.no_masking = "some of its keys come from a reduced map, where queries have no neighbourhood"
    elif not sides:
        found.no_masking = f"its smallest map has a side of {smallest}, too small to hide a neighbourhood"
    elif highest >= subject.num_classes and not subject.no_accuracy:
        found.no_masking = f"its {subject.num_classes} classes are not those of the images (labels up to {highest})"
    if not found.no_masking:
        found.masking = measure_masking(model, batches(settings.images, "masking"), sides=sides)
    return found


def prepared_batches(
    subject: Subject, source: ImageSource | ShardSource, batch_size: int, what: str, console: Console
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield images and labels for a model, on its device; unreadable images are reported and left out."""
    spec = subject.spec
    device = next(subject.model.parameters()).device
    config = ClassificationDataConfig(batch_size=batch_size, workers=0)
    # Any label is accepted: images are analyzed even if their classes are not those of the model.
    loaded: Iterable[tuple[Tensor, Tensor, list[str]]] = make_eval_loader(
        source, evaluation_transform(spec), spec.pixel_format, sys.maxsize, config, process=0, processes=1
    )
    shown = track(loaded, what, console=console)
    for images, labels in drop_unreadable(shown, UnreadableCounter(len(source)), subject.labels):
        yield images.to(device), labels.to(device)


def views_of(subject: Subject, batches: Iterator[tuple[Tensor, Tensor]]) -> list[View]:
    """Return the attention maps of the queries of VIEWS."""
    images = [image for several, _ in batches for image in several]
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (subject.spec.mean, subject.spec.std))
    views = []
    for image, queries in zip(images, VIEWS, strict=False):
        shown = (image.cpu() * std + mean).clamp(0, 1)
        # Of several bands, the first three.
        shown = shown[:3] if len(shown) > 3 else shown[:1].expand(3, -1, -1) if len(shown) == 2 else shown
        pixels = shown.expand(3, -1, -1).permute(1, 2, 0).numpy()
        for query in queries:
            views.append(View(pixels.astype(np.float32), query, attention_maps(subject.model, image, [query])))
    return views


def attention_of(model: nn.Module) -> str:
    """Return the names of a model's attentions, joined by +; models of timm have softmax attention."""
    words = dict.fromkeys(attention_name(type(part)) for part in model.modules() if isinstance(part, BaseAttention))
    return "+".join(words) or "softmax"


def labels_of(models: Sequence[str], attentions: Sequence[str]) -> list[str]:
    """Return names for models: their attentions if they are distinct, or else the names given by the user."""
    if len(set(attentions)) == len(attentions) and all(word in STYLES for word in attentions):
        return [STYLES[word].name for word in attentions]
    names = [Path(model).name for model in models]
    names = names if len(set(names)) == len(names) else list(models)
    counts = [names[: place + 1].count(name) for place, name in enumerate(names)]
    return [name if count == 1 else f"{name} ({count})" for name, count in zip(names, counts, strict=True)]


def open_untrained(model: str, img_size: int | None) -> ClassificationPredictor:
    """Return a model with random weights: that of a training run, NAME, or NAME:OPTION=VALUE,OPTION=VALUE."""
    if has_config(model):
        run = open_run(ClassificationConfig, model).config
        config, data = replace(run.model, checkpoint=None, pretrained=False), run.data
    else:
        name, options = parse_model(model)
        config, data = ModelConfig(name=name, kwargs=options), None
    config = replace(config, drop_path_rate=0.0, img_size=config.img_size if img_size is None else img_size)
    made_for = get_pretrained_cfg(config.name)
    num_classes = config.num_classes or (made_for.num_classes if made_for is not None else 0) or 1000
    # The same each time.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        built = build_model(config, num_classes).eval()
    return ClassificationPredictor(built, config.name, config, num_classes, None, input_spec(config, data))


def analyze_command(
    models: list[str],
    settings: AnalysisSettings,
    *,
    data: str | None = None,
    checkpoint: str | None = None,
    img_size: int | None = None,
    untrained: bool = False,
    device: str | None = None,
    output: str = "runs/analysis",
) -> Path:
    """Analyze models side by side and return the path of the page; the arguments are those of `inlinevit analyze`."""
    started = time.monotonic()
    require(not untrained or checkpoint is None, "checkpoint and untrained exclude each other: choose one of them")
    chosen = resolve_device(device)
    console = new_console(stderr=True, highlight=False, soft_wrap=True)
    # Folders of published models; other names stay as they are.
    sources = [fetch_source(model) for model in models]
    for model in sources:
        if not untrained:
            find_classification_run(model)
    run = open_run(ClassificationConfig, sources[0]) if has_config(sources[0]) else None
    config = ClassificationDataOptions(path=data).applied_to(
        None if run is None else run.config.data, ClassificationDataConfig()
    )
    source = open_source(config, training=False)
    files, folders = source_paths(source)
    inputs = [*files, checkpoint] if checkpoint else files
    folder = check_output_folder(output, OUTPUTS, inputs=inputs, image_folders=folders)
    classifiers = [
        open_untrained(model, img_size)
        if untrained
        else load_classifier(model, checkpoint=checkpoint, img_size=img_size)
        for model in sources
    ]
    for classifier in classifiers:
        most = max(settings.images, settings.confusion_images)
        check_batch_memory(classifier.spec, min(settings.batch_size, most, len(source)))
    make_output_dir(folder)
    attentions = [attention_of(classifier.model) for classifier in classifiers]
    labels = labels_of(models, attentions)
    analyses, rows = [], []
    for model, classifier, attention, label in zip(models, classifiers, attentions, labels, strict=True):
        classifier.model.to(chosen)
        subject = subject_of(classifier, label, attention, source, untrained)
        analyses.append(analyze(subject, source, settings, console))
        weights = "random" if untrained else checkpoint or ("of the run" if has_config(model) else "published")
        size = f"{classifier.spec.size} × {classifier.spec.size}"
        rows.append((label, model, classifier.name, attention, weights, size))
    headings = ("name", "given as", "model", "attention", "weights", "pixels")
    blocks: list[Block] = [Table(headings, rows, "The models", is_prose=True)]
    if untrained:
        console.print(f"warning: {UNTRAINED}", markup=False)
        blocks.insert(0, Text(UNTRAINED, is_key=True))
    facts = {"data": config.path, **vars(settings), "untrained": untrained}
    facts["models"] = [dict(zip(headings, row, strict=True)) for row in rows]
    measured = min(settings.images, len(source))
    report = Report("Attention of the models", f"Measured on {measured} images of {config.path}.")
    report.add(Section("models", "The models", blocks, facts), *analysis_sections(analyses))
    path = report.write(folder, "analysis")
    report.save_figures(folder / "figures")
    console.print(f"Done in {(time.monotonic() - started) / 60:.1f} minutes. The report is in {path.resolve()}")
    return path


def subject_of(
    classifier: ClassificationPredictor, label: str, attention: str, source: ImageSource | ShardSource, untrained: bool
) -> Subject:
    """Return a classifier with its classes matched to those of the images."""
    labels, no_accuracy = None, ""
    if untrained:
        no_accuracy = "it has random weights, so its accuracy is meaningless"
    elif source.classes is not None:
        try:
            labels = classifier.match_classes(source.classes)
        except ValueError:
            count = len(source.classes)
            no_accuracy = f"its {classifier.num_classes} classes are not those of the images ({count})"
    return Subject(label, attention, classifier.model, classifier.spec, classifier.num_classes, labels, no_accuracy)
