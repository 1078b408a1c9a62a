"""Which rows of a map each process holds, and the rows of its neighbours that convolutions need."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from ..utils.validation import require
from .collectives import Exchange, SequenceGroup, exchange, plan_exchange


@dataclass(frozen=True)
class RowSharding:
    """The rows of one map: process i of the group holds those from bounds[i] to bounds[i + 1].

    Attributes:
        bounds: From 0 to the height of the map, one more than there are processes.
        group: The processes.
    """

    bounds: tuple[int, ...]
    group: SequenceGroup

    @property
    def height(self) -> int:
        """Rows of the map."""
        return self.bounds[-1]

    @property
    def start(self) -> int:
        """The first row of this process."""
        return self.bounds[self.group.rank]

    @property
    def end(self) -> int:
        """The row after the last one of this process."""
        return self.bounds[self.group.rank + 1]

    def padded(self, multiple: int) -> "RowSharding":
        """Return the rows after the map is padded to a multiple, at the bottom."""
        return RowSharding((*self.bounds[:-1], -(-self.height // multiple) * multiple), self.group)

    def strided(self, stride: int) -> "RowSharding":
        """Return the rows of the map that has one row for each `stride` rows of this one, rounded up."""
        assert all(bound % stride == 0 for bound in self.bounds[:-1])
        return RowSharding(tuple(-(-bound // stride) for bound in self.bounds), self.group)


class LocalSize(tuple[int, int]):
    """The (H, W) of the rows that a process holds, which knows the map that they belong to.

    Blocks get it as `feat_size`.

    Attributes:
        rows: The rows of the map.
    """

    rows: RowSharding

    def __new__(cls, width: int, rows: RowSharding) -> "LocalSize":
        """Make the size of the rows of this process, in a map of this width."""
        size = super().__new__(cls, (rows.end - rows.start, width))
        size.rows = rows
        return size

    @property
    def map_size(self) -> tuple[int, int]:
        """(H, W) of the whole map."""
        return self.rows.height, self[1]


def split_rows(height: int, reductions: Sequence[int], group: SequenceGroup) -> RowSharding:
    """Split the rows of an image so that no token of any stage has pixels of two processes.

    Processes get equal numbers of rows of the last stage or, where that is not possible, one more or less.

    Args:
        height: Rows of the image.
        reductions: Stride of each stage, in pixels per token, from fine to coarse; each divides the next one.
        group: The processes.
    """
    unit = reductions[-1]
    units = -(-height // unit)
    require(
        units >= group.size,
        f"an image of {height} rows has {units} rows of tokens in the last stage, which {group.size} processes cannot "
        f"share: use at most {units} processes for an image (--parallel.sequence), or larger images",
    )
    bounds = [min(height, unit * (units * rank // group.size)) for rank in range(group.size)]
    return RowSharding((*bounds, height), group)


@lru_cache(maxsize=64)
def _plan_halo(bounds: tuple[int, ...], top: int, bottom: int, rank: int) -> tuple[Exchange, int, int]:
    """Return the exchange of the rows next to those of each process, and how many are above and below this one's."""

    def neighbours(start: int, end: int) -> tuple[Tensor, Tensor]:
        return torch.arange(max(0, start - top), start), torch.arange(end, min(bounds[-1], end + bottom))

    wanted = [neighbours(start, end) for start, end in pairwise(bounds)]
    above, below = wanted[rank]
    return plan_exchange(bounds, [torch.cat(rows) for rows in wanted], rank), len(above), len(below)


def add_halo(x: Tensor, rows: RowSharding, top: int = 1, bottom: int = 1) -> Tensor:
    """Add the rows above and below those of this process; beyond the border of the map they are zero.

    Args:
        x: The rows of this process, (batch, rows, width, channels).
        rows: The rows of the map.
        top: How many to add above.
        bottom: How many to add below.

    Returns:
        (batch, top + rows + bottom, width, channels).
    """
    if top == 0 and bottom == 0:
        return x
    plan, above, below = _plan_halo(rows.bounds, top, bottom, rows.group.rank)
    halo = exchange(x, plan, rows.group)
    x = torch.cat([halo[:, :above], x, halo[:, above:]], dim=1)
    return F.pad(x, (0, 0, 0, 0, top - above, bottom - below))
