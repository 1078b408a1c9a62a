"""Tasks: classification, multi-label classification, detection, segmentation. See `inlinevit.engine.task`.

TASKS is the table of them: the command line lists the tasks and shows their options without importing torch.
"""

import pkgutil
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TaskEntry:
    """A task: its package, and the names of its classes.

    The package NAME has config.py with PREFIXConfig, PREFIXEvalOptions and PREFIXPredictOptions, which do not import
    torch, and task.py with the Task PREFIX.

    Attributes:
        name: The name of the task and of its package.
        prefix: What the names of its classes begin with.
        command: The word between `inlinevit` and train, eval or predict; "" = none.
        description: What the task is called in the help.
        recipe: The name of one of its recipes.
        accepts_names: Whether eval and predict take the name of a model in place of the folder of a run.
        needs_model: Whether eval needs either of them.
        is_exportable: Whether `inlinevit export` takes its models, and eval and predict take exported ones.
    """

    name: str
    prefix: str
    command: str
    description: str
    recipe: str
    accepts_names: bool = False
    needs_model: bool = True
    is_exportable: bool = True

    def command_line(self, what: str) -> str:
        """Return the words after `inlinevit` for train, eval or predict."""
        return f"{self.command} {what}".strip()

    def load_config(self) -> Any:
        """Import the class of its TrainConfig."""
        return pkgutil.resolve_name(f"{__name__}.{self.name}.config:{self.prefix}Config")

    def load_eval_options(self) -> Any:
        """Import the class of its EvalOptions."""
        return pkgutil.resolve_name(f"{__name__}.{self.name}.config:{self.prefix}EvalOptions")

    def load_predict_options(self) -> Any:
        """Import the class of its PredictOptions."""
        return pkgutil.resolve_name(f"{__name__}.{self.name}.config:{self.prefix}PredictOptions")

    def load_task(self) -> Any:
        """Import the class of its Task."""
        return pkgutil.resolve_name(f"{__name__}.{self.name}.task:{self.prefix}")


_ENTRIES = (
    TaskEntry("classification", "Classification", "", "image classification", "inline_swin_tiny", accepts_names=True),
    TaskEntry("multilabel", "Multilabel", "multilabel", "multi-label classification", "multilabel_inline_swin_tiny"),
    TaskEntry(
        "detection",
        "Detection",
        "detect",
        "object detection and instance segmentation",
        "mask_rcnn_inline_pvt_tiny_1x",
        needs_model=False,
        is_exportable=False,
    ),
    TaskEntry("segmentation", "Segmentation", "segment", "semantic segmentation", "semantic_fpn_inline_pvt_tiny"),
)
TASKS = {entry.name: entry for entry in _ENTRIES}
