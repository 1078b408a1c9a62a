"""Models that only answer: what is constant is computed once, and what they do again and again is compiled."""

from collections.abc import Callable
from copy import deepcopy
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ..layers import Block, PositionEmbedding
from ._backbone import Backbone

# Up to so many pixels a call, compiling the model as a whole is the fastest; beyond, blocks that work in pieces are.
FEW_PIXELS = 2**19


def optimize_for_inference(model: nn.Module, *, compile: bool = True) -> nn.Module:
    """A copy of a model that gives the same answers faster, and that learns no more.

    It is in evaluation mode and has no gradients. Positions are resized once for each input size, as long as there are
    not too many. A plain transformer whose head sees the class token alone computes nothing else in its last block.
    What is compiled is compiled when it is first called: the whole model for small inputs, attention and MLP for large
    ones. The weights may change afterwards, by load_state_dict, half() or to(): answers are those of the new weights.

    Args:
        model: A model with blocks of ours, such as `timm.create_model("inline_deit_tiny")`, with or without
            `features_only`.
        compile: Whether to compile. Without, nothing needs a compiler, and the first call is as fast as the others.

    Returns:
        A model of the same class.
    """
    model = deepcopy(model).eval().requires_grad_(False)
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    if not blocks:
        raise ValueError(f"{type(model).__name__} has no block of inlinevit's: there is nothing here to optimize")
    for module in model.modules():
        if isinstance(module, PositionEmbedding):
            module.freeze()
        elif isinstance(module, Backbone):
            module.saves_last_block = True
    # Of a model that was optimized before; one that somebody else has put there is kept.
    if isinstance(getattr(model.forward, "__self__", None), ForwardBySize):
        del model.forward
    for block in blocks:
        block.compiles_branches = compile
    if compile:
        # A method, because copies of methods are bound to copies of their objects.
        model.forward = ForwardBySize(model).forward
    return model


class ForwardBySize:
    """The forward of a model: compiled as a whole for small inputs, as it is for large ones.

    It belongs to its model: a copy of the model has a copy of it, which compiles the forward of that one.

    Args:
        model: The model, with the forward that it had before.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        # None = that of the class, bound to whatever model this object belongs to.
        self.replaced: Callable[..., Any] | None = model.__dict__.get("forward")
        self.compiled: Callable[..., Any] | None = None

    def forward(self, images: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As the forward of the model."""
        forward = self.replaced or MethodType(type(self.model).forward, self.model)
        # While a graph is recorded, there is nothing to compile.
        if torch.compiler.is_compiling() or torch.jit.is_tracing() or not isinstance(images, Tensor):
            return forward(images, *args, **kwargs)
        if images.dim() != 4 or images.shape[0] * images.shape[-2] * images.shape[-1] > FEW_PIXELS:
            return forward(images, *args, **kwargs)
        if self.compiled is None:
            self.compiled = torch.compile(forward)
        return self.compiled(images, *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "compiled": None}
