"""What all training commands do with a task."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..engine.config import TrainConfig
    from ..engine.task import Task


def run_training(task: "Task", config: "TrainConfig") -> None:
    """Train to the end and print the metrics."""
    from ..engine.trainer import Trainer

    trainer = Trainer(task, config)
    metrics = trainer.run()
    if trainer.accelerator.is_main_process:
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        print(f"done: {numbers}; weights and results are in {config.run.output}")
    trainer.accelerator.end_training()
