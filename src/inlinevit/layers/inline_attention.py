"""InLine attention as a module."""

from typing import Any

from timm.layers import register_notrace_module
from torch import Tensor

from .. import ops
from .feature_map import FeatureMap
from .layouts import Windows
from .local_residual import LocalResidual
from .token_mixer import TokenMixer, after_prefix, padding_mask, window_means


@register_notrace_module
class InLineAttention(TokenMixer):
    """InLine attention with the local residual: `InLineAttention(dim, num_heads)(x, size=(H, W))`.

    Args:
        dim: Channels.
        num_heads: Heads; they divide the channels.
        feature_map: φ, one of ops.FEATURE_MAPS.
        local_residual: Add the dynamic 3×3 convolution of the values.
        **options: Those of TokenMixer.
    """

    def __init__(
        self, dim: int, num_heads: int, *, feature_map: str = "identity", local_residual: bool = True, **options: Any
    ) -> None:
        super().__init__(dim, num_heads, **options)
        factory = {"device": options.get("device"), "dtype": options.get("dtype")}
        self.feature_map = FeatureMap(feature_map, num_heads, self.head_dim, **factory)
        self.local_residual = LocalResidual(dim, num_heads, **factory) if local_residual else None

    def mix(self, q: Tensor, k: Tensor, v: Tensor, context: Tensor, windows: Windows) -> Tensor:
        """See TokenMixer.mix. Tokens on both sides of the seam of a shifted window see each other, as published."""
        phi, affine, mask = self.feature_map.name, self.feature_map.affine(windows), padding_mask(q, windows)
        out = ops.inline_attention(q, k, v, feature_map=phi, affine=affine, mask=mask)
        if self.local_residual is None:
            return out
        prefix = q.shape[2] - windows.height * windows.width
        residual = self.local_residual(v[:, :, prefix:], window_means(context, windows), windows)
        return out + after_prefix(residual, prefix)
