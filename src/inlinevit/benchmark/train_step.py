"""The processor time of a training step of a recipe, with one attention beside the other."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

from ..engine.config import MOST_STEPS, config_from_dict
from ..engine.setup import make_optimizer
from ..recipes import load_recipe, merge
from ..tasks.classification.config import ClassificationConfig
from ..tasks.classification.model import build_model
from ..utils.memory import keep_freed_memory
from ..utils.seeding import set_seed
from ..utils.validation import Range, check_value, require
from .machine import GEMM_FLOPS, describe_machine, gemm, pinned_threads
from .results import Measurement, Results
from .timing import interleave, quartiles
from .workload import SEED, disable_dropout, nominal_flops

STEP_MODES = ("eager", "compiled")
NUM_CLASSES = 10


def measure_steps(
    recipe: str,
    attentions: Sequence[str],
    modes: Sequence[str] = STEP_MODES,
    *,
    threads: int = 1,
    rounds: int = 100,
    kwargs: dict[str, Any] | None = None,
    console: Console | None = None,
) -> Results:
    """Measure forward, loss, backward and update of a recipe's model on one batch of random images.

    The steps of all attentions and modes alternate, and their processor time is taken: on a machine that others use as
    well, it changes less than the wall time.

    Args:
        recipe: A recipe of classification.
        attentions: The attentions of the model, instead of that of the recipe.
        modes: Some of STEP_MODES.
        threads: Threads of torch.
        rounds: Timed steps of each.
        kwargs: Arguments of the model that replace those of the recipe.
        console: Where to show a progress bar; None = nowhere.
    """
    check_value("rounds", rounds, int, Range(2, MOST_STEPS))
    unknown = [mode for mode in modes if mode not in STEP_MODES]
    require(not unknown, f"there is no mode {unknown[0] if unknown else ''}: choose among {', '.join(STEP_MODES)}")
    content = load_recipe(recipe, "classification")
    config = config_from_dict(ClassificationConfig, merge(content, {"model": {"kwargs": kwargs or {}}}))
    size, batch = config.model.img_size or 224, config.data.batch_size
    # As the trainer does.
    keep_freed_memory()
    with pinned_threads(threads):
        machine = describe_machine(torch.device("cpu"))
        steps: dict[str, Callable[[], object]] = {}
        found: list[Measurement] = []
        for attention in attentions:
            for mode in modes:
                model = make_model(config, attention)
                images = torch.randn(batch, config.model.in_chans, size, size)
                flops = 3 * nominal_flops(model, images)
                step = make_step(config, model, images, compiled=mode == "compiled")
                started = time.perf_counter()
                step()
                first = time.perf_counter() - started if mode == "compiled" else None
                steps[str(len(steps))] = step
                unknown_yet = quartiles([0.0, 0.0])
                found.append(
                    Measurement(
                        comparison=f"{recipe}, {size}², batch {batch}",
                        name=f"{config.model.name}:attention={attention}",
                        mode=mode,
                        size=size,
                        batch=batch,
                        seconds=unknown_yet,
                        rounds=rounds,
                        flops=flops,
                        memory=None,
                        gemm_rate=0.0,
                        first_seconds=first,
                    )
                )
        times = interleave(
            {**steps, "gemm": gemm(torch.device("cpu"))}, rounds=rounds, processor_time=True, console=console
        )
    rate = GEMM_FLOPS / quartiles(times["gemm"]).median
    machine["gemm_rate"] = rate
    measurements = [
        replace(one, seconds=quartiles(times[str(place)]), gemm_rate=rate) for place, one in enumerate(found)
    ]
    settings = {"recipe": recipe, "attentions": list(attentions), "modes": list(modes), "kwargs": kwargs or {}}
    return Results(
        "step", {**settings, "threads": threads, "rounds": rounds, "backward": True}, machine, measurements, []
    )


def make_model(config: ClassificationConfig, attention: str) -> nn.Module:
    """Return the model of a recipe with another attention, in training mode, without dropout."""
    set_seed(SEED)
    kwargs = {**config.model.kwargs, "attention": attention}
    return disable_dropout(build_model(replace(config.model, kwargs=kwargs), NUM_CLASSES)).train()


def make_step(config: ClassificationConfig, model: nn.Module, images: Tensor, *, compiled: bool) -> Callable[[], None]:
    """Return a training step of a model on a batch (batch, channels, height, width): forward, backward and update."""
    optimizer = make_optimizer(model, config.optimizer, len(images))
    labels = torch.arange(len(images)) % NUM_CLASSES
    if compiled:
        model.compile()

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels, label_smoothing=config.augment.label_smoothing).backward()
        if config.optimizer.clip_grad is not None:
            nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_grad)
        optimizer.step()

    return step
