"""InLine attention from packed q, k and v, with its convolution of the values: one operator, forward and backward."""

from collections.abc import Callable, Mapping, Sequence
from ctypes import byref
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..ops.inline import windowed_inline_attention
from ..ops.windows import Windows, count_windows
from ._eager import is_eager, needs_gradient
from ._library import CAttention, CWindows, call

# The operators of this package: torch.ops.inlinevit.*
OPS = torch.library.Library("inlinevit", "DEF")
DTYPES = {torch.float32: "f32", torch.float64: "f64"}

# A window layout as a sequence of numbers, in the order of ops.windows.Windows.
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
    """The compiled form of ops.inline.windowed_inline_attention, for float32 and float64 on the CPU.

    Args:
        qkv: (batch, prefix + H·W, 3 · channels of all heads). With prefix tokens, the window must cover the map.
        windows: ops.windows.Windows of the head group.
        num_heads: Number of all heads.
        kernels: (batch · windows, channels of the group, 9): the kernels of the local residual, plus those of LePE.
        bias: (channels of the group,), of LePE. Needs kernels.
        scale: Factor of q·k; head_dim^-1/2 by default.

    Returns:
        (batch, prefix + H·W, channels of the group).
    """
    differentiable = needs_gradient(qkv, kernels, bias)
    if not is_eager(qkv):
        return torch.ops.inlinevit.attention(qkv, kernels, bias, num_heads, list(windows), scale, differentiable)[0]
    # The dispatcher would take as long as a small input.
    if differentiable:
        return Attention.apply(qkv, kernels, bias, num_heads, windows, scale)
    return attention(qkv, kernels, bias, num_heads, windows, scale, False)[0]


def check_windows(windows: Sequence[int], tokens: int, num_heads: int) -> None:
    """Raise ValueError for windows that do not fit the map, the tokens or the heads."""
    if len(windows) != 8:
        raise ValueError(f"windows must be the 8 numbers of ops.windows.Windows, but they are {tuple(windows)}")
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


def count_units(qkv: Tensor, windows: Sequence[int]) -> int:
    """Return the number of windows of a batch."""
    return qkv.shape[0] * count_windows(Windows(*windows))


def check_convolution(qkv: Tensor, kernels: Tensor | None, bias: Tensor | None, windows: Sequence[int]) -> None:
    """Raise ValueError for kernels and a bias that do not fit: the compiled code reads memory without asking."""
    if kernels is None:
        if bias is not None:
            raise ValueError("a bias is added together with the convolution: pass kernels as well")
        return
    channels = qkv.shape[2] // 3 // windows[7]
    shapes = {"kernels": (kernels, (count_units(qkv, windows), channels, 9)), "bias": (bias, (channels,))}
    check_tensors(qkv, shapes)


def check_tensors(like: Tensor, shapes: Mapping[str, tuple[Tensor | None, tuple[int, ...]]]) -> None:
    """Raise ValueError for named tensors that are not of their shape, or of another type or device than the first."""
    for name, (tensor, shape) in shapes.items():
        if tensor is None:
            continue
        if tensor.shape != shape or tensor.dtype != like.dtype or tensor.device != like.device:
            raise ValueError(
                f"{name} must be {like.dtype} of shape {shape} on the {like.device}, but it is {tensor.dtype} of "
                f"{tuple(tensor.shape)} on the {tensor.device}"
            )


def pointer(tensor: Tensor | None) -> int | None:
    """Return the address of a tensor's numbers, or None."""
    return None if tensor is None else tensor.data_ptr()


def contiguous(tensor: Tensor | None) -> Tensor | None:
    """Return a contiguous tensor, or None."""
    return None if tensor is None else tensor.contiguous()


@lru_cache(maxsize=256)
def describe(
    shape: torch.Size, dtype: torch.dtype, num_heads: int, windows: tuple[int, ...], scale: float | None, threads: int
) -> CAttention:
    """Return the shapes for the library, which only reads them.

    Args:
        shape: Of qkv.
        dtype: Of qkv.
        num_heads: Number of all heads.
        windows: The windows of the head group.
        scale: Factor of q·k; head_dim^-1/2 by default.
        threads: Number of threads to use.

    Raises:
        ValueError: They do not fit together, or cannot be computed.
    """
    if len(shape) != 3 or num_heads < 1 or shape[2] % (3 * num_heads) != 0 or shape[2] == 0:
        raise ValueError(f"qkv must be (batch, tokens, 3 · heads · width) with {num_heads} heads, but it is {shape}")
    if dtype not in DTYPES:
        raise ValueError(f"the native kernels compute in float32 and float64, but qkv is {dtype}")
    check_windows(windows, shape[1], num_heads)
    width = shape[2] // (3 * num_heads)
    prefix = shape[1] - windows[0] * windows[1]
    scale = width**-0.5 if scale is None else scale
    return CAttention(shape[0], prefix, num_heads, width, threads, scale, CWindows(*windows))


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
    shape = describe(qkv.shape, qkv.dtype, num_heads, tuple(windows), scale, torch.get_num_threads())
    check_convolution(qkv, kernels, bias, windows)
    out, state = make_outputs(qkv, kernels, bias, num_heads, windows, scale, save_state)
    if out.numel() > 0:
        qkv, kernels, bias = qkv.contiguous(), contiguous(kernels), contiguous(bias)
        tensors = (qkv, kernels, bias, out, state if save_state else None)
        call(f"attention_{DTYPES[qkv.dtype]}", byref(shape), *map(pointer, tensors))
    return out, state


