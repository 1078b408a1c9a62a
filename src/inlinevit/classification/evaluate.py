"""How well a model tells classes apart: accuracies, calibration, confusion."""

from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torchmetrics.functional.classification import multiclass_calibration_error, multiclass_confusion_matrix

from .config import DataConfig
from .data import LabelledImages, ProblemCounter, evaluation_batches


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
        return {name: getattr(self, name) for name in ("top1", "top5", "calibration_error", "loss")}


def evaluate(model: nn.Module, images: LabelledImages, config: DataConfig, accelerator: Accelerator) -> Evaluation:
    """Evaluate a model on all images, each counted once whatever the number of processes."""
    loader = accelerator.prepare(evaluation_batches(images, config))
    problems = ProblemCounter(config.max_unreadable)
    outputs = []
    with torch.inference_mode():
        for batch, labels, names in loader:
            problems.check(names)
            outputs.append(accelerator.gather_for_metrics((model(batch).float(), labels)))
    logits, labels = (torch.cat(parts).cpu() for parts in zip(*outputs, strict=True))
    return summarize(logits, labels)


def summarize(logits: Tensor, labels: Tensor) -> Evaluation:
    """Metrics of logits (images, classes) and labels (images,)."""
    classes = logits.shape[1]
    ranks = logits.topk(min(5, classes), dim=1).indices == labels[:, None]
    return Evaluation(
        top1=100 * ranks[:, 0].float().mean().item(),
        top5=100 * ranks.any(dim=1).float().mean().item(),
        calibration_error=100 * multiclass_calibration_error(logits.softmax(1), labels, classes, n_bins=15).item(),
        loss=torch.nn.functional.cross_entropy(logits, labels).item(),
        confusion=multiclass_confusion_matrix(logits, labels, classes),
    )
