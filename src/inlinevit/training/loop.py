"""The training loop. It knows no model and no task: a Task says what a loss and an evaluation are."""

import math
import signal
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import safetensors.torch
import torch
import yaml
from accelerate.utils import broadcast, send_to_device
from torch import nn

from .autopsy import write_autopsy
from .checkpoints import CheckpointFolder, Progress, damage, read_progress, read_state, read_weights, set_aside
from .config import TrainConfig, check_unchanged, read_plain, require, to_plain
from .files import finite, make_folder, replace_bytes, replace_json
from .log import RunLog
from .seeding import seed_of, set_seed
from .setup import (
    checkpoint_gradients,
    make_accelerator,
    make_average,
    make_optimizer,
    make_scheduler,
    synchronize_norms,
)
from .state import get_state, get_weights, own_weights, set_state, set_weights
from .task import Task


class RunEnded(Exception):
    """A run ended before its time; the message says what to do."""


class Stopped(RunEnded):
    """The run was asked to stop, and has left a checkpoint.

    Args:
        message: What happened.
        signal_number: Which signal asked.
    """

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.signal_number = signal_number


class Diverged(RunEnded):
    """The loss is no number any more."""


class Trainer:
    """Trains the model of a task.

    Args:
        task: The job.
        config: How to train.
    """

    def __init__(self, task: Task, config: TrainConfig) -> None:
        self.task, self.config = task, config
        run = config.run
        self.output = Path(run.output)
        set_seed(seed_of(run.seed))
        model: Any = task.build_model()
        self.accelerator = make_accelerator(run, model)
        if run.sync_batch_norm:
            model = synchronize_norms(model, self.accelerator)
        if run.checkpoint_gradients:
            checkpoint_gradients(model)
        self.data = task.training_data(self.accelerator.process_index, self.accelerator.num_processes)
        self.steps_per_epoch = len(self.data) // run.accumulate
        self.total_batch = self.data.batch_size * self.accelerator.num_processes * run.accumulate
        require(
            self.steps_per_epoch > 0,
            f"the training data do not fill one step of {self.total_batch} samples: choose a smaller --data.batch_size "
            "or --run.accumulate",
        )
        optimizer = make_optimizer(model, config.optimizer, self.total_batch)
        self.scheduler, self.total_steps = make_scheduler(
            optimizer, config.schedule, config.optimizer, self.total_batch, self.steps_per_epoch
        )
        if run.compile:
            model.compile()
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.average = make_average(self.bare_model, run, self.total_batch)
        self.checkpoints = CheckpointFolder(self.output / "checkpoints", run.keep)
        self.progress = Progress(total_batch=self.total_batch, steps_per_epoch=self.steps_per_epoch)
        self.stop_signal: int | None = None

    @property
    def bare_model(self) -> nn.Module:
        """The model without what distributed training wraps around it."""
        return self.accelerator.unwrap_model(self.model)

    def run(self) -> dict[str, float]:
        """Train to the end, from the beginning or from where a checkpoint left off; returns the last metrics."""
        self.begin()
        self.saved_at = time.monotonic()
        batches: Iterator[Any] = iter(())
        with RunLog(self.config, self.accelerator, self.progress, self.total_steps) as log, self.stoppable():
            first = self.progress.step
            if first > 0 and self.evaluation_is_due():
                # The run ended before or in this evaluation.
                self.evaluate(log)
            for step in range(first, self.total_steps):
                started = time.monotonic()
                epoch, index = divmod(step, self.steps_per_epoch)
                if index == 0 or step == first:
                    batches = self.data.batches(epoch, index * self.config.run.accumulate)
                loss = self.train_step(step, batches)
                self.progress.step = step + 1
                evaluate, is_last = self.evaluation_is_due(), step + 1 == self.total_steps
                loss, stop, save = self.agree(loss, self.stop_signal is not None, self.checkpoint_is_due())
                log.step(step + 1, loss, self.learning_rate, time.monotonic() - started)
                if stop or save or evaluate:
                    self.save()
                if stop and not is_last:
                    raise Stopped(
                        f"stopped after step {step + 1} of {self.total_steps}: --run.resume auto (the default) "
                        f"goes on from the checkpoint in {self.output}",
                        self.stop_signal or signal.SIGTERM,
                    )
                if evaluate:
                    self.evaluate(log)
                elif index + 1 == self.steps_per_epoch:
                    log.line(step + 1, {})
        self.finish()
        return self.progress.metrics

    @property
    def learning_rate(self) -> float:
        """The learning rate of the step at hand: that of the last layers, if it decays from layer to layer."""
        return max(group["lr"] for group in self.optimizer.param_groups)

    def train_step(self, step: int, batches: Iterator[Any]) -> float:
        """One update of the weights, from as many batches as are accumulated; returns their mean loss."""
        # The seed belongs to the step, not to the run: a resumed run draws the same numbers.
        set_seed(seed_of(self.config.run.seed, step, self.accelerator.process_index))
        self.scheduler.step_update(step)
        self.model.train()
        total = 0.0
        for _ in range(self.config.run.accumulate):
            batch = send_to_device(next(batches), self.accelerator.device, non_blocking=True)
            with self.accelerator.accumulate(self.model):
                loss = self.task.loss(self.model, batch)
                value = loss.item()
                if not math.isfinite(value):
                    self.give_up(step + 1, f"the loss is {value}", batch)
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients and self.config.optimizer.clip_grad is not None:
                    norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.config.optimizer.clip_grad)
                    # With float16, gradients may overflow now and then: the scaler sees to it.
                    if self.accelerator.scaler is None and not math.isfinite(norm):
                        self.give_up(step + 1, f"the norm of the gradients is {float(norm)} (loss {value:.4g})", batch)
                self.optimizer.step()
                self.optimizer.zero_grad()
            total += value
        if self.average is not None:
            self.average.update(self.bare_model, step=step)
        return total / self.config.run.accumulate

    def evaluate(self, log: RunLog) -> None:
        """Evaluate the averaged weights, if there are any, or the weights themselves; the checkpoint is written."""
        # The bare model: DistributedDataParallel waits for processes that may have fewer batches.
        model = self.bare_model if self.average is None else self.average.module
        model.eval()
        # Each process has gathered statistics of its own, such as those of batch norms.
        broadcast(list(model.buffers()))
        with torch.no_grad():
            metrics = self.task.evaluate(model, self.accelerator)
        step, value, best = self.progress.step, metrics[self.task.metric], self.progress.best
        self.progress.evaluated_step, self.progress.metrics = step, metrics
        improves = best is None or (value > best if self.task.greater_is_better else value < best)
        if improves and not math.isnan(value):
            self.progress.best, self.progress.best_step = value, step
        log.evaluation(step, metrics)
        log.line(step, metrics)
        if self.accelerator.is_main_process:
            self.checkpoints.note_evaluation(self.progress)

    def evaluation_is_due(self) -> bool:
        """Whether an evaluation is due after this step: every so many epochs or steps, and at the end."""
        every, by_steps = self.config.run.evaluate_every, self.config.schedule.steps is not None
        interval = every if every and by_steps else (every or 1) * self.steps_per_epoch
        step, is_evaluated = self.progress.step, self.progress.evaluated_step == self.progress.step
        return not is_evaluated and (step == self.total_steps or step % interval == 0)

    def checkpoint_is_due(self) -> bool:
        """Whether a checkpoint is due after this step: at the end of an epoch, if those count, and as configured."""
        run, step = self.config.run, self.progress.step
        by_steps = run.checkpoint_steps is not None and step % run.checkpoint_steps == 0
        by_time = time.monotonic() - self.saved_at > 60 * run.checkpoint_minutes
        by_epochs = self.config.schedule.steps is None and step % self.steps_per_epoch == 0
        return by_steps or by_time or by_epochs or step == self.total_steps

    def agree(self, loss: float, stop: bool, save: bool) -> tuple[float, bool, bool]:
        """The mean loss of all processes; and what any of them wishes, all of them do."""
        if self.accelerator.num_processes == 1:
            return loss, stop, save
        own = torch.tensor([loss, stop, save], dtype=torch.float32, device=self.accelerator.device)
        loss, *wishes = self.accelerator.reduce(own, "mean").tolist()
        return loss, wishes[0] > 0, wishes[1] > 0

    def begin(self) -> None:
        """Take up the checkpoint that the run is to go on from, if there is one, and write down what is run."""
        choice, config = self.config.run.resume, to_plain(self.config)
        if self.accelerator.is_main_process:
            former = set_aside(self.output) if choice == "never" else None
            if former:
                warnings.warn(f"{self.output} held a run: it is now {former}", stacklevel=2)
            make_folder(self.output)
        self.accelerator.wait_for_everyone()
        if choice not in ("auto", "never"):
            require((Path(choice) / "manifest.json").exists(), f"{choice} is no checkpoint: name a step-… folder")
            problem = damage(Path(choice))
            require(problem is None, f"checkpoint {choice} is damaged: {problem}")
            self.resume(Path(choice))
        elif newest := self.checkpoints.newest_good():
            check_unchanged(read_plain(self.output / "config.yaml"), config)
            self.resume(newest)
        steps = self.accelerator.gather(torch.tensor([self.progress.step], device=self.accelerator.device))
        require(bool((steps == steps[0]).all()), f"{self.output} differs between machines: name a folder they share")
        if self.accelerator.is_main_process:
            self.checkpoints.go_on_from(self.progress)
            replace_bytes(self.output / "config.yaml", yaml.safe_dump(config, sort_keys=False).encode())
            for name, content in self.task.notes().items():
                replace_json(self.output / f"{name}.json", content)

    def resume(self, path: Path) -> None:
        """Go on from a checkpoint."""
        new, self.progress = self.progress, read_progress(path)
        for name in ("total_batch", "steps_per_epoch"):
            before, now = vars(self.progress)[name], vars(new)[name]
            require(before == now, f"{path} has {name} {before} and this run {now}: use as many processes and samples")
        set_weights(self.model, read_weights(path, "model"))
        if self.average is not None:
            set_weights(self.average.module, read_weights(path, "ema"))
        set_state(self.model, self.optimizer, self.accelerator, read_state(path))

    def save(self) -> None:
        """Write a checkpoint."""
        weights = {"model": get_weights(self.model)}
        if self.average is not None:
            weights["ema"] = get_weights(self.average.module)
        state = get_state(self.model, self.optimizer, self.accelerator)
        if self.accelerator.is_main_process:
            self.checkpoints.save(self.progress, weights, state)
        self.accelerator.wait_for_everyone()
        self.saved_at = time.monotonic()

    def finish(self) -> None:
        """Leave the weights of the last step, averaged if they are, and what the last evaluation gave."""
        weights = get_weights(self.model if self.average is None else self.average.module)
        if self.accelerator.is_main_process:
            replace_bytes(self.output / "model.safetensors", safetensors.torch.save(weights))
            done = self.progress
            results = {
                "step": done.step,
                "metrics": finite(done.metrics),
                "best": done.best,
                "best_step": done.best_step,
            }
            replace_json(self.output / "results.json", results)

    def give_up(self, step: int, what: str, batch: Any) -> NoReturn:
        """Stop in a step where numbers are no numbers, and leave behind what is needed to look at it."""
        lr = self.learning_rate
        folder = self.output / f"diverged-step-{step}-process-{self.accelerator.process_index}"
        state = write_autopsy(folder, {"what": what, "step": step, "lr": lr}, own_weights(self.bare_model), batch)
        raise Diverged(
            f"{what} in step {step} (learning rate {lr:.3g}, {state}): weights and batch are in {folder}; try a lower "
            "learning rate, a longer warm-up or gradient clipping"
        )

    @contextmanager
    def stoppable(self) -> Iterator[None]:
        """A context in which SIGTERM and Ctrl-C end the run after the step at hand, with a checkpoint."""

        def note(number: int, frame: FrameType | None) -> None:
            if number == signal.SIGINT == self.stop_signal:
                # Ctrl-C for the second time: the user does not want to wait.
                raise KeyboardInterrupt
            self.stop_signal = number

        before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
