"""Metrics of segmentation: all of them come from one confusion matrix of whole numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from accelerate import Accelerator
from PIL import Image
from torch import Tensor, nn
from torchmetrics.functional.classification import multiclass_confusion_matrix

from ...data.pixels import image_to_tensor
from ...engine.evaluator import Evaluation
from ...engine.records import LARGEST_SIDE, rounded, to_picture
from ...engine.results import percent
from ...utils.atomic import finite
from ..dense import SingleImageEvaluator
from ..pixels import MeanStd
from .ade import AdeSource
from .config import InferenceConfig
from .inference import predict_labels
from .labels import IGNORED
from .visualize import draw_with_legend

if TYPE_CHECKING:
    from ...report import Section

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
    worst_caption: ClassVar[str] = (
        "The images with the lowest mIoU, over the classes that occur in their truth or prediction. In the truth, "
        "pixels that do not count are dark."
    )

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

    def sections(self) -> list["Section"]:
        from ..confusion_matrix import confusion_matrix_section

        return [confusion_matrix_section(self.confusion, self.classes, unit="pixels")]

    def save_files(self, folder: Path) -> None:
        # Imported here: matplotlib is slow to import, and training draws nothing.
        from ..confusion_matrix import draw_confusion_matrix

        draw_confusion_matrix(self.confusion, self.classes, folder / CONFUSION_PNG, unit="pixels")

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

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        """Return the index, the image (channels, height, width) and its labels (height, width), both uint8."""
        return index, image_to_tensor(self.source.read_image(index)), self.source.read_labels(index)

    def reset(self, device: torch.device) -> None:
        super().reset(device)
        self.confusion = torch.zeros(len(self.classes), len(self.classes), dtype=torch.int64, device=device)

    def update(self, model: nn.Module, batch: tuple[int, Tensor, Tensor]) -> None:
        index, image, truth = batch
        predicted = predict_labels(model, image, self.inference, self.mean_std, self.device)
        confusion = multiclass_confusion_matrix(
            predicted, truth.to(self.device), len(self.classes), ignore_index=IGNORED, validate_args=False
        )
        self.confusion += confusion
        if self.recorder is not None:
            self.record(index, image, truth, predicted, SegmentationEvaluation(confusion.cpu(), 1, self.classes))

    def record(
        self, index: int, image: Tensor, truth: Tensor, predicted: Tensor, evaluation: SegmentationEvaluation
    ) -> None:
        """Record an image (3, height, width) with its true and predicted labels (height, width)."""
        assert self.recorder is not None
        numbers, ious = evaluation.numbers(), evaluation.class_iou().nan_to_num(nan=2.0)
        worst = int(ious.argmin())
        miou, accuracy = numbers["miou"], numbers["pixel_accuracy"]
        pixels = int(evaluation.confusion.sum())
        values = {
            "pixels": pixels,
            **rounded({"miou": miou, "pixel_accuracy": accuracy}),
            "worst_class": self.classes[worst] if pixels else None,
            **rounded({"worst_iou": float(ious[worst]) if pixels else float("nan")}),
        }

        def draw() -> dict[str, Image.Image]:
            photo = to_picture(image).convert("RGB")
            photo.thumbnail((LARGEST_SIDE, LARGEST_SIDE))
            drawings = {}
            for name, labels in (("truth", truth), ("prediction", predicted)):
                small = Image.fromarray(labels.cpu().numpy()).resize(photo.size, Image.Resampling.NEAREST)
                drawings[name] = draw_with_legend(photo, np.asarray(small), self.source.labels.classes)
            return drawings

        worst_class = f"{self.classes[worst]} {percent(float(ious[worst]))} %"
        lines = (f"mIoU {percent(miou)} %, pixel accuracy {percent(accuracy)} %", f"lowest IoU: {worst_class}")
        badness = (1 - miou,) if miou < 1 else None
        self.recorder.add(index, self.source.image_files[index], values, badness=badness, lines=lines, draw=draw)

    def compute(self, accelerator: Accelerator) -> SegmentationEvaluation:
        confusion = accelerator.reduce(self.confusion, "sum").cpu()
        return SegmentationEvaluation(confusion, len(self.source), self.classes)
