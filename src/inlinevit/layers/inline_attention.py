"""InLine attention with the local residual."""

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module
from torch import Tensor, nn

from .. import ops
from ..ops._common import autocast_off
from ..ops.inline import PATHS, Case, choose_path
from ._chunks import has_hooks
from .base_attention import BaseAttention, add_convolution, join_head_groups
from .feature_map import FeatureMap
from .layouts import (
    Windows,
    covers_map,
    merge_heads,
    padded_size,
    padding_mask,
    take_head_group,
    window_means,
    window_reverse,
)

__all__ = ["PATHS", "InLineAttention", "LocalResidual"]


@register_notrace_module
class InLineAttention(BaseAttention):
    """InLine attention with the local residual: `InLineAttention(dim, num_heads)(x, feat_size=(H, W))`.

    Args:
        dim: Channels.
        num_heads: Heads; they divide the channels.
        feature_map: φ, one of ops.FEATURE_MAPS.
        local_residual: Add the dynamic 3×3 convolution of the values.
        path: How to compute it, a name of PATHS; the fastest by default.
        **kwargs: Arguments of BaseAttention.
    """

    row_wise = True
    attn_kwargs_names = ("feature_map", "local_residual", "path")

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        feature_map: str = "identity",
        local_residual: bool = True,
        path: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(dim, num_heads, **kwargs)
        if path is not None and path not in PATHS:
            raise ValueError(f"unknown path {path!r}: choose one of {', '.join(PATHS)}")
        factory = {"device": kwargs.get("device"), "dtype": kwargs.get("dtype")}
        self.path = path
        self.feature_map = FeatureMap(feature_map, num_heads, self.head_dim, **factory)
        self.local_residual = LocalResidual(dim, num_heads, **factory) if local_residual else None

    def forward(self, x: Tensor, feat_size: tuple[int, int], context: Tensor | None = None) -> Tensor:
        """See BaseAttention.forward."""
        self.check_tokens(x, feat_size, context)
        context = x if context is None else context
        paths = [self.choose_path(x, windows) for windows in self.windows(x, feat_size)]
        if paths == ["folded"]:
            out = self.attend_folded(x, feat_size, context)
            return self.proj_drop(self.proj(out))
        outputs = []
        for path, (q, k, v, windows) in zip(paths, self.partition(x, feat_size), strict=True):
            out = merge_heads(self.attend(q, k, v, windows, path))
            out = add_convolution(out, v, self.local_kernels(context, windows), self.static_kernels(windows), windows)
            outputs.append(window_reverse(out, windows))
        return self.proj_drop(self.proj(join_head_groups(outputs)))

    def choose_path(self, x: Tensor, windows: Windows) -> str:
        """Return the path from tokens (batch, prefix + H·W, dim) to the attention of one head group."""
        device = x.device.type
        autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        prefix = x.shape[1] - windows.map_height * windows.map_width
        whole_map = covers_map(windows) and windows.num_head_groups == 1
        case = Case(
            tokens=prefix + windows.height * windows.width,
            channels=self.dim,
            head_dim=self.head_dim,
            feature_map=self.feature_map.name,
            masked=padded_size(windows) != (windows.map_height, windows.map_width),
            # Only a plain linear layer can be folded, not one that was replaced or that has hooks.
            foldable=type(self.qkv) is nn.Linear and not has_hooks(self.qkv) and whole_map,
            dtype=torch.get_autocast_dtype(device) if autocast else x.dtype,
            device=device,
        )
        return choose_path(case, self.path)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, windows: Windows, path: str | None = None) -> Tensor:
        """See BaseAttention.attend. In shifted windows, tokens attend across the border of the map, as published."""
        phi, affine, mask = self.feature_map.name, self.feature_map.affine(windows), padding_mask(k, windows)
        return ops.inline_attention(q, k, v, feature_map=phi, affine=affine, mask=mask, path=path)

    def attention_weights(
        self, q: Tensor, k: Tensor, v: Tensor, windows: Windows, attn_mask: Tensor | None = None, first: int = 0
    ) -> Tensor:
        """See BaseAttention.attention_weights."""
        phi, affine, mask = self.feature_map.name, self.feature_map.affine(windows), padding_mask(k, windows)
        return ops.inline_weights(q, k, feature_map=phi, affine=affine, mask=mask, attn_mask=attn_mask)

    def local_kernels(self, context: Tensor, windows: Windows) -> Tensor | None:
        """See BaseAttention.local_kernels."""
        if self.local_residual is None:
            return None
        channels = self.dim // windows.num_head_groups
        context = context[:, :, windows.head_group * channels : (windows.head_group + 1) * channels]
        return self.local_residual(window_means(context, windows), windows)

    def attend_folded(self, x: Tensor, feat_size: tuple[int, int], context: Tensor) -> Tensor:
        """Compute attention over the whole map without queries and keys, for φ = identity.

        C = W_k·Cov(X, X)·W_vᵀ for each head, and s·q_i·C = x_i·(s·W_qᵀ·C) + s·b_q·C. Values are
        computed only for the convolution.
        """
        (windows,) = self.layout(feat_size)
        batch, tokens, dim = x.shape
        heads, head_dim = self.num_heads, self.head_dim
        weight_q, weight_k, weight_v = self.qkv.weight.view(3, heads, head_dim, dim).unbind(0)
        bias = self.qkv.bias
        bias_q, _, bias_v = (None,) * 3 if bias is None else bias.view(3, heads, head_dim).unbind(0)
        with autocast_off(x):
            mean = x.mean(dim=1)
            centred = x - mean.unsqueeze(1)
            among_tokens = (centred.transpose(1, 2) @ centred).unsqueeze(1)
            covariance = (weight_k @ among_tokens @ weight_v.transpose(1, 2)) * (head_dim**-0.5 / tokens)
            # (batch, heads, dim, head_dim) -> (batch, dim, heads · head_dim)
            fold = (weight_q.transpose(1, 2) @ covariance).transpose(1, 2).flatten(2)
            weight_v, bias_v = weight_v.flatten(0, 1), None if bias_v is None else bias_v.flatten()
            constant = F.linear(mean, weight_v, bias_v).unsqueeze(1)
            if bias_q is not None:
                constant = constant + (bias_q.unsqueeze(1) @ covariance).view(batch, 1, dim)
            out = torch.baddbmm(constant, x, fold)
            kernels, static = None, self.static_kernels(windows)
            if self.local_residual is not None:
                kernels = self.local_residual(mean if context is x else context.mean(dim=1), windows)
            elif static is None:
                return out
            # All channels as one head: the convolution does not depend on the heads.
            v = F.linear(x, weight_v, bias_v).unsqueeze(1)
            return add_convolution(out, v, kernels, static, windows)


