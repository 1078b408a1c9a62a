"""InLine attention with the local residual."""

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from .. import kernels, ops
from ..ops._common import autocast_off, is_exporting
from ..ops.inline import PATHS, QKV_PATHS, PathParams, select_path
from ..ops.local import add_convolution, local_kernels, widen
from ..ops.windows import (
    Windows,
    count_windows,
    covers_map,
    is_padded,
    padding_mask,
    take_head_group,
    window_means,
)
from ._chunks import has_hooks
from .base_attention import BaseAttention, join_head_groups
from .feature_map import FeatureMap

__all__ = ["PATHS", "InLineAttention", "LocalResidual"]


# Windows, of all images together, beyond which torch makes the kernels of the local residual faster than the compiled
# kernel does.
MOST_NATIVE_MEANS = 128


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

    def attend_fused(self, x: Tensor, feat_size: tuple[int, int], kernel_tokens: Tensor) -> Tensor | None:
        """See BaseAttention.attend_fused."""
        groups = self.windows(x, feat_size)
        path = select_path(self.path_params(x, groups), self.path)
        if path == "folded":
            return self.attend_folded(x, feat_size, kernel_tokens)
        if path != "native":
            return None
        qkv, outputs = self.project_qkv(x, feat_size), []
        for windows in groups:
            taps, bias = self.convolution(kernel_tokens, windows)
            outputs.append(kernels.inline_attention(qkv, windows, self.num_heads, kernels=taps, bias=bias))
        return join_head_groups(outputs)

    def path_params(self, x: Tensor, groups: list[Windows]) -> PathParams:
        """Return what the path of tokens (batch, prefix + H·W, dim) in the windows of each head group depends on."""
        windows, device = groups[0], x.device.type
        autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if autocast else x.dtype
        return PathParams(
            tokens=x.shape[1] if covers_map(windows) else windows.window_height * windows.window_width,
            channels=self.dim,
            head_dim=self.head_dim,
            masked=is_padded(windows),
            dtype=dtype,
            device=device,
            eager=kernels.is_eager(x),
            compiled_training=kernels.is_compiled_training(x),
            exporting=is_exporting(),
            unavailable=self.unavailable_paths(dtype, device, groups),
        )

    def unavailable_paths(self, dtype: torch.dtype, device: str, groups: list[Windows]) -> dict[str, str]:
        """Return the paths that cannot be taken for tokens of this type on this device, and why."""
        phi, replaced = self.feature_map.name, replaced_method(type(self))
        if phi != "identity" or replaced:
            reason = f"{type(self).__name__} has its own {replaced}" if replaced else f"feature_map is {phi!r}"
            return dict.fromkeys(("native", "folded"), f"{reason}, which it does not compute")
        reasons = {}
        if reason := kernels.unavailable_reason():
            reasons["native"] = reason
        elif dtype not in kernels.DTYPES or device not in ("cpu", "meta"):
            reasons["native"] = f"it computes float32 and float64 on a CPU, not {dtype} on {device}"
        if self.lepe is not None and self.lepe.kernel_size[0] > 3:
            reasons["native"] = f"lepe has a side of {self.lepe.kernel_size[0]}, and it convolves with 3×3 kernels"
        if self.rope:
            reasons["folded"] = "rope rotates queries and keys, which it does not compute"
        # Only a plain linear layer can be folded, not one that was replaced or that has hooks.
        if len(groups) > 1 or not covers_map(groups[0]) or type(self.qkv) is not nn.Linear or has_hooks(self.qkv):
            reasons["folded"] = "it needs a plain nn.Linear as qkv, without hooks, and one window that covers the map"
        return reasons

    def attend(self, q: Tensor, k: Tensor, v: Tensor, windows: Windows) -> Tensor:
        """See BaseAttention.attend. In shifted windows, tokens attend across the border of the map, as published."""
        phi, affine, mask = self.feature_map.name, self.feature_map.affine(windows), padding_mask(k, windows)
        path = self.path if self.path in QKV_PATHS else None
        return ops.inline_attention(q, k, v, feature_map=phi, affine=affine, mask=mask, path=path)

    def attention_weights(
        self, q: Tensor, k: Tensor, v: Tensor, windows: Windows, attn_mask: Tensor | None = None, first: int = 0
    ) -> Tensor:
        """See BaseAttention.attention_weights."""
        phi, affine, mask = self.feature_map.name, self.feature_map.affine(windows), padding_mask(k, windows)
        return ops.inline_weights(q, k, feature_map=phi, affine=affine, mask=mask, attn_mask=attn_mask)

    def local_kernels(self, kernel_tokens: Tensor, windows: Windows) -> Tensor | None:
        """See BaseAttention.local_kernels."""
        if self.local_residual is None:
            return None
        if windows.num_head_groups > 1:
            channels = self.dim // windows.num_head_groups
            kernel_tokens = kernel_tokens[:, :, windows.head_group * channels : (windows.head_group + 1) * channels]
        return self.local_residual(window_means(kernel_tokens, windows), windows)

    def convolution(self, kernel_tokens: Tensor, windows: Windows) -> tuple[Tensor | None, Tensor | None]:
        """Return the 3×3 kernels of all that is added to attention, local residual and LePE, and their bias.

        Returns:
            (batch · windows, channels of the head group, 9) and (channels of the head group,), or None.
        """
        static = self.static_kernels(windows)
        weight, bias = (None, None) if static is None else (widen(static[0], 3).flatten(1), static[1])
        local, replaced = self.local_residual, type(self).local_kernels is not InLineAttention.local_kernels
        few = kernel_tokens.shape[0] * count_windows(windows) <= MOST_NATIVE_MEANS
        if local is not None and not replaced and few and local.is_native(kernel_tokens, weight):
            return local.native(kernel_tokens, windows, weight), bias
        dynamic = self.local_kernels(kernel_tokens, windows)
        if weight is None:
            return dynamic, None
        if dynamic is None:
            return weight.expand(kernel_tokens.shape[0] * count_windows(windows), -1, -1), bias
        return dynamic + weight, bias

    def attend_folded(self, x: Tensor, feat_size: tuple[int, int], kernel_tokens: Tensor) -> Tensor:
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
                kernels = self.local_residual(mean if kernel_tokens is x else kernel_tokens.mean(dim=1), windows)
            elif static is None:
                return out
            # All channels as one head: the convolution does not depend on the heads.
            v = F.linear(x, weight_v, bias_v).unsqueeze(1)
            return add_convolution(out, v, kernels, static, windows)


