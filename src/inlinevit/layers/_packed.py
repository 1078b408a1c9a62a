"""Packed weights of modules that compute natively: they follow the weights of the modules."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from timm.layers import DropPath
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as module_hooks

T = TypeVar("T")


def is_plain(x: Tensor) -> bool:
    """Return whether a native kernel may compute with x: float32 on a CPU, with nothing that follows the computation.

    Such as a backward pass, a graph that is being recorded, autocast, torch.func, or a counter of operations.
    """
    return (
        # First, since nothing else can be asked while a graph is recorded.
        not torch.compiler.is_compiling()
        and type(x) is Tensor
        and x.dtype == torch.float32
        and x.is_cpu
        and not (x.requires_grad and torch.is_grad_enabled())
        and not torch.is_autocast_enabled("cpu")
        and not torch.jit.is_tracing()
        and forward_ad._current_level < 0
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._are_functorch_transforms_active()
    )


class PackedWeights(Generic[T]):
    """What a module computes natively with: made from its weights at the first call, and again when they changed.

    Copies, by deepcopy or by pickle, are empty. It is safe to use from several threads. Changes by load_state_dict, in
    place, by half() or to(), and other parameters or child modules are noticed; writing through `.data` or NumPy
    arrays is not.

    Args:
        pack: Makes it from the module, or returns None if this module cannot compute natively.
    """

    def __init__(self, pack: Callable[[Any], T | None]) -> None:
        self.pack = pack
        # Replaced as a whole, so that no thread sees it half-changed.
        self.state: WeightState[T] | None = None

    def get(self, module: nn.Module, x: Tensor) -> T | None:
        """Return the packed weights of the module to compute with x, or None if it must compute without them."""
        if not is_plain(x):
            return None
        state = self.state
        if state is None or not state.is_current():
            self.state = state = WeightState(module)
        if not state.is_inference():
            return None
        if not state.is_packed:
            state.packed = self.pack(module) if state.can_pack else None
            state.is_packed = True
        return state.packed

    def __reduce__(self) -> tuple[Any, ...]:
        return PackedWeights, (self.pack,)


class WeightState(Generic[T]):
    """The state of a module for which packed weights are valid.

    Everything that is asked at each call is in flat lists: a model asks thousands of times per second.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        self.parts = list(module.modules())
        self.children = [(part._modules, *child) for part in self.parts for child in part._modules.items()]
        self.parameters = [
            (part._parameters, name, parameter, parameter.data_ptr(), parameter._version)
            for part in self.parts
            for name, parameter in part._parameters.items()
            # Changes of inference tensors are not counted.
            if parameter is not None and not parameter.is_inference()
        ]
        # Aliases: the memory is not reused, so that other values cannot have the same address.
        self.aliases = [parameter.detach() for _, _, parameter, _, _ in self.parameters]
        self.random_parts = [part for part in self.parts if part is module or isinstance(part, nn.Dropout | DropPath)]
        # Hooks of the module itself are called in any case.
        self.hooks = [
            hooks
            for part in self.parts[1:]
            for hooks in (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks)
        ]
        self.hooks += [module_hooks._global_forward_hooks, module_hooks._global_forward_pre_hooks]
        weights = [parameter for part in self.parts for parameter in part.parameters(recurse=False)]
        # Whether the weights can be followed, are float32 on a CPU, and in modules with the forward of their class.
        self.can_pack = len(weights) == len(self.parameters) and all(
            type(weight) is nn.Parameter and weight.dtype == torch.float32 and weight.is_cpu for weight in weights
        )
        self.can_pack &= not any("forward" in vars(part) for part in self.parts[1:])
        self.is_packed = False
        self.packed: T | None = None

    def is_current(self) -> bool:
        """Return whether the module has the same parts and the same weights as before."""
        for parts, name, part in self.children:
            if parts.get(name) is not part:
                return False
        for parameters, name, parameter, address, known in self.parameters:
            if parameters.get(name) is not parameter or parameter.data_ptr() != address or parameter._version != known:
                return False
        return True

    def is_inference(self) -> bool:
        """Return whether no hooks, no dropout and no gradient of the weights need the modules themselves."""
        if any(self.hooks) or any(part.training for part in self.random_parts):
            return False
        return not (torch.is_grad_enabled() and any(entry[2].requires_grad for entry in self.parameters))
