"""Packed weights of modules that compute natively: they follow the weights of the modules."""

from collections.abc import Callable
from operator import attrgetter
from typing import Any, Generic, TypeVar

import torch
from timm.layers import DropPath
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as module_hooks

T = TypeVar("T")

# Faster than generators.
is_training, requires_grad = attrgetter("training"), attrgetter("requires_grad")


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
        parts = list(module.modules())
        # The module's parts and parameters, as (dictionary, name, part or parameter).
        self.members = [
            (members, *member)
            for part in parts
            for members in (part._modules, part._parameters)
            for member in members.items()
        ]
        self.parameters = parameters = list(module.parameters())
        # Tensors of other types may have no address, and changes of inference tensors are not counted.
        self.weights = [
            (parameter, parameter.data_ptr(), parameter._version)
            for parameter in parameters
            if type(parameter) is nn.Parameter and not parameter.is_inference()
        ]
        # Aliases: the memory is not reused, so that other values cannot have the same address.
        self.aliases = [parameter.detach() for parameter, _, _ in self.weights]
        # Whether all weights can be followed, are float32 on a CPU, and in modules with the forward of their class.
        self.can_pack = (
            len(self.weights) == len(parameters)
            and all(parameter.dtype == torch.float32 and parameter.is_cpu for parameter in parameters)
            and not any("forward" in vars(part) for part in parts[1:])
        )
        self.random_parts = [part for part in parts if part is module or isinstance(part, nn.Dropout | DropPath)]
        # Hooks of the module itself are called in any case.
        self.hooks = [
            hooks
            for part in parts[1:]
            for hooks in (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks)
        ]
        self.hooks += [module_hooks._global_forward_hooks, module_hooks._global_forward_pre_hooks]
        self.is_packed = False
        self.packed: T | None = None

    def is_current(self) -> bool:
        """Return whether the module has the same parts and the same weights as before."""
        for members, name, member in self.members:
            if members.get(name) is not member:
                return False
        for parameter, address, version in self.weights:
            if parameter.data_ptr() != address or parameter._version != version:
                return False
        return True

    def is_inference(self) -> bool:
        """Return whether no hooks, no dropout and no gradient of the weights need the modules themselves."""
        if any(self.hooks) or any(map(is_training, self.random_parts)):
            return False
        return not (torch.is_grad_enabled() and any(map(requires_grad, self.parameters)))
