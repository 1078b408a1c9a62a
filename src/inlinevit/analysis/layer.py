"""The data of one attention layer: queries, keys, values, and the N×N weights in chunks."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

# Values of Layer.places for tokens that are not on the map.
PREFIX = -1
PADDING = -2
# Elements of attention weights that are in memory at once.
CHUNK = 2**24


class WeightsFunction(Protocol):
    """From a range of queries and an attention mask to attention weights; see Layer.attention_weights."""

    def __call__(self, first: int, last: int, attn_mask: Tensor | None) -> Tensor: ...


@dataclass
class Convolution:
    """A depthwise convolution of the values that a layer adds to the map, such as InLine's local residual.

    Attributes:
        kernels: (batch · windows, heads, width, side · side), row by row.
        bias: (heads, width), or None.
        size: (H, W) of the windows.
    """

    kernels: Tensor
    bias: Tensor | None
    size: tuple[int, int]

    @property
    def side(self) -> int:
        """Side of the kernels."""
        return int(self.kernels.shape[-1] ** 0.5)

    def neighbours(self, tokens: int) -> Tensor:
        """Return which token each tap of each token's kernel is applied to, (side · side, tokens); -1 = none.

        Args:
            tokens: Tokens of a window, including prefix tokens.
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
    """One attention layer, or one of its head groups.

    The first dimension of tensors is batch · windows; the windows of an image are consecutive.

    Attributes:
        name: Name of the attention in the model; with the head group, if there are several.
        attention: The kind of attention, such as "softmax".
        size: (H, W) of the map.
        q: Queries (batch · windows, heads, tokens, width).
        k: Keys (batch · windows, heads, tokens, width).
        v: Values, as k.
        places: Where on the map the tokens of a window are, (windows, tokens): row · W + column, PREFIX or PADDING.
        sees_map: Whether keys are the tokens of the map. Keys of a reduced map (PVT) are not: they have no places.
        weights_function: Computes `attention_weights`.
        convolution: What is added to the attention, if there is any.
    """

    name: str
    attention: str
    size: tuple[int, int]
    q: Tensor
    k: Tensor
    v: Tensor
    places: Tensor
    sees_map: bool
    weights_function: WeightsFunction
    convolution: Convolution | None = None

    @property
    def windows(self) -> int:
        """Windows per image."""
        return self.places.shape[0]

    @property
    def images(self) -> int:
        """Images in the batch."""
        return self.q.shape[0] // self.windows

    @property
    def tokens(self) -> int:
        """Queries per window."""
        return self.q.shape[2]

    @property
    def is_real(self) -> Tensor:
        """Which tokens are not padding, (windows, tokens)."""
        return self.places != PADDING

    def attention_weights(self, first: int = 0, last: int | None = None, attn_mask: Tensor | None = None) -> Tensor:
        """Return the attention weights of some of the queries.

        Args:
            first: The first query of a window.
            last: The query after the last; all by default.
            attn_mask: Broadcastable to (batch · windows, heads, queries, tokens), True = the query may attend to the
                token; all by default.

        Returns:
            (batch · windows, heads, queries, tokens): `attention_weights() @ v` is the output of attention.
        """
        return self.weights_function(first, self.tokens if last is None else last, attn_mask)

    def total_weights(self, first: int = 0, last: int | None = None, channel: int | None = None) -> Tensor:
        """Return the attention weights plus those of the convolution.

        Args:
            first: See attention_weights.
            last: See attention_weights.
            channel: The channel of each head. Kernels differ between channels; by default, their mean is used.
        """
        last = self.tokens if last is None else last
        weights = self.attention_weights(first, last)
        if self.convolution is None:
            return weights
        kernels = self.convolution.kernels
        taps = (kernels.mean(dim=2) if channel is None else kernels[:, :, channel]).to(weights.dtype)
        for tap, neighbours in enumerate(self.convolution.neighbours(self.tokens)[:, first:last]):
            (queries,) = torch.nonzero(neighbours >= 0, as_tuple=True)
            weights[:, :, queries, neighbours[queries]] += taps[:, :, None, tap]
        return weights

    def output(self, see: "See | None" = None) -> Tensor:
        """Return the output of the layer before its projection, from explicit weights and kernels.

        Args:
            see: Which tokens queries may attend to; all by default. The convolution ignores the others, too.

        Returns:
            (batch · windows, heads, tokens, width).
        """
        found = []
        for first, last in self.chunks():
            attn_mask = None if see is None else see(self, first, last).repeat(self.images, 1, 1).unsqueeze(1)
            out = self.attention_weights(first, last, attn_mask) @ self.v.to(self.q.dtype)
            if self.convolution is not None:
                out = out + self._convolve(first, last, attn_mask)
            found.append(out)
        return torch.cat(found, dim=2)

    def _convolve(self, first: int, last: int, attn_mask: Tensor | None) -> Tensor:
        """Return the convolution of the values at some of the queries, over the neighbours in the mask."""
        assert self.convolution is not None
        out = torch.zeros_like(self.v[:, :, first:last])
        for tap, neighbours in enumerate(self.convolution.neighbours(self.tokens)[:, first:last]):
            (queries,) = torch.nonzero(neighbours >= 0, as_tuple=True)
            values = self.v[:, :, neighbours[queries]] * self.convolution.kernels[:, :, None, :, tap].to(out.dtype)
            if attn_mask is not None:
                values = values * attn_mask[:, :, queries, neighbours[queries]].unsqueeze(-1).to(out.dtype)
            out[:, :, queries] += values
        if self.convolution.bias is not None:
            height, width = self.convolution.size
            is_map = torch.arange(first, last, device=out.device) >= self.tokens - height * width
            out += self.convolution.bias[:, None, :].to(out.dtype) * is_map[:, None].to(out.dtype)
        return out

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Yield ranges of queries whose attention weights fit into memory."""
        step = max(1, CHUNK // (self.q.shape[0] * self.q.shape[1] * self.k.shape[2]))
        for first in range(0, self.tokens, step):
            yield first, min(first + step, self.tokens)

    def near(self, first: int, last: int, side: int) -> Tensor:
        """Return which tokens are in the neighbourhood of a query on the map, (windows, queries, tokens).

        Args:
            first: See attention_weights.
            last: See attention_weights.
            side: Side length of the neighbourhood, odd; the query is its centre.
        """
        if not self.sees_map:
            raise ValueError(f"the keys of {self.name} belong to a reduced map: they are in no query's neighbourhood")
        if side < 1 or side % 2 == 0:
            raise ValueError(f"the side of a neighbourhood is {side}: it should be odd, so that it has a centre")
        row, column, on_map = self.places // self.size[1], self.places % self.size[1], self.places >= 0
        down = (row[:, first:last, None] - row[:, None, :]).abs()
        right = (column[:, first:last, None] - column[:, None, :]).abs()
        both_on_map = on_map[:, first:last, None] & on_map[:, None, :]
        return both_on_map & (torch.maximum(down, right) <= side // 2)


# From a layer and a range of queries to an attention mask (windows, queries, tokens), True = visible.
See = Callable[[Layer, int, int], Tensor]
