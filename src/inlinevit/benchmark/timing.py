"""Times that can be compared: rivals take turns in one process, so that a noisy machine disturbs all of them alike."""

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import quantiles
from typing import NamedTuple

import torch
from rich.console import Console
from rich.progress import track


class Quartiles(NamedTuple):
    """A quarter of the times are not above the first, half of them not above the second, …."""

    low: float
    median: float
    high: float


def quartiles(times: Sequence[float]) -> Quartiles:
    """What times are like that may have been disturbed."""
    return Quartiles(*quantiles(times, n=4, method="inclusive"))


def take_turns(
    rivals: Mapping[str, Callable[[], object]], *, rounds: int, warmup: int = 3, console: Console | None = None
) -> dict[str, list[float]]:
    """Time functions in turns: A, B, A, B, ….

    Args:
        rivals: What to call, by name.
        rounds: Turns of each.
        warmup: Turns before those that count.
        console: Where to show a bar; None = nowhere.

    Returns:
        Seconds of each call, by name.
    """
    seconds: dict[str, list[float]] = {name: [] for name in rivals}
    turns = range(warmup + rounds)
    for turn in track(turns, "Timing steps", console=console) if console else turns:
        for name, rival in rivals.items():
            _wait_for_device()
            started = time.perf_counter()
            rival()
            _wait_for_device()
            if turn >= warmup:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def _wait_for_device() -> None:
    """GPUs work on while Python goes ahead: wait until they are done."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
