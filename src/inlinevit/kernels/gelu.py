"""GELU with its gradient, for training in float32 on the CPU: torch's takes several times as long."""

from typing import Any

import torch
from torch import Tensor

from ._eager import is_eager, is_plain, needs_gradient
from ._library import available, call


def computes_gelu(x: Tensor) -> bool:
    """Return whether gelu(x) is to be used: in training, where operators are just called. Elsewhere, torch's is."""
    # Plainness first: a tensor of fx has neither a device nor a type.
    return is_plain(x) and is_eager(x) and x.dtype == torch.float32 and needs_gradient(x) and available()


def gelu(x: Tensor) -> Tensor:
    """GELU of x, float32 on the CPU, exact up to 4e-7 · |x|."""
    return Gelu.apply(x)


class Gelu(torch.autograd.Function):
    """GELU with its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """See gelu."""
        x = x.contiguous()
        ctx.save_for_backward(x)
        out = torch.empty_like(x)
        call("gelu", x.numel(), torch.get_num_threads(), x.data_ptr(), out.data_ptr())
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Return the gradient of x."""
        (x,) = ctx.saved_tensors
        # The kernel's own gradient can be neither differentiated (create_graph=True) nor batched.
        if torch.is_grad_enabled() or not torch._C._has_storage(grad):
            return torch.ops.aten.gelu_backward(grad, x)
        grad = grad.contiguous()
        out = torch.empty_like(x)
        call("gelu_backward", x.numel(), torch.get_num_threads(), grad.data_ptr(), x.data_ptr(), out.data_ptr())
        return out
