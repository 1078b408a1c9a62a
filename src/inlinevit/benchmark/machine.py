"""What times depend on: the machine, and how much of it is used."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..utils.memory import available_memory

# Side of the square matrices whose product tells what the machine can do.
GEMM_SIDE = 1024
GEMM_FLOPS = 2 * GEMM_SIDE**3


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Processor, cores, memory in bytes, and how busy the machine is already."""
    facts: dict[str, Any] = {
        "processor": _value("/proc/cpuinfo", "model name") or os.uname().machine,
        "cores": os.cpu_count(),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load": round(os.getloadavg()[0], 2),
    }
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def free_memory(device: torch.device) -> int:
    """Bytes that could be allocated."""
    return torch.cuda.mem_get_info()[0] if device.type == "cuda" else available_memory()


def gemm(device: torch.device) -> Callable[[], Tensor]:
    """A product of large float32 matrices, GEMM_FLOPS a call."""
    a, b = torch.randn(2, GEMM_SIDE, GEMM_SIDE, device=device)
    return lambda: a @ b


def gemm_rate(device: torch.device) -> float:
    """Floating-point operations a second in gemm(), roughly, for estimates."""
    product, seconds = gemm(device), []
    for _ in range(4):
        started = time.perf_counter()
        product().sum().item()
        seconds.append(time.perf_counter() - started)
    return GEMM_FLOPS / min(seconds)


@contextmanager
def pinned_threads(threads: int) -> Iterator[None]:
    """A context in which torch uses so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _value(path: str, name: str) -> str:
    """What stands behind `name:` in a file of the system; "" where there is none."""
    lines = Path(path).read_text().splitlines() if Path(path).exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == name), "")
