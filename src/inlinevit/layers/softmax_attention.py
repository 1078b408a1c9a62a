"""Softmax attention as a module: with relative positions for Swin, with reduced keys and values for PVT."""

from typing import Any

import torch
from timm.layers import register_notrace_module, trunc_normal_
from torch import Tensor, nn
from torch.nn import functional as F

from .. import ops
from ._kept import KeptTensors, may_keep
from .embed import ConvEmbed
from .layouts import WholeMap, Windows, shift_mask, window_mask
from .token_mixer import Share, TokenMixer

# Masks do not depend on weights: they are made once for each way to cut a map, for all models.
KEPT_MASKS = KeptTensors(most=16, most_bytes=2**25)


@register_notrace_module
class SoftmaxAttention(TokenMixer):
    """Softmax attention.

    Args:
        dim: Channels.
        num_heads: Heads; they divide the channels.
        relative_window: Learn a bias for each relative position in a window of this size (Swin); 0 = none.
        reduction: Take keys and values from the map made this many times smaller, by a strided convolution (PVT).
        unit_queries: Give queries unit length first. The map is not injective; this is an experiment.
        **options: Those of TokenMixer.
    """

    own_options = ("unit_queries",)

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        relative_window: int = 0,
        reduction: int = 1,
        unit_queries: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(dim, num_heads, **options)
        windowed = relative_window > 0 or not isinstance(self.layout, WholeMap)
        if reduction > 1 and (windowed or self.lepe is not None or self.num_prefix_tokens > 0):
            raise ValueError(
                f"reduction={reduction} works on the whole map, without windows, lepe, relative_window and prefix "
                "tokens: leave them out, or use reduction=1"
            )
        factory: dict[str, Any] = {"device": options.get("device"), "dtype": options.get("dtype")}
        self.relative_window = relative_window
        self.unit_queries = unit_queries
        self.relative_position_bias_table: nn.Parameter | None = None
        if relative_window > 0:
            table = torch.empty((2 * relative_window - 1) ** 2, num_heads, **factory)
            self.relative_position_bias_table = nn.Parameter(table)
        self.reduce = ConvEmbed(dim, dim, kernel=reduction, stride=reduction, **factory) if reduction > 1 else None
        self.reset_parameters()

    @torch.jit.ignore
    def reset_parameters(self) -> None:
        """Draw the biases of relative positions anew; the layers within have a reset of their own."""
        if self.relative_position_bias_table is not None:
            trunc_normal_(self.relative_position_bias_table, std=0.02)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, windows: Windows) -> Tensor:
        """See TokenMixer.mix. Neither padding nor tokens from beyond the seam of a shifted window are seen."""
        return ops.softmax_attention(self.map_queries(q), k, v, bias=self.score_bias(q, windows))

    @torch.jit.unused
    def rows(
        self, q: Tensor, k: Tensor, v: Tensor, windows: Windows, seen: Tensor | None = None, first: int = 0
    ) -> Tensor:
        """See TokenMixer.rows."""
        bias = None
        # Keys of a reduced map have neither positions nor windows.
        if self.reduce is None and (bias := self.score_bias(k, windows)) is not None:
            bias = bias[:, :, first : first + q.shape[2]]
        return ops.softmax_weights(self.map_queries(q), k, bias=bias, seen=seen)

    @torch.jit.unused
    def shares(self, x: Tensor, size: tuple[int, int], context: Tensor) -> list[Share]:
        """See TokenMixer.shares."""
        if self.reduce is None:
            return TokenMixer.shares(self, x, size, context)
        q, k, v = self.project_reduced(x, size)
        return [Share(q, k, v, self.layout(size)[0], None, None)]

    def map_queries(self, q: Tensor) -> Tensor:
        """The queries whose scores are taken."""
        return F.normalize(q, dim=-1) if self.unit_queries else q

    def score_bias(self, q: Tensor, windows: Windows) -> Tensor | None:
        """What is added to the scores of queries (batch · windows, heads, tokens, width): positions, -inf if hidden."""
        bias = self.relative_position_bias(windows)
        if bias is not None and q.shape[2] != bias.shape[2]:
            raise ValueError("prefix tokens have no relative position: use relative_window=0 where they are")
        hidden = hidden_pairs(windows, q.device)
        if hidden is None:
            return bias
        # (windows, heads or 1, tokens, tokens), for each image
        bias = torch.zeros_like(hidden, dtype=q.dtype) if bias is None else bias.to(q.dtype)
        return bias.masked_fill(hidden, float("-inf")).repeat(q.shape[0] // hidden.shape[0], 1, 1, 1)

    def attend(self, x: Tensor, size: tuple[int, int], context: Tensor) -> Tensor:
        """See TokenMixer.attend."""
        return self.attend_windows(x, size, context) if self.reduce is None else self.attend_reduced(x, size)

    def attend_reduced(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        """Attention of all tokens to the tokens of the reduced map."""
        q, k, v = self.project_reduced(x, size)
        return ops.softmax_attention(self.map_queries(q), k, v).transpose(1, 2).reshape(x.shape)

    def project_reduced(self, x: Tensor, size: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (batch, heads, tokens, width), keys and values (batch, heads, tokens of the reduced map, width)."""
        assert self.reduce is not None
        batch, tokens, dim = x.shape
        if tokens > size[0] * size[1]:
            raise ValueError("prefix tokens have no place on a reduced map: use reduction=1 where they are")
        reduced = self.reduce(x.view(batch, size[0], size[1], dim).permute(0, 3, 1, 2)).flatten(1, 2)
        weight, bias = self.qkv.weight, self.qkv.bias
        q = F.linear(x, weight[:dim], None if bias is None else bias[:dim])
        kv = F.linear(reduced, weight[dim:], None if bias is None else bias[dim:])
        q = q.view(batch, tokens, self.num_heads, self.head_dim).transpose(1, 2)
        k, v = kv.view(batch, reduced.shape[1], 2, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        return q, k, v

    def relative_position_bias(self, windows: Windows) -> Tensor | None:
        """The bias of each pair of tokens in a window, (1, heads, tokens, tokens)."""
        table = self.relative_position_bias_table
        if table is None:
            return None
        if max(windows.height, windows.width) > self.relative_window or windows.shares > 1:
            raise ValueError(
                f"relative_window={self.relative_window} does not hold the positions of windows of "
                f"{windows.height}×{windows.width}: use square windows of at most this size"
            )
        # A window smaller than the table's (a map smaller than the window) uses the middle of the table.
        rows = relative_positions(windows.height, table.device) + self.relative_window - 1
        columns = relative_positions(windows.width, table.device) + self.relative_window - 1
        # (rows, 1, rows, 1) and (1, columns, 1, columns): pairs of tokens, row by row
        index = rows[:, None, :, None] * (2 * self.relative_window - 1) + columns[None, :, None, :]
        tokens = windows.height * windows.width
        return table[index.reshape(-1)].view(tokens, tokens, -1).permute(2, 0, 1).unsqueeze(0)


def relative_positions(length: int, device: torch.device) -> Tensor:
    """How far token i lies behind token j, along one axis: (length, length)."""
    positions = torch.arange(length, device=device)
    return positions[:, None] - positions[None, :]


def hidden_pairs(windows: Windows, device: torch.device) -> Tensor | None:
    """Which tokens a query must not see: (windows, 1, tokens, tokens), True = hidden; None if it sees all."""
    if torch.jit.is_scripting():
        return find_hidden_pairs(windows, device)
    if not may_keep(device):
        return find_hidden_pairs(windows, device)
    hidden = KEPT_MASKS.get((windows, device))
    if hidden is None:
        # A mask that was made in inference mode could not be used in training later.
        with torch.inference_mode(False):
            hidden = find_hidden_pairs(windows, device)
        if hidden is not None:
            KEPT_MASKS.keep((windows, device), hidden)
    return hidden


def find_hidden_pairs(windows: Windows, device: torch.device) -> Tensor | None:
    """Which tokens a query must not see: (windows, 1, tokens, tokens), True = hidden; None if it sees all."""
    real, neighbours = window_mask(windows, device), shift_mask(windows, device)
    if real is None and neighbours is None:
        return None
    tokens = windows.height * windows.width
    seen = torch.ones(1, tokens, tokens, dtype=torch.bool, device=device)
    if real is not None:
        seen = seen & real[:, None, :]
    if neighbours is not None:
        seen = seen & neighbours
    # Every token sees itself: without it, a row of padding might see nothing and turn to NaN.
    return ~(seen | torch.eye(tokens, dtype=torch.bool, device=device)).unsqueeze(1)
