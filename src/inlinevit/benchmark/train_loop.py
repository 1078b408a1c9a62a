"""The cost of the training loop: whether data loading is the bottleneck, and what the loop adds to a bare step."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import count, repeat
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from accelerate.utils import send_to_device
from rich.console import Console
from torch import Tensor, nn

from ..engine.config import MOST_STEPS
from ..engine.trainer import Trainer
from ..tasks.classification.config import ClassificationConfig
from ..tasks.classification.task import Classification
from ..utils.validation import Range, check_value, require
from .timing import Quartiles, interleave, quartiles


@dataclass
class LoopTimes:
    """Seconds of a training step, and of the steps that it is compared with.

    Attributes:
        training: A training step with real data.
        data_only: The same with a model that does nothing: reading, augmenting and moving data, and the loop.
        loop_on_tensors: A training step on one batch, repeated.
        bare_on_tensors: Forward, backward and update on the same batch, without the loop.
    """

    training: Quartiles
    data_only: Quartiles
    loop_on_tensors: Quartiles
    bare_on_tensors: Quartiles

    def summary(self) -> dict[str, Any]:
        """Return all times and the two ratios of interest."""
        return {
            **{name: list(times) for name, times in asdict(self).items()},
            "times_faster_without_model": self.training.median / self.data_only.median,
            "overhead_percent": 100 * (self.loop_on_tensors.median / self.bare_on_tensors.median - 1),
            "threads": torch.get_num_threads(),
        }


class ConstantModel(nn.Module):
    """A model that does no work: the same logits for every image."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(num_classes))

    def forward(self, images: Tensor) -> Tensor:
        """Map (batch, channels, height, width) to (batch, classes)."""
        return self.logits.expand(len(images), -1)


class WithoutModel(Classification):
    """Classification with a model that does nothing."""

    def build_model(self) -> nn.Module:
        """See Task.build_model."""
        return ConstantModel(self.num_classes)


def measure_loop(config: ClassificationConfig, steps: int = 30) -> LoopTimes:
    """Measure the training loop with the data and the model of a recipe.

    Args:
        config: The recipe.
        steps: Steps of each kind.
    """
    require(steps > 1, f"steps is {steps}: it should be at least 2, for quartiles")
    check_value("steps", steps, int, Range(2, MOST_STEPS))
    with TemporaryDirectory() as folder:
        config = replace(config, run=replace(config.run, output=str(Path(folder) / "run"), resume="never"))
        console, numbers = Console(stderr=True), count()
        on_tensors = Trainer(Classification(config), config)
        batch = send_to_device(next(on_tensors.data.batches(0, 0)), on_tensors.accelerator.device)
        times = interleave(
            {
                "loop_on_tensors": lambda: on_tensors.train_step(next(numbers), repeat(batch)),
                "bare_on_tensors": bare_step(config, batch),
            },
            rounds=steps,
            console=console,
        )
        # Timed separately, because workers that prefetch would disturb the others.
        real, idle = Trainer(Classification(config), config), Trainer(WithoutModel(config), config)
        real_batches, idle_batches = endless(real), endless(idle)
        times |= interleave(
            {
                "training": lambda: real.train_step(next(numbers), real_batches),
                "data_only": lambda: idle.train_step(next(numbers), idle_batches),
            },
            rounds=steps,
            console=console,
        )
        return LoopTimes(**{name: quartiles(seconds) for name, seconds in times.items()})


def endless(trainer: Trainer) -> Iterator[Any]:
    """Yield the batches of one epoch after the other."""
    for epoch in count():
        yield from trainer.data.batches(epoch, 0)


def bare_step(config: ClassificationConfig, batch: Any) -> Any:
    """Return a training step without the loop."""
    trainer = Trainer(Classification(config), config)
    model, optimizer = trainer.unwrapped_model.train(), trainer.optimizer.optimizer
    images, labels, _ = batch

    def step() -> None:
        optimizer.zero_grad()
        for _ in range(config.run.grad_accum_steps):
            with trainer.accelerator.autocast():
                loss = F.cross_entropy(model(images), labels, label_smoothing=config.augment.label_smoothing)
            loss.backward()
        if config.optimizer.clip_grad is not None:
            nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_grad)
        optimizer.step()

    return step
