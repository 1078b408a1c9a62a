"""Logs of a run: progress bar and lines on the terminal, train.log, metrics.jsonl, accelerate's trackers."""

import json
import time
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..utils.atomic import atomic_write_bytes, disk_full_errors, finite
from ..utils.console import new_console
from .checkpoints import Progress as RunProgress
from .config import TrainConfig, flattened, to_plain
from .monitor import StepValues

# In metrics.jsonl, metrics of an evaluation have this prefix.
EVALUATION_PREFIX = "eval_"


class RunLogger:
    """Writes and shows the progress of a run; only the main process does.

    The progress has the sum of losses since the last line, so that checkpoints contain it.
    """

    def __init__(self, config: TrainConfig, accelerator: Accelerator, progress: RunProgress, total_steps: int) -> None:
        self.config, self.accelerator, self.progress, self.total_steps = config, accelerator, progress, total_steps
        self.first_step, self.steps_per_epoch = progress.step, progress.steps_per_epoch
        self.file = Path(config.run.output) / "metrics.jsonl"
        self.text_file = Path(config.run.output) / "train.log"
        self.console = new_console(stderr=True, quiet=not accelerator.is_main_process)
        self.bar = Progress(
            TextColumn("epoch {task.fields[epoch]}" if config.schedule.steps is None else "step"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.3f}  {task.fields[rate]:.0f} images/s"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not accelerator.is_main_process,
        )
        self.task = self.bar.add_task(
            "", total=total_steps, completed=self.first_step, epoch=0, loss=float("nan"), rate=0.0
        )
        self.started = time.monotonic()
        # Steps that this process has done since the last line, and their duration.
        self.steps, self.seconds = 0, 0.0
        self.latest: dict[str, float] = {}

    def __enter__(self) -> "RunLogger":
        if self.accelerator.is_main_process:
            self._drop_repeated_lines()
        if self.config.run.trackers:
            settings = flattened(to_plain(self.config))
            simple = {name: value for name, value in settings.items() if isinstance(value, int | float | str)}
            self.accelerator.init_trackers("inlinevit", config=simple)
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()
        for tracker in self.accelerator.trackers:
            tracker.finish()

    def _drop_repeated_lines(self) -> None:
        """Drop the lines of steps after the checkpoint that the run resumes from: they are trained again."""
        if self.file.exists():
            lines = [line for line in self.file.read_text().splitlines() if not self._is_repeated(line)]
            atomic_write_bytes(self.file, "".join(f"{line}\n" for line in lines).encode())

    def _is_repeated(self, line: str) -> bool:
        try:
            content = json.loads(line)
            step = content["step"]
        except (ValueError, KeyError, TypeError):
            # The line is incomplete.
            return True
        if step != self.first_step:
            return bool(step > self.first_step)
        is_evaluation = any(name.startswith(EVALUATION_PREFIX) for name in content)
        return is_evaluation and self.progress.evaluated_step != step

    def advance(self, step: int) -> None:
        """Move the progress bar to a step; its loss may not be known yet."""
        self.bar.update(self.task, completed=step, epoch=(step - 1) // self.steps_per_epoch + 1)

    def step(self, values: StepValues) -> None:
        """Add the numbers of a step, and write a line where one is due."""
        step, loss = values.step, values.loss
        self.progress.loss_sum += loss
        self.progress.loss_count += 1
        self.steps += 1
        self.seconds += values.seconds
        rate = self.progress.total_batch * self.steps / self.seconds
        self.bar.update(self.task, loss=loss, rate=rate)
        if step % self.config.run.log_every == 0 or step % self.steps_per_epoch == 0 or step == self.total_steps:
            mean_loss = self.progress.loss_sum / self.progress.loss_count
            self.latest = {"loss": mean_loss, "lr": values.lr, "images_per_second": rate}
            self.progress.loss_sum, self.progress.loss_count = 0.0, 0
            self.steps, self.seconds = 0, 0.0
            self.write(step, self.latest)

    def evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """Write the metrics of an evaluation."""
        self.write(step, {f"{EVALUATION_PREFIX}{name}": value for name, value in metrics.items()})

    def line(self, step: int, metrics: dict[str, float]) -> None:
        """Print one line on how far the run is, and how long it will take."""
        pace = (time.monotonic() - self.started) / max(1, step - self.first_step)
        left = timedelta(seconds=round(pace * (self.total_steps - step)))
        training = " ".join(f"{name} {value:.4g}" for name, value in self.latest.items())
        evaluation = " ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        by_epochs = self.config.schedule.steps is None
        parts = [
            f"epoch {step / self.steps_per_epoch:g} (step {step})"
            if by_epochs
            else f"step {step} of {self.total_steps}",
            f"training: {training}" if training else "",
            f"evaluation: {evaluation}" if evaluation else "",
            f"left {left}",
        ]
        self.print("  ".join(filter(None, parts)))

    def begin(self, lines: Sequence[str]) -> None:
        """Print what the run does, at its beginning, and when it is resumed."""
        now = datetime.now().astimezone().isoformat(" ", "seconds")
        self.print(f"{now}  {f'resumed at step {self.first_step}' if self.first_step else 'started'}", shown=False)
        for line in lines:
            self.print(line)

    def print(self, line: str, *, shown: bool = True) -> None:
        """Append a line to train.log, and print it if it is to be shown."""
        if shown:
            self.console.print(line, highlight=False, soft_wrap=True, markup=False)
        if self.accelerator.is_main_process:
            with disk_full_errors(self.text_file), self.text_file.open("a", encoding="utf-8") as stream:
                stream.write(f"{line}\n")

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Append a line to metrics.jsonl, and pass it to the trackers."""
        if self.accelerator.is_main_process:
            with disk_full_errors(self.file), self.file.open("a") as stream:
                line = {"step": step, "epoch": step / self.steps_per_epoch, **finite(values)}
                stream.write(json.dumps(line) + "\n")
        if self.config.run.trackers:
            self.accelerator.log(values, step=step)
