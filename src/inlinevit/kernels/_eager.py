"""Whether a compiled kernel may be called: past torch's dispatcher, without a gradient, or in a compiled graph."""

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad


def is_plain(x: Tensor) -> bool:
    """Return whether it is not a tensor of fx or of a fake mode, or of another subclass."""
    return type(x) in (Tensor, nn.Parameter)


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Return whether an operator on these tensors is differentiated by autograd."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def is_eager(x: Tensor) -> bool:
    """Return whether operators on a tensor are just called, on the CPU: nothing records, counts or transforms them."""
    return (
        x.device.type == "cpu"
        and is_plain(x)
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        # Modes that see each operator, such as FLOP counters.
        and torch._C._len_torch_dispatch_stack() == 0
        # vmap, grad and jvp of torch.func, and forward-mode differentiation.
        and torch._C._functorch.peek_interpreter_stack() is None
        and forward_ad._current_level < 0
    )


def is_compiled_training(x: Tensor) -> bool:
    """Return whether torch.compile records a graph on the CPU in which a tensor has a gradient; not torch.export."""
    # torch.export says so since torch 2.7; before, it cannot be told from torch.compile.
    return (
        torch.compiler.is_compiling()
        and hasattr(torch.compiler, "is_exporting")
        and not torch.compiler.is_exporting()
        and x.device.type == "cpu"
        and needs_gradient(x)
    )
