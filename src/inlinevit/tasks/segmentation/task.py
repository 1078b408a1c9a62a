"""Segmentation as a Task of the training loop."""

from typing import Any

import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn

from ...data.batch_plan import BatchPlan
from ...data.loader import TrainLoader
from ...engine.outputs import check_run_output
from ...models.factory import check_model_name
from ...utils.memory import require_memory_for_images
from ..backbone import mean_and_std
from .ade import open_ade
from .config import SegmentationConfig
from .dataset import make_train_loader
from .evaluate import evaluate
from .inference import normalized
from .labels import IGNORED, open_labels
from .model import build_segmenter


class Segmentation:
    """A class for each pixel.

    Args:
        config: The run.
    """

    metric = "miou"
    greater_is_better = True
    batch_multiple = 1

    def __init__(self, config: SegmentationConfig) -> None:
        self.config = config
        self.batch_size, self.workers = config.data.batch_size, config.data.workers
        check_model_name(config.model.backbone)
        self.mean_std = mean_and_std(config.model.backbone)
        self.labels = open_labels(config.data, config.model.num_classes)
        self.train_source = open_ade(config.data, self.labels, training=True)
        self.eval_source = open_ade(config.data, self.labels, training=False)
        crop, remedy = config.augment.crop_size, "choose a smaller data.batch_size, or augment.crop_size"
        require_memory_for_images(config.data.batch_size, 3, crop, crop, remedy)
        inputs = [file for file in (config.data.labels, config.model.checkpoint) if file]
        check_run_output(config.run.output, inputs)

    def build_model(self) -> nn.Module:
        """See Task.build_model."""
        return build_segmenter(self.config.model, len(self.labels.classes))

    def train_loader(self, plan: BatchPlan) -> TrainLoader:
        """See Task.train_loader."""
        config = self.config
        return make_train_loader(self.train_source, config.augment, config.run.seed, plan)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """See Task.loss."""
        images, labels = batch
        answer = model(normalized(images, *self.mean_std))
        if isinstance(answer, Tensor):
            return pixel_loss(answer, labels)
        logits, auxiliary = answer
        return pixel_loss(logits, labels) + self.config.model.aux_weight * pixel_loss(auxiliary, labels)

    def evaluate(self, model: nn.Module, accelerator: Accelerator) -> dict[str, float]:
        """See Task.evaluate."""
        config = self.config
        return evaluate(model, self.eval_source, config.data, config.inference, self.mean_std, accelerator).numbers()

    def notes(self) -> dict[str, Any]:
        """See Task.notes."""
        return {"labels": self.labels.to_plain()}


def pixel_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy over the pixels that count; 0 if there are none.

    Args:
        logits: (batch, classes, height, width).
        labels: (batch, height, width) of bytes; IGNORED where a pixel does not count.
    """
    total = F.cross_entropy(logits.float(), labels.long(), ignore_index=IGNORED, reduction="sum")
    return total / (labels != IGNORED).sum().clamp(min=1)
