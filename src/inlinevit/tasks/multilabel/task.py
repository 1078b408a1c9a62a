"""Multi-label classification as a task."""

from typing import Any

from torch import Tensor, nn

from ...engine.evaluator import EvalData
from ...engine.exported_model import is_exported
from ...engine.exported_run import load_exported
from ...engine.results import ClassProbability
from ...engine.runs import Run, open_run
from ...utils.validation import require
from .. import TASKS
from ..classification.model import build_trained
from ..classification.predictor import CLASSES_JSON, ImagePredictor, check_batch_memory, exported_spec, parse_classes
from ..classification.task import ImageTask
from ..classification.transforms import input_spec
from .config import MultilabelConfig, MultilabelDataConfig, MultilabelEvalOptions, MultilabelPredictOptions
from .dataset import CsvSource, open_csv
from .metrics import MultilabelEvaluator, multilabel_loss


class MultilabelPredictor(ImagePredictor):
    """A multi-label model that is ready to use; it returns labels with at least the threshold."""

    options_class = MultilabelPredictOptions

    def rank(self, logits: Tensor, options: MultilabelPredictOptions) -> list[list[ClassProbability] | None]:
        return self.top_classes(logits.sigmoid(), self.num_classes, options.threshold)

    def settings(self, options: MultilabelEvalOptions) -> dict[str, Any]:
        return {**super().settings(options), "threshold": options.threshold}

    def make_evaluator(self, data: EvalData, options: MultilabelEvalOptions) -> MultilabelEvaluator:
        return MultilabelEvaluator(data.source, self.spec.with_pixels(data.config), data.config, options.threshold)


class Multilabel(ImageTask, config=MultilabelConfig, command=TASKS["multilabel"].command, metric="map"):
    """Multi-label classification."""

    config: MultilabelConfig

    def __init__(self, config: MultilabelConfig) -> None:
        super().__init__(config)
        self.train_source: CsvSource = open_csv(config.data, training=True)
        self.resolve_inputs()
        self.classes, self.targets = self.train_source.classes, self.train_source.targets
        self.eval_source: CsvSource = open_csv(config.data, training=False, classes=self.classes)
        self.num_classes, self.num_targets = len(self.classes), len(self.train_source)
        fits = self.num_classes > 0 and config.model.num_classes in (None, self.num_classes)
        require(fits, f"{config.data.path} has {self.num_classes} labels: model.num_classes should be as many")
        check_batch_memory(self.spec, min(config.data.batch_size, len(self.train_source)))
        weights = [config.model.checkpoint] if config.model.checkpoint else []
        self.check_run_output([self.train_source.file, self.eval_source.file, *weights])

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor, list[str]]) -> Tensor:
        images, rows, problems = batch
        self.unreadable.check(problems)
        # Kept on the device, so that no step waits for it.
        self.targets = self.targets.to(images.device)
        return multilabel_loss(model(images).float(), self.targets[rows], self.config.loss)

    def make_evaluator(self) -> MultilabelEvaluator:
        return MultilabelEvaluator(self.eval_source, self.spec, self.config.data, threshold=0.5)

    def metadata(self) -> dict[str, Any]:
        return {CLASSES_JSON: self.classes}

    @classmethod
    def open_eval_data(cls, config: MultilabelDataConfig, run: Run[Any] | None, options: Any) -> EvalData:
        assert run is not None
        source = open_csv(config, training=False, classes=run.metadata(CLASSES_JSON, parse_classes))
        return EvalData(config, source, config.path, [source.file, *source.files])

    @classmethod
    def load_predictor(cls, model: str | None, options: Any) -> MultilabelPredictor:
        if is_exported(model or ""):
            exported, opened = load_exported(MultilabelConfig, model or "", options)
            metadata = exported.metadata
            names, inputs = metadata.classes, exported_spec(metadata, model or "")
            limit = metadata.preprocessing.max_pixels
            return MultilabelPredictor(
                exported, metadata.model, opened.config, len(names), names, inputs, max_pixels=limit
            )
        run = open_run(MultilabelConfig, model or "")
        classes = run.metadata(CLASSES_JSON, parse_classes) or []
        config, file = run.config.model, str(run.weights(options.checkpoint))
        trained = build_trained(config, file, len(classes))
        spec, limit = input_spec(config, run.config.data), run.config.data.max_pixels
        return MultilabelPredictor(trained, config.name, run.config, len(classes), classes, spec, max_pixels=limit)
