"""Plain linear attention as a module."""

from typing import Any, ClassVar

import torch
from timm.layers import register_notrace_module
from torch import Tensor

from .. import ops
from .feature_map import FeatureMap
from .layouts import Windows
from .token_mixer import TokenMixer, padding_mask


@register_notrace_module
class LinearAttention(TokenMixer):
    """Linear attention, the rival that InLine mends.

    Args:
        dim: Channels.
        num_heads: Heads; they divide the channels.
        feature_map: φ, one of ops.FEATURE_MAPS.
        **options: Those of TokenMixer.
    """

    own_options: ClassVar[tuple[str, ...]] = ("feature_map",)

    def __init__(self, dim: int, num_heads: int, *, feature_map: str = "relu", **options: Any) -> None:
        super().__init__(dim, num_heads, **options)
        factory = {"device": options.get("device"), "dtype": options.get("dtype")}
        self.feature_map = FeatureMap(feature_map, num_heads, self.head_dim, **factory)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, windows: Windows) -> Tensor:
        """See TokenMixer.mix."""
        phi, affine, mask = self.feature_map.name, self.feature_map.affine(windows), padding_mask(k, windows)
        return ops.linear_attention(q, k, v, feature_map=phi, affine=affine, mask=mask)

    @torch.jit.unused
    def rows(
        self, q: Tensor, k: Tensor, v: Tensor, windows: Windows, seen: Tensor | None = None, first: int = 0
    ) -> Tensor:
        """See TokenMixer.rows."""
        phi, affine, mask = self.feature_map.name, self.feature_map.affine(windows), padding_mask(k, windows)
        return ops.linear_weights(q, k, feature_map=phi, affine=affine, mask=mask, seen=seen)
