"""Times that can be compared: rivals take turns in one process, so that a noisy machine disturbs all of them alike."""

import time
from collections.abc import Callable, Mapping, Sequence
from math import inf
from statistics import quantiles
from typing import NamedTuple

import torch
from rich.console import Console
from rich.progress import track

# So many rounds are made, however long they take.
FEWEST_ROUNDS = 3


class Quartiles(NamedTuple):
    """A quarter of the times are not above the first, half of them not above the second, …."""

    low: float
    median: float
    high: float


def quartiles(times: Sequence[float]) -> Quartiles:
    """What times are like that may have been disturbed."""
    return Quartiles(*quantiles(times, n=4, method="inclusive"))


def interleave(
    rivals: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warmup: int = 3,
    patience: float = inf,
    rehearse_below: float = 0.0,
    device: torch.device | None = None,
    console: Console | None = None,
) -> dict[str, list[float]]:
    """Time functions in turns: A, B, A, B, ….

    Args:
        rivals: What to call, by name.
        rounds: Turns of each.
        warmup: Turns before those that count.
        patience: Seconds after which no further round begins; FEWEST_ROUNDS are always made.
        rehearse_below: Rivals that last took fewer seconds are called once, untimed, before a call that counts, so that
            what their neighbour has left in the caches does not.
        device: Where the rivals work. On a GPU its own events are the clock; else it is the computer's.
        console: Where to show a bar; None = nowhere.

    Returns:
        Seconds of each call, by name.
    """
    clock = _gpu_seconds if device is not None and device.type == "cuda" else _wall_seconds
    seconds: dict[str, list[float]] = {name: [] for name in rivals}
    turns = range(warmup + rounds)
    latest = dict.fromkeys(rivals, inf)
    started = time.perf_counter()
    for turn in track(turns, "Timing steps", console=console) if console else turns:
        if turn >= warmup + FEWEST_ROUNDS and time.perf_counter() - started > patience:
            break
        for name, rival in rivals.items():
            if latest[name] < rehearse_below:
                rival()
            latest[name] = clock(rival)
            if turn >= warmup:
                seconds[name].append(latest[name])
    return seconds


def _wall_seconds(rival: Callable[[], object]) -> float:
    """A call by the computer's clock, from idle devices to idle devices."""
    _wait_for_device()
    started = time.perf_counter()
    rival()
    _wait_for_device()
    return time.perf_counter() - started


def _gpu_seconds(rival: Callable[[], object]) -> float:
    """A call by the GPU's clock."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    rival()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1000


def _wait_for_device() -> None:
    """GPUs work on while Python goes ahead: wait until they are done."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
