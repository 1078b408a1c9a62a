"""Times that can be compared: rivals take turns in one process, so that a noisy machine disturbs all of them alike."""

import time
from collections.abc import Callable, Mapping
from statistics import quantiles
from typing import NamedTuple

import torch


class Quartiles(NamedTuple):
    """Seconds of a call: a quarter of the calls took no longer than the first, half of them than the second, …."""

    low: float
    median: float
    high: float


def take_turns(rivals: Mapping[str, Callable[[], object]], *, rounds: int, warmup: int = 2) -> dict[str, Quartiles]:
    """Time functions in turns: A, B, A, B, ….

    Args:
        rivals: What to call, by name.
        rounds: Turns of each.
        warmup: Turns before those that count.

    Returns:
        Seconds of a call, by name.
    """
    seconds: dict[str, list[float]] = {name: [] for name in rivals}
    for turn in range(warmup + rounds):
        for name, rival in rivals.items():
            _wait_for_device()
            started = time.perf_counter()
            rival()
            _wait_for_device()
            if turn >= warmup:
                seconds[name].append(time.perf_counter() - started)
    return {name: Quartiles(*quantiles(times, n=4, method="inclusive")) for name, times in seconds.items()}


def _wait_for_device() -> None:
    """GPUs work on while Python goes ahead: wait until they are done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
