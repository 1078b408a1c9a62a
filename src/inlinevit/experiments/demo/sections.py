"""The sections of the demo's report, which compare classifiers that differ in their attention only."""

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
    Panel,
    Picture,
    Section,
    Series,
    Table,
    Text,
    Tile,
    curves_figure,
    dots_figure,
    spread_figure,
)
from ...tasks.classification.metrics import ClassificationEvaluation
from ...tasks.classification.sources import ArraySource
from ...tasks.confusion import most_confused

# How many images a grid shows.
SAMPLES = 18
DISAGREEMENTS = 27
# How many pairs of classes the table of confusions has.
CONFUSIONS = 8


@dataclass
class Candidate:
    """What is known of one of the models after its training.

    Attributes:
        parameters: How many it has.
        evaluation: How well it does on the test images.
        predictions: (images,) the class that it gives to each of them.
        history: The lines of its metrics.jsonl.
        batch_size: Images of a training step.
        step_seconds: Times of training steps, measured in turns with the other candidates.
    """

    parameters: int
    evaluation: ClassificationEvaluation
    predictions: NDArray[np.int64]
    history: list[dict[str, Any]]
    batch_size: int
    step_seconds: list[float]

    @property
    def quartiles(self) -> Quartiles:
        """A step's time, in seconds."""
        return quartiles(self.step_seconds)

    def curve(self, metric: str) -> tuple[list[int], list[float]]:
        """Steps and values of a metric in the history."""
        lines = [line for line in self.history if metric in line]
        return [line["step"] for line in lines], [line[metric] for line in lines]


# Contenders by the word for their attention.
Contenders = Mapping[str, Candidate]


def comparison_sections(candidates: Contenders, source: ArraySource) -> list[Section]:
    """All of them.

    Args:
        candidates: The models.
        source: The test images.
    """
    labels = source.labels.astype(np.int64)
    for candidate in candidates.values():
        assert (candidate.predictions == labels).sum() == candidate.evaluation.confusion.diagonal().sum()
    classes = source.classes or [str(label) for label in range(labels.max() + 1)]
    return [
        results_section(candidates, labels),
        training_section(candidates),
        speed_section(candidates),
        images_section(candidates, source, labels, classes),
        confusions_section(candidates, classes),
    ]


def results_section(candidates: Contenders, labels: NDArray[np.int64]) -> Section:
    """Accuracy, size and speed in one table, and in a sentence what came out."""
    rows = [
        (
            STYLES[attention].name,
            f"{candidate.evaluation.top1:.1f}",
            f"{candidate.evaluation.loss:.3f}",
            f"{candidate.evaluation.calibration_error:.1f}",
            f"{candidate.parameters:,}",
            f"{1000 * candidate.quartiles.median:.0f}",
        )
        for attention, candidate in candidates.items()
    ]
    headings = ("attention", "right %", "test loss", "calibration error %", "parameters", "ms per training step")
    data = {
        attention: {
            **candidate.evaluation.numbers(),
            "parameters": candidate.parameters,
            "median_step_seconds": candidate.quartiles.median,
        }
        for attention, candidate in candidates.items()
    }
    sentences = verdict(candidates, labels)
    return Section(
        "results",
        "What came out",
        [Text(sentences, is_key=True), Table(headings, rows, f"Results on {len(labels):,} test images")],
        {"test_images": len(labels), "verdict": sentences, "models": data},
    )