class LocalResidual(nn.Module):
    """The kernels of the dynamic depthwise 3×3 convolution: r = W₂·GELU(W₁·x̄), one for each window and channel.

    Args:
        dim: Channels.
        num_heads: W₁ and W₂ are block-diagonal, with one block per head.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.fc1 = nn.Conv1d(dim, dim, 1, groups=num_heads, device=device, dtype=dtype)
        self.fc2 = nn.Conv1d(dim, 9 * dim, 1, groups=num_heads, device=device, dtype=dtype)

    def forward(self, mean: Tensor, windows: Windows) -> Tensor:
        """Make kernels (batch · windows, channels, 9) from x̄ of each window (batch · windows, channels).

        The channels are those of the head group of the windows.
        """
        heads = self.num_heads // windows.num_head_groups
        # Head by head: (heads, batch · windows, head_dim).
        x = mean.unflatten(1, (heads, -1)).transpose(0, 1)
        x = F.gelu(linear_by_head(x, self.fc1, windows))
        x = linear_by_head(x, self.fc2, windows)
        return x.transpose(0, 1).reshape(mean.shape[0], mean.shape[1], 9)


def linear_by_head(x: Tensor, layer: nn.Conv1d, windows: Windows) -> Tensor:
    """Apply one linear layer per head, from (heads, batch, head_dim) to (heads, batch, outputs).

    The weights are those of a 1×1 convolution with one group per head, which is slow over a single token.
    """
    heads, _, head_dim = x.shape
    weight, bias = take_head_group(layer.weight, windows), take_head_group(layer.bias, windows)
    return torch.baddbmm(bias.view(heads, 1, -1), x, weight.view(heads, -1, head_dim).transpose(1, 2))
