"""InLine attention from packed q, k and v, with its convolution of the values: one operator, forward and backward."""

from collections.abc import Sequence
from ctypes import byref
from typing import Any

import torch
from torch import Tensor

from ._library import CAttention, CWindows, call

# The operators of this package: torch.ops.inlinevit.*
OPS = torch.library.Library("inlinevit", "DEF")
DTYPES = {torch.float32: "f32", torch.float64: "f64"}

# A window layout as a sequence of numbers, in the order of layers.layouts.Windows.
WindowSizes = Sequence[int]


def inline_attention(
    qkv: Tensor,
    windows: WindowSizes,
    num_heads: int,
    *,
    kernels: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """InLine attention of one head group within windows (φ = identity), plus a 3×3 convolution of the values.

    It is what partition_heads, ops.inline_attention, add_convolution and window_reverse compute one after the other.

    Args:
        qkv: (batch, prefix + H·W, 3 · channels of all heads) on the CPU, float32 or float64. With prefix tokens, the
            window must cover the map.
        windows: layers.layouts.Windows of the head group.
        num_heads: Number of all heads.
        kernels: (batch · windows, channels of the group, 9): the kernels of the local residual, plus those of LePE.
        bias: (channels of the group,), of LePE. Needs kernels.
        scale: Factor of q·k; width^-1/2 by default.

    Returns:
        (batch, prefix + H·W, channels of the group).
    """
    differentiable = torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in (qkv, kernels, bias)
    )
    return torch.ops.inlinevit.attention(qkv, kernels, bias, num_heads, list(windows), scale, differentiable)[0]


def check(qkv: Tensor, kernels: Tensor | None, bias: Tensor | None, num_heads: int, windows: Sequence[int]) -> None:
    """Raise ValueError for what the kernel cannot compute: it reads memory without asking."""
    if qkv.dim() != 3 or num_heads < 1 or qkv.shape[2] % (3 * num_heads) != 0 or qkv.shape[2] == 0:
        raise ValueError(
            f"qkv must be (batch, tokens, 3 · heads · width) with {num_heads} heads, but it is {qkv.shape}"
        )
    if qkv.dtype not in DTYPES:
        raise ValueError(f"the native kernels compute in float32 and float64, but qkv is {qkv.dtype}")
    check_windows(windows, qkv.shape[1], num_heads)
    channels = qkv.shape[2] // 3 // windows[7]
    shapes = {"kernels": (kernels, (count_units(qkv, windows), channels, 9)), "bias": (bias, (channels,))}
    for name, (tensor, shape) in shapes.items():
        if tensor is not None and (tuple(tensor.shape) != shape or tensor.dtype != qkv.dtype):
            raise ValueError(f"{name} must be {qkv.dtype} of shape {shape}, but it is {tensor.dtype} of {tensor.shape}")
    if bias is not None and kernels is None:
        raise ValueError("a bias is added together with the convolution: pass kernels as well")


def check_windows(windows: Sequence[int], tokens: int, num_heads: int) -> None:
    """Raise ValueError for windows that do not fit the map, the tokens or the heads."""
    if len(windows) != 8:
        raise ValueError(f"windows must be the 8 numbers of layers.layouts.Windows, but they are {tuple(windows)}")
    map_height, map_width, height, width, shift_up, shift_left, head_group, num_head_groups = windows
    if not (1 <= height <= map_height and 1 <= width <= map_width):
        raise ValueError(f"windows of {height}×{width} do not fit into the map of {map_height}×{map_width}")
    if not (0 <= shift_up < height and 0 <= shift_left < width):
        raise ValueError(f"windows are shifted by less than their size, but {windows} are not")
    if num_head_groups < 1 or not 0 <= head_group < num_head_groups or num_heads % num_head_groups != 0:
        raise ValueError(f"{num_heads} heads do not divide into {num_head_groups} groups with a group {head_group}")
    prefix = tokens - map_height * map_width
    if prefix < 0 or (prefix > 0 and (height, width) != (map_height, map_width)):
        raise ValueError(
            f"{tokens} tokens do not match windows of {height}×{width} in a map of {map_height}×{map_width}: expected "
            "one for each place, and prefix tokens only if the window covers the map"
        )


