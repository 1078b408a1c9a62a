"""Softmax attention as a module: with relative positions for Swin, with reduced keys and values for PVT."""

from typing import Any

import torch
from timm.layers import register_notrace_module, trunc_normal_
from torch import Tensor, nn
from torch.nn import functional as F

from .. import ops
from ..ops.windows import Windows, shift_mask, window_mask
from ._cache import TensorCache, can_cache
from .base_attention import BaseAttention, HeadGroup
from .embed import ConvEmbed
from .layouts import WholeMap

# Masks do not depend on weights: they are computed once for each way to split a map, for all models.
MASK_CACHE = TensorCache(max_entries=16, max_bytes=2**25)


@register_notrace_module
class SoftmaxAttention(BaseAttention):
    """Softmax attention.

    Args:
        dim: Channels.
        num_heads: Heads; they divide the channels.
        relative_window: Learn a bias for each relative position in a window of this size (Swin); 0 = none.
        sr_ratio: Take keys and values from the map made this many times smaller, by a strided convolution (PVT).
        unit_queries: Normalise queries to unit length. Attention is then not injective; for experiments.
        **kwargs: Arguments of BaseAttention.
    """

    row_wise = True
    attn_kwargs_names = ("unit_queries",)
    no_weight_decay_names = ("relative_position_bias_table",)

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        relative_window: int = 0,
        sr_ratio: int = 1,
        unit_queries: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(dim, num_heads, **kwargs)
        windowed = relative_window > 0 or not isinstance(self.layout, WholeMap)
        if sr_ratio > 1 and (windowed or self.lepe is not None or self.rope or self.num_prefix_tokens):
            raise ValueError(
                f"sr_ratio={sr_ratio} works on the whole map, without windows, lepe, rope, relative_window and prefix "
                "tokens: leave them out, or use sr_ratio=1"
            )
        factory: dict[str, Any] = {"device": kwargs.get("device"), "dtype": kwargs.get("dtype")}
        self.relative_window = relative_window
        self.unit_queries = unit_queries
        self.relative_position_bias_table: nn.Parameter | None = None
        if relative_window > 0:
            table = torch.empty((2 * relative_window - 1) ** 2, num_heads, **factory)
            self.relative_position_bias_table = nn.Parameter(table)
        self.reduce = ConvEmbed(dim, dim, kernel=sr_ratio, stride=sr_ratio, **factory) if sr_ratio > 1 else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the biases of relative positions; child modules have their own reset_parameters."""
        if self.relative_position_bias_table is not None:
            trunc_normal_(self.relative_position_bias_table, std=0.02)

    def partition(self, x: Tensor, feat_size: tuple[int, int]) -> list[HeadGroup]:
        """See BaseAttention.partition. With sr_ratio > 1, keys and values are tokens of the reduced map."""
        if self.reduce is None:
            return super().partition(x, feat_size)
        batch, tokens, dim = x.shape
        if tokens > feat_size[0] * feat_size[1]:
            raise ValueError("prefix tokens have no place on a reduced map: use sr_ratio=1 where they are")
        reduced = self.reduce(x.view(batch, feat_size[0], feat_size[1], dim).permute(0, 3, 1, 2)).flatten(1, 2)
        weight, bias = self.qkv.weight, self.qkv.bias
        q = F.linear(x, weight[:dim], None if bias is None else bias[:dim])
        kv = F.linear(reduced, weight[dim:], None if bias is None else bias[dim:])
        q = q.view(batch, tokens, self.num_heads, self.head_dim).transpose(1, 2)
        k, v = kv.view(batch, reduced.shape[1], 2, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        return [HeadGroup(q, k, v, self.layout(feat_size)[0])]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, windows: Windows) -> Tensor:
        """See BaseAttention.attend. Padding and tokens from across the border of a shifted map are masked."""
        return ops.softmax_attention(self.map_queries(q), k, v, bias=self.score_bias(k, windows))

    def attention_weights(
        self, q: Tensor, k: Tensor, v: Tensor, windows: Windows, attn_mask: Tensor | None = None, first: int = 0
    ) -> Tensor:
        """See BaseAttention.attention_weights."""
        bias = self.score_bias(k, windows)
        if bias is not None:
            bias = bias[:, :, first : first + q.shape[2]]
        return ops.softmax_weights(self.map_queries(q), k, bias=bias, attn_mask=attn_mask)

    def map_queries(self, q: Tensor) -> Tensor:
        """Return the queries as they enter the scores."""
        return F.normalize(q, dim=-1) if self.unit_queries else q

    def score_bias(self, k: Tensor, windows: Windows) -> Tensor | None:
        """Return the bias of the scores for keys (batch · windows, heads, tokens, head_dim); -inf where masked."""
        # Keys of a reduced map have neither positions nor windows.
        if self.reduce is not None:
            return None
        bias = self.relative_position_bias(windows)
        if bias is not None and k.shape[2] != bias.shape[2]:
            raise ValueError("prefix tokens have no relative position: use relative_window=0 where they are")
        masked = masked_pairs(windows, k.device)
        if masked is None:
            return bias
        # (windows, heads or 1, tokens, tokens), for each image
        bias = torch.zeros_like(masked, dtype=k.dtype) if bias is None else bias.to(k.dtype)
        return bias.masked_fill(masked, float("-inf")).repeat(k.shape[0] // masked.shape[0], 1, 1, 1)

    def relative_position_bias(self, windows: Windows) -> Tensor | None:
        """Return the bias of each pair of tokens in a window, (1, heads, tokens, tokens)."""
        table = self.relative_position_bias_table
        if table is None:
            return None
        if max(windows.window_height, windows.window_width) > self.relative_window or windows.num_head_groups > 1:
            raise ValueError(
                f"relative_window={self.relative_window} has no positions for windows of "
                f"{windows.window_height}×{windows.window_width}: use square windows of at most this size"
            )
        # A window smaller than the table's (a map smaller than the window) uses the middle of the table.
        rows = relative_positions(windows.window_height, table.device) + self.relative_window - 1
        columns = relative_positions(windows.window_width, table.device) + self.relative_window - 1
        # (rows, 1, rows, 1) and (1, columns, 1, columns): pairs of tokens, row by row
        index = rows[:, None, :, None] * (2 * self.relative_window - 1) + columns[None, :, None, :]
        tokens = windows.window_height * windows.window_width
        return table[index.reshape(-1)].view(tokens, tokens, -1).permute(2, 0, 1).unsqueeze(0)


def relative_positions(length: int, device: torch.device) -> Tensor:
    """Return the distance from token j to token i along one axis, (length, length)."""
    positions = torch.arange(length, device=device)
    return positions[:, None] - positions[None, :]


def masked_pairs(windows: Windows, device: torch.device) -> Tensor | None:
    """Return which tokens are masked for each query: (windows, 1, tokens, tokens), True = masked; None if none is."""
    if not can_cache(device):
        return compute_masked_pairs(windows, device)
    masked = MASK_CACHE.get((windows, device))
    if masked is None:
        # A mask that is computed in inference mode could not be used in training later.
        with torch.inference_mode(False):
            masked = compute_masked_pairs(windows, device)
        if masked is not None:
            MASK_CACHE.put((windows, device), masked)
    return masked


def compute_masked_pairs(windows: Windows, device: torch.device) -> Tensor | None:
    """Return which tokens are masked for each query: (windows, 1, tokens, tokens), True = masked; None if none is."""
    real, neighbours = window_mask(windows, device), shift_mask(windows, device)
    if real is None and neighbours is None:
        return None
    tokens = windows.window_height * windows.window_width
    visible = torch.ones(1, tokens, tokens, dtype=torch.bool, device=device)
    if real is not None:
        visible = visible & real[:, None, :]
    if neighbours is not None:
        visible = visible & neighbours
    # Every token attends to itself: otherwise a row of padding might attend to nothing and become NaN.
    return ~(visible | torch.eye(tokens, dtype=torch.bool, device=device)).unsqueeze(1)
