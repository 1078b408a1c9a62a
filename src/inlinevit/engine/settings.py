"""What a run does, after batches are planned and learning rates are scaled: the lines at the beginning of its log."""

from collections.abc import Sequence

from ..data.batch_plan import BatchPlan
from .config import TrainConfig
from .setup import scale_lr

# Schedules that end at schedule.min_lr.
FALLING = ("cosine", "poly", "tanh")


def describe_settings(
    config: TrainConfig, plan: BatchPlan, steps_per_epoch: int, total_steps: int, device: str, rates: Sequence[float]
) -> list[str]:
    """Return the batch, the learning rate and the schedule that a run uses, in three lines.

    Args:
        config: The run.
        plan: The batches of its processes.
        steps_per_epoch: Steps in an epoch.
        total_steps: Steps in the whole run.
        device: The device of this process.
        rates: The learning rates of the parameter groups, relative to optimizer.lr.
    """
    return [
        _describe_batch(config, plan, steps_per_epoch, total_steps) + f"; precision {_precision(config)} on {device}",
        _describe_optimizer(config, plan.total_batch, min(rates)),
        _describe_schedule(config, plan.total_batch, steps_per_epoch),
    ]


def _describe_batch(config: TrainConfig, plan: BatchPlan, steps_per_epoch: int, total_steps: int) -> str:
    processes = "1 process" if plan.processes == 1 else f"{plan.processes} processes"
    if (sequence := config.parallel.sequence) > 1:
        processes = f"{plan.processes} × {sequence} processes that share images"
    accumulated = f" × {plan.grad_accum_steps} accumulated" if plan.grad_accum_steps > 1 else ""
    return (
        f"total batch {plan.total_batch} ({plan.batch_size} × {processes}{accumulated}), {steps_per_epoch} steps per "
        f"epoch, {total_steps} steps = {total_steps / steps_per_epoch:.3g} epochs"
    )


def _precision(config: TrainConfig) -> str:
    return "float32" if config.run.precision == "no" else config.run.precision


def _describe_optimizer(config: TrainConfig, total_batch: int, least: float) -> str:
    optimizer = config.optimizer
    rate = scale_lr(optimizer.lr, optimizer, total_batch)
    base = optimizer.lr_base_size
    how = f" (optimizer.lr {optimizer.lr:g} × {total_batch} / {base})" if base not in (0, total_batch) else ""
    lowest = "" if optimizer.lr_scales else f" (down to {rate * least:.3g})"
    parts = [
        f"{optimizer.name}, learning rate {rate:.3g}{how}",
        f"layer decay {optimizer.layer_decay:g}{lowest}" if optimizer.layer_decay else "",
        *(f"× {scale:g} for {pattern}" for pattern, scale in optimizer.lr_scales.items()),
        f"weight decay {optimizer.weight_decay:g}",
        f"gradients clipped at {optimizer.clip_grad:g}" if optimizer.clip_grad else "",
    ]
    return ", ".join(filter(None, parts))


def _describe_schedule(config: TrainConfig, total_batch: int, steps_per_epoch: int) -> str:
    schedule, optimizer = config.schedule, config.optimizer
    unit = steps_per_epoch if schedule.steps is None else 1
    first, last = (scale_lr(rate, optimizer, total_batch) for rate in (schedule.warmup_lr, schedule.min_lr))
    parts = [
        f"{schedule.name} schedule",
        f"warm-up from {first:.3g} in {round(schedule.warmup * unit)} steps" if schedule.warmup else "no warm-up",
        f"down to {last:.3g}" if schedule.name in FALLING else "",
        f"× {schedule.decay_rate:g} at {schedule.milestones}" if schedule.name in ("step", "multistep") else "",
        f"cool-down of {schedule.cooldown * unit} steps" if schedule.cooldown else "",
    ]
    return ", ".join(filter(None, parts))
