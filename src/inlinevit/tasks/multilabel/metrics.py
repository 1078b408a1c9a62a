"""Metrics and losses of multi-label classification."""

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor
from torchmetrics.classification import MultilabelAveragePrecision, MultilabelStatScores

from ...engine.evaluator import Evaluation
from ...engine.records import rounded
from ...utils.atomic import finite
from ..calibration import calibration_details, calibration_section, expected_calibration_error
from ..classification.metrics import ImageEvaluator, ImageRecord
from ..classification.transforms import InputSpec
from .config import MultilabelDataConfig, MultilabelLossConfig
from .dataset import CsvSource

if TYPE_CHECKING:
    from ...report import Section


def multilabel_loss(logits: Tensor, targets: Tensor, config: MultilabelLossConfig) -> Tensor:
    """Return binary cross-entropy, or the asymmetric loss (Ridnik et al., https://arxiv.org/abs/2009.14119).

    Args:
        logits: (batch, labels).
        targets: (batch, labels) 1 where an image has a label, else 0.
        config: Which loss.
    """
    if config.name == "bce":
        return F.binary_cross_entropy_with_logits(logits, targets)
    probability = logits.sigmoid()
    # Negatives that are already easy do not count: their probability is shifted to 0.
    shifted = (probability - config.clip).clamp(min=0)
    positive = F.logsigmoid(logits) * (1 - probability) ** config.gamma_pos
    negative = (1 - shifted).clamp(min=1e-8).log() * shifted**config.gamma_neg
    return -(targets * positive + (1 - targets) * negative).sum(dim=1).mean()


@dataclass
class MultilabelEvaluation(Evaluation):
    """The result of an evaluation.

    Attributes:
        classes: The labels.
        counts: (classes, 4) images by label: true positives, false positives, false negatives, support.
        average_precision: (classes,) 0 … 1; NaN for labels without images.
        images: How many images were evaluated.
        calibration: See CalibrationBins; None if single images were not recorded.
    """

    headings: ClassVar[dict[str, str]] = {"map": "mAP %", "f1": "F1 %"}
    worst_caption: ClassVar[str] = (
        "The images with the highest loss. Pictures show what the model gets: resized and cropped."
    )

    classes: list[str]
    counts: Tensor
    average_precision: Tensor
    images: int
    calibration: Tensor | None = None

    def details(self) -> dict[str, Any]:
        return calibration_details(self.calibration)

    def sections(self) -> list["Section"]:
        if self.calibration is None or not self.calibration.any():
            return []
        error = expected_calibration_error(self.calibration)
        return [calibration_section(self.calibration, error, "pairs of image and label", "true")]

    def f1(self) -> Tensor:
        """Return the F1 of each label, (classes,); NaN for labels without images."""
        tp, fp, fn, support = self.counts.double().unbind(dim=1)
        return torch.where(support > 0, 2 * tp / (2 * tp + fp + fn), math.nan)

    def numbers(self) -> dict[str, float]:
        """See Evaluation.numbers; means over the labels that occur."""
        return {"map": float(self.average_precision.nanmean()), "f1": float(self.f1().nanmean())}

    def class_scores(self) -> tuple[Sequence[str], Mapping[str, Sequence[float]]]:
        return self.classes, {"AP": self.average_precision.tolist(), "F1": self.f1().tolist()}

    def per_class(self) -> list[dict[str, Any]]:
        columns = self.counts.tolist(), self.average_precision.tolist(), self.f1().tolist()
        return [
            {"label": name, "images": counts[3], "predicted": counts[0] + counts[1], **finite({"ap": ap, "f1": f1})}
            for name, counts, ap, f1 in zip(self.classes, *columns, strict=True)
        ]


class MultilabelEvaluator(ImageEvaluator):
    """Evaluates multi-label models on one data set; labels count as predicted from the threshold on."""

    def __init__(self, source: CsvSource, spec: InputSpec, config: MultilabelDataConfig, threshold: float) -> None:
        super().__init__(source, spec, config, len(source))
        self.classes, self.targets, self.threshold = source.classes, source.targets, threshold

    def reset(self, device: torch.device) -> None:
        super().reset(device)
        num_labels = len(self.classes)
        self.precision = MultilabelAveragePrecision(num_labels, average=None, validate_args=False).to(device)
        self.scores = MultilabelStatScores(num_labels, self.threshold, average=None, validate_args=False).to(device)

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """See ImageEvaluator.add; the labels are indices of rows of the targets."""
        probabilities, targets = logits.sigmoid(), self.targets[labels].long().to(self.device)
        self.precision.update(probabilities, targets)
        self.scores.update(probabilities, targets)

    def make_records(self, logits: Tensor, labels: Tensor) -> Iterator[ImageRecord]:
        """See ImageEvaluator.make_records; the worst images are those with the highest binary cross-entropy."""
        probabilities, targets = logits.sigmoid(), self.targets[labels]
        losses = F.binary_cross_entropy_with_logits(logits, targets, reduction="none").mean(dim=1).tolist()
        predicted, true = probabilities > self.threshold, targets > 0
        self.calibration_bins.update(probabilities, true)
        tops = self.top_classes(logits, probabilities, self.classes)
        for guess, truth, loss, top in zip(predicted, true, losses, tops, strict=True):
            right, wrong, missed = (guess & truth), (guess & ~truth), (truth & ~guess)
            total = int(guess.sum() + truth.sum())
            values: dict[str, Any] = {
                "truth": self.names(truth),
                "prediction": self.names(guess),
                "correct": int(bool((guess == truth).all())),
                # Nothing to find and nothing found is right.
                **rounded({"f1": 2 * int(right.sum()) / total if total else 1.0, "loss": loss}),
            }
            parts = {"right": right, "wrong": wrong, "missed": missed}
            lines = tuple(f"{name}: {self.names(part)}" for name, part in parts.items() if part.any())
            badness = math.inf if values["loss"] is None else values["loss"]
            yield ImageRecord(values | top, None if values["correct"] else (badness,), lines or ("no labels",))

    def names(self, chosen: Tensor) -> str:
        """Return the names of the chosen labels, (labels,) of truth values."""
        return ";".join(self.classes[index] for index in chosen.nonzero()[:, 0].tolist())

    def compute(self, accelerator: Accelerator) -> MultilabelEvaluation:
        tp, fp, tn, fn, support = self.scores.compute().cpu().unbind(dim=1)
        images = int((tp + fp + tn + fn)[0])
        self.require_images(images)
        with warnings.catch_warnings(action="ignore"):
            precision = torch.where(support > 0, self.precision.compute().cpu().double(), math.nan)
        counts = torch.stack([tp, fp, fn, support], dim=1)
        calibration = None if self.recorder is None else self.calibration_bins.gather()
        return MultilabelEvaluation(self.classes, counts, precision, images, calibration)
