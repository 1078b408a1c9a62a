"""Limits on time and memory: candidates beyond them are left out."""

import torch

from .machine import free_memory
from .workload import Candidate

# A call that needs more than this fraction of the free memory is left out.
MEMORY_FRACTION = 0.7
# A path that does more than this many times the work of the reference path is left out: it would slow down each round.
MAX_WORK = 3


class Limits:
    """Estimates whether a candidate takes too much time or memory.

    Args:
        longest_call: Seconds per call.
        device: Where candidates run.
        rate: Floating-point operations per second of the machine; a candidate is expected to reach half of it.
    """

    def __init__(self, longest_call: float, device: torch.device, rate: float) -> None:
        self.longest_call = longest_call
        self.device = device
        self.rate = rate / 2
        self.bytes_per_flop: dict[str, float] = {}

    def learn(self, candidate: Candidate, work: float, memory: int) -> None:
        """Note the bytes that a candidate took; a larger input is expected to take more in proportion to its work."""
        used = memory / max(work, 1)
        self.bytes_per_flop[candidate.name] = max(used, self.bytes_per_flop.get(candidate.name, 0))

    def exceeded(self, candidate: Candidate, flops: float, work: float) -> str:
        """Return why a candidate cannot be measured, or "" if it can.

        Args:
            candidate: The candidate.
            flops: Floating-point operations on the reference path.
            work: Floating-point operations on the path that it takes.
        """
        if work > MAX_WORK * flops:
            return f"it does {work / flops:.1f} times the work"
        seconds, memory = work / self.rate, work * self.bytes_per_flop.get(candidate.name, 0)
        if seconds > self.longest_call:
            return f"a call would take about {seconds:.1f} s, and {self.longest_call:g} s are allowed"
        free = MEMORY_FRACTION * free_memory(self.device)
        if memory > free:
            return f"a call would need about {memory / 1e9:.0f} GB of memory, and {free / 1e9:.0f} GB are free for it"
        return ""
