"""Classification as a task."""

from contextlib import suppress
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from timm.data import Mixup
from torch import Tensor, nn

from ...data.batch_plan import BatchPlan
from ...data.loader import TrainLoader
from ...engine.config import PixelConfig
from ...engine.evaluator import EvalData
from ...engine.exported_model import is_exported
from ...engine.runs import Run
from ...engine.task import Task
from ...models.factory import check_model_name
from ...utils.validation import require
from .. import TASKS
from ..describe import describe_start
from ..pixels import MOST_MEASURED, resolve_pixels
from .config import (
    AugmentConfig,
    ClassificationConfig,
    ClassificationDataConfig,
    ClassificationEvalOptions,
    DistillationConfig,
    ModelConfig,
)
from .dataset import UnreadableCounter, make_train_loader
from .metrics import CONFUSION_PNG, ClassificationEvaluator
from .model import build_model, classes_of_model
from .predictor import (
    CLASSES_JSON,
    ClassificationPredictor,
    check_batch_memory,
    find_classification_run,
    load_classifier,
    load_exported_classifier,
)
from .published import with_published
from .shards import ShardImages, ShardSource
from .sources import DEFAULT_EVAL_SHARE, ImageSource, SubsetSource, labels_by_name, open_source, source_paths
from .transforms import InputSpec, input_spec, training_transform


class Teacher(nn.Module):
    """A frozen model, and the loss of a student, whose images it gets, against its predictions."""

    scale: Tensor
    shift: Tensor

    def __init__(
        self, config: DistillationConfig, student: ModelConfig, num_classes: int, data: PixelConfig | None = None
    ) -> None:
        super().__init__()
        assert config.teacher is not None
        check_model_name(config.teacher)
        self.config = config
        inputs = input_spec(student, data)
        model = ModelConfig(
            name=config.teacher,
            img_size=inputs.size,
            in_chans=student.in_chans,
            drop_path_rate=0.0,
            pretrained=config.checkpoint is None,
            checkpoint=config.checkpoint,
        )
        known = classes_of_model(model)
        require(
            known == num_classes,
            f"the teacher {config.teacher} has {known} classes, but the data have {num_classes}: name the file "
            "of one that was trained on them with --distillation.checkpoint",
        )
        built = build_model(model, num_classes, new_head=False, option="--distillation.checkpoint FILE")
        self.model = built.eval().requires_grad_(False)
        # The student's images are normalised for the student; the teacher may expect another mean and std.
        # Of other bands than its own it is not known what the teacher expects, so they are as the student's.
        own = input_spec(model, None if student.in_chans in (1, 3) else data)
        mean, std, own_mean, own_std = (
            torch.tensor(values).view(-1, 1, 1) for values in (inputs.mean, inputs.std, own.mean, own.std)
        )
        self.register_buffer("scale", std / own_std, persistent=False)
        self.register_buffer("shift", (mean - own_mean) / own_std, persistent=False)

    def forward(self, images: Tensor, logits: Tensor) -> Tensor:
        """Return the loss of the student's logits (batch, classes) against the teacher's on the same images."""
        with torch.no_grad():
            targets = self.model(images * self.scale + self.shift).float()
        if self.config.kind == "hard":
            return F.cross_entropy(logits, targets.argmax(dim=1))
        temperature = self.config.temperature
        student, teacher = (F.log_softmax(values / temperature, dim=1) for values in (logits, targets))
        return temperature**2 * F.kl_div(student, teacher, reduction="batchmean", log_target=True)


class ImageTask(Task):
    """A task with labels of whole images; its config has `data`, `augment` and `model`."""

    supports_sequence = True

    train_source: ImageSource | ShardSource
    eval_source: ImageSource | ShardSource
    # The input of the model, and the transform of training images.
    spec: InputSpec
    transform: Any
    # Width of the head.
    num_classes: int
    # Labels of the training data are below this: the number of classes, or of rows in a table of targets.
    num_targets: int

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        config.model = with_published(config.model)
        check_model_name(config.model.name)
        self.unreadable = UnreadableCounter(config.data.max_unreadable)

    def resolve_inputs(self) -> None:
        """Set `spec` and `transform`; what the config leaves open is found in the training data, and written to it."""
        config, source = self.config, self.train_source
        if isinstance(source, ShardSource):
            stored: list[dict[str, Any]] = []
            # What is wrong with a shard is reported when it is its turn.
            with suppress(OSError, ValueError):
                stored.extend(islice(source.read(0), MOST_MEASURED))
            source = ShardImages(stored)
        resolve_pixels(config.data, config.model.in_chans, len(source), lambda index: source.read(index)[0])
        self.spec = input_spec(config.model, config.data)
        self.transform = training_transform(config.augment, self.spec)

    def build_model(self) -> nn.Module:
        return build_model(self.config.model, self.num_classes)

    def describe(self) -> str:
        name = f"{self.config.model.name} for {self.num_classes} classes"
        return describe_start(name, self.config, self.train_source, self.eval_source)

    def train_loader(self, plan: BatchPlan) -> TrainLoader:
        """See Task.train_loader: images, labels, problems."""
        return make_train_loader(
            self.train_source,
            self.transform,
            self.spec.pixel_format,
            self.num_targets,
            self.config.data,
            self.config.augment.repeats,
            self.config.run.seed,
            plan,
        )


