"""Attention whose tokens are rows of a map in several processes.

- InLine and linear attention in windows of the map's full height, such as the map itself or vertical stripes: each
  process summarizes its tokens, and the summaries are merged (reduce_state).
- Softmax attention over the whole map: keys and values are gathered in all processes.
- Other windows: each window is computed by one process, which gets the projected tokens and returns the outputs.

Convolutions of the values get the rows next to those of a process, in windows of full height from other processes.
"""

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from .. import ops
from ..layers import BaseAttention, EnhancedAttention, InLineAttention, LinearAttention, SoftmaxAttention
from ..layers.base_attention import join_head_groups
from ..layers.feature_map import FeatureMap
from ..layers.softmax_attention import masked_pairs
from ..ops import KeyValueState
from ..ops._common import autocast_off, default_scale, promote
from ..ops.feature_maps import apply_feature_map
from ..ops.linear import EPSILON
from ..ops.local import add_convolution, convolve_values
from ..ops.windows import (
    Windows,
    covers_map,
    merge_heads,
    padding_mask,
    partition_heads,
    window_mask,
    window_partition,
    window_reverse,
)
from ..utils.validation import require
from .collectives import Exchange, exchange, gather_items, plan_exchange, reduce_state, return_items
from .rows import LocalSize, add_halo


class OwnWindows(NamedTuple):
    """The windows that a process computes.

    Attributes:
        first: Index of the first one among all windows of the map.
        end: Index after the last one.
        plan: How their tokens are exchanged.
        places: For each token of the windows, its index among the received tokens; padding has the index after the last
            one. (windows, tokens).
        order: For each received token, its place among all tokens of the windows.
    """

    first: int
    end: int
    plan: Exchange
    places: Tensor
    order: Tensor


