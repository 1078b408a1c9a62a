"""What the loop must be told about a job: classification, detection and segmentation each are a Task."""

from typing import Any, Protocol

from accelerate import Accelerator
from torch import Tensor, nn

from ..data.batch_plan import BatchPlan
from ..data.loader import TrainLoader


class Task(Protocol):
    """A job: a model, data, a loss and an evaluation."""

    # The metric that tells which weights are the best, and whether more of it is better.
    metric: str
    greater_is_better: bool
    # Samples in a batch of one process, a number that batch sizes have to be multiples of, and its data workers.
    batch_size: int
    batch_multiple: int
    workers: int

    def build_model(self) -> nn.Module:
        """The model to train, with the weights it starts from."""

    def train_loader(self, plan: BatchPlan) -> TrainLoader:
        """The share of one process in the training data."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss of a batch that lies on the model's device."""

    def evaluate(self, model: nn.Module, accelerator: Accelerator) -> dict[str, float]:
        """Metrics on the validation data, the same on all processes."""

    def notes(self) -> dict[str, Any]:
        """What to leave beside the results, by the name of a JSON file: {"classes": […]}."""