def replaced_method(kind: type[InLineAttention]) -> str | None:
    """Return a method that a subclass defines, and that paths which do not start from q, k and v would not call."""
    methods = ("attend", "partition", "project_qkv", "static_kernels")
    return next((name for name in methods if getattr(kind, name) is not getattr(InLineAttention, name)), None)


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
        return local_kernels(mean, self.num_heads // windows.num_head_groups, **self.weights(windows))

    def weights(self, windows: Windows) -> dict[str, Tensor]:
        """Return the weights and biases of the head group of the windows, by the names that `local_kernels` has."""
        return {
            "weight1": take_head_group(self.fc1.weight, windows),
            "bias1": take_head_group(self.fc1.bias, windows),
            "weight2": take_head_group(self.fc2.weight, windows),
            "bias2": take_head_group(self.fc2.bias, windows),
        }

    def is_native(self, x: Tensor, added: Tensor | None = None) -> bool:
        """Return whether `native` can replace forward: the module is as it is here, and tensors are plain ones."""
        tensors = [x, *self.parameters(), *([] if added is None else [added])]
        return (
            type(self) is LocalResidual
            and not has_hooks(self)
            and not (module_hooks._global_forward_hooks or module_hooks._global_forward_pre_hooks)
            and kernels.is_eager(x)
            and all(map(kernels.is_plain, tensors))
        )

    def native(self, x: Tensor, windows: Windows, added: Tensor | None = None) -> Tensor:
        """Make the kernels of forward by one compiled kernel, from tokens (batch, prefix + H·W, dim).

        `added`, (channels of the head group, 9), is added to all of them.
        """
        return kernels.local_kernels(x, windows, self.num_heads, **self.weights(windows), added=added)
