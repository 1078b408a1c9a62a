"""`inlinevit [TASK] train`: train a model."""

from collections.abc import Sequence
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from ..tasks import TASKS, TaskEntry
from .parsing import add_import, add_options, add_recipe, new_parser, to_config


def make_parser(entry: TaskEntry) -> ArgumentParser:
    """Return the parser: a recipe, and the fields of the task's configuration."""
    description = f"Train a model for {entry.description}. Options override the recipe."
    parser = new_parser(entry.command_line("train"), description, "[--config RECIPE] [options]")
    add_import(parser)
    add_recipe(parser, entry.name, entry.recipe)
    add_options(parser, entry.load_config())
    return parser


def parse_config(arguments: Sequence[str], task: str = "classification") -> Any:
    """Return the configuration that `train` of a task would use for these arguments."""
    parser = make_parser(TASKS[task])
    return to_config(parser.instantiate(parser.parse_args(list(arguments))), TASKS[task].load_config())


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