def count_windows(windows: Sequence[int]) -> int:
    """Return the number of windows of a map."""
    map_height, map_width, height, width = windows[:4]
    return -(-map_height // height) * -(-map_width // width)


def count_units(qkv: Tensor, windows: Sequence[int]) -> int:
    """Return the number of windows of a batch."""
    return qkv.shape[0] * count_windows(windows)


def pointer(tensor: Tensor | None) -> int | None:
    """Return the address of a tensor's numbers, or None."""
    return None if tensor is None else tensor.data_ptr()


def contiguous(tensor: Tensor | None) -> Tensor | None:
    """Return a contiguous tensor, or None."""
    return None if tensor is None else tensor.contiguous()


def describe(qkv: Tensor, num_heads: int, windows: Sequence[int], scale: float | None) -> CAttention:
    """Return the shapes for the library."""
    width = qkv.shape[2] // (3 * num_heads)
    prefix = qkv.shape[1] - windows[0] * windows[1]
    scale = width**-0.5 if scale is None else scale
    return CAttention(qkv.shape[0], prefix, num_heads, width, torch.get_num_threads(), scale, CWindows(*windows))


OPS.define(
    "attention(Tensor qkv, Tensor? kernels, Tensor? bias, int num_heads, SymInt[] windows, float? scale, "
    "bool save_state) -> (Tensor, Tensor)"
)
OPS.define(
    "attention_backward(Tensor grad, Tensor qkv, Tensor? kernels, Tensor state, int num_heads, SymInt[] windows, "
    "float? scale, bool has_bias) -> (Tensor, Tensor, Tensor)"
)


@torch.library.register_fake("inlinevit::attention", lib=OPS)
def make_outputs(
    qkv: Tensor,
    kernels: Tensor | None,
    bias: Tensor | None,
    num_heads: int,
    windows: Sequence[int],
    scale: float | None,
    save_state: bool,
) -> tuple[Tensor, Tensor]:
    """Return empty outputs: the result, and what the backward pass needs (covariance, mean key, mean value)."""
    groups, width = windows[7], qkv.shape[2] // (3 * num_heads)
    out = qkv.new_empty(qkv.shape[0], qkv.shape[1], num_heads // groups * width)
    if not save_state:
        return out, qkv.new_empty(0)
    return out, qkv.new_empty(count_units(qkv, windows), num_heads // groups, width + 2, width)


@torch.library.impl("inlinevit::attention", "CPU", lib=OPS)
def attention(
    qkv: Tensor,
    kernels: Tensor | None,
    bias: Tensor | None,
    num_heads: int,
    windows: Sequence[int],
    scale: float | None,
    save_state: bool,
) -> tuple[Tensor, Tensor]:
    """Compute the forward pass; see inline_attention."""
    check(qkv, kernels, bias, num_heads, windows)
    out, state = make_outputs(qkv, kernels, bias, num_heads, windows, scale, save_state)
    if out.numel() > 0:
        qkv, kernels, bias = qkv.contiguous(), contiguous(kernels), contiguous(bias)
        shape = describe(qkv, num_heads, windows, scale)
        tensors = (qkv, kernels, bias, out, state if save_state else None)
        call(f"attention_{DTYPES[qkv.dtype]}", byref(shape), *map(pointer, tensors))
    return out, state


@torch.library.register_fake("inlinevit::attention_backward", lib=OPS)
def make_gradients(
    grad: Tensor,
    qkv: Tensor,
    kernels: Tensor | None,
    state: Tensor,
    num_heads: int,
    windows: Sequence[int],
    scale: float | None,
    has_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return empty gradients of qkv, of the kernels (empty without them) and of the bias for each window."""
    # The channels of other head groups get no gradient from here.
    grad_qkv = qkv.new_empty(qkv.shape) if windows[7] == 1 else qkv.new_zeros(qkv.shape)
    grad_kernels = qkv.new_empty(0 if kernels is None else kernels.shape)
    grad_bias = qkv.new_empty((count_units(qkv, windows), grad.shape[2]) if has_bias else 0)
    return grad_qkv, grad_kernels, grad_bias


@torch.library.impl("inlinevit::attention_backward", "CPU", lib=OPS)
def attention_backward(
    grad: Tensor,
    qkv: Tensor,
    kernels: Tensor | None,
    state: Tensor,
    num_heads: int,
    windows: Sequence[int],
    scale: float | None,
    has_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of attention."""
    gradients = make_gradients(grad, qkv, kernels, state, num_heads, windows, scale, has_bias)
    if grad.numel() > 0:
        grad, qkv, kernels, state = grad.contiguous(), qkv.contiguous(), contiguous(kernels), state.contiguous()
        shape = describe(qkv, num_heads, windows, scale)
        outputs = (gradients[0], gradients[1] if kernels is not None else None, gradients[2] if has_bias else None)
        tensors = (grad, qkv, kernels, state, *outputs)
        call(f"attention_backward_{DTYPES[qkv.dtype]}", byref(shape), *map(pointer, tensors))
    return gradients


def save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Save what backward needs."""
    qkv, kernels, bias, num_heads, windows, scale, save_state = inputs
    assert save_state, "attention was called without save_state, but its gradient is needed"
    ctx.save_for_backward(qkv, kernels, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.arguments = (num_heads, windows, scale, bias is not None)


def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of the arguments of attention."""
    qkv, kernels, state = ctx.saved_tensors
    has_bias = ctx.arguments[-1]
    grad_qkv, grad_kernels, grad_bias = torch.ops.inlinevit.attention_backward(
        grad, qkv, kernels, state, *ctx.arguments
    )
    return (
        grad_qkv,
        None if kernels is None else grad_kernels,
        grad_bias.sum(0) if has_bias else None,
        None,
        None,
        None,
        None,
    )


torch.library.register_autograd("inlinevit::attention", backward, setup_context=save_for_backward, lib=OPS)