def verdict(candidates: Contenders, labels: NDArray[np.int64]) -> str:
    """What the numbers say, and how far they can be trusted.

    Two models are compared on the same images: the uncertainty is that of the mean difference between right and wrong.
    """
    ranking = sorted(candidates, key=lambda attention: candidates[attention].evaluation.top1, reverse=True)
    shares = [f"{STYLES[attention].name} {candidates[attention].evaluation.top1:.1f} %" for attention in ranking]
    sentences = [
        f"After the same training, of the {len(labels):,} test images these are told right: {', '.join(shares)}."
    ]
    if "inline" in candidates:
        inline = candidates["inline"]
        for attention in (name for name in ranking if name != "inline"):
            other, name = candidates[attention], STYLES[attention].name
            gains = (inline.predictions == labels).astype(float) - (other.predictions == labels)
            points, error = 100 * gains.mean(), 200 * gains.std() / len(gains) ** 0.5
            chance = f"chance in the choice of test images (±{error:.1f})"
            if abs(points) > error:
                where = "above" if points > 0 else "below"
                outcome = f"InLine is {abs(points):.1f} points {where} {name}, more than {chance}"
            else:
                outcome = f"InLine and {name} differ by {abs(points):.1f} points, no more than {chance}"
            ratio = inline.quartiles.median / other.quartiles.median
            cost = f"InLine's training step takes {ratio:.2f} times as long"
            if inline.parameters != other.parameters:
                cost += f", and it has {inline.parameters / other.parameters:.2f} times as many parameters"
            sentences.append(f"{outcome}; {cost}.")
    sentences.append("This is one seed on one small data set: small differences may turn with another seed.")
    return " ".join(sentences)


def training_section(candidates: Contenders) -> Section:
    """Loss and accuracy against images and against time."""
    panels = []
    for metric, label in (("loss", "training loss"), ("eval_top1", "test images right, %")):
        curves = {attention: candidate.curve(metric) for attention, candidate in candidates.items()}
        for unit, x_label in (("images", "training images"), ("seconds", "training time, s")):
            series = [
                Series(attention, [step * scale(candidates[attention], unit) for step in steps], values)
                for attention, (steps, values) in curves.items()
            ]
            panels.append(Panel(x_label, label, series))
    caption = (
        "Against the number of images (left) all have the same budget. Against time (right), a step counts with the "
        "median time of its model, so that the curves do not depend on what else the machine did in the meantime; "
        "reading images and evaluations do not count."
    )
    alt = "Curves of the training loss and of the test accuracy of each attention, against images and against time."
    data = {
        attention: {
            "batch_size": candidate.batch_size,
            "training": dict(zip(("step", "loss"), candidate.curve("loss"), strict=True)),
            "test": dict(zip(("step", "top1"), candidate.curve("eval_top1"), strict=True)),
        }
        for attention, candidate in candidates.items()
    }
    return Section("training", "How they learned", [Picture(curves_figure(panels), alt, caption)], data)


def scale(candidate: Candidate, unit: str) -> float:
    """What a step is in "images" or in "seconds"."""
    return candidate.batch_size if unit == "images" else candidate.quartiles.median


def speed_section(candidates: Contenders) -> Section:
    """How long a training step takes."""
    milliseconds = {
        attention: [1000 * seconds for seconds in candidate.step_seconds] for attention, candidate in candidates.items()
    }
    rounds = len(next(iter(milliseconds.values())))
    rows = [
        (
            STYLES[attention].name,
            *(f"{1000 * seconds:.1f}" for seconds in candidate.quartiles),
            f"{candidate.batch_size / candidate.quartiles.median:.0f}",
        )
        for attention, candidate in candidates.items()
    ]
    return Section(
        "speed",
        "How long a step takes",
        [
            Table(
                ("attention", "lower quartile ms", "median ms", "upper quartile ms", "images per second"),
                rows,
                f"Forward, backward and update, {rounds} rounds in which each model has its turn",
            ),
            Picture(
                spread_figure(milliseconds, "ms per training step"),
                "A box for each attention with the times of its training steps; the table above has the numbers.",
                "Median, quartiles, and whiskers to the 5th and 95th percentile.",
            ),
            Text(
                "The cost of softmax attention grows with the square of the number of tokens, that of linear and "
                "InLine attention with the number itself. Images as small as these make few tokens, so this table "
                "says little about large ones."
            ),
        ],
        {attention: {"seconds": candidate.step_seconds} for attention, candidate in candidates.items()},
    )