OPS.impl("attention", attention, "CPU")


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
        shape = describe(qkv.shape, qkv.dtype, num_heads, tuple(windows), scale, torch.get_num_threads())
        outputs = (gradients[0], gradients[1] if kernels is not None else None, gradients[2] if has_bias else None)
        tensors = (grad, qkv, kernels, state, *outputs)
        call(f"attention_backward_{DTYPES[qkv.dtype]}", byref(shape), *map(pointer, tensors))
    return gradients


OPS.impl("attention_backward", attention_backward, "CPU")


class Attention(torch.autograd.Function):
    """attention with its gradient, past the dispatcher."""

    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        kernels: Tensor | None,
        bias: Tensor | None,
        num_heads: int,
        windows: Sequence[int],
        scale: float | None,
    ) -> Tensor:
        """See inline_attention."""
        out, state = attention(qkv, kernels, bias, num_heads, windows, scale, True)
        save_for_backward(ctx, (qkv, kernels, bias, num_heads, windows, scale), state)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the arguments."""
        return (*compute_gradients(ctx, grad, attention_backward), None, None, None)


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Save what backward needs."""
    assert inputs[-1], "attention was called without save_state, but its gradient is needed"
    ctx.mark_non_differentiable(output[1])
    save_for_backward(ctx, inputs[:-1], output[1])


def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of the arguments of the operator."""
    return (*compute_gradients(ctx, grad, torch.ops.inlinevit.attention_backward), None, None, None, None)


torch.library.register_autograd("inlinevit::attention", backward, setup_context=setup_context, lib=OPS)


def save_for_backward(ctx: Any, inputs: Sequence[Any], state: Tensor) -> None:
    """Save what compute_gradients needs."""
    ctx.save_for_backward(*inputs[:3], state)
    ctx.arguments = inputs[3:]


def compute_gradients(ctx: Any, grad: Tensor, attention_backward: Callable[..., Any]) -> Sequence[Tensor | None]:
    """Return the gradients of qkv, the kernels and the bias."""
    qkv, kernels, bias, state = ctx.saved_tensors
    # The kernel's own gradient can be neither differentiated (create_graph=True) nor batched (is_grads_batched=True).
    if torch.is_grad_enabled() or not torch._C._has_storage(grad):
        return differentiable_gradients(grad, qkv, kernels, bias, *ctx.arguments)
    grad_qkv, grad_kernels, grad_bias = attention_backward(grad, qkv, kernels, state, *ctx.arguments, bias is not None)
    return grad_qkv, None if kernels is None else grad_kernels, None if bias is None else grad_bias.sum(0)


def differentiable_gradients(
    grad: Tensor,
    qkv: Tensor,
    kernels: Tensor | None,
    bias: Tensor | None,
    num_heads: int,
    windows: Sequence[int],
    scale: float | None,
) -> Sequence[Tensor | None]:
    """Return the gradients of qkv, the kernels and the bias, as functions of all arguments."""
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        out = windowed_inline_attention(qkv, Windows(*windows), num_heads, kernels=kernels, bias=bias, scale=scale)
    inputs = [tensor for tensor in (qkv, kernels, bias) if tensor is not None and tensor.requires_grad]
    gradients = iter(torch.autograd.grad(out, inputs, grad, create_graph=create_graph))
    return [next(gradients) if tensor is not None and tensor.requires_grad else None for tensor in (qkv, kernels, bias)]


@register_flop_formula(torch.ops.inlinevit.attention)
def count_flops(qkv: Any, kernels: Any, bias: Any, num_heads: int, windows: Sequence[int], *_: Any, **__: Any) -> int:
    """Return the nominal cost: each token's key times its value, and its query times the covariance."""
    batch, tokens, channels = qkv
    count = count_windows(Windows(*windows))
    places = tokens if count == 1 else count * windows[2] * windows[3]
    return 4 * batch * places * (channels // 3 // windows[7]) * (channels // 3 // num_heads)


@register_flop_formula(torch.ops.inlinevit.attention_backward)
def count_backward_flops(
    grad: Any, qkv: Any, kernels: Any, state: Any, num_heads: int, windows: Sequence[int], *_: Any, **__: Any
) -> int:
    """Return the nominal cost, twice that of the forward pass."""
    return 2 * count_flops(qkv, kernels, None, num_heads, windows)
