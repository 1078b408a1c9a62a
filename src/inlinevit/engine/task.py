"""What a task supplies; training, evaluation, prediction and all files are the engine's.

A task is a package with a config (dataclasses, no torch) and four classes:

- Task: dataset, model and loss for the Trainer. Its class methods open the data of `eval` and load a Predictor.
- Predictor: a model with its weights. It turns images into results, and draws them where there is something to draw.
- Evaluator: runs a model on the batches of one data set and accumulates its metrics (reset, update, compute).
- Evaluation: what an Evaluator computes: numbers, values per class, further files.

`eval_command` and `predict_command` do the rest, the same for every task: they open the run, apply options to its
config, check the output paths, choose the device, show progress, print tables and write files. The table TASKS of
`inlinevit.tasks` names the classes of each task, so that the command line needs no import to list them.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

from accelerate import Accelerator
from torch import Tensor, nn

from ..data.batch_plan import BatchPlan
from ..data.loader import TrainLoader
from .config import EvalOptions, TrainConfig
from .evaluator import EvalData, Evaluator, evaluate_model
from .exported_model import is_exported
from .exported_run import open_exported_to_evaluate
from .outputs import check_run_output
from .predictor import Predictor
from .runs import Run, open_run, task_of


class Task(ABC):
    """A task: dataset, model, loss and metrics.

    It has two roles. An instance is one training run, whose data it opens: `Trainer(task, config).run()` asks it for
    model, batches, loss and evaluator. The class itself, without an instance, is what `eval` and `predict` need: its
    class methods find a run, open the data to evaluate on, and load a Predictor.

        config = ClassificationConfig(…)
        Trainer(Classification(config), config).run()
        predictor = Classification.load_predictor("runs/first", ClassificationPredictOptions())

    Args:
        config: The run; its `data` has batch_size and workers. A task may change it: what the config leaves open is
            replaced by what the training data say, so that the stored config is complete.
    """

    # Arguments of the class statement: class MyTask(Task, config=…, command=…, metric=…).
    # The configuration, and the word between `inlinevit` and train, eval or predict; "" = none.
    config_class: ClassVar[type[TrainConfig]]
    command: ClassVar[str]
    # The metric that decides which weights are the best, and whether larger is better.
    metric: ClassVar[str]
    greater_is_better: ClassVar[bool] = True
    # Whether several processes can share an image (parallel.sequence): the model is one of images to logits.
    supports_sequence: ClassVar[bool] = False
    # Batch sizes must be multiples of this number.
    batch_multiple: int = 1

    def __init_subclass__(cls, config: type[TrainConfig] | None = None, command: str = "", metric: str = "") -> None:
        if config is not None:
            cls.config_class, cls.command, cls.metric = config, command, metric

    def __init__(self, config: Any) -> None:
        self.config = config
        # Samples in a batch of one process, and the data workers of that process.
        self.batch_size: int = config.data.batch_size
        self.workers: int = config.data.workers

    @abstractmethod
    def build_model(self) -> nn.Module:
        """Return the model to train, with its initial weights."""

    @abstractmethod
    def train_loader(self, plan: BatchPlan) -> TrainLoader:
        """Return one process's part of the training batches."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the loss of a batch, which is on the model's device."""

    @abstractmethod
    def make_evaluator(self) -> Evaluator:
        """Return the evaluator of the validation data."""

    def compute_metrics(self, model: nn.Module, accelerator: Accelerator) -> dict[str, float]:
        """Return the metrics on the validation data, the same on all processes."""
        return evaluate_model(model, self.make_evaluator(), accelerator).numbers()

    def metadata(self) -> dict[str, Any]:
        """Return what to store in the run folder, by the names of JSON files: {"classes.json": […]}."""
        return {}

    def describe(self) -> str:
        """Return the model with its initial weights and the numbers of images in one line, for the log; "" = none."""
        return ""

    def check_run_output(self, inputs: Iterable[str | Path]) -> None:
        """Refuse a run folder in which the run would replace files that it reads, such as weights to start from."""
        check_run_output(self.config.run.output, inputs, self.metadata())

    @classmethod
    def find_run(cls, model: str | None, options: EvalOptions) -> Run | None:
        """Open the run or the exported model that `eval` is given; None if the task accepts something else."""
        if model is None:
            raise ValueError(f"name the folder of a {task_of(cls.config_class)} run")
        if is_exported(model):
            return open_exported_to_evaluate(cls.config_class, model, options)
        return open_run(cls.config_class, model)

    @classmethod
    @abstractmethod
    def open_eval_data(cls, config: Any, run: Run | None, options: Any) -> EvalData:
        """Open the data that `eval` evaluates on: those of a data config, with the labels of the run if any."""

    @classmethod
    @abstractmethod
    def load_predictor(cls, model: str | None, options: Any) -> Predictor[Any]:
        """Load a model with its weights, on the CPU and in evaluation mode, for `eval` or `predict`.

        Args:
            model: The folder of a run, the file of an exported model, or a name if the task accepts one.
            options: The options of the command.
        """

    @classmethod
    def eval_files(cls, options: Any) -> tuple[str, ...]:
        """Return the names of the files that Evaluation.save_files writes."""
        return ()