def images_section(
    candidates: Contenders, source: ArraySource, labels: NDArray[np.int64], classes: Sequence[str]
) -> Section:
    """Test images, and those on which the models disagree."""
    right = {attention: candidate.predictions == labels for attention, candidate in candidates.items()}
    votes = np.stack(list(right.values())).sum(axis=0)
    counts = {
        attention: {
            "right": int(hits.sum()),
            "wrong": int((~hits).sum()),
            "alone right": int((hits & (votes == 1)).sum()),
            "alone wrong": int((~hits & (votes == len(right) - 1)).sum()),
        }
        for attention, hits in right.items()
    }
    all_right, all_wrong = int((votes == len(right)).sum()), int((votes == 0).sum())
    disputed = np.flatnonzero((votes > 0) & (votes < len(right)))
    samples = [
        Tile(source.read(index)[0], f"Test image {index}: {classes[labels[index]]}", [classes[labels[index]]])
        for index in range(min(SAMPLES, len(labels)))
    ]
    tiles = []
    for index in disputed[:DISAGREEMENTS].tolist():
        truth = classes[labels[index]]
        answers = [
            f"{STYLES[attention].name}: {'✓' if right[attention][index] else classes[candidate.predictions[index]]}"
            for attention, candidate in candidates.items()
        ]
        tiles.append(Tile(source.read(index)[0], f"Test image {index}: {truth}", [truth, *answers]))
    return Section(
        "images",
        "What they see",
        [
            ImageGrid(samples, f"The first {len(samples)} of the {len(labels):,} test images."),
            Table(
                ("attention", "right", "wrong", "alone right", "alone wrong"),
                [
                    (STYLES[attention].name, *(f"{number:,}" for number in numbers.values()))
                    for attention, numbers in counts.items()
                ],
                f"All are right on {all_right:,} images, all wrong on {all_wrong:,}",
            ),
            ImageGrid(
                tiles,
                f"The first {len(tiles)} of the {len(disputed):,} images on which some are right and some are wrong: "
                "the class, and what each model says.",
            ),
        ],
        {"all right": all_right, "all wrong": all_wrong, "models": counts},
    )


def confusions_section(candidates: Contenders, classes: Sequence[str]) -> Section:
    """How well each class is told, and which are taken for which."""
    confusions = {attention: candidate.evaluation.confusion for attention, candidate in candidates.items()}
    total = torch.stack(list(confusions.values())).sum(dim=0)
    rows = [
        (
            f"{classes[true]} taken for {classes[guess]}",
            *(str(int(confusion[true, guess])) for confusion in confusions.values()),
        )
        for true, guess, _ in most_confused(total, CONFUSIONS)
    ]
    shares = {attention: candidate.evaluation.class_accuracy for attention, candidate in candidates.items()}
    return Section(
        "confusions",
        "What they confuse",
        [
            Picture(
                dots_figure(shares, classes, "test images right, %"),
                "For each class, the share of its images that each attention tells right.",
                "How well each class is told.",
            ),
            Table(
                ("confusion", *(STYLES[attention].name for attention in candidates)),
                rows,
                "The most frequent confusions, with the number of images",
            ),
        ],
        {
            "classes": list(classes),
            "percent right by class": shares,
            "confusion": {attention: confusion.tolist() for attention, confusion in confusions.items()},
        },
    )


def settings_section(settings: Mapping[str, Any], training_images: int) -> Section:
    """The budget that all models had.

    Args:
        settings: The plain configuration of each run, by attention.
        training_images: How many images there are to train on.
    """
    first = next(iter(settings.values()))
    steps, batch_size = first["schedule"]["steps"], first["data"]["batch_size"]
    model = {**first["model"]["kwargs"]}
    model.pop("attention")
    rows = [
        ("data", f"{first['data']['path']}, {training_images:,} training images"),
        ("budget of each model", f"{steps:,} steps of {batch_size} images = {steps * batch_size:,} images"),
        ("model", f"{first['model']['name']} with {', '.join(f'{name} {value}' for name, value in model.items())}"),
        ("optimizer", f"{first['optimizer']['name']}, learning rate {first['optimizer']['lr']:g}"),
        ("seed", str(first["run"]["seed"])),
    ]
    caveat = (
        "The learning rate and the size are the same for all and were not tuned for each: they come from a few trial "
        "runs with one seed, judged on the embedded test images. The training is short; a longer one, or other "
        "settings, may change the differences."
    )
    table = Table(("setting", "value"), rows, "The same for all", is_prose=True)
    return Section("settings", "How they were trained", [table, Text(caveat)], settings)
