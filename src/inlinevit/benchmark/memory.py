"""The peak memory of a call, by torch's own allocations."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile


def peak_memory(call: Callable[[], object], device: torch.device) -> int:
    """Return the most bytes that a call holds at a time, beyond what was allocated before it.

    On a CPU this is the maximum of the running total of torch's allocations, which is the same for each call.
    """
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with _without_stderr(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        call()
    # Memory that was allocated before the call and is freed by it does not count: allocations have addresses.
    held: dict[int, int] = {}
    total = peak = 0
    for event in sorted(_allocations(record), key=lambda event: event.start_time_ns):
        address, size = event.extra_fields.ptr, event.extra_fields.alloc_size
        if size > 0:
            held[address] = size
            total += size
        else:
            total -= held.pop(address, 0)
        peak = max(peak, total)
    return peak


def _allocations(record: profile) -> list[Any]:
    """Return all events of allocation and release."""
    assert record.profiler is not None
    assert record.profiler.kineto_results is not None
    found, waiting = [], list(record.profiler.kineto_results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.tag == _EventType.Allocation:
            found.append(event)
    return found


@contextmanager
def _without_stderr() -> Iterator[None]:
    """Suppress stderr: the library behind the profiler writes to it when it starts and stops, and has no option."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
