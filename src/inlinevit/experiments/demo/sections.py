"""The sections of the demo's report, which compare classifiers that differ only in their attention."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...benchmark.timing import Quartiles, quartiles
from ...report import (
    STYLES,
    ImageGrid,
    Line,
    Panel,
    Picture,
    Section,
    Table,
    Text,
    Tile,
    dots_figure,
    lines_figure,
    spread_figure,
)
from ...tasks.classification.metrics import ClassificationEvaluation
from ...tasks.classification.sources import ArraySource
from ...tasks.confusion_matrix import most_confused

# Images in a grid.
SAMPLES = 18
DISAGREEMENTS = 27
# Rows of the table of confused classes.
CONFUSIONS = 8


@dataclass
class TrainedModel:
    """The results of one of the models.

    Attributes:
        parameters: Number of parameters.
        evaluation: Metrics on the test images.
        predictions: (images,) the predicted class of each of them.
        history: The lines of its metrics.jsonl.
        batch_size: Images per training step.
        step_seconds: Times of training steps, interleaved with those of the other models.
    """

    parameters: int
    evaluation: ClassificationEvaluation
    predictions: NDArray[np.int64]
    history: list[dict[str, Any]]
    batch_size: int
    step_seconds: list[float]

    @property
    def quartiles(self) -> Quartiles:
        """Seconds per training step."""
        return quartiles(self.step_seconds)

    def curve(self, metric: str) -> tuple[list[int], list[float]]:
        """Return steps and values of a metric in the history."""
        lines = [line for line in self.history if metric in line]
        return [line["step"] for line in lines], [line[metric] for line in lines]


# By attention.
Models = Mapping[str, TrainedModel]


def comparison_sections(models: Models, source: ArraySource) -> list[Section]:
    """Return the sections that compare the models on the test images."""
    labels = source.labels.astype(np.int64)
    for model in models.values():
        assert (model.predictions == labels).sum() == model.evaluation.confusion.diagonal().sum()
    classes = source.classes or [str(label) for label in range(labels.max() + 1)]
    return [
        results_section(models, labels),
        training_section(models),
        speed_section(models),
        images_section(models, source, labels, classes),
        classes_section(models, classes),
    ]


def results_section(models: Models, labels: NDArray[np.int64]) -> Section:
    """Report accuracy, size and speed in one table, and a verdict."""
    rows, data = [], {}
    for attention, model in models.items():
        rows.append(
            (
                STYLES[attention].name,
                f"{model.evaluation.top1:.1f}",
                f"{model.evaluation.loss:.3f}",
                f"{model.evaluation.calibration_error:.1f}",
                f"{model.parameters:,}",
                f"{1000 * model.quartiles.median:.0f}",
            )
        )
        measured = {"parameters": model.parameters, "median_step_seconds": model.quartiles.median}
        data[attention] = {**model.evaluation.numbers(), **measured}
    headings = ("attention", "top-1 %", "test loss", "calibration error %", "parameters", "ms per training step")
    sentences = verdict(models, labels)
    return Section(
        "results",
        "Results",
        [Text(sentences, is_key=True), Table(headings, rows, f"Results on {len(labels):,} test images")],
        {"test_images": len(labels), "verdict": sentences, "models": data},
    )


def verdict(models: Models, labels: NDArray[np.int64]) -> str:
    """Return the differences between the models, and whether they are more than chance.

    Two models are compared on the same images: the uncertainty is that of the mean difference of correctness.
    """
    ranking = sorted(models, key=lambda attention: models[attention].evaluation.top1, reverse=True)
    accuracies = [f"{STYLES[attention].name} {models[attention].evaluation.top1:.1f} %" for attention in ranking]
    sentences = [f"Top-1 accuracy on the {len(labels):,} test images: {', '.join(accuracies)}."]
    inline = models["inline"]
    for attention in (name for name in ranking if name != "inline"):
        other, name = models[attention], STYLES[attention].name
        gains = (inline.predictions == labels).astype(float) - (other.predictions == labels)
        points, error = 100 * gains.mean(), 200 * gains.std() / len(gains) ** 0.5
        chance = f"chance in the choice of test images (±{error:.1f})"
        if abs(points) > error:
            where = "above" if points > 0 else "below"
            outcome = f"InLine is {abs(points):.1f} points {where} {name}, more than {chance}"
        else:
            outcome = f"InLine and {name} differ by {abs(points):.1f} points, not more than {chance}"
        ratio = inline.quartiles.median / other.quartiles.median
        cost = f"InLine's training step takes {ratio:.2f} times as long"
        if inline.parameters != other.parameters:
            cost += f", and it has {inline.parameters / other.parameters:.2f} times as many parameters"
        sentences.append(f"{outcome}; {cost}.")
    sentences.append("This is one seed on one small data set: small differences may change with another seed.")
    return " ".join(sentences)


def training_section(models: Models) -> Section:
    """Plot loss and accuracy over images and over time."""
    panels = []
    for metric, label in (("loss", "training loss"), ("eval_top1", "top-1 on test images, %")):
        by_images, by_time = [], []
        for attention, model in models.items():
            steps, values = model.curve(metric)
            by_images.append(Line(STYLES[attention], [step * model.batch_size for step in steps], values))
            by_time.append(Line(STYLES[attention], [step * model.quartiles.median for step in steps], values))
        panels += [Panel("training images", label, by_images), Panel("training time, s", label, by_time)]
    caption = (
        "Over the number of images (left), all have the same budget. Over time (right), each step takes the median "
        "time of its model, so that the curves do not depend on other work of the machine; reading images and "
        "evaluation are not included."
    )
    alt = "Training loss and test accuracy of each attention, over images and over time."
    data = {
        attention: {
            "batch_size": model.batch_size,
            "training": dict(zip(("step", "loss"), model.curve("loss"), strict=True)),
            "test": dict(zip(("step", "top1"), model.curve("eval_top1"), strict=True)),
        }
        for attention, model in models.items()
    }
    return Section("training", "Training", [Picture(lines_figure(panels, share_y=True), alt, caption)], data)


def speed_section(models: Models) -> Section:
    """Report the time of a training step."""
    milliseconds = {attention: [1000 * value for value in model.step_seconds] for attention, model in models.items()}
    rounds = len(next(iter(milliseconds.values())))
    rows = [
        (
            STYLES[attention].name,
            *(f"{1000 * seconds:.1f}" for seconds in model.quartiles),
            f"{model.batch_size / model.quartiles.median:.0f}",
        )
        for attention, model in models.items()
    ]
    headings = ("attention", "lower quartile ms", "median ms", "upper quartile ms", "images per second")
    blocks = [
        Table(headings, rows, f"Forward, backward and update, {rounds} interleaved rounds"),
        Picture(
            spread_figure(milliseconds, "ms per training step"),
            "One box per attention with the times of its training steps; the table above has the numbers.",
            "Median, quartiles, and whiskers to the 5th and 95th percentile.",
        ),
        Text(
            "The cost of softmax attention grows with the square of the number of tokens, that of linear and InLine "
            "attention grows linearly. Images as small as these have few tokens, so these times are not representative "
            "of large images."
        ),
    ]
    data = {attention: {"seconds": model.step_seconds} for attention, model in models.items()}
    return Section("speed", "Time of a training step", blocks, data)


def images_section(models: Models, source: ArraySource, labels: NDArray[np.int64], classes: Sequence[str]) -> Section:
    """Show test images, and those on which the models disagree."""
    correct = {attention: model.predictions == labels for attention, model in models.items()}
    votes = np.stack(list(correct.values())).sum(axis=0)
    counts = {
        attention: {
            "correct": int(hits.sum()),
            "wrong": int((~hits).sum()),
            "only one correct": int((hits & (votes == 1)).sum()),
            "only one wrong": int((~hits & (votes == len(models) - 1)).sum()),
        }
        for attention, hits in correct.items()
    }
    all_correct, all_wrong = int((votes == len(models)).sum()), int((votes == 0).sum())
    disputed = np.flatnonzero((votes > 0) & (votes < len(models)))

    def tile(index: int, *lines: str) -> Tile:
        name = classes[labels[index]]
        return Tile(source.read(index)[0], f"Test image {index}: {name}", [name, *lines])

    samples = [tile(index) for index in range(min(SAMPLES, len(labels)))]
    disagreements = []
    for index in disputed[:DISAGREEMENTS].tolist():
        predictions = [
            f"{STYLES[attention].name}: {'✓' if correct[attention][index] else classes[model.predictions[index]]}"
            for attention, model in models.items()
        ]
        disagreements.append(tile(index, *predictions))
    blocks = [
        ImageGrid(samples, f"The first {len(samples)} of the {len(labels):,} test images."),
        Table(
            ("attention", *counts[next(iter(counts))]),
            [(STYLES[attention].name, *(f"{one:,}" for one in counts[attention].values())) for attention in counts],
            f"All are correct on {all_correct:,} images, all are wrong on {all_wrong:,}",
        ),
        ImageGrid(
            disagreements,
            f"The first {len(disagreements)} of the {len(disputed):,} images on which some models are correct: the "
            "class, and the prediction of each model.",
        ),
    ]
    data = {"all correct": all_correct, "all wrong": all_wrong, "models": counts}
    return Section("images", "Test images", blocks, data)


def classes_section(models: Models, classes: Sequence[str]) -> Section:
    """Report the accuracy of each class, and the most frequent confusions."""
    confusions = {attention: model.evaluation.confusion for attention, model in models.items()}
    total = torch.stack(list(confusions.values())).sum(dim=0)
    rows = [
        (
            f"{classes[true]} predicted as {classes[guess]}",
            *(str(int(confusion[true, guess])) for confusion in confusions.values()),
        )
        for true, guess, _ in most_confused(total, CONFUSIONS)
    ]
    accuracies = {attention: model.evaluation.class_accuracy for attention, model in models.items()}
    figure = dots_figure(accuracies, classes, "top-1 on test images, %")
    headings = ("confusion", *(STYLES[attention].name for attention in models))
    blocks = [
        Picture(figure, "The accuracy of each attention on each class.", "Accuracy by class."),
        Table(headings, rows, "The most frequent confusions, with the number of images"),
    ]
    data = {
        "classes": list(classes),
        "top1_by_class": accuracies,
        "confusion": {attention: confusion.tolist() for attention, confusion in confusions.items()},
    }
    return Section("confusions", "Classes", blocks, data)


def settings_section(settings: Mapping[str, Any], training_images: int) -> Section:
    """Report the settings of the training: configurations as JSON values, by attention."""
    first = next(iter(settings.values()))
    steps, batch_size = first["schedule"]["steps"], first["data"]["batch_size"]
    options = [f"{name} {value}" for name, value in first["model"]["kwargs"].items() if name != "attention"]
    rows = [
        ("data", f"{first['data']['path']}, {training_images:,} training images"),
        ("budget of each model", f"{steps:,} steps of {batch_size} images = {steps * batch_size:,} images"),
        ("model", f"{first['model']['name']} with {', '.join(options)}"),
        ("optimizer", f"{first['optimizer']['name']}, learning rate {first['optimizer']['lr']:g}"),
        ("seed", str(first["run"]["seed"])),
    ]
    caveat = (
        "The learning rate and the size are the same for all models and were not tuned for each of them: they come "
        "from a few trial runs with one seed, judged on the embedded test images. The training is short; a longer one, "
        "or other settings, may change the differences."
    )
    table = Table(("setting", "value"), rows, "The same for all models", is_prose=True)
    return Section("settings", "Settings", [table, Text(caveat)], settings)
