"""The machine that times depend on: its description, its speed, its threads."""

import os
import platform
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from ..utils.memory import available_memory
from .timing import interleave

# Side length of the square matrices whose product is the reference for speed.
GEMM_SIDE = 1024
GEMM_FLOPS = 2 * GEMM_SIDE**3


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Return processor, cores, memory in bytes and the load before measuring."""
    facts: dict[str, Any] = {
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "memory": psutil.virtual_memory().total,
        "load": round(psutil.getloadavg()[0], 2),
    }
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def processor_name(info: Path = Path("/proc/cpuinfo")) -> str:
    """Return the name of the processor, or its architecture where the system does not provide the name.

    Virtual machines may have names without a number, such as AMD EPYC, that stand for processors of different speed:
    family and model tell these apart.

    Args:
        info: Where Linux describes it.
    """
    found = re.findall(r"^(model name|cpu family|model)\s*:\s*(.+)$", info.read_text() if info.exists() else "", re.M)
    facts = dict(reversed(found))  # those of the first core
    name = facts.get("model name") or platform.processor() or platform.machine()
    if "cpu family" in facts and "model" in facts and not any(letter.isdigit() for letter in name):
        return f"{name} (family {facts['cpu family']}, model {facts['model']})"
    return name


def free_memory(device: torch.device) -> int:
    """Return the bytes that could be allocated."""
    return torch.cuda.mem_get_info()[0] if device.type == "cuda" else available_memory()


def gemm(device: torch.device) -> Callable[[], Tensor]:
    """Return a product of large float32 matrices, with GEMM_FLOPS operations per call."""
    a, b = torch.randn(2, GEMM_SIDE, GEMM_SIDE, device=device)
    return lambda: a @ b


def gemm_rate(device: torch.device) -> float:
    """Return a rough estimate of the floating-point operations per second in gemm()."""
    return GEMM_FLOPS / min(interleave({"gemm": gemm(device)}, rounds=3, warmup=1, device=device)["gemm"])


@contextmanager
def pinned_threads(threads: int) -> Iterator[None]:
    """Let torch use this many threads in a context."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
