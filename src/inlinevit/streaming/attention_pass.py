"""Attention as a pass over the rows of a map, in torch."""

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ..layers import BaseAttention
from ..layers.angular_attention import AngularAttention
from ..layers.block import Block
from ..layers.focused_attention import FocusedAttention
from ..ops.key_value_state import KeyValueState
from ..ops.local import convolve_values
from ..ops.windows import merge_heads
from ..parallel.collectives import SequenceGroup, reduce_state
from .head_group import CHUNK, HeadGroup, V
from .passes import Chunk, Pass
from .states import merge_states


class AttentionPass(Pass):
    """norm → attention → add and, unless it has a convolution, norm → MLP → add.

    Args:
        block: The block.
        feat_size: (H, W) of the map.
        num_prefix_tokens: Tokens before the map.
    """

    # Copies of a chunk that exist at once: its tokens, their norm, values, convolution, attention, and the new tokens.
    copies = 9

    def __init__(self, block: Block, feat_size: tuple[int, int], num_prefix_tokens: int) -> None:
        self.block, self.attn = block, cast(BaseAttention, block.attn)
        self.groups = [HeadGroup(self.attn, windows, num_prefix_tokens) for windows in self.attn.layout(feat_size)]
        low = [group.windows for group in self.groups if not group.is_tall]
        self.row_height = max((windows.window_height for windows in low), default=1)
        self.shift = max((windows.shift_up for windows in low), default=0)
        self.halo = max(group.halo for group in self.groups)
        self.needs_summary = any(group.is_tall for group in self.groups)
        # Focused queries and keys, their positions, or values for a convolution along the tokens.
        more = 3 if isinstance(self.attn, AngularAttention | FocusedAttention) else 0
        # The gate, and its product; a second convolution, which is added.
        more += (2 if self.attn.gate is not None else 0) + (1 if self.halo > 1 else 0)
        self.token_floats = (self.copies + more) * self.attn.dim
        self.summary_height = max(
            cast(Any, self.attn).reduce.stride if group.is_reduced else 1 for group in self.groups
        )

    def start_summary(self) -> Any:
        """See Pass.start_summary: a state for each head group whose windows are as high as the map."""
        return [group.start() if group.is_tall else None for group in self.groups]

    def add(self, summary: Any, rows: Tensor, mask: Tensor | None, top: int | None) -> None:
        """See Pass.add; top is None for prefix tokens."""
        normed = self.block.norm1(rows)
        for group, state in zip(self.groups, summary, strict=True):
            if state is not None:
                group.add(state, normed, rows if self.block.kernels_before_norm else normed, mask, top)

    def add_prefix(self, summary: Any, prefix: Tensor) -> None:
        """Add prefix tokens (prefix, channels) to a summary, before the rows of the map."""
        self.add(summary, prefix.unsqueeze(0), None, None)

    def reduce(self, summary: Any, group: SequenceGroup) -> Any:
        """See Pass.reduce."""
        for state in summary:
            if state is not None:
                state.reduce(group)
        return summary

    def finish(self, summary: Any) -> Any:
        """See Pass.finish: the states, and the kernels of the local residual."""
        return [
            (state, None if state is None else group.local_kernels(state))
            for group, state in zip(self.groups, summary, strict=True)
        ]

    def apply(self, chunk: Chunk, finished: Any) -> Tensor:
        """See Pass.apply."""
        extended = chunk.extended()
        normed, outputs = self.block.norm1(extended), []
        for group, (state, taps) in zip(self.groups, finished, strict=True):
            if state is not None:
                outputs.append(group.attend_tall(chunk, normed, state, taps))
            else:
                own = normed if len(extended) == len(chunk.tokens) else chunk.own_rows(normed)
                outputs.append(group.attend_low(chunk.without_halo(), own, self.own_kernel_tokens(chunk, own)))
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
        return self.add_branches(chunk.tokens, self.attn.apply_gate(out, chunk.own_rows(normed)))

    def own_kernel_tokens(self, chunk: Chunk, normed: Tensor) -> Tensor:
        """Return the tokens whose mean makes the kernels of the local residual."""
        return chunk.tokens if self.block.kernels_before_norm else normed

    def apply_prefix(self, prefix: Tensor, finished: Any) -> Tensor:
        """See Pass.apply_prefix: they have no convolution, except along the sequence of tokens."""
        (group,), ((state, _),) = self.groups, finished
        assert state is not None
        normed = self.block.norm1(prefix)
        out = self.attn.apply_gate(merge_heads(group.attend_prefix(normed, state)).squeeze(0), normed)
        return self.add_branches(prefix.unsqueeze(0), out.unsqueeze(0)).squeeze(0)

    def add_branches(self, x: Tensor, attended: Tensor) -> Tensor:
        """Return rows after the output projection and, unless it has a convolution, the MLP.

        Args:
            x: Rows before the block, (rows, width, channels).
            attended: Rows before the output projection, with their gate, as x.
        """
        block, out = self.block, torch.empty_like(x)
        step = max(1, CHUNK // block.hidden_dim)
        flat = (rows.reshape(-1, x.shape[2]).split(step) for rows in (x, attended, out))
        for before, attention, target in zip(*flat, strict=True):
            torch.add(before, self.attn.proj(attention), out=target)
            if not block.conv_mlp:
                target.add_(block.mlp(block.norm2(target)))
        return out


class FoldedPass(AttentionPass):
    """A pass of InLine attention over the whole map, φ = identity, without queries and keys (InLineAttention).

    The summary is the covariance of the normed tokens.
    """

    def start_summary(self) -> Any:
        """See Pass.start_summary."""
        return {}

    def add(self, summary: Any, rows: Tensor, mask: Tensor | None, top: int | None) -> None:
        """See AttentionPass.add."""
        normed = self.block.norm1(rows).flatten(0, 1)
        tokens = rows.reshape(1, *normed.shape) if self.block.kernels_before_norm else None
        mask = None if mask is None else mask.reshape(1, -1)
        added = KeyValueState.from_tokens(normed[None, None], normed[None, None], tokens, mask)
        summary["state"] = merge_states(summary.get("state"), added)

    def reduce(self, summary: Any, group: SequenceGroup) -> Any:
        """See Pass.reduce."""
        dim = self.attn.dim
        tokens = dim if self.block.kernels_before_norm else None
        empty = KeyValueState.empty(1, 1, dim, channels=tokens, dtype=torch.float64)
        return {"state": reduce_state(summary.get("state", empty), group)}

    def finish(self, summary: Any) -> Any:
        """See Pass.finish."""
        (group,), attn = self.groups, self.attn
        state: KeyValueState = summary["state"]
        heads, head_dim, dim = attn.num_heads, attn.head_dim, attn.dim
        weight_q, weight_k, weight_v = attn.qkv.weight.double().view(3, heads, head_dim, dim).unbind(0)
        # (heads, head_dim, head_dim), divided by the number of tokens and multiplied by the scale
        covariance = weight_k @ state.scaled_covariance(head_dim**-0.5)[0] @ weight_v.transpose(1, 2)
        fold = (weight_q.transpose(1, 2) @ covariance).transpose(0, 1).flatten(1)
        constant = weight_v.flatten(0, 1) @ state.k_mean.flatten()
        if attn.qkv.bias is not None:
            bias_q, _, bias_v = attn.qkv.bias.double().view(3, heads, 1, head_dim).unbind(0)
            constant = constant + bias_v.flatten() + (bias_q @ covariance).flatten()
        taps = None
        if group.local_residual is not None:
            mean = state.k_mean.flatten(1) if state.token_mean is None else state.token_mean
            taps = group.local_residual(mean.float(), group.windows)
        return Folded(fold.float(), constant.float(), taps)

    def apply(self, chunk: Chunk, finished: Any) -> Tensor:
        """See Pass.apply."""
        (group,) = self.groups
        normed = self.block.norm1(chunk.extended())
        own = chunk.own_rows(normed)
        out = torch.addmm(finished.constant, own.flatten(0, 1), finished.fold).view_as(own)
        if finished.taps is not None or group.static is not None:
            (v,) = group.project(normed, V)
            if chunk.mask is not None:
                v = v.masked_fill(~chunk.mask.unsqueeze(2), 0.0)
            out += chunk.own_rows(convolve_values(v.unsqueeze(0), finished.taps, group.static).squeeze(0))
        return self.add_branches(chunk.tokens, self.attn.apply_gate(out, own))

    def apply_prefix(self, prefix: Tensor, finished: Any) -> Tensor:
        """See Pass.apply_prefix."""
        normed = self.block.norm1(prefix)
        out = self.attn.apply_gate(torch.addmm(finished.constant, normed, finished.fold), normed)
        return self.add_branches(prefix.unsqueeze(0), out.unsqueeze(0)).squeeze(0)


class Folded(NamedTuple):
    """InLine attention to all tokens, as a function of a normed token: x·fold + constant.

    Attributes:
        fold: (channels, channels).
        constant: (channels,).
        taps: Kernels of the local residual, (1, channels, 9), if there is one.
    """

    fold: Tensor
    constant: Tensor
    taps: Tensor | None
