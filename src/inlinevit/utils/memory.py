"""How much memory there is, and refusing what cannot fit into it before any of it is taken."""

import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

GIGABYTE = 1e9
FLOAT_BYTES = 4
# Where Linux tells what a container may take, and has taken.
CGROUP = Path("/sys/fs/cgroup")


def available_memory() -> int:
    """Bytes of main memory that could still be taken, without what a container must not take."""
    available = _system_memory()
    limit, used = (_number_in(CGROUP / name) for name in ("memory.max", "memory.current"))
    return available if limit is None or used is None else max(0, min(available, limit - used))


def _system_memory() -> int:
    """Bytes of main memory that are free, or that there are, where the system does not tell."""
    info = Path("/proc/meminfo")
    lines = info.read_text().splitlines() if info.exists() else []
    free = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return 1024 * int(free) if free else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _number_in(file: Path) -> int | None:
    """The number in a file of the system; None if there is no such file, or a word in it."""
    text = file.read_text().strip() if file.is_file() else ""
    return int(text) if text.isdecimal() else None


def require_memory(needed: float, what: str, remedy: str) -> None:
    """Refuse what needs more memory than there is.

    Args:
        needed: Bytes that are needed at least.
        what: What needs them, as the subject of a sentence.
        remedy: What to do instead.
    """
    available = available_memory()
    if needed > available:
        raise ValueError(
            f"{what} would take at least {needed / GIGABYTE:.1f} GB of memory, but {available / GIGABYTE:.1f} GB are "
            f"free: {remedy}"
        )


def require_memory_for_images(count: int, channels: int, height: int, width: int, remedy: str) -> None:
    """Refuse images that do not fit into memory together, as numbers of four bytes.

    Args:
        count: How many there are at a time.
        channels: Of each.
        height: Of each, in pixels.
        width: Of each, in pixels.
        remedy: What to do instead.
    """
    what = f"a batch of {count} image{'' if count == 1 else 's'} of {height} × {width} pixels"
    require_memory(FLOAT_BYTES * count * channels * height * width, what, remedy)


def require_memory_for_model(build: Callable[[], nn.Module], name: str, remedy: str) -> None:
    """Refuse a model whose weights do not fit into memory.

    Args:
        build: Makes the model on torch's default device. It is called on the meta device, where weights take no memory.
            Models of timm's that cannot be made there are let pass.
        name: What to call the model.
        remedy: What to do instead.
    """
    try:
        # Initial weights must not depend on whether memory was looked at.
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            model = build()
    except (RuntimeError, NotImplementedError):
        return
    needed = sum(weight.numel() * weight.element_size() for weight in model.state_dict().values())
    require_memory(needed, f"the weights of {name}", remedy)
