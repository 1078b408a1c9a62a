"""Models that only answer: what is constant is computed once, and what they do again and again is compiled."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from .layers import Block, PositionEmbedding
from .models._backbone import Backbone

# Up to so many pixels a call, compiling the model as a whole is the fastest; beyond, blocks that work in pieces are.
FEW_PIXELS = 2**19


def optimize_for_inference(model: nn.Module, *, compile: bool = True) -> nn.Module:
    """A copy of a model that gives the same answers faster, and that learns no more.

    It is in evaluation mode and has no gradients. Positions are resized once for each input size. A plain transformer
    whose head sees the class token alone computes nothing else in its last block. What is compiled is
    compiled when it is first called: the whole model for small inputs, attention and MLP for large ones.

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
    if compile:
        whole, in_pieces = torch.compile(model.forward), model.forward
        for block in blocks:
            block.compile_branches()
        model.forward = by_pixels(whole, in_pieces)
    return model


def by_pixels(few: Callable[..., Any], many: Callable[..., Any]) -> Callable[..., Any]:
    """A function of images that leaves small inputs to one function and large ones to another."""

    def forward(images: Tensor, *args: Any, **kwargs: Any) -> Any:
        pixels = images.shape[0] * images.shape[-2] * images.shape[-1]
        return (few if pixels <= FEW_PIXELS else many)(images, *args, **kwargs)

    return forward
