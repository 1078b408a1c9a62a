"""A pass over the rows of a map: what it needs of them, and the rows that it gives.

In a pass, chunks of rows are replaced by new ones from top to bottom; if attention needs a summary of the whole map,
all rows are added to it before, as soon as they are known.
"""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ..layers.block import Block, DWConvMlp, ResidualConvMlp
from ..layers.surroundings import ResidualConv
from ..parallel.collectives import SequenceGroup


class Chunk(NamedTuple):
    """Rows of a map.

    Attributes:
        tokens: (rows, width, channels).
        above: The rows above, as they were before the pass, (up to `halo` rows, width, channels); fewer at the border.
        below: The rows below, as above.
        mask: Which tokens are real, of the rows above, these and those below, (rows, width); None = all.
        wrapped: How many of the last rows come from the top of the map.
    """

    tokens: Tensor
    above: Tensor
    below: Tensor
    mask: Tensor | None = None
    wrapped: int = 0

    def extended(self) -> Tensor:
        """Return the rows together with those above and below."""
        if len(self.above) == 0 and len(self.below) == 0:
            return self.tokens
        return torch.cat([self.above, self.tokens, self.below])

    def own_rows(self, extended: Tensor) -> Tensor:
        """Return the part of extended rows that are rows of this chunk."""
        return extended[len(self.above) : len(self.above) + len(self.tokens)]

    def without_halo(self) -> "Chunk":
        """Return the chunk without the rows above and below."""
        mask = None if self.mask is None else self.own_rows(self.mask)
        return Chunk(self.tokens, self.tokens[:0], self.tokens[:0], mask, self.wrapped)


class Pass(ABC):
    """A pass over the map of a stage, by chunks of rows."""

    # Rows above and below a chunk that its new rows depend on.
    halo = 0
    # Chunks, but for the last, have a multiple of this many rows.
    row_height = 1
    # The row at which the first chunk begins; the last one ends with the rows above it.
    shift = 0
    # Whether all rows have to be added to a summary before the first chunk.
    needs_summary = False
    # Rows that are added to the summary at once, but for the last, are a multiple of these.
    summary_height = 1
    # Numbers per token of a chunk that exist at once.
    token_floats = 0

    def start_summary(self) -> Any:
        """Return an empty summary."""
        return None

    def add(self, summary: Any, rows: Tensor, mask: Tensor | None, top: int) -> None:
        """Add rows (rows, width, channels), the first of which is row `top`, to a summary; mask as in Chunk."""
        raise NotImplementedError

    def reduce(self, summary: Any, group: SequenceGroup) -> Any:
        """Return the summary of the tokens that all processes have added, in all of them."""
        return summary

    def finish(self, summary: Any) -> Any:
        """Return what `apply` needs of a summary to which all tokens were added."""
        return summary

    @abstractmethod
    def apply(self, chunk: Chunk, finished: Any) -> Tensor:
        """Return the new rows of a chunk, (rows, width, channels)."""

    @abstractmethod
    def apply_prefix(self, prefix: Tensor, finished: Any) -> Tensor:
        """Return the new prefix tokens, (prefix, channels)."""


class PositionsPass(Pass):
    """x + convolution of x, at the beginning of a block.

    Args:
        block: The block, which has `cpe`.
    """

    halo = 1

    def __init__(self, block: Block) -> None:
        assert block.cpe is not None
        self.conv = block.cpe
        self.token_floats = 5 * self.conv.in_channels

    def apply(self, chunk: Chunk, finished: Any) -> Tensor:
        """See Pass.apply."""
        return chunk.own_rows(add_convolved(chunk.extended(), self.conv, chunk.mask))

    def apply_prefix(self, prefix: Tensor, finished: Any) -> Tensor:
        """See Pass.apply_prefix: they skip the convolution."""
        return prefix


def add_convolved(rows: Tensor, conv: ResidualConv, mask: Tensor | None) -> Tensor:
    """Return rows (rows, width, channels) plus their convolution, in which masked tokens (rows, width) are zero."""
    real = rows if mask is None else rows.masked_fill(~mask.unsqueeze(2), 0.0)
    maps = F.conv2d(real.permute(2, 0, 1).unsqueeze(0), conv.weight, conv.bias, padding=1, groups=conv.groups)
    return rows + maps.squeeze(0).permute(1, 2, 0)


class ConvMlpPass(Pass):
    """norm → MLP with a convolution → add.

    Args:
        block: The block.
    """

    halo = 1

    def __init__(self, block: Block) -> None:
        self.block, self.mlp = block, cast(DWConvMlp | ResidualConvMlp, block.mlp)
        self.token_floats = 4 * self.mlp.fc1.in_features + 5 * self.mlp.fc1.out_features

    def apply(self, chunk: Chunk, finished: Any) -> Tensor:
        """See Pass.apply."""
        hidden = self.mlp.fc1(self.block.norm2(chunk.extended()))
        if isinstance(self.mlp, ResidualConvMlp):
            hidden = add_convolved(F.gelu(hidden), self.mlp.conv, chunk.mask)
            return chunk.tokens + self.mlp.fc2(chunk.own_rows(hidden))
        if chunk.mask is not None:
            hidden = hidden.masked_fill(~chunk.mask.unsqueeze(2), 0.0)
        convolved = self.mlp.conv(hidden.permute(2, 0, 1).unsqueeze(0)).squeeze(0).permute(1, 2, 0)
        return chunk.tokens + self.mlp.fc2(F.gelu(chunk.own_rows(convolved)))

    def apply_prefix(self, prefix: Tensor, finished: Any) -> Tensor:
        """See Pass.apply_prefix: they skip the convolution."""
        return prefix + self.mlp(self.block.norm2(prefix).unsqueeze(0), (0, 0)).squeeze(0)
