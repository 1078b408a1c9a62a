"""How much memory streaming takes, and how many rows are computed at once."""

import math
import mmap
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from ..utils.memory import FLOAT_BYTES, GIGABYTE

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
# Elements of a chunk beyond which larger ones are not faster.
CHUNK_ELEMENTS = 2**22
# Bytes for what is computed a few tokens at a time: hidden layers of MLPs, windows.
WORKSPACE = 48 * 10**6
# Bytes beyond the budget: what libraries keep for themselves, and memory that is freed but not given back.
OVERHEAD = 64 * 10**6


class StageSize(NamedTuple):
    """What the memory of a stage depends on.

    Attributes:
        height: Rows of the map.
        width: Tokens of a row.
        channels: Channels of a token.
        row_multiple: Chunks have a multiple of this many rows.
        halo: Rows above and below a chunk that are needed as well.
        token_floats: Numbers per token of a chunk that exist at once.
        state_bytes: Largest summaries that exist at once.
    """

    height: int
    width: int
    channels: int
    row_multiple: int
    halo: int
    token_floats: int
    state_bytes: int

    @property
    def map_bytes(self) -> int:
        """Size of the map."""
        return FLOAT_BYTES * self.height * self.width * self.channels

    def chunk_bytes(self, rows: int) -> int:
        """Return the memory that computing with a chunk of so many rows takes."""
        rows = min(rows, self.height) + 2 * self.halo
        return FLOAT_BYTES * rows * self.width * self.token_floats + self.state_bytes

    def round_rows(self, rows: int) -> int:
        """Return the nearest number of rows that a chunk can have, at most `rows` where that is possible."""
        most = -(-self.height // self.row_multiple) * self.row_multiple
        return min(most, max(self.row_multiple, rows // self.row_multiple * self.row_multiple))

    def most_rows(self, available: int) -> int:
        """Return the rows of a chunk that fits into so many bytes, and is not larger than useful."""
        row_bytes = FLOAT_BYTES * self.width * self.token_floats
        affordable = (available - self.state_bytes) // row_bytes - 2 * self.halo
        useful = max(8, -(-CHUNK_ELEMENTS // (self.width * self.channels)))
        return self.round_rows(min(affordable, useful))


class StepSize(NamedTuple):
    """What the memory of a step of a decoder depends on.

    Attributes:
        height: Rows of the map that it makes.
        row_floats: Numbers of the widest map that it computes, per row of the map that it makes.
        bytes_of: From rows to the memory that computing with a chunk of so many rows takes.
    """

    height: int
    row_floats: int
    bytes_of: Callable[[int], int]

    def chunk_bytes(self, rows: int) -> int:
        """Return the memory that computing with a chunk of so many rows takes."""
        return self.bytes_of(min(rows, self.height))

    def round_rows(self, rows: int) -> int:
        """Return the nearest number of rows that a chunk can have."""
        return min(self.height, max(1, rows))

    def most_rows(self, available: int) -> int:
        """Return the rows of a chunk that fits into so many bytes, and is not larger than useful."""
        rows = self.round_rows(max(8, -(-CHUNK_ELEMENTS // self.row_floats)))
        while rows > 1 and self.chunk_bytes(rows) > available:
            rows -= max(1, rows // 8)
        return rows


class MemoryPlan(NamedTuple):
    """Where the maps are, and how many rows are computed at once.

    Attributes:
        in_memory: Whether maps are in memory, or in files.
        chunk_rows: Rows per chunk, for each stage, and for each step of a decoder.
        map_bytes: Size of the maps that exist at once.
        peak_bytes: Largest amount of memory that is used at once, weights and OVERHEAD not included.
    """

    in_memory: bool
    chunk_rows: tuple[int, ...]
    map_bytes: int
    peak_bytes: int


def make_plan(
    stages: Sequence[StageSize],
    budget: int,
    *,
    fixed: int = 0,
    can_spill: bool,
    must_spill: bool,
    chunk_rows: int | None,
    steps: Sequence[StepSize] = (),
    kept_bytes: int | None = None,
) -> MemoryPlan:
    """Choose where the maps are and how many rows are computed at once.

    Args:
        stages: The stages of the model.
        budget: Bytes that may be used.
        fixed: Bytes that are used all the time.
        can_spill: Whether maps may be in files.
        must_spill: Whether maps have to be in files.
        chunk_rows: Rows per chunk, rounded to whole windows; None = those that the budget allows, and no more than are
            useful.
        steps: The steps of a decoder.
        kept_bytes: Size of the maps that exist at once, if more than one is kept.

    Raises:
        ValueError: The budget is too small, with the minimum.
    """
    fixed += WORKSPACE
    map_bytes = max(stage.map_bytes for stage in stages)
    pairs = max((first.map_bytes + second.map_bytes for first, second in pairwise(stages)), default=0)
    if not hasattr(mmap, "MADV_DONTNEED"):
        map_bytes = max(map_bytes, pairs)
    if kept_bytes is not None:
        map_bytes = kept_bytes
    parts: list[StageSize | StepSize] = [*stages, *steps]
    least = max(part.chunk_bytes(part.round_rows(chunk_rows or 1)) for part in parts)
    needed_in_memory, needed_spilled = fixed + map_bytes + least, fixed + least
    in_memory = not must_spill and needed_in_memory <= budget
    if (not in_memory and needed_spilled > budget) or (not in_memory and not can_spill):
        smallest = needed_spilled if can_spill else needed_in_memory
        remedy = "" if can_spill else f", or {describe_bytes(needed_spilled)} and a folder to spill to"
        raise ValueError(
            f"the memory of {describe_bytes(budget)} is too small for this image and model: allow at least "
            f"{describe_bytes(smallest)}{remedy}"
        )
    available = budget - fixed - (map_bytes if in_memory else 0)
    rows = tuple(part.most_rows(available) if chunk_rows is None else part.round_rows(chunk_rows) for part in parts)
    chunks = max(part.chunk_bytes(count) for part, count in zip(parts, rows, strict=True))
    peak = fixed + chunks + (map_bytes if in_memory else 0)
    return MemoryPlan(in_memory, rows, map_bytes if in_memory else max(pairs, map_bytes), peak)


def parse_bytes(text: str | int) -> int:
    """Return a number of bytes, such as 2000000000, "2GB" or "512 MiB"."""
    if isinstance(text, int) and not isinstance(text, bool):
        count = float(text)
    else:
        found = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([A-Za-z]*)\s*", str(text))
        if found is None or found[2].upper() not in UNITS:
            raise ValueError(
                f'memory is {str(text)[:40]!r}: it should be a number with a unit, such as "2GB" or "512MB"'
            )
        count = float(found[1]) * UNITS[found[2].upper()]
    if not 0 < count < 2**60:
        raise ValueError(f'memory is {str(text)[:40]!r}: it should be a number with a unit, such as "2GB" or "512MB"')
    return math.floor(count)


def describe_bytes(count: int) -> str:
    """Return a number of bytes, rounded up, for messages."""
    if count >= GIGABYTE:
        return f"{math.ceil(count / 1e7) / 100:.2f} GB"
    return f"{math.ceil(count / 1e6)} MB"
