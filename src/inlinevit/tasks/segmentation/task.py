"""Segmentation as a task."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ...data.batch_plan import BatchPlan
from ...data.loader import TrainLoader
from ...engine.evaluator import EvalData
from ...engine.exported_model import is_exported
from ...engine.runs import Run
from ...utils.memory import require_memory_for_images
from .. import TASKS
from ..backbone import mean_and_std, padding_color
from ..dense import DenseTask
from .ade import open_ade
from .config import SegmentationConfig, SegmentationDataConfig, SegmentationEvalOptions
from .dataset import make_train_loader
from .inference import normalize
from .labels import IGNORED, open_labels
from .metrics import CONFUSION_PNG, SegmentationEvaluator
from .model import build_segmenter
from .predictor import (
    LABELS_JSON,
    SegmentationPredictor,
    evaluation_labels,
    load_exported_segmenter,
    load_segmenter,
)


class Segmentation(DenseTask, config=SegmentationConfig, command=TASKS["segmentation"].command, metric="miou"):
    """Semantic segmentation."""

    config: SegmentationConfig

    def __init__(self, config: SegmentationConfig) -> None:
        super().__init__(config)
        channels = config.model.in_chans
        self.labels = open_labels(config.data, config.model.num_classes)
        self.num_classes = len(self.labels.classes)
        self.train_source = open_ade(config.data, self.labels, training=True, channels=channels)
        self.resolve_inputs()
        self.eval_source = open_ade(config.data, self.labels, training=False, channels=channels)
        self.mean_std = mean_and_std(config.model, config.data)
        crop, remedy = config.augment.crop_size, "choose a smaller data.batch_size, or augment.crop_size"
        require_memory_for_images(config.data.batch_size, channels, crop, crop, remedy)
        inputs = [file for file in (config.data.labels, config.model.checkpoint) if file]
        self.check_run_output(inputs)

    def build_model(self) -> nn.Module:
        return build_segmenter(self.config.model, self.num_classes)

    def train_loader(self, plan: BatchPlan) -> TrainLoader:
        config = self.config
        color = padding_color(config.model, config.data)
        return make_train_loader(self.train_source, config.augment, config.run.seed, plan, color)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        output = model(normalize(images, *self.mean_std))
        if isinstance(output, Tensor):
            return pixel_loss(output, labels)
        logits, auxiliary = output
        return pixel_loss(logits, labels) + self.config.model.aux_weight * pixel_loss(auxiliary, labels)

    def make_evaluator(self) -> SegmentationEvaluator:
        config = self.config
        return SegmentationEvaluator(self.eval_source, config.data.workers, config.inference, self.mean_std)

    def metadata(self) -> dict[str, Any]:
        return {LABELS_JSON: self.labels.to_plain()}

    @classmethod
    def open_eval_data(
        cls, config: SegmentationDataConfig, run: Run[Any] | None, options: SegmentationEvalOptions
    ) -> EvalData:
        assert run is not None
        labels = evaluation_labels(run, config, is_given=options.data.labels is not None)
        source = open_ade(config, labels, training=False, channels=run.config.model.in_chans)
        files = [] if config.labels is None else [config.labels]
        folders = [source.images_folder, source.masks_folder]
        return EvalData(config, source, str(source.images_folder), files, folders)

    @classmethod
    def load_predictor(cls, model: str | None, options: Any) -> SegmentationPredictor:
        if is_exported(model or ""):
            return load_exported_segmenter(model or "", options)
        return load_segmenter(model or "", checkpoint=options.checkpoint)

    @classmethod
    def eval_files(cls, options: Any) -> tuple[str, ...]:
        return (CONFUSION_PNG,)


def pixel_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy over the pixels that count; 0 if there are none.

    Args:
        logits: (batch, classes, height, width).
        labels: (batch, height, width) of bytes; IGNORED where a pixel does not count.
    """
    total = F.cross_entropy(logits.float(), labels.long(), ignore_index=IGNORED, reduction="sum")
    return total / (labels != IGNORED).sum().clamp(min=1)
