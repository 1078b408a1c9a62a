"""The local residual: a dynamic depthwise 3×3 convolution, with a kernel for each image and channel."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ._common import autocast_off, needs_gradient, promote
from .windows import Windows, merge_heads

# From this many tokens on, a CPU convolves one map after the other faster than all maps at once.
LARGE_MAP = 1024


def local_residual(v: Tensor, kernels: Tensor, feat_size: tuple[int, int]) -> Tensor:
    """Convolve each channel of each image with its own 3×3 kernel (correlation, zero padding).

    Args:
        v: Values (batch, heads, H·W, head_dim).
        kernels: Any shape with batch × heads × head_dim × 3 × 3 elements in this order.
        feat_size: (H, W) of the map.

    Returns:
        (batch, heads, H·W, head_dim), in v's dtype.
    """
    if v.dim() != 4:
        raise ValueError("v must have four dimensions: (batch, heads, tokens, head_dim)")
    batch, heads, tokens, head_dim = v.shape
    height, width = feat_size
    if tokens != height * width:
        raise ValueError(
            f"{tokens} tokens do not make a map of {height}×{width}: pass (H, W) of the token grid as feat_size"
        )
    if kernels.numel() != 9 * batch * heads * head_dim:
        raise ValueError(f"expected 9 numbers for each of {batch}×{heads}×{head_dim} channels, but got {kernels.shape}")
    maps = promote(v).transpose(1, 2).reshape(batch, height, width, heads * head_dim)
    out = convolve_maps(maps, promote(kernels).reshape(batch, heads * head_dim, 9))
    return out.view(batch, tokens, heads, head_dim).transpose(1, 2).to(v.dtype)


def local_kernels(
    mean: Tensor, num_heads: int, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor
) -> Tensor:
    """Make the kernels of the local residual, W₂·GELU(W₁·x̄), head by head.

    Args:
        mean: x̄ of each window, (batch · windows, channels).
        num_heads: Heads that the channels belong to.
        weight1: W₁ (channels, head_dim, 1), a convolution with one group per head.
        bias1: (channels,).
        weight2: W₂ (9 · channels, head_dim, 1).
        bias2: (9 · channels,).

    Returns:
        (batch · windows, channels, 9).
    """
    # (heads, batch · windows, head_dim)
    x = mean.unflatten(1, (num_heads, -1)).transpose(0, 1)
    x = linear_by_head(F.gelu(linear_by_head(x, weight1, bias1)), weight2, bias2)
    return x.transpose(0, 1).reshape(mean.shape[0], mean.shape[1], 9)


def linear_by_head(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Apply one linear layer per head, from (heads, batch, head_dim) to (heads, batch, outputs).

    The weights are those of a 1×1 convolution with one group per head, which is slow over a single token.
    """
    heads, _, head_dim = x.shape
    return torch.baddbmm(bias.view(heads, 1, -1), x, weight.view(heads, -1, head_dim).transpose(1, 2))


