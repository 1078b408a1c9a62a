"""The data of one attention layer: queries, keys, values, and the N×N weights in chunks."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import isqrt

import torch
import torch.nn.functional as F
from torch import Tensor

# Values of Layer.places for tokens that are not on the map.
PREFIX = -1
PADDING = -2
# Elements of attention weights that are in memory at once.
CHUNK = 2**24
# From a range of queries and an attention mask to attention weights; see Layer.attention_weights.
WeightsFunction = Callable[[int, int, Tensor | None], Tensor]


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

    def taps(self, tokens: int, first: int, last: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield each tap of the kernels, the queries (relative to `first`) that it applies to, and their neighbours.

        A window has this number of tokens, including prefix tokens.
        """
        prefix, side = tokens - self.size[0] * self.size[1], isqrt(self.kernels.shape[-1])
        # The map is padded with zeros: count from 1.
        places = torch.arange(prefix + 1, tokens + 1, dtype=torch.float32, device=self.kernels.device)
        neighbours = F.unfold(places.view(1, 1, *self.size), side, padding=side // 2)[0].long() - 1
        for tap, row in enumerate(F.pad(neighbours, (prefix, 0), value=-1)[:, first:last]):
            (queries,) = torch.nonzero(row >= 0, as_tuple=True)
            yield tap, queries, row[queries]


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
        """Return the attention weights of queries (see attention_weights) plus those of the convolution.

        Kernels differ between the channels of a head: those of one channel are used, or by default their mean.
        """
        last = self.tokens if last is None else last
        weights = self.attention_weights(first, last)
        if self.convolution is None:
            return weights
        kernels = self.convolution.kernels
        taps = (kernels.mean(dim=2) if channel is None else kernels[:, :, channel]).to(weights.dtype)
        for tap, queries, neighbours in self.convolution.taps(self.tokens, first, last):
            weights[:, :, queries, neighbours] += taps[:, :, None, tap]
        return weights

    def output(self, mask_function: "MaskFunction | None" = None) -> Tensor:
        """Return the output (batch · windows, heads, tokens, width) before the projection, from explicit weights.

        By default, queries attend to all tokens. The convolution ignores tokens that they may not attend to, too.
        """
        found = []
        for first, last in self.chunks():
            attn_mask = None
            if mask_function is not None:
                attn_mask = mask_function(self, first, last).repeat(self.images, 1, 1).unsqueeze(1)
            out = self.attention_weights(first, last, attn_mask) @ self.v.to(self.q.dtype)
            if self.convolution is not None:
                out = out + self._convolve(self.convolution, first, last, attn_mask)
            found.append(out)
        return torch.cat(found, dim=2)

    def _convolve(self, convolution: Convolution, first: int, last: int, attn_mask: Tensor | None) -> Tensor:
        """Return the convolution of the values at some of the queries, over the neighbours in the mask."""
        out = torch.zeros_like(self.v[:, :, first:last])
        for tap, queries, neighbours in convolution.taps(self.tokens, first, last):
            values = self.v[:, :, neighbours] * convolution.kernels[:, :, None, :, tap].to(out.dtype)
            if attn_mask is not None:
                values = values * attn_mask[:, :, queries, neighbours].unsqueeze(-1)
            out[:, :, queries] += values
        if convolution.bias is not None:
            prefix = self.tokens - convolution.size[0] * convolution.size[1]
            out[:, :, max(prefix - first, 0) :] += convolution.bias[:, None, :].to(out.dtype)
        return out

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Yield ranges of queries whose attention weights fit into memory."""
        step = max(1, CHUNK // (self.q.shape[0] * self.q.shape[1] * self.k.shape[2]))
        for first in range(0, self.tokens, step):
            yield first, min(first + step, self.tokens)

    def near(self, first: int, last: int, side: int) -> Tensor:
        """Return which tokens are in the side × side neighbourhood of a query, (windows, queries, tokens)."""
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
MaskFunction = Callable[[Layer, int, int], Tensor]
