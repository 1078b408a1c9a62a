"""`inlinevit [TASK] train`: train a model."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from ..tasks import TASKS, TaskEntry
from .commands import Command
from .parsing import parse_as, to_config, train_parser


def make_parser(entry: TaskEntry) -> ArgumentParser:
    """Return the parser: a recipe, and the fields of the task's configuration."""
    description = f"Train a model for {entry.description}."
    return train_parser(entry.command_line("train"), description, entry.name, entry.load_config(), entry.recipe)


def parse_config(arguments: Sequence[str], task: str = "classification") -> Any:
    """Return the configuration that `train` of a task would use for these arguments."""
    return parse_as(TASKS[task].load_config(), make_parser(TASKS[task]), arguments)


def run(entry: TaskEntry, settings: Namespace) -> None:
    """Train to the end and print the metrics."""
    from ..engine.trainer import Trainer

    config: Any = to_config(settings, entry.load_config())
    trainer = Trainer(entry.load_task()(config), config)
    metrics = trainer.run()
    if trainer.accelerator.is_main_process:
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        print(f"done: {numbers}; weights and results are in {config.run.output}")
    trainer.accelerator.end_training()


def make_command(entry: TaskEntry) -> Command:
    """Return the command of a task."""
    return Command(partial(make_parser, entry), partial(run, entry))
