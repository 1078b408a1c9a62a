"""The cost of the training loop: whether data loading is the bottleneck, and what the loop adds to a bare step."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count, repeat
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
import torch.nn.functional as F
from accelerate.utils import send_to_device
from torch import Tensor, nn

from ..engine.config import MOST_STEPS
from ..engine.trainer import Trainer
from ..tasks.classification.config import ClassificationConfig
from ..tasks.classification.task import Classification
from ..utils.console import new_console
from ..utils.validation import Range, check_value
from .timing import Quartiles, interleave, quartiles


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


def measure_loop(config: ClassificationConfig, steps: int = 30) -> dict[str, Any]:
    """Measure the training loop with the data and the model of a recipe.

    Args:
        config: The recipe.
        steps: Steps of each kind.

    Returns:
        Quartiles of the seconds of a training step with real data ("training"), the same with a model that does
        nothing ("data_only"), a training step on one batch, repeated ("loop_on_tensors"), and forward, backward and
        update on the same batch without the loop ("bare_on_tensors"); and the ratios of summarize().
    """
    # Quartiles need two.
    check_value("steps", steps, int, Range(2, MOST_STEPS))
    with TemporaryDirectory() as folder:
        config = replace(config, run=replace(config.run, output=str(Path(folder) / "run"), resume="never"))
        console, numbers = new_console(stderr=True), count()
        on_tensors = Trainer(Classification(config), config)
        batch = first_batch(on_tensors)
        steps_on_tensors = {
            "loop_on_tensors": lambda: on_tensors.train_step(next(numbers), repeat(batch)),
            "bare_on_tensors": bare_step(Trainer(Classification(config), config), batch),
        }
        times = interleave(steps_on_tensors, rounds=steps, console=console)
        # Timed separately, because workers that prefetch would disturb the others.
        real, idle = Trainer(Classification(config), config), Trainer(WithoutModel(config), config)
        real_batches, idle_batches = endless(real), endless(idle)
        steps_on_data = {
            "training": lambda: real.train_step(next(numbers), real_batches),
            "data_only": lambda: idle.train_step(next(numbers), idle_batches),
        }
        times |= interleave(steps_on_data, rounds=steps, console=console)
    return summarize({name: quartiles(seconds) for name, seconds in times.items()})


def summarize(times: dict[str, Quartiles]) -> dict[str, Any]:
    """Return the times with the two ratios of interest."""
    return {
        **times,
        "times_faster_without_model": times["training"].median / times["data_only"].median,
        "overhead_percent": 100 * (times["loop_on_tensors"].median / times["bare_on_tensors"].median - 1),
        "threads": torch.get_num_threads(),
    }


def first_batch(trainer: Trainer) -> tuple[Tensor, Tensor, list[str]]:
    """Return the first training batch: images, labels, and what was unreadable."""
    return send_to_device(next(trainer.data.batches(0, 0)), trainer.accelerator.device)


def endless(trainer: Trainer) -> Iterator[Any]:
    """Yield the batches of one epoch after the other."""
    for epoch in count():
        yield from trainer.data.batches(epoch, 0)


def bare_step(trainer: Trainer, batch: tuple[Tensor, Tensor, list[str]]) -> Callable[[], None]:
    """Return a training step of a trainer's model on one batch, without the loop."""
    config = cast(ClassificationConfig, trainer.config)
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
