"""One layer of attention, laid open: queries, keys, values, and the N×N weights in pieces."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

# What stands in Layer.places for a token that is no place of the map.
PREFIX = -1
PADDING = -2
# Numbers of a piece of rows that are in memory at once.
PIECE = 2**24


class Rows(Protocol):
    """From a range of queries, and which tokens they may see, to their rows; see Layer.rows."""

    def __call__(self, first: int, last: int, seen: Tensor | None) -> Tensor: ...


@dataclass
class Convolution:
    """A depthwise convolution of the values that a layer adds to the map, as InLine's local residual is.

    Attributes:
        kernels: (batch · windows, heads, width, side · side), row by row.
        bias: (heads, width), or None.
        size: (H, W) of the windows within which neighbours are neighbours.
    """

    kernels: Tensor
    bias: Tensor | None
    size: tuple[int, int]

    @property
    def side(self) -> int:
        """Side of the kernels."""
        return int(self.kernels.shape[-1] ** 0.5)

    def neighbours(self, tokens: int) -> Tensor:
        """Which token each tap of each token's kernel meets, (side · side, tokens); -1 = none.

        Args:
            tokens: Of a window, those before the map included.
        """
        height, width = self.size
        prefix, reach = tokens - height * width, self.side // 2
        row, column = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        found = []
        for down in range(-reach, reach + 1):
            for right in range(-reach, reach + 1):
                there_row, there_column = row + down, column + right
                inside = (there_row >= 0) & (there_row < height) & (there_column >= 0) & (there_column < width)
                index = torch.where(inside, prefix + there_row * width + there_column, -1).flatten()
                found.append(torch.cat([torch.full((prefix,), -1), index]))
        return torch.stack(found).to(self.kernels.device)


@dataclass
class Layer:
    """One layer of attention, or the share of its heads that sees the same windows.

    Tensors have a window for each image and window, those of an image side by side.

    Attributes:
        name: The attention's name in the model; with the share, where there are several.
        attention: The word for its kind, such as "softmax".
        size: (H, W) of the map.
        q: Queries (batch · windows, heads, tokens, width).
        k: Keys (batch · windows, heads, tokens, width).
        v: Values, as k.
        places: Where on the map the tokens of a window are, (windows, tokens): row · W + column, PREFIX or PADDING.
        sees_map: Whether keys are the tokens of the map. Keys of a reduced map (PVT's) are not: they have no places.
        make_rows: What `rows` calls.
        convolution: What is added to the attention, if anything is.
    """

    name: str
    attention: str
    size: tuple[int, int]
    q: Tensor
    k: Tensor
    v: Tensor
    places: Tensor
    sees_map: bool
    make_rows: Rows
    convolution: Convolution | None = None

    @property
    def windows(self) -> int:
        """Windows of an image."""
        return self.places.shape[0]

    @property
    def images(self) -> int:
        """Images of the batch."""
        return self.q.shape[0] // self.windows

    @property
    def tokens(self) -> int:
        """Queries of a window."""
        return self.q.shape[2]

    @property
    def is_real(self) -> Tensor:
        """Which tokens are not padding, (windows, tokens)."""
        return self.places != PADDING

    def rows(self, first: int = 0, last: int | None = None, seen: Tensor | None = None) -> Tensor:
        """What the values count for some of the queries.

        Args:
            first: The first query of a window.
            last: The query after the last; all by default.
            seen: Which tokens they may see, broadcastable to (batch · windows, heads, queries, tokens); all by default.

        Returns:
            (batch · windows, heads, queries, tokens): `rows() @ v` is the layer's attention.
        """
        return self.make_rows(first, self.tokens if last is None else last, seen)

    def total_rows(self, first: int = 0, last: int | None = None, channel: int | None = None) -> Tensor:
        """The same with the convolution, whose weights are as much a part of what the values count for a query.

        Args:
            first: See rows.
            last: See rows.
            channel: Of each head. Kernels differ from channel to channel; by default, their mean.
        """
        last = self.tokens if last is None else last
        rows = self.rows(first, last)
        if self.convolution is None:
            return rows
        kernels = self.convolution.kernels
        taps = (kernels.mean(dim=2) if channel is None else kernels[:, :, channel]).to(rows.dtype)
        for tap, neighbours in enumerate(self.convolution.neighbours(self.tokens)[:, first:last]):
            (queries,) = torch.nonzero(neighbours >= 0, as_tuple=True)
            rows[:, :, queries, neighbours[queries]] += taps[:, :, None, tap]
        return rows

    def output(self, see: "See | None" = None) -> Tensor:
        """What the layer makes of its values before its projection, from rows and kernels written out.

        Args:
            see: Which tokens queries may see; all by default. What is hidden is hidden from the convolution, too.

        Returns:
            (batch · windows, heads, tokens, width).
        """
        found = []
        for first, last in self.pieces():
            seen = None if see is None else see(self, first, last).repeat(self.images, 1, 1).unsqueeze(1)
            out = self.rows(first, last, seen) @ self.v.to(self.q.dtype)
            if self.convolution is not None:
                out = out + self._convolve(first, last, seen)
            found.append(out)
        return torch.cat(found, dim=2)

    def _convolve(self, first: int, last: int, seen: Tensor | None) -> Tensor:
        """The convolution of the values at some of the queries, of those neighbours that they may see."""
        assert self.convolution is not None
        out = torch.zeros_like(self.v[:, :, first:last])
        for tap, neighbours in enumerate(self.convolution.neighbours(self.tokens)[:, first:last]):
            (queries,) = torch.nonzero(neighbours >= 0, as_tuple=True)
            values = self.v[:, :, neighbours[queries]] * self.convolution.kernels[:, :, None, :, tap].to(out.dtype)
            if seen is not None:
                values = values * seen[:, :, queries, neighbours[queries]].unsqueeze(-1).to(out.dtype)
            out[:, :, queries] += values
        if self.convolution.bias is not None:
            height, width = self.convolution.size
            is_map = torch.arange(first, last, device=out.device) >= self.tokens - height * width
            out += self.convolution.bias[:, None, :].to(out.dtype) * is_map[:, None].to(out.dtype)
        return out

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Ranges of queries whose rows fit in memory."""
        step = max(1, PIECE // (self.q.shape[0] * self.q.shape[1] * self.k.shape[2]))
        for first in range(0, self.tokens, step):
            yield first, min(first + step, self.tokens)

    def near(self, first: int, last: int, side: int) -> Tensor:
        """Which tokens lie in the neighbourhood of a query on the map, (windows, queries, tokens).

        Args:
            first: See rows.
            last: See rows.
            side: Side of the neighbourhood, odd; the query is its middle.
        """
        if not self.sees_map:
            raise ValueError(f"the keys of {self.name} are of a reduced map: they are in no query's neighbourhood")
        if side < 1 or side % 2 == 0:
            raise ValueError(f"the side of a neighbourhood is {side}: it should be odd, so that it has a middle")
        row, column, on_map = self.places // self.size[1], self.places % self.size[1], self.places >= 0
        down = (row[:, first:last, None] - row[:, None, :]).abs()
        right = (column[:, first:last, None] - column[:, None, :]).abs()
        both_on_map = on_map[:, first:last, None] & on_map[:, None, :]
        return both_on_map & (torch.maximum(down, right) <= side // 2)


# From a layer and a range of queries to which tokens they may see, (windows, queries, tokens), True = seen.
See = Callable[[Layer, int, int], Tensor]
