"""Multi-head linear attention with token-level mixing (MHLA) as a module."""

from typing import Any

import torch
from timm.layers import register_notrace_module
from torch import Tensor, nn

from .. import ops
from ..ops._common import promote
from ..ops.mhla import BLOCKS, initial_mixing
from ..ops.rope import rotate_qkv
from ..ops.windows import Windows, padding_mask
from .base_attention import BaseAttention, HeadGroup
from .surroundings import Surroundings


@register_notrace_module
class MHLAAttention(BaseAttention):
    """MHLA: linear attention to a learned mixture of 4 × 4 blocks of the map, with its norms and LePE.

    The learned coefficients `mixing` stay in [0, 1]: `project_parameters` clamps them after each step of an optimizer.

    Args:
        dim: Channels.
        num_heads: Heads; they divide the channels.
        shared_divisor: Use the divisor of the published code, which has the queries of other blocks, instead of that of
            the paper; `k` of `partition`, `attend` and `attention_weights` then holds the key and the query of each
            token.
        **kwargs: Arguments of BaseAttention.
    """

    attn_kwargs_names = ("shared_divisor",)
    supports_prefix_tokens = False
    surroundings = Surroundings(lepe=5)

    def __init__(self, dim: int, num_heads: int, *, shared_divisor: bool = False, **kwargs: Any) -> None:
        super().__init__(dim, num_heads, **kwargs)
        factory: dict[str, Any] = {"device": kwargs.get("device"), "dtype": kwargs.get("dtype")}
        self.shared_divisor = shared_divisor
        self.norm = nn.LayerNorm(dim, eps=1e-5, **factory)
        self.q_norm = RMSNorm(dim, **factory)
        self.k_norm = RMSNorm(dim, **factory)
        # Row: the block of the query; column: that of the keys.
        self.mixing = nn.Parameter(torch.empty(BLOCKS**2, BLOCKS**2, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the coefficients by the distances of the blocks; child modules have their own reset_parameters."""
        with torch.no_grad():
            self.mixing.copy_(initial_mixing())

    def project_parameters(self) -> None:
        """See BaseAttention.project_parameters."""
        self.mixing.clamp_(0, 1)

    def project_qkv(self, x: Tensor, feat_size: tuple[int, int], first_row: int = 0) -> Tensor:
        """See BaseAttention.project_qkv; tokens are normed before, queries and keys of all heads together after it."""
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        qkv = torch.cat([self.q_norm(q), self.k_norm(k), v], dim=-1)
        return rotate_qkv(qkv, feat_size, self.num_heads, first_row) if self.rope else qkv

    def partition(self, x: Tensor, feat_size: tuple[int, int]) -> list[HeadGroup]:
        """See BaseAttention.partition; with the divisor of the code, keys are followed by queries."""
        groups = super().partition(x, feat_size)
        if not self.shared_divisor:
            return groups
        return [HeadGroup(q, torch.cat([k, q], dim=-1), v, windows) for q, k, v, windows in groups]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, windows: Windows) -> Tensor:
        """See BaseAttention.attend."""
        k, _ = self.split_keys(k)
        size = (windows.window_height, windows.window_width)
        return ops.mhla_attention(q, k, v, self.mixing, size, padding_mask(k, windows), self.shared_divisor)

    def attention_weights(
        self, q: Tensor, k: Tensor, v: Tensor, windows: Windows, attn_mask: Tensor | None = None, first: int = 0
    ) -> Tensor:
        """See BaseAttention.attention_weights."""
        k, queries = self.split_keys(k)
        return ops.mhla_weights(
            q,
            k,
            mixing=self.mixing,
            feat_size=(windows.window_height, windows.window_width),
            mask=padding_mask(k, windows),
            attn_mask=attn_mask,
            first=first,
            shared_queries=queries,
        )

    def split_keys(self, k: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the keys, and with the divisor of the code the queries of the same tokens."""
        if not self.shared_divisor:
            return k, None
        k, queries = k.chunk(2, dim=-1)
        return k, queries


class RMSNorm(nn.Module):
    """x/√(mean x² + ε)·w over the channels, in float32 or better; ε is the machine epsilon of that dtype.

    torch's takes the epsilon of half precision there, which is as large as the mean.

    Args:
        dim: Channels.
    """

    def __init__(self, dim: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the weight to 1."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Map (…, dim) to the same shape and dtype."""
        wide = promote(x)
        wide = wide * (wide.square().mean(dim=-1, keepdim=True) + torch.finfo(wide.dtype).eps).rsqrt()
        return (wide * self.weight.to(wide.dtype)).to(x.dtype)
