"""Classification as a Task of the training loop."""

from typing import Any

import timm
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from timm.data import Mixup
from torch import Tensor, nn

from ..models import Backbone, load_checkpoint
from ..training.data import TrainingData
from .config import ClassificationConfig, DistillationConfig, ModelConfig
from .data import (
    LabelledImages,
    ProblemCounter,
    evaluation_batches,
    evaluation_transform,
    training_batches,
    training_transform,
)
from .evaluate import evaluate
from .sources import open_source


def build_model(config: ModelConfig, num_classes: int) -> nn.Module:
    """The model of a configuration, with the weights it starts from."""
    options = {"in_chans": config.in_chans, "drop_path_rate": config.drop_path, **config.options}
    model = timm.create_model(
        config.name, pretrained=config.pretrained, num_classes=num_classes, img_size=config.img_size, **options
    )
    if config.checkpoint is not None:
        if isinstance(model, Backbone):
            load_checkpoint(model, config.checkpoint)
        else:
            timm.models.load_checkpoint(model, config.checkpoint)
    return model


class Teacher(nn.Module):
    """A frozen model and the loss of not answering as it does.

    Args:
        config: Which model, and how to learn from it.
        num_classes: Classes of the student.
    """

    def __init__(self, config: DistillationConfig, num_classes: int) -> None:
        super().__init__()
        assert config.teacher is not None
        self.config = config
        self.model = timm.create_model(config.teacher, pretrained=config.checkpoint is None, num_classes=num_classes)
        if config.checkpoint is not None:
            timm.models.load_checkpoint(self.model, config.checkpoint)
        self.eval().requires_grad_(False)

    def forward(self, images: Tensor, logits: Tensor) -> Tensor:
        """The loss of the student's logits (batch, classes) against the teacher's on the same images."""
        with torch.no_grad():
            taught = self.model(images)
        if self.config.kind == "hard":
            return F.cross_entropy(logits, taught.argmax(dim=1))
        heat = self.config.temperature
        divergence = F.kl_div(
            F.log_softmax(logits / heat, dim=1), F.log_softmax(taught / heat, dim=1), reduction="batchmean", log_target=True
        )
        return heat**2 * divergence


class Classification:
    """Images into classes.

    Args:
        config: The run.
    """

    metric = "top1"
    greater_is_better = True

    def __init__(self, config: ClassificationConfig) -> None:
        self.config = config
        self.training_source = open_source(config.data, training=True)
        self.evaluation_source = open_source(config.data, training=False)
        self.classes = self.training_source.classes
        self.num_classes = config.model.num_classes or len(self.classes or ())
        if self.num_classes == 0:
            raise ValueError(f"{config.data.path} does not tell its classes: set --model.num_classes")
        self.problems = ProblemCounter(config.data.max_unreadable)
        augment = config.augment
        self.mixup = (
            Mixup(
                mixup_alpha=augment.mixup,
                cutmix_alpha=augment.cutmix,
                switch_prob=augment.mixup_switch,
                label_smoothing=augment.label_smoothing,
                num_classes=self.num_classes,
            )
            if augment.mixup > 0 or augment.cutmix > 0
            else None
        )
        self.teacher = Teacher(config.distillation, self.num_classes) if config.distillation.teacher else None

    def build_model(self) -> nn.Module:
        """See Task.build_model."""
        return build_model(self.config.model, self.num_classes)

    def training_data(self, process: int, processes: int) -> TrainingData:
        """See Task.training_data."""
        model = self.config.model
        transform = training_transform(self.config.augment, model.img_size, model.normalization)
        images = LabelledImages(self.training_source, transform, model.image_mode, self.num_classes)
        seed, repeats = self.config.run.seed, self.config.augment.repeats
        return training_batches(images, self.config.data, repeats, seed, process, processes)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor, list[str]]) -> Tensor:
        """See Task.loss."""
        images, labels, problems = batch
        self.problems.check(problems)
        targets = labels
        if self.mixup is not None:
            # Mixup pairs the images of a batch, so it wants an even number of them.
            images, targets = self.mixup(images, labels)
        logits = model(images)
        smoothing = 0.0 if self.mixup is not None else self.config.augment.label_smoothing
        loss = F.cross_entropy(logits.float(), targets, label_smoothing=smoothing)
        if self.teacher is None:
            return loss
        share = self.config.distillation.weight
        return (1 - share) * loss + share * self.teacher.to(images.device)(images, logits.float())

    def evaluate(self, model: nn.Module, accelerator: Accelerator) -> dict[str, float]:
        """See Task.evaluate."""
        return evaluate(model, self.evaluation_images(), self.config.data, accelerator).numbers()

    def evaluation_images(self) -> LabelledImages:
        """The images for evaluation, without augmentation."""
        model = self.config.model
        transform = evaluation_transform(model.img_size, model.normalization, model.crop_pct)
        return LabelledImages(self.evaluation_source, transform, model.image_mode, self.num_classes)
