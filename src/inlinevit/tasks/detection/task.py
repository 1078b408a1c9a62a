"""Detection as a task."""

from typing import Any

from accelerate import Accelerator
from torch import Tensor, nn

from ...data.batch_plan import BatchPlan
from ...data.loader import TrainLoader
from ...engine.evaluator import EvalData
from ...engine.runs import Run
from ...utils.memory import require_memory_for_images
from ...utils.validation import require
from .. import TASKS
from ..backbone import mean_and_std, padding_color
from ..dense import DenseTask
from .coco import open_coco
from .config import DetectionConfig, DetectionDataConfig, DetectionEvalOptions
from .dataset import make_train_loader
from .metrics import IOU_TYPES, RESULTS_JSON, DetectionEvaluator
from .model import build_detector
from .predictor import CATEGORIES_JSON, DetectionPredictor, StoredResults, load_detector

# The metrics of a run; `inlinevit detect eval` has more.
LOGGED = ("box_AP", "box_AP50", "box_AP75", "mask_AP", "mask_AP50", "mask_AP75")


class Detection(DenseTask, config=DetectionConfig, command=TASKS["detection"].command, metric="box_AP"):
    """Object detection and instance segmentation."""

    config: DetectionConfig

    def __init__(self, config: DetectionConfig) -> None:
        super().__init__(config)
        channels = config.model.in_chans
        self.train_source = open_coco(config.data, training=True, channels=channels)
        self.resolve_inputs()
        self.eval_source = open_coco(config.data, training=False, channels=channels)
        self.categories = self.train_source.categories
        require(
            self.categories == self.eval_source.categories,
            f"{self.train_source.file} and {self.eval_source.file} have different categories: both should "
            "list the same ids and names",
        )
        check_memory(config)
        weights = [config.model.checkpoint] if config.model.checkpoint else []
        self.check_run_output([self.train_source.file, self.eval_source.file, *weights])
        self.num_classes = config.model.num_classes or len(self.categories)
        require(
            self.num_classes >= len(self.categories),
            f"model.num_classes is {self.num_classes}, but {self.train_source.file} has {len(self.categories)} "
            "categories: leave it out, or raise it",
        )

    def build_model(self) -> nn.Module:
        mean_std = mean_and_std(self.config.model, self.config.data)
        return build_detector(self.config.model, self.num_classes, mean_std)

    def train_loader(self, plan: BatchPlan) -> TrainLoader:
        config = self.config
        color = padding_color(config.model, config.data)
        return make_train_loader(self.train_source, config.augment, config.data, config.run.seed, plan, color)

    def loss(self, model: nn.Module, batch: tuple[list[Tensor], list[dict[str, Tensor]]]) -> Tensor:
        images, targets = batch
        losses: dict[str, Tensor] = model([image.float() / 255 for image in images], targets)
        return sum(losses.values(), start=images[0].new_zeros((), dtype=losses["loss_objectness"].dtype))

    def make_evaluator(self) -> DetectionEvaluator:
        return DetectionEvaluator(self.eval_source, self.config.data.workers)

    def compute_metrics(self, model: nn.Module, accelerator: Accelerator) -> dict[str, float]:
        numbers = super().compute_metrics(model, accelerator)
        return {name: numbers[name] for name in LOGGED}

    def metadata(self) -> dict[str, Any]:
        return {CATEGORIES_JSON: [category._asdict() for category in self.categories]}

    @classmethod
    def find_run(cls, model: str | None, options: Any) -> Run[Any] | None:
        """See Task.find_run; stored results need no run, unless their data are to be those of one."""
        if isinstance(options, DetectionEvalOptions) and model is None:
            require(bool(options.results), "name the folder of a training run, or results with --results")
            return None
        return super().find_run(model, options)

    @classmethod
    def open_eval_data(cls, config: DetectionDataConfig, run: Any, options: DetectionEvalOptions) -> EvalData:
        channels = 3 if run is None else run.config.model.in_chans
        source = open_coco(config, training=False, channels=channels)
        return EvalData(config, source, str(source.file), [source.file, *(options.results or [])])

    @classmethod
    def load_predictor(cls, model: str | None, options: Any) -> DetectionPredictor:
        if isinstance(options, DetectionEvalOptions) and options.results:
            return StoredResults(options.results)
        return load_detector(model or "", checkpoint=options.checkpoint)

    @classmethod
    def eval_files(cls, options: DetectionEvalOptions) -> tuple[str, ...]:
        return () if options.results else tuple(RESULTS_JSON.format(iou_type) for iou_type in IOU_TYPES.values())


def check_memory(config: DetectionConfig) -> None:
    """Refuse images that do not fit into memory: a batch of those for training, and one for evaluation."""
    augment, remedy = config.augment, "choose a smaller data.batch_size, or smaller sides"
    side = max(augment.min_sizes) if augment.scale_jitter is None else augment.jitter_size
    require_memory_for_images(config.data.batch_size, config.model.in_chans, side, side, remedy)
    side = config.model.min_size
    require_memory_for_images(1, config.model.in_chans, side, side, "choose a smaller model.min_size")
