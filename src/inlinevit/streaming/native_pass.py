"""Attention as a pass over the rows of a map, by the native kernels."""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .. import kernels
from ..layers.block import Block
from ..ops.key_value_state import KeyValueState
from ..parallel.collectives import SequenceGroup, reduce_state
from .attention_pass import AttentionPass
from .passes import Chunk


class PackedPass(AttentionPass):
    """A pass with packed weights.

    Args:
        block: See AttentionPass.
        feat_size: See AttentionPass.
        num_prefix_tokens: See AttentionPass.
        packed: The weights of the block.
    """

    def __init__(
        self, block: Block, feat_size: tuple[int, int], num_prefix_tokens: int, packed: kernels.PackedBlock
    ) -> None:
        super().__init__(block, feat_size, num_prefix_tokens)
        self.packed = packed


class NativePass(PackedPass):
    """A pass of InLine attention over the whole map, φ = identity, by the native kernels. Chunks are overwritten."""

    copies = 2

    @cached_property
    def native(self) -> kernels.StreamedBlock:
        """The kernels."""
        return kernels.StreamedBlock(self.packed)

    def start_summary(self) -> Any:
        """See Pass.start_summary."""
        return {}

    def add(self, summary: Any, rows: Tensor, mask: Tensor | None, top: int | None) -> None:
        """See AttentionPass.add."""
        added = self.native.summarize(rows.flatten(0, 1), None if mask is None else mask.flatten())
        summary["moments"] = summary["moments"].merge(added) if summary else added

    def reduce(self, summary: Any, group: SequenceGroup) -> Any:
        """See Pass.reduce."""
        if not summary:
            self.add(summary, torch.empty(0, 1, self.attn.dim), None, 0)
        moments: kernels.TokenMoments = summary["moments"]
        # Normed tokens in place of keys and values.
        mean = moments.mean.view(1, 1, 1, -1)
        state = KeyValueState(
            moments.count.long().view(1, 1, 1, 1),
            mean,
            mean,
            moments.covariance[None, None],
            moments.kernel_mean.unsqueeze(0),
        )
        state = reduce_state(state, group)
        assert state.token_mean is not None
        return {
            "moments": kernels.TokenMoments(
                state.count.double().view(()),
                state.k_mean.flatten(),
                state.token_mean.flatten(),
                state.covariance[0, 0],
            )
        }

    def finish(self, summary: Any) -> Any:
        """See Pass.finish."""
        return summary["moments"]

    def apply(self, chunk: Chunk, finished: Any) -> Tensor:
        """See Pass.apply."""
        tokens = chunk.tokens.flatten(0, 1)
        above, below = (rows[0] if len(rows) > 0 else None for rows in (chunk.above, chunk.below))
        masks: dict[str, Tensor | None] = {}
        if chunk.mask is not None:
            masks["mask"] = chunk.own_rows(chunk.mask).flatten()
            masks["mask_above"] = None if above is None else chunk.mask[0]
            masks["mask_below"] = None if below is None else chunk.mask[-1]
        self.native.apply(tokens, finished, chunk.tokens.shape[1], above, below, tokens, **masks)
        return chunk.tokens

    def apply_prefix(self, prefix: Tensor, finished: Any) -> Tensor:
        """See Pass.apply_prefix."""
        return self.native.apply_prefix(prefix, finished)


class NativeWindowPass(PackedPass):
    """A pass of attention within square windows, by the native kernels where a chunk has whole windows only."""

    def apply(self, chunk: Chunk, finished: Any) -> Tensor:
        """See Pass.apply."""
        (group,), tokens = self.groups, chunk.tokens
        if chunk.mask is not None or chunk.wrapped > 0 or len(tokens) < group.windows.window_height:
            return super().apply(chunk, finished)
        windows = group.windows._replace(map_height=len(tokens), shift_up=0)
        return self.packed(tokens.flatten(0, 1).unsqueeze(0), [windows]).view_as(tokens)