@lru_cache(maxsize=32)
def plan_windows(windows: Windows, bounds: tuple[int, ...], rank: int) -> OwnWindows:
    """Return the windows of a process, and how it gets their tokens; processes have equal numbers of windows.

    Args:
        windows: How the map is split into windows.
        bounds: Process i holds the tokens from bounds[i] to bounds[i + 1], row by row.
        rank: This process.
    """
    numbers = torch.arange(1, bounds[-1] + 1).view(1, -1, 1)
    # The index of each token of each window; -1 = padding.
    tokens = window_partition(numbers, windows).squeeze(-1) - 1
    processes = len(bounds) - 1
    edges = [len(tokens) * process // processes for process in range(processes + 1)]
    parts = [tokens[start:end] for start, end in pairwise(edges)]
    wanted = [part[part >= 0].sort().values for part in parts]
    own, items = parts[rank].contiguous(), wanted[rank]
    places = torch.where(own >= 0, torch.searchsorted(items, own.clamp(min=0)), len(items))
    real = (own >= 0).flatten().nonzero().squeeze(1)
    order = real[own.flatten()[real].argsort()]
    return OwnWindows(edges[rank], edges[rank + 1], plan_exchange(bounds, wanted, rank), places, order)


class SequenceParallelAttention(BaseAttention):
    """The parts that all kinds of attention share; a kind defines `attend_rows` and `attend_windows`.

    With a `feat_size` that is not a LocalSize, they are as the classes that they are derived from.
    """

    supports_gate = supports_rope = True

    def forward(self, x: Tensor, feat_size: tuple[int, int], kernel_tokens: Tensor | None = None) -> Tensor:
        """See BaseAttention.forward: x has the prefix tokens, and the rows of this process."""
        if not isinstance(feat_size, LocalSize):
            return super().forward(x, feat_size, kernel_tokens)
        self.check_tokens(x, feat_size, kernel_tokens)
        kernel_tokens = x if kernel_tokens is None else kernel_tokens
        windows_by_group = self.layout(feat_size.map_size)
        if x.shape[1] > feat_size[0] * feat_size[1]:
            require(all(map(covers_map, windows_by_group)), "prefix tokens are in no window: use the whole map")
        groups = [self.attend_group(x, windows, feat_size, kernel_tokens) for windows in windows_by_group]
        return self.project_out(join_head_groups(groups), x)

    def attend_group(self, x: Tensor, windows: Windows, size: LocalSize, kernel_tokens: Tensor) -> Tensor:
        """Compute one head group: (batch, prefix + tokens, dim) to (batch, prefix + tokens, channels of the group)."""
        if self.splits_rows(windows):
            return self.attend_rows(x, windows, size, kernel_tokens)
        return self.attend_own_windows(x, windows, size, kernel_tokens)

    def splits_rows(self, windows: Windows) -> bool:
        """Return whether windows are computed by all processes together, each having rows of them."""
        raise NotImplementedError

    def attend_rows(self, x: Tensor, windows: Windows, size: LocalSize, kernel_tokens: Tensor) -> Tensor:
        """Compute windows of which each process has rows; see attend_group."""
        raise NotImplementedError

    def attend_windows(self, q: Tensor, k: Tensor, v: Tensor, windows: Windows, first: int, end: int) -> Tensor:
        """Compute the windows from `first` to `end` of each image, as BaseAttention.attend computes all of them."""
        raise NotImplementedError

    def has_local_residual(self) -> bool:
        """Return whether kernels are made from the means of windows."""
        return False

    def kernels_from_means(self, means: Tensor, windows: Windows) -> Tensor | None:
        """Return the kernels of the local residual from the means of windows (batch · windows, channels)."""
        return None

    def attend_own_windows(self, x: Tensor, windows: Windows, size: LocalSize, kernel_tokens: Tensor) -> Tensor:
        """Compute windows of which each is computed by one process; see attend_group."""
        batch, tokens, _ = x.shape
        heads, rows = self.num_heads // windows.num_head_groups, size.rows
        own = plan_windows(windows, tuple(bound * size[1] for bound in rows.bounds), rows.group.rank)
        packed = self.project_qkv(x, size, rows.start).view(batch, tokens, 3, self.num_heads, self.head_dim)
        packed = packed[:, :, :, windows.head_group * heads : (windows.head_group + 1) * heads].flatten(2)
        channels = heads * self.head_dim
        if self.has_local_residual():
            # x̄ of a window needs its tokens, too.
            packed = torch.cat([packed, group_channels(kernel_tokens, windows).to(packed.dtype)], dim=2)
        received = exchange(packed, own.plan, rows.group)
        # Padding is zero.
        received = torch.cat([received, received.new_zeros(batch, 1, received.shape[2])], dim=1)
        received = received[:, own.places.to(x.device)].flatten(0, 1)
        q, k, v = received[..., : 3 * channels].unflatten(2, (3, heads, self.head_dim)).permute(2, 0, 3, 1, 4).unbind(0)
        out = merge_heads(self.attend_windows(q, k, v, windows, own.first, own.end))
        dynamic = None
        if received.shape[2] > 3 * channels:
            real = (own.places < len(own.order)).sum(dim=1).to(x.device).repeat(batch)
            means = promote(received[..., 3 * channels :]).sum(dim=1) / real[:, None]
            dynamic = self.kernels_from_means(means.to(kernel_tokens.dtype), windows)
        out = add_convolution(out, v, dynamic, self.static_kernels(windows), windows)
        out = out.reshape(batch, -1, channels)[:, own.order.to(x.device)]
        return return_items(out, own.plan, rows.group)

    def add_halo_convolution(
        self, out: Tensor, v: Tensor, dynamic: Tensor | None, windows: Windows, size: LocalSize
    ) -> Tensor:
        """Add the convolutions of the values to rows of windows; arguments as of add_convolution, for these rows.

        Args:
            out: (batch · windows, prefix + tokens, channels).
            v: (batch · windows, heads, prefix + tokens, head_dim).
            dynamic: (batch · windows, channels, 9), if there are any.
            windows: Windows of the rows of this process, of their full height.
            size: The rows of this process.
        """
        static = self.static_kernels(windows)
        if dynamic is None and static is None:
            return out
        prefix = v.shape[2] - windows.window_height * windows.window_width
        maps = merge_heads(v)[:, prefix:].unflatten(1, (windows.window_height, windows.window_width))
        border = max(1, 0 if static is None else static[0].shape[2] // 2)
        maps = add_halo(promote(maps), size.rows, border, border)
        promoted = None if static is None else (promote(static[0]), promote(static[1]))
        with autocast_off(maps):
            added = convolve_values(maps, dynamic, promoted)[:, border:-border].flatten(1, 2).to(out.dtype)
        if prefix == 0:
            return out + added
        return torch.cat([out[:, :prefix], out[:, prefix:] + added], dim=1)


class StateAttention(SequenceParallelAttention):
    """Attention that needs of its keys and values only a KeyValueState, with a feature map φ."""

    feature_map: FeatureMap

    def splits_rows(self, windows: Windows) -> bool:
        """See SequenceParallelAttention.splits_rows: windows of the full height of the map."""
        return windows.window_height >= windows.map_height

    def attend_rows(self, x: Tensor, windows: Windows, size: LocalSize, kernel_tokens: Tensor) -> Tensor:
        """See SequenceParallelAttention.attend_rows."""
        local = windows._replace(map_height=size[0], window_height=size[0])
        q, k, v = partition_heads(self.project_qkv(x, size, size.rows.start), local, self.num_heads)
        tokens = None
        if self.has_local_residual():
            tokens = window_partition(group_channels(kernel_tokens, windows), local)
        # All processes have the prefix tokens; the first one counts them.
        skipped = 0 if size.rows.group.rank == 0 else x.shape[1] - size[0] * size[1]
        phi, affine, mask = self.feature_map.name, self.feature_map.affine(windows), padding_mask(k, local)
        with autocast_off(x):
            state = KeyValueState.from_tokens(
                k[:, :, skipped:],
                v[:, :, skipped:],
                None if tokens is None else tokens[:, skipped:],
                None if mask is None else mask[:, skipped:],
                phi,
                affine,
            )
            state = reduce_state(state, size.rows.group)
            out = merge_heads(self.attend_state(q, state, windows))
        dynamic = None
        if state.token_mean is not None:
            dynamic = self.kernels_from_means(state.token_mean.to(kernel_tokens.dtype), windows)
        return window_reverse(self.add_halo_convolution(out, v, dynamic, local, size), local)

    def attend_state(self, q: Tensor, state: KeyValueState, windows: Windows) -> Tensor:
        """Compute attention of queries (batch · windows, heads, queries, head_dim) from a state."""
        raise NotImplementedError


class SequenceParallelInLineAttention(StateAttention, InLineAttention):
    """InLine attention over rows in several processes."""

    def attend_state(self, q: Tensor, state: KeyValueState, windows: Windows) -> Tensor:
        """See StateAttention.attend_state."""
        return state.attend(q, feature_map=self.feature_map.name, affine=self.feature_map.affine(windows))

    def attend_windows(self, q: Tensor, k: Tensor, v: Tensor, windows: Windows, first: int, end: int) -> Tensor:
        """See SequenceParallelAttention.attend_windows."""
        mask = own_mask(k, windows, first, end)
        return ops.inline_attention(
            q,
            k,
            v,
            feature_map=self.feature_map.name,
            affine=self.feature_map.affine(windows),
            mask=mask,
            path="covariance",
        )

    def has_local_residual(self) -> bool:
        """See SequenceParallelAttention.has_local_residual."""
        return self.local_residual is not None

    def kernels_from_means(self, means: Tensor, windows: Windows) -> Tensor | None:
        """See SequenceParallelAttention.kernels_from_means."""
        return None if self.local_residual is None else self.local_residual(means, windows)


class SequenceParallelLinearAttention(StateAttention, LinearAttention):
    """Linear attention over rows in several processes."""

    def attend_state(self, q: Tensor, state: KeyValueState, windows: Windows) -> Tensor:
        """See StateAttention.attend_state: as ops.linear_attention."""
        queries = apply_feature_map(promote(q), self.feature_map.name, self.feature_map.affine(windows))
        queries = queries * default_scale(q, None)
        # The mean of φ(k)ᵀ·v.
        key_value = state.scaled_covariance(1.0) + state.k_mean.transpose(-2, -1) @ state.v_mean
        divisor = queries @ state.k_mean.transpose(-2, -1)
        return (queries @ key_value / (divisor + EPSILON / state.count.to(divisor.dtype))).to(q.dtype)

    def attend_windows(self, q: Tensor, k: Tensor, v: Tensor, windows: Windows, first: int, end: int) -> Tensor:
        """See SequenceParallelAttention.attend_windows."""
        phi, affine, mask = self.feature_map.name, self.feature_map.affine(windows), own_mask(k, windows, first, end)
        return ops.linear_attention(q, k, v, feature_map=phi, affine=affine, mask=mask)


class SequenceParallelEnhancedAttention(SequenceParallelLinearAttention, EnhancedAttention):
    """Enhanced linear attention over rows in several processes."""


class SequenceParallelSoftmaxAttention(SequenceParallelAttention, SoftmaxAttention):
    """Softmax attention over rows in several processes; over the whole map, all keys and values are gathered."""

    def splits_rows(self, windows: Windows) -> bool:
        """See SequenceParallelAttention.splits_rows."""
        return covers_map(windows)

    def attend_rows(self, x: Tensor, windows: Windows, size: LocalSize, kernel_tokens: Tensor) -> Tensor:
        """See SequenceParallelAttention.attend_rows."""
        height, width = size
        local, rows = windows._replace(map_height=height, window_height=height), size.rows
        if self.reduce is None:
            q, k, v = partition_heads(self.project_qkv(x, size, rows.start), local, self.num_heads)
        else:
            ratio = self.reduce.stride
            require(
                all(bound % ratio == 0 for bound in rows.bounds[:-1]),
                f"sr_ratio={ratio} reduces rows of two processes to one: use fewer processes, or a smaller ratio",
            )
            q, k, v, _ = self.partition(x, (height, width))[0]
            rows, width = rows.strided(ratio), -(-width // ratio)
        prefix = k.shape[2] - (rows.end - rows.start) * width
        # (batch, tokens, heads, 2 · head_dim)
        keys_values = torch.cat([k, v], dim=3).transpose(1, 2)
        bounds = [bound * width for bound in rows.bounds]
        gathered = gather_items(keys_values[:, prefix:], bounds, rows.group)
        gathered = torch.cat([keys_values[:, :prefix], gathered], dim=1).transpose(1, 2)
        all_keys, all_values = gathered.chunk(2, dim=3)
        bias = None if self.reduce is not None else self.relative_position_bias(windows)
        if bias is not None:
            bias = bias[:, :, size.rows.start * size[1] : size.rows.end * size[1]].to(q.dtype)
        out = merge_heads(ops.softmax_attention(self.map_queries(q), all_keys, all_values, bias=bias))
        # With reduced keys and values there is no convolution.
        return out if self.reduce is not None else self.add_halo_convolution(out, v, None, local, size)

    def attend_windows(self, q: Tensor, k: Tensor, v: Tensor, windows: Windows, first: int, end: int) -> Tensor:
        """See SequenceParallelAttention.attend_windows."""
        bias, masked = self.relative_position_bias(windows), masked_pairs(windows, k.device)
        if end == first:
            # This process computes no window. The backward pass goes through all inputs nevertheless, because all
            # processes take part in it; torch's kernel would leave them out.
            return q + k + v if bias is None else q + k + v + 0 * bias.sum()
        if masked is not None:
            # (windows, heads or 1, tokens, tokens), for each image
            masked = masked[first:end]
            bias = torch.zeros_like(masked, dtype=k.dtype) if bias is None else bias.to(k.dtype)
            bias = bias.masked_fill(masked, float("-inf")).repeat(k.shape[0] // (end - first), 1, 1, 1)
        return ops.softmax_attention(self.map_queries(q), k, v, bias=bias)


# By the class of the attention that is split.
PARALLEL_ATTENTIONS: dict[type[BaseAttention], type[SequenceParallelAttention]] = {
    InLineAttention: SequenceParallelInLineAttention,
    LinearAttention: SequenceParallelLinearAttention,
    EnhancedAttention: SequenceParallelEnhancedAttention,
    SoftmaxAttention: SequenceParallelSoftmaxAttention,
}


def group_channels(x: Tensor, windows: Windows) -> Tensor:
    """Return the channels of tokens (batch, tokens, channels) that belong to the head group of the windows."""
    channels = x.shape[2] // windows.num_head_groups
    return x[:, :, windows.head_group * channels : (windows.head_group + 1) * channels]


def own_mask(k: Tensor, windows: Windows, first: int, end: int) -> Tensor | None:
    """Return which tokens of the windows from `first` to `end` are real, (batch · windows, tokens)."""
    mask = window_mask(windows, k.device)
    return None if mask is None else mask[first:end].repeat(k.shape[0] // max(1, end - first), 1)
