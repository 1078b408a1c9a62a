"""The training loop. It knows nothing about models and tasks: a Task defines the loss and the evaluation."""

import math
import signal
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, NoReturn

import torch
from accelerate.utils import broadcast, send_to_device
from torch import Tensor, nn

from ..data.batch_plan import BatchPlan
from ..layers import modules_of_attentions, project_parameters
from ..parallel import parallelize_sequence, whole_images
from ..utils.seeding import derive_seed, set_seed
from ..utils.validation import require
from .checkpoints import Progress, read_manifest
from .config import TrainConfig
from .distributed import run_local_main_first
from .errors import Diverged, Stopped
from .logger import RunLogger
from .monitor import StepMonitor, StepValues
from .nan_dump import write_nan_dump
from .run_folder import RunFolder
from .settings import describe_settings
from .setup import (
    build_model,
    convert_batch_norms,
    enable_grad_checkpointing,
    make_ema,
    make_mesh,
    make_optimizer,
    make_scheduler,
    make_train_accelerator,
    shard_model,
)
from .signals import StopRequest
from .state import all_finite, own_weights, whole_tensor
from .task import Task


class Trainer:
    """Trains the model of a task.

    Args:
        task: Model, data, loss and evaluation.
        config: How to train. It is stored in the run folder, with `run.attention_modules` set to the modules of
            other packages that registered attentions of the model.
    """

    def __init__(self, task: Task, config: TrainConfig) -> None:
        self.task, self.config = task, config
        run = config.run
        self.accelerator = make_train_accelerator(run, config.parallel)
        mesh = make_mesh(self.accelerator, config, task.supports_sequence)
        # Processes that share images take the same samples, and draw the same random numbers.
        self.data_rank = self.accelerator.process_index if mesh is None else mesh.get_local_rank("data")
        model: Any = run_local_main_first(
            self.accelerator, partial(build_model, task.build_model, run, self.accelerator)
        )
        run.attention_modules = modules_of_attentions(model)
        self.folder = RunFolder(config, self.accelerator, task.command, task.metadata())
        if run.sync_batch_norm:
            model = convert_batch_norms(model, self.accelerator)
        model = model if mesh is None else parallelize_sequence(model, mesh["sequence"])
        if run.grad_checkpointing:
            enable_grad_checkpointing(model)
        plan = BatchPlan.initial(
            task.batch_size,
            process=self.data_rank,
            processes=self.accelerator.num_processes // config.parallel.sequence,
            grad_accum_steps=run.grad_accum_steps,
            workers=task.workers,
        )
        self.progress = Progress(
            total_batch=plan.total_batch, processes=plan.processes, batch_size=plan.batch_size, workers=plan.workers
        )
        if self.folder.resume_path is not None:
            self.progress, _ = read_manifest(self.folder.resume_path)
        self.is_same_batch = plan.total_batch == self.progress.total_batch
        self.plan = plan.resumed(self.progress, task.batch_multiple)
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
        optimizer = make_optimizer(model, config.optimizer, self.total_batch, self.accelerator.device)
        self.scheduler, self.total_steps = make_scheduler(
            optimizer, config.schedule, config.optimizer, self.total_batch, self.steps_per_epoch
        )
        if run.compile:
            model.compile()
        # A sharded model synchronizes its gradients by itself.
        self.model = self.accelerator.prepare_model(model, evaluation_mode=run.fsdp)
        self.optimizer = self.accelerator.prepare_optimizer(optimizer)
        self.ema = make_ema(self.unwrapped_model, run, self.total_batch)
        self.progress.start_from(self.folder.resume_path, self.steps_per_epoch, self.total_steps)
        self.stop = StopRequest()
        self.monitor = StepMonitor(self.accelerator)
        # When the last checkpoint was written.
        self.saved_at = time.monotonic()

    @property
    def unwrapped_model(self) -> nn.Module:
        """The model without the wrapper of distributed training."""
        return self.accelerator.unwrap_model(self.model)

    @property
    def state(self) -> tuple[nn.Module, nn.Module | None, Any]:
        """What training changes: the model, its EMA copy if there is one, and the optimizer."""
        return self.model, None if self.ema is None else self.ema.module, self.optimizer

    def run(self) -> dict[str, float]:
        """Train to the end, from the beginning or from a checkpoint; returns the last metrics."""
        with self.folder.locked():
            self.folder.begin(self.progress, *self.state, self.is_same_batch)
            return self.train()

    def train(self) -> dict[str, float]:
        """Train to the end; returns the last metrics."""
        self.saved_at = time.monotonic()
        batches: Iterator[Any] = iter(())
        with RunLogger(self.config, self.accelerator, self.progress, self.total_steps) as log, self.stop:
            log.begin(self.describe())
            first = self.progress.step
            if first > 0 and self.evaluation_is_due():
                # The run ended before or during this evaluation.
                self.evaluate(log)
            for step in range(first, self.total_steps):
                started = time.monotonic()
                epoch, index = divmod(step, self.steps_per_epoch)
                if index == 0 or step == first:
                    batches = self.data.batches(epoch, index * self.plan.grad_accum_steps)
                numbers = self.train_step(step, batches)
                self.progress.step = step + 1
                self.monitor.add(StepValues(step + 1, self.learning_rate, time.monotonic() - started), numbers)
                log.advance(step + 1)
                evaluate = self.evaluation_is_due()
                save = self.checkpoint_is_due()
                stop, save_by_time = self.read_steps(log, wait=evaluate or save)
                if stop or save or save_by_time or evaluate:
                    self.save()
                if stop and step + 1 < self.total_steps:
                    raise Stopped(
                        f"stopped after step {step + 1} of {self.total_steps}: --run.resume auto (the default) "
                        f"resumes from the checkpoint in {self.folder.path}",
                        self.stop.signal_number or signal.SIGTERM,
                    )
                if evaluate:
                    self.evaluate(log)
                elif index + 1 == self.steps_per_epoch:
                    log.line(step + 1, {})
        self.folder.write_results(self.progress, self.model if self.ema is None else self.ema.module)
        return self.progress.metrics

    def describe(self) -> list[str]:
        """Return the model, the data and the settings that have an effect, in a few lines."""
        rates = [group.get("lr_scale", 1.0) for group in self.optimizer.param_groups]
        device = self.accelerator.device.type
        settings = describe_settings(self.config, self.plan, self.steps_per_epoch, self.total_steps, device, rates)
        return [*filter(None, [self.task.describe()]), *settings]

    def evaluation_is_due(self) -> bool:
        """Whether to evaluate now: every so many epochs or steps, and at the end, unless that was done."""
        every, by_steps = self.config.run.eval_every, self.config.schedule.steps is not None
        interval = every if every and by_steps else (every or 1) * self.steps_per_epoch
        step = self.progress.step
        return self.progress.evaluated_step != step and (step == self.total_steps or step % interval == 0)

    def checkpoint_is_due(self) -> bool:
        """Whether to save now, whatever the time: as configured, after an epoch if those count, at the end."""
        every, step = self.config.run.checkpoint_steps, self.progress.step
        by_steps = every is not None and step % every == 0
        by_epochs = self.config.schedule.steps is None and step % self.steps_per_epoch == 0
        return by_steps or by_epochs or step == self.total_steps

    @property
    def learning_rate(self) -> float:
        """The current learning rate, without the factors of parameter groups."""
        return max(float(group["lr"]) / group.get("lr_scale", 1.0) for group in self.optimizer.param_groups)

    def train_step(self, step: int, batches: Iterator[Any]) -> Tensor:
        """Update the weights once, in a step counted from 0. The host does not wait for the device.

        Returns:
            On the device: the loss of each accumulated batch, then the norm of the gradients, (grad_accum_steps + 1,).
            The norm is 0 if gradients are not clipped, and with float16: the scaler skips steps that overflow.
        """
        # The seed belongs to the step, not to the run: a resumed run draws the same numbers.
        set_seed(derive_seed(self.config.run.seed, step, self.data_rank))
        self.scheduler.step_update(step)
        self.model.train()
        losses, numbers = list[Tensor](), torch.empty(0)
        for _ in range(self.plan.grad_accum_steps):
            batch = send_to_device(next(batches), self.accelerator.device, non_blocking=True)
            with self.accelerator.accumulate(self.model):
                loss = self.task.loss(self.model, batch)
                losses.append(loss.detach().float())
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    numbers = torch.stack([*losses, self.clip_gradients(losses[0])])
                    if self.config.run.log_every == 1:
                        # Before the weights change, so that the dump has those that gave this loss.
                        own, mean = numbers.tolist(), self.accelerator.reduce(numbers, "mean").tolist()
                        self.require_finite(StepValues(step + 1, self.learning_rate, 0.0, own, mean))
                self.optimizer.step()
                self.optimizer.zero_grad()
        project_parameters(self.unwrapped_model)
        if self.ema is not None:
            self.ema.update(self.unwrapped_model, step=step)
        return numbers

    def clip_gradients(self, like: Tensor) -> Tensor:
        """Clip the gradients if configured; returns their norm, or 0 without clipping and for float16."""
        if self.config.optimizer.clip_grad is None:
            return torch.zeros_like(like)
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.config.optimizer.clip_grad)
        return torch.zeros_like(like) if self.accelerator.scaler is not None else whole_tensor(norm).to(like)

    def read_steps(self, log: RunLogger, wait: bool) -> tuple[bool, bool]:
        """Log the steps whose losses have arrived from the device; new ones are read every `log_every` steps.

        Args:
            log: Where losses go.
            wait: Whether to read the losses up to this step now.

        Returns:
            Whether to stop, and whether to save because of the time; the same in all processes.
        """
        step, log_every = self.progress.step, self.config.run.log_every
        by_time = time.monotonic() - self.saved_at > 60 * self.config.run.checkpoint_minutes
        steps, (stop, save) = self.monitor.read(
            (self.stop.signal_number is not None, by_time),
            start=step % log_every == 0,
            wait=wait or log_every == 1 or step % self.steps_per_epoch == 0,
        )
        for values in steps:
            self.require_finite(values)
            log.step(values)
        return stop, save

    def evaluate(self, log: RunLogger) -> None:
        """Evaluate the EMA weights if there are any, otherwise the weights; a checkpoint of them exists already."""
        model = (self.unwrapped_model if self.ema is None else self.ema.module).eval()
        # Each process has gathered statistics of its own, such as those of batch norms.
        broadcast(list(model.buffers()))
        with whole_images(model):
            metrics = self.task.compute_metrics(model, self.accelerator)
        step, value, best = self.progress.step, metrics[self.task.metric], self.progress.best
        self.progress.evaluated_step, self.progress.metrics = step, metrics
        improves = best is None or (value > best if self.task.greater_is_better else value < best)
        if improves and math.isfinite(value):
            self.progress.best, self.progress.best_step = value, step
        log.evaluation(step, metrics)
        log.line(step, metrics)
        self.folder.save_evaluation(self.progress)

    def save(self) -> None:
        """Write a checkpoint; the losses up to this step have been read and are finite."""
        if not all_finite(self.model.parameters(), self.accelerator):
            self.abort_non_finite(self.progress.step, "a weight is NaN or infinite", self.plan.grad_accum_steps - 1)
        self.folder.save(self.progress, *self.state)
        self.saved_at = time.monotonic()

    def require_finite(self, values: StepValues) -> None:
        """End the run if the loss or the gradients of a step are NaN or infinite."""
        problem = values.find_non_finite()
        if problem is not None:
            self.abort_non_finite(values.step, *problem)

    def abort_non_finite(self, step: int, what: str, number: int | None) -> NoReturn:
        """End the run because of NaN or infinity, and write what is needed to find the cause.

        Args:
            step: The first step that had them, counted from 1.
            what: What is NaN or infinite.
            number: The batch of this process to write, among those of the step; None = the cause is elsewhere.
        """
        self.scheduler.step_update(step - 1)
        lr = self.learning_rate
        remedy = "try a lower learning rate, a longer warm-up or gradient clipping"
        if number is None:
            raise Diverged(f"{what} in step {step} (learning rate {lr:.3g}): {remedy}")
        epoch, index = divmod(step - 1, self.steps_per_epoch)
        batch = next(self.data.batches(epoch, index * self.plan.grad_accum_steps + number))
        folder = self.folder.path / f"diverged-step-{step}-process-{self.accelerator.process_index}"
        facts = {"what": what, "step": step, "weights_after_step": self.progress.step, "lr": lr}
        state = write_nan_dump(folder, facts, own_weights(self.unwrapped_model), batch)
        raise Diverged(
            f"{what} in step {step} (learning rate {lr:.3g}, {state}): weights and batch are in {folder}; {remedy}"
        )
