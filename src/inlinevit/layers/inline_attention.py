"""InLine attention as a module."""

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module
from torch import Tensor, nn

from .. import ops
from ..ops._common import autocast_off
from ..ops.paths import PATHS, Case, choose_path
from .feature_map import FeatureMap
from .layouts import Windows, covers_map
from .local_residual import LocalResidual
from .token_mixer import TokenMixer, has_hooks, padding_mask, window_means

__all__ = ["PATHS", "InLineAttention"]


@register_notrace_module
class InLineAttention(TokenMixer):
    """InLine attention with the local residual: `InLineAttention(dim, num_heads)(x, size=(H, W))`.

    Args:
        dim: Channels.
        num_heads: Heads; they divide the channels.
        feature_map: φ, one of ops.FEATURE_MAPS.
        local_residual: Add the dynamic 3×3 convolution of the values.
        path: How to compute it, a name of PATHS; the fastest by default. TorchScript knows the covariance form alone.
        **options: Those of TokenMixer.
    """

    own_options = ("feature_map", "local_residual", "path")

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        feature_map: str = "identity",
        local_residual: bool = True,
        path: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(dim, num_heads, **options)
        if path is not None and path not in PATHS:
            raise ValueError(f"unknown path {path!r}: choose one of {', '.join(PATHS)}")
        factory = {"device": options.get("device"), "dtype": options.get("dtype")}
        self.path = path
        self.feature_map = FeatureMap(feature_map, num_heads, self.head_dim, **factory)
        self.local_residual = LocalResidual(dim, num_heads, **factory) if local_residual else None

    def mix(self, q: Tensor, k: Tensor, v: Tensor, windows: Windows) -> Tensor:
        """See TokenMixer.mix. Tokens on both sides of the seam of a shifted window see each other, as published."""
        phi, affine, mask = self.feature_map.name, self.feature_map.affine(windows), padding_mask(k, windows)
        if torch.jit.is_scripting():
            return ops.inline_attention(q, k, v, feature_map=phi, affine=affine, mask=mask)
        # "folded" is a path from the tokens; for a prefix alone, q, k and v are made even so.
        path = None if self.path == "folded" else self.path
        return ops.inline_attention(q, k, v, feature_map=phi, affine=affine, mask=mask, path=path)

    @torch.jit.unused
    def rows(
        self, q: Tensor, k: Tensor, v: Tensor, windows: Windows, seen: Tensor | None = None, first: int = 0
    ) -> Tensor:
        """See TokenMixer.rows."""
        phi, affine, mask = self.feature_map.name, self.feature_map.affine(windows), padding_mask(k, windows)
        return ops.inline_weights(q, k, feature_map=phi, affine=affine, mask=mask, seen=seen)

    def local_kernels(self, context: Tensor, windows: Windows) -> Tensor | None:
        """See TokenMixer.local_kernels."""
        return None if self.local_residual is None else self.local_residual(window_means(context, windows), windows)

    def attend(self, x: Tensor, size: tuple[int, int], context: Tensor) -> Tensor:
        """See TokenMixer.attend."""
        if not torch.jit.is_scripting() and self.choose_path(x, size) == "folded":
            return self.attend_folded(x, size, context)
        return self.attend_windows(x, size, context)

    @torch.jit.ignore
    def choose_path(self, x: Tensor, size: tuple[int, int]) -> str:
        """The way from tokens (batch, prefix + H·W, dim) to attention."""
        device = x.device.type
        windows = self.layout(size)
        one_window = len(windows) == 1 and covers_map(windows[0])
        autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        case = Case(
            tokens=x.shape[1],
            channels=self.dim,
            width=self.head_dim,
            feature_map=self.feature_map.name,
            masked=False,
            # Only a linear layer whose weights are all that it is can be folded, not one that was replaced or hooked.
            projected=type(self.qkv) is not nn.Linear or has_hooks(self.qkv) or not one_window,
            dtype=torch.get_autocast_dtype(device) if autocast else x.dtype,
            device=device,
        )
        return choose_path(case, self.path)

    @torch.jit.ignore
    def attend_folded(self, x: Tensor, size: tuple[int, int], context: Tensor) -> Tensor:
        """Attention over the whole map without queries and keys, for φ = identity.

        With x̄ the mean token, C = W_k·Cov(X, X)·W_vᵀ for each head, and s·q_i·C = x_i·(s·W_qᵀ·C) + s·b_q·C. So values
        are made for the convolution alone.
        """
        (windows,) = self.layout(size)
        batch, tokens, dim = x.shape
        heads, width = self.num_heads, self.head_dim
        weight_q, weight_k, weight_v = self.qkv.weight.view(3, heads, width, dim).unbind(0)
        bias_q, _, bias_v = (None,) * 3 if self.qkv.bias is None else self.qkv.bias.view(3, heads, width).unbind(0)
        with autocast_off(x):
            mean = x.mean(dim=1)
            centred = x - mean.unsqueeze(1)
            among_tokens = (centred.transpose(1, 2) @ centred).unsqueeze(1)
            covariance = (weight_k @ among_tokens @ weight_v.transpose(1, 2)) * (width**-0.5 / tokens)
            # (batch, heads, dim, width) -> (batch, dim, heads · width)
            fold = (weight_q.transpose(1, 2) @ covariance).transpose(1, 2).flatten(2)
            weight_v, bias_v = weight_v.flatten(0, 1), None if bias_v is None else bias_v.flatten()
            constant = F.linear(mean, weight_v, bias_v).unsqueeze(1)
            if bias_q is not None:
                constant = constant + (bias_q.unsqueeze(1) @ covariance).view(batch, 1, dim)
            out = torch.baddbmm(constant, x, fold)
            kernels = None
            if self.local_residual is not None:
                kernels = self.local_residual(mean if context is x else context.mean(dim=1), windows)
            elif self.lepe is None:
                return out
            return self.add_neighbours(out, F.linear(x, weight_v, bias_v), kernels, windows)
