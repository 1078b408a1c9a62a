"""Interleaved timing: functions are called in alternation in one process, so that noise affects all of them alike."""

import time
from collections.abc import Callable, Mapping, Sequence
from math import inf
from statistics import quantiles
from typing import NamedTuple

import torch
from rich.console import Console
from rich.progress import track

# Rounds that are made however long they take.
MIN_ROUNDS = 3


class Quartiles(NamedTuple):
    """The lower quartile, the median and the upper quartile."""

    low: float
    median: float
    high: float


def quartiles(times: Sequence[float]) -> Quartiles:
    """Return the quartiles of times, which outliers hardly change."""
    return Quartiles(*quantiles(times, n=4, method="inclusive"))


def interleave(
    functions: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warmup: int = 3,
    patience: float = inf,
    rehearse_below: float = 0.0,
    device: torch.device | None = None,
    processor_time: bool = False,
    console: Console | None = None,
) -> dict[str, list[float]]:
    """Time functions in alternation: A, B, A, B, ….

    Args:
        functions: What to call, by name.
        rounds: Timed calls of each function.
        warmup: Untimed rounds before them.
        patience: Seconds after which no further round begins; MIN_ROUNDS are always made.
        rehearse_below: Functions that last took fewer seconds are called once, untimed, before each timed call, so that
            the caches have their data and not those of the function before.
        device: Where the functions run. CUDA devices are timed by CUDA events, others by the wall clock.
        processor_time: Whether to take the processor time of all threads of this process instead, which other load on
            the machine changes less.
        console: Where to show a progress bar; None = nowhere.

    Returns:
        Seconds of each call, by name.
    """
    clock = _gpu_seconds if device is not None and device.type == "cuda" else _wall_seconds
    if processor_time:
        clock = _processor_seconds
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    steps = range(warmup + rounds)
    latest = dict.fromkeys(functions, inf)
    started = time.perf_counter()
    for step in track(steps, "Timing steps", console=console) if console else steps:
        if step >= warmup + MIN_ROUNDS and time.perf_counter() - started > patience:
            break
        for name, function in functions.items():
            if latest[name] < rehearse_below:
                function()
            latest[name] = clock(function)
            if step >= warmup:
                seconds[name].append(latest[name])
    return seconds


def _wall_seconds(function: Callable[[], object]) -> float:
    """Time a call by the wall clock, from idle devices to idle devices."""
    _wait_for_device()
    started = time.perf_counter()
    function()
    _wait_for_device()
    return time.perf_counter() - started


def _processor_seconds(function: Callable[[], object]) -> float:
    """Time a call by the processor time of this process, user and system."""
    started = time.process_time()
    function()
    return time.process_time() - started


def _gpu_seconds(function: Callable[[], object]) -> float:
    """Time a call by CUDA events."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    function()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1000


def _wait_for_device() -> None:
    """Wait until the accelerator has finished its queue."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
