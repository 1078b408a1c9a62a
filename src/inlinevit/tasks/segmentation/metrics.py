"""How well pixels are labelled, in numbers: all of them come from one confusion matrix of whole numbers."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .labels import IGNORED


@dataclass
class SegmentationEvaluation:
    """The outcome of an evaluation.

    Attributes:
        confusion: (classes, classes) int64 on the CPU: pixels by true class and by predicted class.
        images: How many images were evaluated.
    """

    confusion: Tensor
    images: int

    def class_iou(self) -> Tensor:
        """(classes,) intersection over union, 0 … 1; nan for a class that is neither in the truth nor in answers."""
        right, true, predicted = self._pixels()
        return right / (true + predicted - right)

    def class_accuracy(self) -> Tensor:
        """(classes,) share of a class's pixels that are labelled as such; nan for a class that is not in the truth."""
        right, true, _ = self._pixels()
        return right / true

    def numbers(self) -> dict[str, float]:
        """The metrics that are one number each, 0 … 1; nan if no pixel counts.

        miou is the mean over the classes that occur in the truth or in answers, and macc over those in the truth, as
        mmsegmentation has it.
        """
        right, true, _ = self._pixels()
        return {
            "miou": float(self.class_iou().nanmean()),
            "macc": float(self.class_accuracy().nanmean()),
            "pixel_accuracy": float(right.sum() / true.sum()),
        }

    def _pixels(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of each class: pixels that are labelled right, that there are, that are labelled so."""
        confusion = self.confusion.double()
        return confusion.diagonal(), confusion.sum(dim=1), confusion.sum(dim=0)


def count_pixels(truth: Tensor, answer: Tensor, classes: int) -> Tensor:
    """A confusion matrix (classes, classes) int64: pixels by true class and by predicted class.

    Args:
        truth: (height, width) uint8 indices of classes; pixels that are IGNORED do not count.
        answer: (height, width) uint8 indices of classes, on the same device.
        classes: How many classes there are.
    """
    counts = truth != IGNORED
    pairs = truth[counts].long() * classes + answer[counts]
    return torch.bincount(pairs, minlength=classes**2).view(classes, classes)
