"""Magnitude-aware linear attention as a module."""

from timm.layers import register_notrace_module
from torch import Tensor

from .. import ops
from ..ops.windows import Windows, padding_mask
from .base_attention import BaseAttention
from .surroundings import Surroundings


@register_notrace_module
class MALAAttention(BaseAttention):
    """Magnitude-aware linear attention (MALA), with its gate, LePE and rotary positions.

    Queries and keys are rotated after the feature map.

    Args:
        dim: Channels.
        num_heads: Heads; they divide the channels.

    Further arguments are those of BaseAttention.
    """

    row_wise = True
    rotates_in_attend = True
    surroundings = Surroundings(gate=True, lepe=5, rope=True)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, windows: Windows) -> Tensor:
        """See BaseAttention.attend."""
        return ops.mala_attention(q, k, v, rope=self.rope_tables(k, windows), mask=padding_mask(k, windows))

    def attention_weights(
        self, q: Tensor, k: Tensor, v: Tensor, windows: Windows, attn_mask: Tensor | None = None, first: int = 0
    ) -> Tensor:
        """See BaseAttention.attention_weights."""
        rope, mask = self.rope_tables(k, windows), padding_mask(k, windows)
        return ops.mala_weights(q, k, rope=rope, mask=mask, attn_mask=attn_mask, first=first)
