"""Whether a compiled kernel may be called past torch's dispatcher."""

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad


def is_eager(x: Tensor) -> bool:
    """Return whether operators on a tensor are just called, on the CPU: nothing records, counts or transforms them."""
    return (
        x.device.type == "cpu"
        # Not a tensor of fx or of a fake mode, or of another subclass.
        and type(x) in (Tensor, nn.Parameter)
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        # Modes that see each operator, such as FLOP counters.
        and torch._C._len_torch_dispatch_stack() == 0
        # vmap, grad and jvp of torch.func, and forward-mode differentiation.
        and torch._C._functorch.peek_interpreter_stack() is None
        and forward_ad._current_level < 0
    )
