"""The training loop. It knows no model and no task: a Task says what a loss and an evaluation are."""

import math
import signal
import time
from collections.abc import Iterator
from typing import Any, NoReturn

import safetensors.torch
import torch
from accelerate.utils import broadcast, send_to_device
from torch import nn

from ..data.batch_plan import BatchPlan
from ..utils.atomic import atomic_write_bytes, atomic_write_json, finite
from ..utils.seeding import derive_seed, set_seed
from ..utils.validation import require
from .checkpoints import Progress, read_progress
from .config import TrainConfig
from .logger import RunLogger
from .nan_dump import write_nan_dump
from .run_folder import RunFolder
from .setup import (
    convert_batch_norms,
    enable_grad_checkpointing,
    make_accelerator,
    make_ema,
    make_optimizer,
    make_scheduler,
    shard_model,
)
from .signals import StopRequest
from .state import get_weights, own_weights
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
        set_seed(derive_seed(run.seed))
        model: Any = task.build_model()
        self.accelerator = make_accelerator(run)
        self.folder = RunFolder(config, self.accelerator)
        self.output = self.folder.path
        if run.sync_batch_norm:
            model = convert_batch_norms(model, self.accelerator)
        if run.grad_checkpointing:
            enable_grad_checkpointing(model)
        self.progress, self.plan = self.plan_batches()
        self.accelerator.gradient_accumulation_steps = self.plan.grad_accum_steps
        self.total_batch = self.plan.total_batch
        self.data = task.train_loader(self.plan)
        self.steps_per_epoch = len(self.data) // self.plan.grad_accum_steps
        require(
            self.steps_per_epoch > 0,
            f"the training data do not fill one step of {self.total_batch} samples: choose a smaller --data.batch_size "
            "or --run.grad_accum_steps",
        )
        if run.fsdp:
            model = shard_model(model, self.accelerator)
        optimizer = make_optimizer(model, config.optimizer, self.total_batch)
        self.scheduler, self.total_steps = make_scheduler(
            optimizer, config.schedule, config.optimizer, self.total_batch, self.steps_per_epoch
        )
        if run.compile:
            model.compile()
        # A sharded model synchronizes its gradients by itself.
        self.model = self.accelerator.prepare_model(model, evaluation_mode=run.fsdp)
        self.optimizer = self.accelerator.prepare_optimizer(optimizer)
        self.average = make_ema(self.unwrapped_model, run, self.total_batch)
        self.check_progress()
        self.stop = StopRequest()

    def plan_batches(self) -> tuple[Progress, BatchPlan]:
        """How far the run has come, and how samples are dealt out from here on."""
        task, path = self.task, self.folder.resume_path
        plan = BatchPlan.first(
            task.batch_size,
            process=self.accelerator.process_index,
            processes=self.accelerator.num_processes,
            grad_accum_steps=self.config.run.grad_accum_steps,
            workers=task.workers,
        )
        self.configured_batch = plan.total_batch
        if path is not None:
            progress = read_progress(path)
            return progress, plan.resumed(progress, task.batch_multiple)
        progress = Progress(
            total_batch=plan.total_batch,
            processes=plan.processes,
            batch_size=plan.batch_size,
            workers=plan.workers,
        )
        return progress, plan

    def check_progress(self) -> None:
        """Refuse a checkpoint that is not of this training."""
        path, before, now = self.folder.resume_path, self.progress.steps_per_epoch, self.steps_per_epoch
        if path is None:
            self.progress.steps_per_epoch = now
            return
        require(
            before == now,
            f"{path} has {before} steps in an epoch and this run {now}: use the training data it was written with",
        )
        require(
            self.progress.step <= self.total_steps,
            f"{path} is at step {self.progress.step}, and this run has {self.total_steps}: make the schedule longer",
        )

    @property
    def unwrapped_model(self) -> nn.Module:
        """The model without what distributed training wraps around it."""
        return self.accelerator.unwrap_model(self.model)

    @property
    def trained(self) -> tuple[nn.Module, nn.Module | None, Any]:
        """What training changes: the model, the one with averaged weights, if there is one, and the optimizer."""
        return self.model, None if self.average is None else self.average.module, self.optimizer

    def run(self) -> dict[str, float]:
        """Train to the end, from the beginning or from where a checkpoint left off; returns the last metrics."""
        with self.folder.claimed():
            self.folder.begin(self.progress, self.task.metadata(), *self.trained, self.configured_batch)
            return self.train()

    def train(self) -> dict[str, float]:
        """Train to the end; returns the last metrics."""
        self.saved_at = time.monotonic()
        batches: Iterator[Any] = iter(())
        with RunLogger(self.config, self.accelerator, self.progress, self.total_steps) as log, self.stop:
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
                loss, stop, save = self.agree(loss, self.stop.signal_number is not None, self.checkpoint_is_due())
                log.step(step + 1, loss, self.learning_rate, time.monotonic() - started)
                if stop or save or evaluate:
                    self.save()
                if stop and not is_last:
                    raise Stopped(
                        f"stopped after step {step + 1} of {self.total_steps}: --run.resume auto (the default) "
                        f"resumes from the checkpoint in {self.output}",
                        self.stop.signal_number or signal.SIGTERM,
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
        set_seed(derive_seed(self.config.run.seed, step, self.accelerator.process_index))
        self.scheduler.step_update(step)
        self.model.train()
        total = 0.0
        for _ in range(self.plan.grad_accum_steps):
            batch = send_to_device(next(batches), self.accelerator.device, non_blocking=True)
            with self.accelerator.accumulate(self.model):
                loss = self.task.loss(self.model, batch)
                value = loss.item()
                if not math.isfinite(value):
                    self.abort_non_finite(step + 1, f"the loss is {value}", batch)
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients and self.config.optimizer.clip_grad is not None:
                    norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.config.optimizer.clip_grad)
                    # With float16, gradients may overflow now and then: the scaler sees to it.
                    if self.accelerator.scaler is None and not math.isfinite(norm):
                        self.abort_non_finite(
                            step + 1, f"the norm of the gradients is {float(norm)} (loss {value:.4g})", batch
                        )
                self.optimizer.step()
                self.optimizer.zero_grad()
            total += value
        if self.average is not None:
            self.average.update(self.unwrapped_model, step=step)
        return total / self.plan.grad_accum_steps

    def evaluate(self, log: RunLogger) -> None:
        """Evaluate the averaged weights, if there are any, or the weights themselves; the checkpoint is written."""
        # The bare model: DistributedDataParallel waits for processes that may have fewer batches.
        model = self.unwrapped_model if self.average is None else self.average.module
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
        self.folder.note_evaluation(self.progress)

    def evaluation_is_due(self) -> bool:
        """Whether an evaluation is due after this step: every so many epochs or steps, and at the end."""
        every, by_steps = self.config.run.eval_every, self.config.schedule.steps is not None
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

    def save(self) -> None:
        """Write a checkpoint."""
        self.folder.save(self.progress, *self.trained)
        self.saved_at = time.monotonic()

    def finish(self) -> None:
        """Leave the weights of the last step, averaged if they are, and what the last evaluation gave."""
        weights = get_weights(self.model if self.average is None else self.average.module)
        if self.accelerator.is_main_process:
            atomic_write_bytes(self.output / "model.safetensors", safetensors.torch.save(weights))
            done = self.progress
            results = {
                "step": done.step,
                "metrics": finite(done.metrics),
                "best": done.best,
                "best_step": done.best_step,
            }
            atomic_write_json(self.output / "results.json", results)

    def abort_non_finite(self, step: int, what: str, batch: Any) -> NoReturn:
        """Stop in a step where numbers are no numbers, and leave behind what is needed to look at it."""
        lr = self.learning_rate
        folder = self.output / f"diverged-step-{step}-process-{self.accelerator.process_index}"
        state = write_nan_dump(folder, {"what": what, "step": step, "lr": lr}, own_weights(self.unwrapped_model), batch)
        raise Diverged(
            f"{what} in step {step} (learning rate {lr:.3g}, {state}): weights and batch are in {folder}; try a lower "
            "learning rate, a longer warm-up or gradient clipping"
        )
