"""Rank-augmented linear attention as a module."""

import torch
from timm.layers import register_notrace_module
from torch import Tensor

from .. import ops
from ..ops.windows import Windows, padding_mask
from .base_attention import BaseAttention, HeadGroup
from .surroundings import Surroundings


@register_notrace_module
class RALAAttention(BaseAttention):
    """Rank-augmented linear attention (RALA), with its gate, LePE and rotary positions.

    Queries and keys are rotated after the feature map. Since every row of weights depends on the queries of all tokens,
    `k` of `partition`, `attend` and `attention_weights` holds the key and the query of each token: (batch · windows,
    heads, tokens, 2 · head_dim). So some of the queries can be computed alone.

    Args:
        dim: Channels.
        num_heads: Heads; they divide the channels.

    Further arguments are those of BaseAttention.
    """

    row_wise = True
    rotates_in_attend = True
    surroundings = Surroundings(gate=True, lepe=5, rope=True)

    def partition(self, x: Tensor, feat_size: tuple[int, int]) -> list[HeadGroup]:
        """See BaseAttention.partition; keys are followed by the queries of the same tokens."""
        return [
            HeadGroup(q, torch.cat([k, q], dim=-1), v, windows) for q, k, v, windows in super().partition(x, feat_size)
        ]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, windows: Windows) -> Tensor:
        """See BaseAttention.attend."""
        k, queries = k.chunk(2, dim=-1)
        rope, mask = self.rope_tables(k, windows), padding_mask(k, windows)
        return ops.rala_attention(q, k, v, queries, rope=rope, mask=mask)

    def attention_weights(
        self, q: Tensor, k: Tensor, v: Tensor, windows: Windows, attn_mask: Tensor | None = None, first: int = 0
    ) -> Tensor:
        """See BaseAttention.attention_weights."""
        k, queries = k.chunk(2, dim=-1)
        rope, mask = self.rope_tables(k, windows), padding_mask(k, windows)
        return ops.rala_weights(q, k, queries=queries, rope=rope, mask=mask, attn_mask=attn_mask, first=first)
