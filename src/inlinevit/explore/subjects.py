"""The models that are explored: training runs, and models of this library and of timm."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..analysis.analyze import attention_of, labels_of, open_untrained
from ..engine.runs import has_config
from ..engine.setup import resolve_device
from ..models.hub import fetch_source
from ..tasks.classification.config import ClassificationConfig
from ..tasks.classification.predictor import ClassificationPredictor, find_classification_run, load_classifier
from ..tasks.classification.published import is_published
from ..utils.validation import require

DEMO = "runs/demo"
# What is explored if nothing is named and there is no demo: one architecture, three attentions.
DEFAULT_MODELS = ("inline_deit_tiny:attention=softmax", "inline_deit_tiny:attention=linear", "inline_deit_tiny")
MOST_MODELS = 6


@dataclass
class Subject:
    """A model that is explored.

    Attributes:
        label: Its name on the page.
        given: What the user has named.
        predictor: The model, in evaluation mode, with its input and its classes.
        weights: Where its weights come from: "random", "run" or "published" or "checkpoint".
    """

    label: str
    given: str
    predictor: ClassificationPredictor
    weights: str

    @property
    def is_fashion_mnist(self) -> bool:
        """Whether it was trained on the images that come with this package, or on all of Fashion-MNIST."""
        config = self.predictor.config
        return isinstance(config, ClassificationConfig) and config.data.path.startswith(("embedded", "fashion-mnist:"))


def open_subjects(
    models: Sequence[str],
    *,
    pretrained: bool = False,
    checkpoint: str | None = None,
    img_size: int | None = None,
    device: str | None = None,
) -> list[Subject]:
    """Open the models that a user names.

    Args:
        models: Folders of runs or of several runs, such as runs/demo, names of models, or published models
            (hf-hub:USER/NAME, local-dir:FOLDER); none = runs/demo if there is one, else three models with random
            weights.
        pretrained: Download the published weights of models that are given by name; they have random weights otherwise.
        checkpoint: As for inlinevit eval; the same for all models.
        img_size: Side of the images that the models see; None = what they were trained for.
        device: Where to compute; None = the best device there is.

    Raises:
        OSError: There is no such folder.
        ValueError: There is no such model, or it cannot be explored.
    """
    require(not (pretrained and checkpoint), "checkpoint and pretrained exclude each other: choose one of them")
    chosen = resolve_device(device)
    names = [run for model in models for run in runs_in(model)]
    if not names:
        names = runs_in(DEMO) if Path(DEMO).is_dir() and runs_in(DEMO) != [DEMO] else list(DEFAULT_MODELS)
    require(len(names) <= MOST_MODELS, f"{len(names)} models are too many to compare: name at most {MOST_MODELS}")
    opened = []
    for name in names:
        source = fetch_source(name)
        is_run, has_weights = has_config(source), pretrained or is_published(source)
        is_trained = is_run or has_weights or checkpoint is not None
        if is_trained or Path(source).is_dir() or "/" in source:
            # Refuses what is neither a run nor a model.
            find_classification_run(source)
        if is_trained:
            predictor = load_classifier(source, checkpoint=checkpoint, img_size=img_size)
        else:
            predictor = open_untrained(source, img_size)
        predictor.model.to(chosen)
        weights = "checkpoint" if checkpoint else "run" if is_run else "published" if has_weights else "random"
        opened.append((name, predictor, weights))
    labels = labels_of(names, [attention_of(predictor.model) for _, predictor, _ in opened])
    subjects = [
        Subject(label, name, predictor, weights)
        for label, (name, predictor, weights) in zip(labels, opened, strict=True)
    ]
    if note := weights_notice(subjects):
        warnings.warn(note, stacklevel=2)
    return subjects


def runs_in(model: str) -> list[str]:
    """Return the runs in a folder that holds several of them, such as runs/demo; or else what was given."""
    folder = Path(model)
    if has_config(model) or not folder.is_dir():
        return [model]
    # In the order of the demo, where there is one.
    order = ("softmax", "linear", "inline")
    found = [str(path) for path in sorted(folder.iterdir()) if has_config(str(path))]
    found.sort(key=lambda path: order.index(Path(path).name) if Path(path).name in order else len(order))
    return found or [model]


def weights_notice(subjects: Sequence[Subject]) -> str:
    """Return what to know about the weights; "" if all models are trained."""
    random = [subject.label for subject in subjects if subject.weights == "random"]
    if not random:
        return ""
    who = "all models" if len(random) == len(subjects) else ", ".join(random)
    return (
        f"The weights of {who} are random: this shows an architecture before any training, where attention is close to "
        "uniform, and rows hardly differ. Name a training run, or use --pretrained to download published weights"
    )
