"""Metrics of classification: accuracy, calibration, confusion."""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassCalibrationError, MulticlassConfusionMatrix

from ...data.loader import EvalLoader
from ...engine.evaluator import Evaluation, Evaluator
from ...utils.validation import require
from .config import ImageDataConfig
from .dataset import UnreadableCounter, drop_unreadable, make_eval_loader
from .shards import ShardSource
from .sources import ImageSource
from .transforms import InputSpec, evaluation_transform

CALIBRATION_BINS = 15
CONFUSION_PNG = "confusion.png"


@dataclass
class ClassificationEvaluation(Evaluation):
    """The result of an evaluation.

    Attributes:
        top1: Top-1 accuracy, in percent.
        top5: Top-5 accuracy, in percent.
        calibration_error: Expected calibration error over 15 bins, in percent.
        loss: Mean cross-entropy.
        confusion: (classes, classes) images by true and by predicted class.
        classes: Names of the classes; their indices, if they are not known.
    """

    top1: float
    top5: float
    calibration_error: float
    loss: float
    confusion: Tensor
    classes: list[str] = field(default_factory=list)

    def numbers(self) -> dict[str, float]:
        return {name: vars(self)[name] for name in ("top1", "top5", "calibration_error", "loss")}

    @property
    def images(self) -> int:  # type: ignore[override]
        """How many images were evaluated."""
        return int(self.confusion.sum())

    @property
    def class_accuracy(self) -> list[float | None]:
        """Accuracy of each class, in percent; None for a class without images."""
        correct, images = self.confusion.diagonal().tolist(), self.confusion.sum(dim=1).tolist()
        return [100 * some / all_ if all_ else None for some, all_ in zip(correct, images, strict=True)]

    def tables(self) -> list[list[dict[str, str]]]:
        percents = {"top-1 %": self.top1, "top-5 %": self.top5, "calibration error %": self.calibration_error}
        return [[{**{name: f"{value:.2f}" for name, value in percents.items()}, "loss": f"{self.loss:.4f}"}]]

    def class_scores(self) -> tuple[Sequence[str], Mapping[str, Sequence[float]]]:
        return self.classes, {"accuracy": [math.nan if one is None else one / 100 for one in self.class_accuracy]}

    def per_class(self) -> list[dict[str, Any]]:
        images, right = self.confusion.sum(dim=1).tolist(), self.confusion.diagonal().tolist()
        keys = ("index", "class", "images", "right", "accuracy")
        columns = (range(len(self.classes)), self.classes, images, right, self.class_accuracy)
        return [dict(zip(keys, row, strict=True)) for row in zip(*columns, strict=True)]

    def details(self) -> dict[str, Any]:
        return {"confusion": self.confusion.tolist()}

    def save_files(self, folder: Path) -> None:
        # Imported here: matplotlib is slow to import, and training draws nothing.
        from ..confusion import draw_confusion

        draw_confusion(self.confusion, self.classes, folder / CONFUSION_PNG)


class ImageEvaluator(Evaluator):
    """Evaluates models on batches of whole images.

    Args:
        source: The images.
        spec: The model's input.
        config: How they are read.
        num_targets: Labels of the source are below this: the number of classes, or of rows in a table of targets.
        labels: For each label of the source, that of the model; None = they are the same.
    """

    def __init__(
        self,
        source: ImageSource | ShardSource,
        spec: InputSpec,
        config: ImageDataConfig,
        num_targets: int,
        labels: Sequence[int] | None = None,
    ) -> None:
        self.source, self.spec, self.config, self.labels = source, spec, config, labels
        self.num_targets = num_targets

    def loader(self, process: int, processes: int) -> EvalLoader:
        """See Evaluator.loader: images, labels, problems."""
        transform = evaluation_transform(self.spec)
        return make_eval_loader(
            self.source, transform, self.spec.mode, self.num_targets, self.config, process, processes
        )

    def reset(self, device: torch.device) -> None:
        super().reset(device)
        self.unreadable = UnreadableCounter(self.config.max_unreadable)

    def update(self, model: nn.Module, batch: tuple[Tensor, Tensor, list[str]]) -> None:
        """See Evaluator.update; unreadable images are left out."""
        for images, labels in drop_unreadable([batch], self.unreadable, self.labels):
            self.add(model(images.to(self.device, non_blocking=True)).float(), labels)

    @abstractmethod
    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Add the logits (images, classes) and the labels (images,) of a batch; the labels are on the CPU."""

    @staticmethod
    def require_images(images: int) -> None:
        """Refuse to compute metrics of nothing."""
        require(images > 0, "there is not one image to evaluate on: check the data")


class ClassificationEvaluator(ImageEvaluator):
    """Evaluates classifiers on one data set; see ImageEvaluator.

    Args:
        num_classes: Width of the model's head.
        classes: Names of the model's classes; None = their indices.
    """

    def __init__(
        self,
        source: ImageSource | ShardSource,
        spec: InputSpec,
        config: ImageDataConfig,
        num_classes: int,
        *,
        labels: Sequence[int] | None = None,
        classes: Sequence[str] | None = None,
    ) -> None:
        super().__init__(source, spec, config, num_classes if labels is None else len(labels), labels)
        self.num_classes = num_classes
        self.classes = [str(index) for index in range(num_classes)] if classes is None else list(classes)

    def reset(self, device: torch.device) -> None:
        super().reset(device)
        top_k = min(5, self.num_classes)
        self.top5 = MulticlassAccuracy(self.num_classes, top_k=top_k, average="micro", validate_args=False).to(device)
        self.calibration = MulticlassCalibrationError(self.num_classes, CALIBRATION_BINS, validate_args=False)
        self.calibration.to(device)
        self.loss = MeanMetric(nan_strategy="disable").to(device)
        self.confusion = MulticlassConfusionMatrix(self.num_classes, validate_args=False).to(device)

    def add(self, logits: Tensor, labels: Tensor) -> None:
        labels = labels.to(self.device)
        # Ranks come from logits, because the smallest probabilities are all 0. Calibration gets probabilities, because
        # torchmetrics takes logits that are all in 0 … 1 for probabilities.
        self.top5.update(logits, labels)
        self.confusion.update(logits, labels)
        self.calibration.update(logits.softmax(dim=1), labels)
        self.loss.update(F.cross_entropy(logits, labels, reduction="none"))

    def compute(self, accelerator: Accelerator) -> ClassificationEvaluation:
        confusion = self.confusion.compute().cpu()
        self.require_images(int(confusion.sum()))
        return ClassificationEvaluation(
            top1=100 * int(confusion.diagonal().sum()) / int(confusion.sum()),
            top5=100 * self.top5.compute().item(),
            calibration_error=100 * self.calibration.compute().item(),
            loss=self.loss.compute().item(),
            confusion=confusion,
            classes=self.classes,
        )
