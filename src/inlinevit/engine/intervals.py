"""After which steps a run evaluates and saves."""

from dataclasses import dataclass

from .checkpoints import Progress
from .config import TrainConfig


@dataclass(frozen=True)
class Intervals:
    """The steps after which something is due, the same in all processes.

    Attributes:
        config: The run's configuration.
        steps_per_epoch: Steps of an epoch.
        total_steps: Steps of the whole run.
    """

    config: TrainConfig
    steps_per_epoch: int
    total_steps: int

    def evaluation_is_due(self, progress: Progress) -> bool:
        """Whether to evaluate now: every so many epochs or steps, and at the end, unless that was done."""
        every, by_steps = self.config.run.eval_every, self.config.schedule.steps is not None
        interval = every if every and by_steps else (every or 1) * self.steps_per_epoch
        step = progress.step
        return progress.evaluated_step != step and (step == self.total_steps or step % interval == 0)

    def checkpoint_is_due(self, step: int) -> bool:
        """Whether to save after a step, whatever the time: as configured, after an epoch if those count, at the end."""
        every = self.config.run.checkpoint_steps
        by_steps = every is not None and step % every == 0
        by_epochs = self.config.schedule.steps is None and step % self.steps_per_epoch == 0
        return by_steps or by_epochs or step == self.total_steps
