"""Metrics of segmentation: all of them come from one confusion matrix of whole numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torchmetrics.functional.classification import multiclass_confusion_matrix

from ...data.pixels import image_to_tensor
from ...engine.evaluator import Evaluation
from ...utils.atomic import finite
from ..dense import SingleImageEvaluator
from ..pixels import MeanStd
from .ade import AdeSource
from .config import InferenceConfig
from .inference import predict_labels
from .labels import IGNORED

CONFUSION_PNG = "confusion.png"


@dataclass
class SegmentationEvaluation(Evaluation):
    """The result of an evaluation.

    Attributes:
        confusion: (classes, classes) int64 on the CPU: pixels by true class and by predicted class.
        images: How many images were evaluated.
        classes: Names of the classes.
    """

    headings: ClassVar[dict[str, str]] = {"miou": "mIoU %", "macc": "mAcc %", "pixel_accuracy": "pixel accuracy %"}

    confusion: Tensor
    images: int
    classes: list[str] = field(default_factory=list)

    def class_iou(self) -> Tensor:
        """(classes,) intersection over union, 0 … 1; NaN for a class that is neither in the truth nor predicted."""
        right, true, predicted = self._pixels()
        return right / (true + predicted - right)

    def class_accuracy(self) -> Tensor:
        """(classes,) share of a class's pixels that are predicted right; NaN for a class that is not in the truth."""
        right, true, _ = self._pixels()
        return right / true

    def numbers(self) -> dict[str, float]:
        """See Evaluation.numbers; NaN if no pixel counts.

        miou is the mean over the classes that occur in the truth or in predictions, and macc over those in the truth,
        as in mmsegmentation.
        """
        right, true, _ = self._pixels()
        return {
            "miou": float(self.class_iou().nanmean()),
            "macc": float(self.class_accuracy().nanmean()),
            "pixel_accuracy": float(right.sum() / true.sum()),
        }

    def class_scores(self) -> tuple[Sequence[str], Mapping[str, Sequence[float]]]:
        return self.classes, {"IoU": self.class_iou().tolist(), "accuracy": self.class_accuracy().tolist()}

    def per_class(self) -> list[dict[str, Any]]:
        pixels = self.confusion.sum(dim=1).tolist(), self.confusion.sum(dim=0).tolist()
        shares = self.class_iou().tolist(), self.class_accuracy().tolist()
        return [
            {"name": name, "pixels": true, "predicted": predicted, **finite({"iou": iou, "accuracy": accuracy})}
            for name, true, predicted, iou, accuracy in zip(self.classes, *pixels, *shares, strict=True)
        ]

    def details(self) -> dict[str, Any]:
        return {"confusion": self.confusion.tolist()}

    def save_files(self, folder: Path) -> None:
        # Imported here: matplotlib is slow to import, and training draws nothing.
        from ..confusion import draw_confusion

        draw_confusion(self.confusion, self.classes, folder / CONFUSION_PNG, unit="pixels")

    def _pixels(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the pixels of each class: predicted right, true, predicted."""
        confusion = self.confusion.double()
        return confusion.diagonal(), confusion.sum(dim=1), confusion.sum(dim=0)


class SegmentationEvaluator(SingleImageEvaluator):
    """Evaluates models on one data set.

    Args:
        source: The images.
        workers: Data workers.
        inference: Inference settings.
        mean_std: What the model's images are normalised by.
    """

    def __init__(self, source: AdeSource, workers: int, inference: InferenceConfig, mean_std: MeanStd) -> None:
        super().__init__(source, workers)
        self.inference, self.mean_std = inference, mean_std
        self.classes = [one.name for one in source.labels.classes]

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return an image (channels, height, width) and its labels (height, width), both uint8."""
        return image_to_tensor(self.source.read_image(index)), self.source.read_labels(index)

    def reset(self, device: torch.device) -> None:
        super().reset(device)
        self.confusion = torch.zeros(len(self.classes), len(self.classes), dtype=torch.int64, device=device)

    def update(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
        image, truth = batch
        predicted = predict_labels(model, image, self.inference, self.mean_std, self.device)
        self.confusion += multiclass_confusion_matrix(
            predicted, truth.to(self.device), len(self.classes), ignore_index=IGNORED, validate_args=False
        )

    def compute(self, accelerator: Accelerator) -> SegmentationEvaluation:
        confusion = accelerator.reduce(self.confusion, "sum").cpu()
        return SegmentationEvaluation(confusion, len(self.source), self.classes)
