"""Available memory, and errors for what cannot fit into it, before any of it is allocated."""

import ctypes
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

GIGABYTE = 1e9
FLOAT_BYTES = 4
# Where Linux has the memory limit and usage of a container.
CGROUP = Path("/sys/fs/cgroup")
# Of glibc: numbers of its options, and variables that set the same.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
MALLOC_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
MMAP_THRESHOLD, KEPT_BYTES = 32 * 2**20, 2**30


def available_memory() -> int:
    """Return the bytes of main memory that can still be allocated, within the limit of a container."""
    # Here, because models alone do not need it.
    import psutil

    available: int = psutil.virtual_memory().available
    limit, used = (_number_in(CGROUP / name) for name in ("memory.max", "memory.current"))
    return available if limit is None or used is None else max(0, min(available, limit - used))


def _number_in(file: Path) -> int | None:
    """Return the number in a system file; None if there is no such file, or no number in it."""
    text = file.read_text().strip() if file.is_file() else ""
    return int(text) if text.isdecimal() else None


def require_memory(needed: float, what: str, remedy: str) -> None:
    """Refuse what (the subject of a sentence) needs more bytes than there are, and say what to do instead."""
    available = available_memory()
    if needed > available:
        raise ValueError(
            f"{what} would take at least {needed / GIGABYTE:.1f} GB of memory, but {available / GIGABYTE:.1f} GB are "
            f"free: {remedy}"
        )


def require_memory_for_images(count: int, channels: int, height: int, width: int, remedy: str) -> None:
    """Refuse a batch of float32 images that does not fit into memory, and say what to do instead."""
    what = f"a batch of {count} image{'' if count == 1 else 's'} of {height} × {width} pixels"
    require_memory(FLOAT_BYTES * count * channels * height * width, what, remedy)


def require_memory_for_model(build: Callable[[], nn.Module], name: str, remedy: str) -> None:
    """Refuse a model whose weights do not fit into memory.

    Args:
        build: Builds the model on torch's default device. It is called on the meta device, where weights need no
            memory. Models of timm's that cannot be built there are not checked.
        name: The model, for messages.
        remedy: What to do instead.
    """
    try:
        # Initial weights must not depend on this check.
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            model = build()
    except (RuntimeError, NotImplementedError):
        return
    needed = sum(weight.numel() * weight.element_size() for weight in model.state_dict().values())
    require_memory(needed, f"the weights of {name}", remedy)


def keep_freed_memory() -> bool:
    """Let glibc keep up to KEPT_BYTES of freed memory for this process, for loops that allocate the same again.

    By default, it returns freed memory to the system when the end of the heap is free, as after each training step, and
    the pages of the next step are mapped and cleared again.

    Returns:
        Whether it is in effect; not with other C libraries, or if the environment sets one of MALLOC_VARIABLES.
    """
    if any(name in os.environ for name in MALLOC_VARIABLES):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        return False
    # Setting one ends glibc's own adjustment of both; this is the largest threshold that it would choose by itself.
    return bool(mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD) and mallopt(M_TRIM_THRESHOLD, KEPT_BYTES))
