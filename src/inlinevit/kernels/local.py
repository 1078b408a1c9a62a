"""The kernels of the local residual from tokens, W₂·GELU(W₁·x̄): one call, forward and backward."""

from collections.abc import Sequence
from ctypes import byref
from typing import Any

import torch
from torch import Tensor

from ..ops import local as reference
from ..ops.windows import Windows, covers_map, window_means
from ._eager import needs_gradient
from ._library import CAttention, call
from .attention import DTYPES, WindowSizes, check_tensors, contiguous, count_units, describe, pointer


def local_kernels(
    x: Tensor,
    windows: WindowSizes,
    num_heads: int,
    *,
    weight1: Tensor,
    bias1: Tensor,
    weight2: Tensor,
    bias2: Tensor,
    added: Tensor | None = None,
) -> Tensor:
    """Make the kernels of the local residual, W₂·GELU(W₁·x̄). Not an operator: graphs use ops.local.local_kernels.

    Args:
        x: Tokens (batch, prefix + H·W, channels of all heads), float32 or float64 on the CPU. With prefix tokens, the
            window must cover the map. x̄ is the mean over the real tokens of each window.
        windows: ops.windows.Windows of the head group.
        num_heads: Number of all heads.
        weight1: W₁ of the head group, (channels of the group, head_dim, 1): a convolution with one group per head.
        bias1: (channels of the group,).
        weight2: W₂ of the head group, (9 · channels of the group, head_dim, 1).
        bias2: (9 · channels of the group,).
        added: (channels of the group, 9), added to all kernels: those of LePE.

    Returns:
        (batch · windows, channels of the group, 9).
    """
    tensors = (x, weight1, bias1, weight2, bias2, added)
    if needs_gradient(*tensors):
        return LocalKernels.apply(*tensors, num_heads, tuple(windows))
    return forward(tensors, num_heads, windows, save_state=False)[0]


def forward(
    tensors: Sequence[Tensor | None], num_heads: int, windows: WindowSizes, *, save_state: bool
) -> tuple[Tensor, Tensor]:
    """Compute the forward pass of the tensors of local_kernels, in order.

    Returns:
        The kernels, and what the backward pass needs: x̄ and W₁·x̄ + b₁, (2, batch · windows, channels of the group).
    """
    x, weight1, bias1, weight2, bias2, added = tensors
    assert x is not None
    if x.dim() != 3 or x.device.type != "cpu":
        raise ValueError(
            f"x must be (batch, tokens, channels) on the CPU, but it is {tuple(x.shape)} on the {x.device}"
        )
    shape = describe_tokens(x.shape, x.dtype, num_heads, windows)
    channels, width = x.shape[2] // windows[7], x.shape[2] // num_heads
    shapes: dict[str, tuple[Tensor | None, tuple[int, ...]]] = {
        "weight1": (weight1, (channels, width, 1)),
        "bias1": (bias1, (channels,)),
        "weight2": (weight2, (9 * channels, width, 1)),
        "bias2": (bias2, (9 * channels,)),
        "added": (added, (channels, 9)),
    }
    check_tensors(x, shapes)
    units = count_units(x, windows)
    out, state = x.new_empty(units, channels, 9), x.new_empty((2, units, channels) if save_state else 0)
    if out.numel() > 0:
        # A list, so that copies live until the kernel has read them.
        inputs = [contiguous(tensor) for tensor in tensors]
        outputs = (out, state if save_state else None)
        call(f"local_kernels_{DTYPES[x.dtype]}", byref(shape), *map(pointer, inputs), *map(pointer, outputs))
    return out, state


def describe_tokens(shape: torch.Size, dtype: torch.dtype, num_heads: int, windows: WindowSizes) -> CAttention:
    """Return the shapes for the library of tokens (batch, prefix + H·W, channels of all heads)."""
    packed = torch.Size((shape[0], shape[1], 3 * shape[2]))
    return describe(packed, dtype, num_heads, tuple(windows), None, torch.get_num_threads())


class LocalKernels(torch.autograd.Function):
    """local_kernels with its gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight1: Tensor,
        bias1: Tensor,
        weight2: Tensor,
        bias2: Tensor,
        added: Tensor | None,
        num_heads: int,
        windows: tuple[int, ...],
    ) -> Tensor:
        """See local_kernels."""
        tensors = (x, weight1, bias1, weight2, bias2, added)
        out, state = forward(tensors, num_heads, windows, save_state=True)
        ctx.save_for_backward(*tensors, state)
        ctx.arguments = num_heads, windows
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the arguments."""
        *tensors, state = ctx.saved_tensors
        # The kernel's own gradient can be neither differentiated (create_graph=True) nor batched.
        if torch.is_grad_enabled() or not torch._C._has_storage(grad):
            return (*differentiable_gradients(grad, tensors, *ctx.arguments), None, None)
        return (*compute_gradients(grad, tensors, state, *ctx.arguments, ctx.needs_input_grad[0]), None, None)


def compute_gradients(
    grad: Tensor, tensors: Sequence[Tensor | None], state: Tensor, num_heads: int, windows: WindowSizes, needs_x: bool
) -> Sequence[Tensor | None]:
    """Return the gradients of the tensors of local_kernels; that of x only if it is needed."""
    x, weight1, _, weight2, _, added = tensors
    assert x is not None
    grad_added = None if added is None else grad.sum(0)
    gradients = [x.new_empty(tensor.shape) for tensor in tensors[1:5] if tensor is not None]
    if grad.numel() == 0:
        return torch.zeros_like(x), *(gradient.zero_() for gradient in gradients), grad_added
    grad_mean = state.new_empty(state.shape[1:]) if needs_x else None
    # All tokens of a window have the same gradient: that of a whole map needs no memory of its own.
    whole = covers_map(Windows(*windows)) and windows[7] == 1
    grad_x = None
    if needs_x and not whole:
        # The channels of other head groups get no gradient from here.
        grad_x = x.new_empty(x.shape) if windows[7] == 1 else x.new_zeros(x.shape)
    inputs = [contiguous(tensor) for tensor in (grad, state, weight1, weight2)]
    name, shape = f"local_kernels_backward_{DTYPES[x.dtype]}", describe_tokens(x.shape, x.dtype, num_heads, windows)
    call(name, byref(shape), *map(pointer, inputs), *map(pointer, (grad_mean, grad_x, *gradients)))
    if grad_mean is not None and whole:
        grad_x = grad_mean.unsqueeze(1).expand(x.shape)
    return grad_x, *gradients, grad_added


def differentiable_gradients(
    grad: Tensor, tensors: Sequence[Tensor | None], num_heads: int, windows: WindowSizes
) -> Sequence[Tensor | None]:
    """Return the gradients of the tensors of local_kernels, as functions of all of them."""
    create_graph, layout = torch.is_grad_enabled(), Windows(*windows)
    with torch.enable_grad():
        x, weight1, bias1, weight2, bias2, added = tensors
        assert x is not None
        group = x.unflatten(2, (layout.num_head_groups, -1))[:, :, layout.head_group]
        weights: Any = (weight1, bias1, weight2, bias2)
        out = reference.local_kernels(window_means(group, layout), num_heads // layout.num_head_groups, *weights)
        out = out if added is None else out + added
    inputs = [tensor for tensor in tensors if tensor is not None and tensor.requires_grad]
    gradients = iter(torch.autograd.grad(out, inputs, grad, create_graph=create_graph))
    return [next(gradients) if tensor is not None and tensor.requires_grad else None for tensor in tensors]
