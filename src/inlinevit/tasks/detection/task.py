"""Detection as a Task of the training loop."""

from dataclasses import asdict
from typing import Any

from accelerate import Accelerator
from torch import Tensor, nn

from ...data.batch_plan import BatchPlan
from ...data.loader import TrainLoader
from ...engine.outputs import check_run_output
from ...models.factory import check_model_name
from ...utils.memory import require_memory_for_images
from ...utils.validation import require
from .coco import open_coco
from .config import DetectionConfig
from .dataset import make_train_loader
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
        self.train_source = open_coco(config.data, training=True)
        self.eval_source = open_coco(config.data, training=False)
        self.categories = self.train_source.categories
        require(
            self.categories == self.eval_source.categories,
            f"{self.train_source.file} and {self.eval_source.file} have different categories: both should "
            "list the same ids and names",
        )
        check_memory(config)
        for source in (self.train_source, self.eval_source):
            weights = [config.model.checkpoint] if config.model.checkpoint else []
            check_run_output(config.run.output, [source.file, *weights])
        self.num_classes = config.model.num_classes or len(self.categories)
        require(
            self.num_classes >= len(self.categories),
            f"model.num_classes is {self.num_classes}, but {self.train_source.file} has {len(self.categories)} "
            "categories: leave it out, or raise it",
        )

    def build_model(self) -> nn.Module:
        """See Task.build_model."""
        return build_detector(self.config.model, self.num_classes)

    def train_loader(self, plan: BatchPlan) -> TrainLoader:
        """See Task.train_loader."""
        config = self.config
        return make_train_loader(self.train_source, config.augment, config.data, config.run.seed, plan)

    def loss(self, model: nn.Module, batch: tuple[list[Tensor], list[dict[str, Tensor]]]) -> Tensor:
        """See Task.loss."""
        images, targets = batch
        losses: dict[str, Tensor] = model([image.float() / 255 for image in images], targets)
        return sum(losses.values(), start=images[0].new_zeros((), dtype=losses["loss_objectness"].dtype))

    def evaluate(self, model: nn.Module, accelerator: Accelerator) -> dict[str, float]:
        """See Task.evaluate."""
        numbers = evaluate(model, self.eval_source, self.config.data, accelerator).numbers()
        return {name: numbers[name] for name in TOLD}

    def notes(self) -> dict[str, Any]:
        """See Task.notes."""
        return {"categories": [asdict(category) for category in self.categories]}


def check_memory(config: DetectionConfig) -> None:
    """Refuse images that do not fit into memory: a batch of those for training, and one for evaluation."""
    augment, remedy = config.augment, "choose a smaller data.batch_size, or smaller sides"
    side = max(augment.min_sizes) if augment.scale_jitter is None else augment.jitter_size
    require_memory_for_images(config.data.batch_size, 3, side, side, remedy)
    require_memory_for_images(1, 3, config.model.min_size, config.model.min_size, "choose a smaller model.min_size")
