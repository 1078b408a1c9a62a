"""Plain linear attention as a module."""

from typing import Any, ClassVar

from timm.layers import register_notrace_module
from torch import Tensor

from .. import ops
from ..ops.windows import Windows, padding_mask
from .base_attention import BaseAttention
from .feature_map import FeatureMap


@register_notrace_module
class LinearAttention(BaseAttention):
    """Linear attention, the baseline that InLine attention improves on.

    Args:
        dim: Channels.
        num_heads: Heads; they divide the channels.
        feature_map: φ, one of ops.FEATURE_MAPS.
        **kwargs: Arguments of BaseAttention.
    """

    row_wise = True
    attn_kwargs_names: ClassVar[tuple[str, ...]] = ("feature_map",)

    def __init__(self, dim: int, num_heads: int, *, feature_map: str = "relu", **kwargs: Any) -> None:
        super().__init__(dim, num_heads, **kwargs)
        factory = {"device": kwargs.get("device"), "dtype": kwargs.get("dtype")}
        self.feature_map = FeatureMap(feature_map, num_heads, self.head_dim, **factory)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, windows: Windows) -> Tensor:
        """See BaseAttention.attend."""
        phi, affine, mask = self.feature_map.name, self.feature_map.affine(windows), padding_mask(k, windows)
        return ops.linear_attention(q, k, v, feature_map=phi, affine=affine, mask=mask)

    def attention_weights(
        self, q: Tensor, k: Tensor, v: Tensor, windows: Windows, attn_mask: Tensor | None = None, first: int = 0
    ) -> Tensor:
        """See BaseAttention.attention_weights."""
        phi, affine, mask = self.feature_map.name, self.feature_map.affine(windows), padding_mask(k, windows)
        return ops.linear_weights(q, k, feature_map=phi, affine=affine, mask=mask, attn_mask=attn_mask)