def convolve_maps(maps: Tensor, kernels: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the local residual of maps in channels-last memory format.

    Args:
        maps: (batch, H, W, channels).
        kernels: (batch, channels, 9).
        bias: (channels,), added to all tokens.

    Returns:
        (batch, H, W, channels).
    """
    with autocast_off(maps):
        return CONVOLUTIONS[choose_convolution(maps, kernels)](maps, kernels, bias)


def add_convolution(
    out: Tensor, v: Tensor, dynamic: Tensor | None, static: tuple[Tensor, Tensor] | None, windows: Windows
) -> Tensor:
    """Add depthwise convolutions of the values to the tokens of the map; prefix tokens stay as they are.

    Args:
        out: The result of attention, (batch · windows, prefix + tokens, channels), which may be overwritten.
        v: Values (batch · windows, heads, prefix + tokens, head_dim).
        dynamic: 3×3 kernels for each window, (batch · windows, channels, 9), if there are any.
        static: Weight (channels, 1, side, side) and bias (channels,) for all windows, if there are any.
        windows: How the map was split.

    Returns:
        As out.
    """
    if dynamic is None and static is None:
        return out
    v = merge_heads(v)
    prefix = v.shape[1] - windows.window_height * windows.window_width
    added = convolve_values(v[:, prefix:].unflatten(1, (windows.window_height, windows.window_width)), dynamic, static)
    added = added.flatten(1, 2).to(out.dtype)
    if prefix == 0:
        return out + added
    if torch.compiler.is_compiling() or needs_gradient(out, added):
        return out + F.pad(added, (0, 0, prefix, 0))
    out[:, prefix:].add_(added)
    return out


def convolve_values(maps: Tensor, dynamic: Tensor | None, static: tuple[Tensor, Tensor] | None) -> Tensor:
    """Return the sum of depthwise convolutions of the values, of which there must be at least one.

    Args:
        maps: Values (batch · windows, H, W, channels).
        dynamic: See add_convolution.
        static: See add_convolution.

    Returns:
        As maps.
    """
    if static is None:
        assert dynamic is not None
        return convolve_maps(promote(maps), promote(dynamic))
    weight, bias = static
    if dynamic is None:
        padding, groups = weight.shape[2] // 2, weight.shape[0]
        return F.conv2d(maps.permute(0, 3, 1, 2), weight, bias, padding=padding, groups=groups).permute(0, 2, 3, 1)
    if weight.shape[2] > 3:
        return convolve_values(maps, dynamic, None) + convolve_values(maps, None, static)
    # The sum of two convolutions of the same map is one convolution with the sum of their kernels.
    return convolve_maps(promote(maps), promote(dynamic) + promote(widen(weight, 3).flatten(1)), promote(bias))


def widen(weight: Tensor, side: int) -> Tensor:
    """Return kernels (…, side', side') with zeros around them, so that they have this side or more."""
    border = max(0, side - weight.shape[-1]) // 2
    return weight if border == 0 else F.pad(weight, (border,) * 4)


def add_kernels(first: Tensor, second: Tensor) -> Tensor:
    """Return the sum of kernels (…, side, side) of different odd sides, which has the larger side."""
    return widen(first, second.shape[-1]) + widen(second, first.shape[-1])


def choose_convolution(maps: Tensor, kernels: Tensor) -> str:
    """Return the name of the fastest way to compute it, a key of CONVOLUTIONS."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or maps.device.type == "meta" or maps.shape[0] == 0:
        return "padded"
    if maps.device.type == "cuda":
        return "grouped"
    if maps.device.type != "cpu" or maps.dtype != torch.float32 or not torch.backends.mkldnn.is_available():
        return "padded"
    if maps.shape[0] == 1 or maps.shape[1] * maps.shape[2] >= LARGE_MAP:
        return "one by one"
    return "grouped" if needs_gradient(maps, kernels) else "in place"


def convolve_one_by_one(maps: Tensor, kernels: Tensor, bias: Tensor | None) -> Tensor:
    """A depthwise convolution for each image."""
    channels = maps.shape[3]
    convolved = [
        F.conv2d(one.permute(0, 3, 1, 2), kernel.view(channels, 1, 3, 3), bias, padding=1, groups=channels)
        for one, kernel in zip(maps.split(1), kernels.unbind(0), strict=True)
    ]
    return (convolved[0] if len(convolved) == 1 else torch.cat(convolved)).permute(0, 2, 3, 1).contiguous()


def convolve_grouped(maps: Tensor, kernels: Tensor, bias: Tensor | None) -> Tensor:
    """One depthwise convolution whose channels are those of all images."""
    batch, height, width, channels = maps.shape
    weight = kernels.reshape(batch * channels, 1, 3, 3)
    side_by_side = maps.permute(0, 3, 1, 2).reshape(1, batch * channels, height, width)
    out = F.conv2d(side_by_side, weight, None if bias is None else bias.repeat(batch), 1, 1, groups=batch * channels)
    return out.view(batch, channels, height, width).permute(0, 2, 3, 1).contiguous()


def shift_in_place(maps: Tensor, kernels: Tensor, bias: Tensor | None) -> Tensor:
    """Nine shifted maps, each scaled by its tap, added into one."""
    height, width = maps.shape[1:3]
    taps = kernels.permute(2, 0, 1).contiguous()[:, :, None, None]
    out = maps * taps[4] if bias is None else torch.addcmul(bias, maps, taps[4])
    for tap in (0, 1, 2, 3, 5, 6, 7, 8):
        down, right = tap // 3 - 1, tap % 3 - 1
        there = maps[:, max(0, down) : height + min(0, down), max(0, right) : width + min(0, right)]
        here = out[:, max(0, -down) : height + min(0, -down), max(0, -right) : width + min(0, -right)]
        here.addcmul_(there, taps[tap])
    return out


def shift_padded(maps: Tensor, kernels: Tensor, bias: Tensor | None) -> Tensor:
    """The same from a map with a border of zeros: compilers fuse it, and exported it fits any batch."""
    height, width = maps.shape[1], maps.shape[2]
    taps = kernels.permute(2, 0, 1).contiguous()[:, :, None, None]
    padded = F.pad(maps, (0, 0, 1, 1, 1, 1))
    rows = [padded[:, row : row + height] for row in range(3)]
    out = rows[0][:, :, :width] * taps[0]
    for tap in range(1, 9):
        row, column = tap // 3, tap % 3
        out.addcmul_(rows[row][:, :, column : column + width], taps[tap])
    return out if bias is None else out + bias


CONVOLUTIONS = {
    "one by one": convolve_one_by_one,
    "grouped": convolve_grouped,
    "in place": shift_in_place,
    "padded": shift_padded,
}
