"""PolaFormer's attention as a module."""

from typing import Any

import torch
from timm.layers import register_notrace_module
from torch import Tensor, nn

from .. import ops
from ..ops._common import promote
from ..ops.windows import Windows, padding_mask, take_head_group
from .focused_attention import KeyPositionAttention
from .surroundings import Surroundings


@register_notrace_module
class PolaFormerAttention(KeyPositionAttention):
    """PolaFormer's attention: learned powers of the positive and negative parts of queries and keys, and a gate.

    Keys have learned positions, and the values a learned 5×5 convolution that the heads share, as in focused attention.

    Args:
        dim: Channels.
        num_heads: Heads; they divide the channels in parts of even width.
        **kwargs: Arguments of KeyPositionAttention.
    """

    row_wise = True
    matrices_per_head = 2
    no_weight_decay_names = ("pos_embed", "spread", "power")
    surroundings = Surroundings(gate=True)

    def __init__(self, dim: int, num_heads: int, **kwargs: Any) -> None:
        super().__init__(dim, num_heads, interpolation="bilinear", **kwargs)
        if self.head_dim % 2 != 0:
            raise ValueError(
                f"PolaFormer's attention halves the values of each head, but {num_heads} heads of {dim} channels have "
                f"{self.head_dim}: use another num_heads"
            )
        factory: dict[str, Any] = {"device": kwargs.get("device"), "dtype": kwargs.get("dtype")}
        # Powers are 1 + 4·sigmoid of it.
        self.power = nn.Parameter(torch.empty(num_heads, self.head_dim, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise positions, spread and powers with zeros; child modules have their own reset_parameters."""
        for parameter in (self.pos_embed, self.spread, self.power):
            nn.init.zeros_(parameter)

    def powers(self, windows: Windows) -> Tensor:
        """Return the powers of the channels of the head group, (heads, head_dim): from 1 to 5."""
        return 1 + 4 * torch.sigmoid(promote(take_head_group(self.power, windows)))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, windows: Windows) -> Tensor:
        """See BaseAttention.attend."""
        k, mask = self.add_pos_embed(k, windows), padding_mask(k, windows)
        return ops.polaformer_attention(q, k, v, self.positive_spread(windows), self.powers(windows), mask)

    def attention_weights(
        self, q: Tensor, k: Tensor, v: Tensor, windows: Windows, attn_mask: Tensor | None = None, first: int = 0
    ) -> Tensor:
        """See BaseAttention.attention_weights: two matrices per head."""
        k, mask = self.add_pos_embed(k, windows), padding_mask(k, windows)
        spread, power = self.positive_spread(windows), self.powers(windows)
        return ops.polaformer_weights(q, k, spread=spread, power=power, mask=mask, attn_mask=attn_mask)
