"""Tasks: classification, multi-label classification, detection, segmentation. See `inlinevit.engine.task`.

TASKS names the classes of each task, so that the command line can list the tasks and show their options without
importing torch.
"""

import pkgutil
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TaskEntry:
    """Where the parts of a task are.

    Attributes:
        name: The name of the task.
        command: The word between `inlinevit` and train, eval or predict; "" = none.
        description: One line for the help.
        recipe: The name of one of its recipes.
        config: "package.module:Class" of the task's TrainConfig.
        eval_options: Of its EvalOptions.
        predict_options: Of its PredictOptions.
        task: Of its Task; the only one of the four that imports torch.
        accepts_names: Whether eval and predict take the name of a model in place of the folder of a run.
        needs_model: Whether eval needs either of them.
    """

    name: str
    command: str
    description: str
    recipe: str
    config: str
    eval_options: str
    predict_options: str
    task: str
    accepts_names: bool = False
    needs_model: bool = True

    def command_line(self, what: str) -> str:
        """Return the words after `inlinevit` for train, eval or predict."""
        return f"{self.command} {what}".strip()

    def load_config(self) -> Any:
        """Import the class of the task's TrainConfig."""
        return pkgutil.resolve_name(self.config)

    def load_eval_options(self) -> Any:
        """Import the class of the task's EvalOptions."""
        return pkgutil.resolve_name(self.eval_options)

    def load_predict_options(self) -> Any:
        """Import the class of the task's PredictOptions."""
        return pkgutil.resolve_name(self.predict_options)

    def load_task(self) -> Any:
        """Import the class of the task."""
        return pkgutil.resolve_name(self.task)


TASKS = {
    "classification": TaskEntry(
        name="classification",
        command="",
        description="image classification",
        recipe="inline_swin_tiny",
        config=f"{__name__}.classification.config:ClassificationConfig",
        eval_options=f"{__name__}.classification.config:ClassificationEvalOptions",
        predict_options=f"{__name__}.classification.config:ClassificationPredictOptions",
        task=f"{__name__}.classification.task:Classification",
        accepts_names=True,
    ),
    "multilabel": TaskEntry(
        name="multilabel",
        command="multilabel",
        description="multi-label classification",
        recipe="multilabel_inline_swin_tiny",
        config=f"{__name__}.multilabel.config:MultilabelConfig",
        eval_options=f"{__name__}.multilabel.config:MultilabelEvalOptions",
        predict_options=f"{__name__}.multilabel.config:MultilabelPredictOptions",
        task=f"{__name__}.multilabel.task:Multilabel",
    ),
    "detection": TaskEntry(
        name="detection",
        command="detect",
        description="object detection and instance segmentation",
        recipe="mask_rcnn_inline_pvt_tiny_1x",
        config=f"{__name__}.detection.config:DetectionConfig",
        eval_options=f"{__name__}.detection.config:DetectionEvalOptions",
        predict_options=f"{__name__}.detection.config:DetectionPredictOptions",
        task=f"{__name__}.detection.task:Detection",
        needs_model=False,
    ),
    "segmentation": TaskEntry(
        name="segmentation",
        command="segment",
        description="semantic segmentation",
        recipe="semantic_fpn_inline_pvt_tiny",
        config=f"{__name__}.segmentation.config:SegmentationConfig",
        eval_options=f"{__name__}.segmentation.config:SegmentationEvalOptions",
        predict_options=f"{__name__}.segmentation.config:SegmentationPredictOptions",
        task=f"{__name__}.segmentation.task:Segmentation",
    ),
}
