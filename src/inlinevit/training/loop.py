"""The training loop. It knows no model and no task: a Task says what a loss and an evaluation are."""

import math
import multiprocessing
import os
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
from .batching import BatchPlan
from .checkpoints import MANIFEST, CheckpointFolder, Progress, damage, read_progress, set_aside
from .config import TrainConfig, check_unchanged, read_plain, require, to_plain
from .files import finite, make_folder, replace_bytes, replace_json, space_for
from .lock import RUN_LOCK, RunLock
from .log import RunLog
from .processes import all_or_none, on_main
from .runs import check_free_folder, check_run_folder
from .seeding import seed_of, set_seed
from .setup import (
    checkpoint_gradients,
    make_accelerator,
    make_average,
    make_optimizer,
    make_scheduler,
    shard_model,
    synchronize_norms,
)
from .state import get_weights, is_sharded, own_weights, pack, restore, save_shards, unsharded
from .task import Task

# A launcher may pass on a signal that the whole process group gets: within so many seconds, it counts once.
REPEATED_SIGNAL = 0.2


def end_at_once() -> None:
    """End this process and its data workers as SIGTERM does by default."""
    for worker in multiprocessing.active_children():
        worker.kill()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)


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
        self.checkpoints = CheckpointFolder(self.output / "checkpoints", run.keep)
        self.lock: RunLock | None = None
        set_seed(seed_of(run.seed))
        model: Any = task.build_model()
        self.accelerator = make_accelerator(run)
        # What is wrong with the folder shows before data are opened and models are copied.
        self.resume_path = on_main(self.accelerator, self.find_checkpoint)
        if run.sync_batch_norm:
            model = synchronize_norms(model, self.accelerator)
        if run.checkpoint_gradients:
            checkpoint_gradients(model)
        self.progress, self.plan = self.plan_batches()
        self.accelerator.gradient_accumulation_steps = self.plan.grad_accum_steps
        self.data = task.training_data(self.plan)
        self.steps_per_epoch = len(self.data) // self.plan.grad_accum_steps
        require(
            self.steps_per_epoch > 0,
            f"the training data do not fill one step of {self.total_batch} samples: choose a smaller --data.batch_size "
            "or --run.accumulate",
        )
        if run.fsdp:
            model = shard_model(model, self.accelerator)
        optimizer = make_optimizer(model, config.optimizer, self.total_batch)
        self.scheduler, self.total_steps = make_scheduler(
            optimizer, config.schedule, config.optimizer, self.total_batch, self.steps_per_epoch
        )
        if run.compile:
            model.compile()
        # A sharded model synchronizes its own gradients.
        self.model = self.accelerator.prepare_model(model, evaluation_mode=run.fsdp)
        self.optimizer = self.accelerator.prepare_optimizer(optimizer)
        self.average = make_average(self.bare_model, run, self.total_batch)
        self.check_progress()
        self.stop_signal: int | None = None
        self.stop_time = 0.0

    @property
    def total_batch(self) -> int:
        """Samples of a step."""
        return self.plan.total_batch

    def find_checkpoint(self) -> Path | None:
        """The checkpoint to resume from, if there is one; nothing is changed.

        Raises:
            ValueError: The run's folder is in use or not that of a run, or what is in it cannot be resumed.
        """
        if not self.output.is_dir():
            return self.choose_checkpoint()
        with RunLock(self.output):
            return self.choose_checkpoint()

    def choose_checkpoint(self) -> Path | None:
        """The checkpoint that the settings name, or the newest good one."""
        choice = self.config.run.resume
        if choice == "never":
            check_run_folder(self.output)
            return None
        if choice != "auto":
            path = Path(choice)
            require((path / MANIFEST).is_file(), f"{choice} is not a checkpoint: name a step-… folder")
            problem = damage(path)
            require(problem is None, f"checkpoint {choice} is damaged: {problem}")
            return path
        newest = self.checkpoints.newest_good()
        if newest is None:
            check_free_folder(self.output)
        return newest

    def plan_batches(self) -> tuple[Progress, BatchPlan]:
        """How far the run has come, and how samples are dealt out from here on."""
        task, processes = self.task, self.accelerator.num_processes
        plan = BatchPlan.first(
            task.batch_size,
            process=self.accelerator.process_index,
            processes=processes,
            grad_accum_steps=self.config.run.accumulate,
            workers=task.workers,
        )
        if self.resume_path is None:
            started = {"processes": processes, "batch_size": task.batch_size, "workers": task.workers}
            return Progress(total_batch=plan.total_batch, **started), plan
        progress = read_progress(self.resume_path)
        drawn = {name: vars(progress)[name] for name in ("total_batch", "processes", "batch_size", "workers")}
        resumed = plan.resumed(multiple=task.batch_multiple, **drawn)
        if (resumed.batch_size, resumed.grad_accum_steps) != (plan.batch_size, plan.grad_accum_steps):
            warnings.warn(
                f"{self.resume_path} has {resumed.total_batch} samples in a step: on {processes} processes, that is "
                f"{resumed.grad_accum_steps} batches of {resumed.batch_size} each",
                stacklevel=2,
            )
        return progress, resumed

    def check_progress(self) -> None:
        """Refuse a checkpoint that is not of this training."""
        if self.resume_path is None:
            self.progress.steps_per_epoch = self.steps_per_epoch
            return
        before, now = self.progress.steps_per_epoch, self.steps_per_epoch
        require(
            before == now,
            f"{self.resume_path} has {before} steps in an epoch and this run {now}: use the training data it was "
            "written with",
        )
        require(
            self.progress.step <= self.total_steps,
            f"{self.resume_path} is at step {self.progress.step}, and this run has {self.total_steps}: make the "
            "schedule longer",
        )

    @property
    def bare_model(self) -> nn.Module:
        """The model without what distributed training wraps around it."""
        return self.accelerator.unwrap_model(self.model)

    def run(self) -> dict[str, float]:
        """Train to the end, from the beginning or from where a checkpoint left off; returns the last metrics."""
        with self.exclusively():
            self.begin()
            return self.train()

    def train(self) -> dict[str, float]:
        """Train to the end; returns the last metrics."""
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
                    batches = self.data.batches(epoch, index * self.plan.grad_accum_steps)
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
                        f"resumes from the checkpoint in {self.output}",
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
        for _ in range(self.plan.grad_accum_steps):
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
        return total / self.plan.grad_accum_steps

    def evaluate(self, log: RunLog) -> None:
        """Evaluate the averaged weights, if there are any, or the weights themselves; the checkpoint is written."""
        # The bare model: DistributedDataParallel waits for processes that may have fewer batches.
        model = self.bare_model if self.average is None else self.average.module
        model.eval()
        # Each process has gathered statistics of its own, such as those of batch norms.
        broadcast(list(model.buffers()))
        with torch.no_grad(), unsharded(model):
            metrics = self.task.evaluate(model, self.accelerator)
        step, value, best = self.progress.step, metrics[self.task.metric], self.progress.best
        self.progress.evaluated_step, self.progress.metrics = step, metrics
        improves = best is None or (value > best if self.task.greater_is_better else value < best)
        if improves and not math.isnan(value):
            self.progress.best, self.progress.best_step = value, step
        log.evaluation(step, metrics)
        log.line(step, metrics)
        on_main(self.accelerator, lambda: self.checkpoints.note_evaluation(self.progress))

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

    @contextmanager
    def exclusively(self) -> Iterator[None]:
        """A context in which no other run writes into the folder of this one."""
        on_main(self.accelerator, self.claim_folder)
        try:
            yield
        finally:
            if self.lock is not None:
                self.lock.release()

    def claim_folder(self) -> None:
        """Take the folder of the results, and rename what was in it if the run is to start over."""
        make_folder(self.output)
        lock = RunLock(self.output)
        lock.acquire()
        if self.resume_path is None and self.config.run.resume == "auto" and self.checkpoints.paths():
            # Another run has been here since this one was set up.
            lock.release()
            raise ValueError(f"{self.output} has changed since this run was set up: start it again")
        if self.config.run.resume == "never" and set(os.listdir(self.output)) > {RUN_LOCK}:
            # Nobody can have taken the lock in between: it is renamed with the folder.
            former = set_aside(self.output)
            warnings.warn(f"{self.output} held a run: it is now {former}", stacklevel=2)
            make_folder(self.output)
            again = RunLock(self.output)
            again.acquire()
            lock.release(former)
            lock = again
        self.lock = lock

    def begin(self) -> None:
        """Restore the checkpoint to resume from, if there is one, and write down what is run."""
        config, path = to_plain(self.config), self.resume_path
        if path is not None:
            all_or_none(self.accelerator, lambda: self.resume(path))
        if self.accelerator.is_main_process:
            self.checkpoints.resume_from(self.progress)
            replace_bytes(self.output / "config.yaml", yaml.safe_dump(config, sort_keys=False).encode())
            for name, content in self.task.notes().items():
                replace_json(self.output / f"{name}.json", content)

    def resume(self, path: Path) -> None:
        """Resume from a checkpoint."""
        require(path.is_dir(), f"{self.output} is not the same on all machines: name a folder that they share")
        if self.config.run.resume == "auto":
            configured = self.task.batch_size * self.accelerator.num_processes * self.config.run.accumulate
            is_same_batch = configured == self.progress.total_batch
            check_unchanged(read_plain(self.output / "config.yaml"), to_plain(self.config), is_same_batch)
        average = None if self.average is None else self.average.module
        restore(path, self.model, average, self.optimizer, self.accelerator)

    def save(self) -> None:
        """Write a checkpoint."""
        average = None if self.average is None else self.average.module
        if is_sharded(self.model):
            aside = on_main(self.accelerator, lambda: self.checkpoints.prepare(self.progress.step))
            with space_for(aside):
                parts = all_or_none(
                    self.accelerator, lambda: save_shards(aside, self.model, self.optimizer, self.accelerator)
                )
            written = {name: entry for entries, _ in parts for name, entry in entries.items()}
            on_main(self.accelerator, lambda: self.checkpoints.commit(self.progress, parts[0][1], written))
        else:
            on_main(
                self.accelerator,
                lambda: self.checkpoints.save(
                    self.progress, pack(self.model, average, self.optimizer, self.accelerator)
                ),
            )
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
            if number == signal.SIGTERM == self.stop_signal and time.monotonic() - self.stop_time > REPEATED_SIGNAL:
                end_at_once()
            if self.stop_signal is None:
                self.stop_time = time.monotonic()
            self.stop_signal = number

        before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
