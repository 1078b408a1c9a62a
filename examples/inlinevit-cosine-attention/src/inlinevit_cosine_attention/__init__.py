"""Cosine attention for the models of inlinevit."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inlinevit import register_attention
from inlinevit.layers import BaseAttention, Windows, padding_mask, take_head_group


@register_attention("cosine")
class CosineAttention(BaseAttention):
    """Softmax of the cosine between queries and keys, with a learned temperature per head, as in Swin V2.

    Args:
        dim: Channels.
        num_heads: Heads; they divide the channels.
        max_scale: Upper bound of the factor that the cosine is multiplied by.
        **kwargs: Arguments of BaseAttention.
    """

    attn_kwargs_names = ("max_scale",)
    no_weight_decay_names = ("log_scale",)
    row_wise = True

    def __init__(self, dim: int, num_heads: int, *, max_scale: float = 100.0, **kwargs: Any) -> None:
        super().__init__(dim, num_heads, **kwargs)
        if max_scale <= 0:
            raise ValueError(f"max_scale is {max_scale}: it should be above 0")
        self.max_scale = max_scale
        factory = {"device": kwargs.get("device"), "dtype": kwargs.get("dtype")}
        self.log_scale = nn.Parameter(torch.empty(num_heads, 1, 1, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the temperatures; child modules have their own reset_parameters."""
        nn.init.constant_(self.log_scale, math.log(10))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, windows: Windows) -> Tensor:
        """See BaseAttention.attend."""
        return self.attention_weights(q, k, v, windows).to(v.dtype) @ v

    def attention_weights(
        self, q: Tensor, k: Tensor, v: Tensor, windows: Windows, attn_mask: Tensor | None = None, first: int = 0
    ) -> Tensor:
        """See BaseAttention.attention_weights."""
        scale = take_head_group(self.log_scale, windows).exp().clamp(max=self.max_scale)
        scores = scale * (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1))
        visible = torch.ones_like(scores, dtype=torch.bool)
        mask = padding_mask(k, windows)
        if mask is not None:
            visible = visible & mask[:, None, None, :]
        if attn_mask is not None:
            visible = visible & attn_mask
        weights = scores.masked_fill(~visible, torch.finfo(scores.dtype).min).softmax(dim=-1)
        # A query that sees nothing has no weights, rather than equal ones.
        return weights.masked_fill(~visible, 0.0)