class Classification(ImageTask, config=ClassificationConfig, command=TASKS["classification"].command, metric="top1"):
    """Image classification."""

    config: ClassificationConfig

    def __init__(self, config: ClassificationConfig) -> None:
        super().__init__(config)
        # Mixup pairs the images of a batch.
        self.batch_multiple = 2 if config.augment.mixes else 1
        self.train_source = open_source(config.data, training=True)
        if isinstance(self.train_source, SubsetSource):
            config.data.eval_share = config.data.eval_share or DEFAULT_EVAL_SHARE
        self.resolve_inputs()
        self.classes = self.train_source.classes
        self.eval_source = open_source(config.data, training=False)
        self.eval_labels = labels_by_name(self.eval_source.classes, self.classes)
        self.num_classes = self.num_targets = config.model.num_classes or len(self.classes or ())
        if self.num_classes == 0:
            raise ValueError(f"{config.data.path} does not name its classes: set --model.num_classes")
        require(
            self.num_classes >= len(self.classes or ()),
            f"model.num_classes is {self.num_classes}, but {config.data.path} has {len(self.classes or ())} classes: "
            "leave it out, or raise it",
        )
        weights = [file for file in (config.model.checkpoint, config.distillation.checkpoint) if file]
        for source in (self.train_source, self.eval_source):
            check_batch_memory(self.spec, min(config.data.batch_size, len(source)))
            self.check_run_output([*source_paths(source)[0], *weights])
        self.mixup = make_mixup(config.augment, self.num_classes)
        self.teacher = (
            Teacher(config.distillation, config.model, self.num_classes, config.data)
            if config.distillation.teacher
            else None
        )

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor, list[str]]) -> Tensor:
        images, labels, problems = batch
        self.unreadable.check(problems)
        # Mixed images come with mixed, smoothed labels.
        images, targets = self.mixup(images, labels) if self.mixup is not None else (images, labels)
        smoothing = self.config.augment.label_smoothing if self.mixup is None else 0.0
        logits = model(images).float()
        loss = F.cross_entropy(logits, targets, label_smoothing=smoothing)
        if self.teacher is None:
            return loss
        weight = self.config.distillation.weight
        return (1 - weight) * loss + weight * self.teacher.to(images.device)(images, logits)

    def make_evaluator(self) -> ClassificationEvaluator:
        return ClassificationEvaluator(
            self.eval_source, self.spec, self.config.data, self.num_classes, labels=self.eval_labels
        )

    def metadata(self) -> dict[str, Any]:
        return {CLASSES_JSON: self.classes}

    @classmethod
    def find_run(cls, model: str | None, options: Any) -> Run[ClassificationConfig] | None:
        """See Task.find_run; the name of a model is accepted, too."""
        if is_exported(model or ""):
            return super().find_run(model, options)
        return find_classification_run(model or "")

    @classmethod
    def open_eval_data(cls, config: ClassificationDataConfig, run: Any, options: Any) -> EvalData:
        source = open_source(config, training=False)
        return EvalData(config, source, config.path, *source_paths(source))

    @classmethod
    def load_predictor(cls, model: str | None, options: Any) -> ClassificationPredictor:
        crop_pct = options.crop_pct if isinstance(options, ClassificationEvalOptions) else None
        inputs = {"img_size": options.img_size, "crop_pct": crop_pct}
        if is_exported(model or ""):
            return load_exported_classifier(model or "", options, **inputs)
        return load_classifier(model or "", checkpoint=options.checkpoint, **inputs)

    @classmethod
    def eval_files(cls, options: Any) -> tuple[str, ...]:
        return (CONFUSION_PNG,)


def make_mixup(augment: AugmentConfig, num_classes: int) -> Mixup | None:
    """Return timm's mixup and cutmix, if they are on."""
    if not augment.mixes:
        return None
    return Mixup(
        mixup_alpha=augment.mixup,
        cutmix_alpha=augment.cutmix,
        switch_prob=augment.mixup_switch,
        label_smoothing=augment.label_smoothing,
        num_classes=num_classes,
    )
