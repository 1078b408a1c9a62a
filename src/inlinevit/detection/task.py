"""Detection as a Task of the training loop."""

from dataclasses import asdict
from typing import Any

from accelerate import Accelerator
from torch import Tensor, nn

from ..training.batching import BatchPlan
from ..training.config import require
from ..training.creation import check_model_name
from ..training.data import TrainingData
from ..training.memory import require_memory_for_images
from ..training.outputs import check_run_output
from .coco import open_coco
from .config import DetectionConfig
from .data import training_batches
from .evaluate import evaluate
from .model import build_detector

# What a run tells of its evaluations; `inlinevit detect eval` tells more.
TOLD = ("box_AP", "box_AP50", "box_AP75", "mask_AP", "mask_AP50", "mask_AP75")


class Detection:
    """Objects in images, with boxes and masks.

    Args:
        config: The run.
    """

    metric = "box_AP"
    greater_is_better = True
    batch_multiple = 1

    def __init__(self, config: DetectionConfig) -> None:
        self.config = config
        self.batch_size, self.workers = config.data.batch_size, config.data.workers
        check_model_name(config.model.backbone)
        self.training_source = open_coco(config.data, training=True)
        self.evaluation_source = open_coco(config.data, training=False)
        self.categories = self.training_source.categories
        require(
            self.categories == self.evaluation_source.categories,
            f"{self.training_source.file} and {self.evaluation_source.file} have different categories: both should "
            "list the same ids and names",
        )
        check_memory(config)
        for source in (self.training_source, self.evaluation_source):
            weights = [config.model.checkpoint] if config.model.checkpoint else []
            check_run_output(config.run.output, [source.file, *weights])
        self.num_classes = config.model.num_classes or len(self.categories)
        require(
            self.num_classes >= len(self.categories),
            f"model.num_classes is {self.num_classes}, but {self.training_source.file} has {len(self.categories)} "
            "categories: leave it out, or raise it",
        )

    def build_model(self) -> nn.Module:
        """See Task.build_model."""
        return build_detector(self.config.model, self.num_classes)

    def training_data(self, plan: BatchPlan) -> TrainingData:
        """See Task.training_data."""
        config = self.config
        return training_batches(self.training_source, config.augment, config.data, config.run.seed, plan)

    def loss(self, model: nn.Module, batch: tuple[list[Tensor], list[dict[str, Tensor]]]) -> Tensor:
        """See Task.loss."""
        images, targets = batch
        losses: dict[str, Tensor] = model([image.float() / 255 for image in images], targets)
        return sum(losses.values(), start=images[0].new_zeros((), dtype=losses["loss_objectness"].dtype))

    def evaluate(self, model: nn.Module, accelerator: Accelerator) -> dict[str, float]:
        """See Task.evaluate."""
        numbers = evaluate(model, self.evaluation_source, self.config.data, accelerator).numbers()
        return {name: numbers[name] for name in TOLD}

    def notes(self) -> dict[str, Any]:
        """See Task.notes."""
        return {"categories": [asdict(category) for category in self.categories]}


def check_memory(config: DetectionConfig) -> None:
    """Refuse images that do not fit into memory: a batch of those for training, and one for evaluation."""
    augment, remedy = config.augment, "choose a smaller data.batch_size, or smaller sides"
    side = max(augment.sides) if augment.scale_jitter is None else augment.jitter_side
    require_memory_for_images(config.data.batch_size, 3, side, side, remedy)
    require_memory_for_images(1, 3, config.model.side, config.model.side, "choose a smaller model.side")
