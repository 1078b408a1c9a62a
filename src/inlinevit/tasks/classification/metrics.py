"""Numbers that tell how well classes are told apart: accuracies, calibration, confusion."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassCalibrationError, MulticlassConfusionMatrix

CALIBRATION_BINS = 15


@dataclass
class Evaluation:
    """The outcome of an evaluation.

    Attributes:
        top1: Share of images whose class comes first, in percent.
        top5: Share of images whose class is among the first five, in percent.
        calibration_error: Mean gap between confidence and accuracy over 15 bins, in percent.
        loss: Mean cross-entropy.
        confusion: (classes, classes) images by true and by predicted class.
    """

    top1: float
    top5: float
    calibration_error: float
    loss: float
    confusion: Tensor

    def numbers(self) -> dict[str, float]:
        """The metrics that are one number each."""
        return {
            "top1": self.top1,
            "top5": self.top5,
            "calibration_error": self.calibration_error,
            "loss": self.loss,
        }

    @property
    def images(self) -> int:
        """How many images were evaluated."""
        return int(self.confusion.sum())

    @property
    def per_class(self) -> list[float | None]:
        """Share of each class's images that are told right, in percent; None for a class without images."""
        right, images = self.confusion.diagonal().tolist(), self.confusion.sum(dim=1).tolist()
        return [100 * some / all_ if all_ else None for some, all_ in zip(right, images, strict=True)]


class EvaluationMetrics:
    """What an evaluation adds up, over batches and over processes.

    Args:
        num_classes: Width of the logits.
        device: Where the logits are.
    """

    def __init__(self, num_classes: int, device: torch.device) -> None:
        top_k = min(5, num_classes)
        self.top5 = MulticlassAccuracy(num_classes, top_k=top_k, average="micro", validate_args=False).to(device)
        self.calibration = MulticlassCalibrationError(num_classes, CALIBRATION_BINS, validate_args=False).to(device)
        self.loss = MeanMetric(nan_strategy="disable").to(device)
        self.confusion = MulticlassConfusionMatrix(num_classes, validate_args=False).to(device)

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add a batch: logits (images, classes) and labels (images,)."""
        # Ranks come from logits, because the smallest probabilities are all 0. Calibration is given probabilities,
        # because torchmetrics would take logits that are all in 0 … 1 for them.
        self.top5.update(logits, labels)
        self.confusion.update(logits, labels)
        self.calibration.update(logits.softmax(dim=1), labels)
        self.loss.update(F.cross_entropy(logits, labels, reduction="none"))

    def compute(self) -> Evaluation:
        """The outcome over all processes; every one of them must call this."""
        confusion = self.confusion.compute().cpu()
        if confusion.sum() == 0:
            raise ValueError("there is not one image to evaluate on: check the data")
        return Evaluation(
            top1=100 * int(confusion.diagonal().sum()) / int(confusion.sum()),
            top5=100 * self.top5.compute().item(),
            calibration_error=100 * self.calibration.compute().item(),
            loss=self.loss.compute().item(),
            confusion=confusion,
        )
