"""Models for inference only: modules are replaced by ones that compute the same results faster."""

from collections.abc import Callable
from copy import deepcopy
from functools import cache
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..layers import BaseAttention, Block, ResamplePosEmbed
from ..layers._cached_pos_embed import CachedResamplePosEmbed
from ..layers._chunks import has_hooks, records_graph
from ..ops.windows import merge_heads
from ._backbone import Backbone, as_image

# Up to this many pixels per call, compiling the model as a whole is fastest; beyond, compiled branches in chunks are.
FEW_PIXELS = 2**19


def optimize_for_inference(model: nn.Module, *, compile: bool = True) -> nn.Module:
    """Return a copy of a model that gives the same outputs faster, without gradients.

    The copy is in evaluation mode. Resized positions are cached for each input size. A plain transformer whose head
    only uses the class token computes only that in its last block. Compilation happens at the first call: of the whole
    model for small inputs, of attention and MLP for large ones. The weights may change afterwards, by load_state_dict,
    half() or to(): outputs are those of the new weights.

    Args:
        model: A model with blocks of inlinevit, such as `timm.create_model("inline_deit_tiny")`, with or without
            `features_only`; or another one after `replace_attention`, which is compiled as a whole for small inputs.
        compile: Whether to compile. Without compilation, the first call is as fast as the others.

    Returns:
        A model of the same class.
    """
    model = deepcopy(model).eval().requires_grad_(False)
    modules = list(model.modules())
    if not any(isinstance(module, Block | BaseAttention) for module in modules):
        raise ValueError(f"{type(model).__name__} has no block or attention of inlinevit: there is nothing to optimize")
    CompiledForward.remove(model)
    for module in modules:
        # Only exactly these classes: a subclass may have a forward of its own.
        if type(module) is ResamplePosEmbed:
            CachedResamplePosEmbed.replace(module)
        elif type(module) in (Block, InferenceBlock):
            InferenceBlock.replace(cast(Block, module), compile_branches=compile)
        elif isinstance(module, Backbone) and "forward" not in vars(module):
            set_forward(module, ClassTokenForward(module).forward)
    if compile:
        set_forward(model, CompiledForward(model).forward)
    return model


def set_forward(model: nn.Module, forward: Callable[..., Any]) -> None:
    """Replace the forward of one model by a bound method, which is copied and pickled together with the model."""
    model.forward = forward


@cache
def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a compiled function, the same one for all blocks; importing the compiler takes seconds."""
    return torch.compile(function)


class InferenceBlock(Block):
    """A block with compiled branches, and with an output for the prefix tokens alone."""

    compile_branches: bool

    @classmethod
    def replace(cls, block: Block, *, compile_branches: bool) -> None:
        """Change a block in place into one of this class; its parameters, hooks and names stay.

        Args:
            block: The block.
            compile_branches: Whether to compile attention and MLP.
        """
        block.__class__ = cls
        cast(InferenceBlock, block).compile_branches = compile_branches

    def forward(self, x: Tensor, feat_size: tuple[int, int], prefix_only: bool = False) -> Tensor:
        """Map tokens (batch, prefix + H·W, dim) to the same shape or, with prefix_only, to (batch, prefix, dim)."""
        if not prefix_only:
            return super().forward(x, feat_size)
        prefix = x.shape[1] - feat_size[0] * feat_size[1]
        # Hooks of attention get all tokens.
        if has_hooks(self.attn) or not isinstance(self.attn, BaseAttention) or not self.attn.row_wise:
            return super().forward(x, feat_size)[:, :prefix]
        x = x[:, :prefix] + self.call_branch(attend_prefix, x, feat_size)
        return x + self.mlp_branch(x, (0, 0))

    def attention_branch(self, x: Tensor, feat_size: tuple[int, int]) -> Tensor:
        """See Block.attention_branch."""
        return self.call_branch(Block.attention_branch, x, feat_size)

    def mlp_branch(self, x: Tensor, feat_size: tuple[int, int]) -> Tensor:
        """See Block.mlp_branch."""
        return self.call_branch(Block.mlp_branch, x, feat_size)

    def call_branch(self, branch: Callable[..., Tensor], x: Tensor, feat_size: tuple[int, int]) -> Tensor:
        """Return branch(self, x, feat_size), compiled unless a graph is being recorded."""
        if self.compile_branches and not records_graph(x):
            branch = compiled(branch)
        return branch(self, x, feat_size)


def attend_prefix(block: Block, x: Tensor, feat_size: tuple[int, int]) -> Tensor:
    """Compute norm → attention of a block for the prefix tokens alone, which have no local residual.

    Args:
        block: The block.
        x: Tokens (batch, prefix + H·W, dim).
        feat_size: (H, W) of the map.

    Returns:
        (batch, prefix, dim).
    """
    attn = cast(BaseAttention, block.attn)
    prefix = x.shape[1] - feat_size[0] * feat_size[1]
    ((q, k, v, windows),) = attn.partition(block.norm1(x), feat_size)
    out = merge_heads(attn.attend(q[:, :, :prefix], k, v, windows))
    return block.drop_path1(attn.proj_drop(attn.proj(out)))


class ClassTokenForward:
    """The forward of a Backbone; with global_pool="token", its last block computes the class token alone.

    A copy of the model has a copy of this object.

    Args:
        model: The model.
    """

    def __init__(self, model: Backbone) -> None:
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Map images (batch, in_chans, H, W) to logits (batch, num_classes)."""
        model = self.model
        *stages, last = model.stage_list()
        block = last.blocks[-1]
        if model.global_pool != "token" or not isinstance(block, InferenceBlock):
            return type(model).forward(model, x)
        x = as_image(x, model.in_chans)
        for stage in stages:
            x = stage(x)
        x, feat_size, _ = last.forward_tokens(x, last=len(last.blocks) - 2)
        return model.forward_head(model.norm(block(x, feat_size, prefix_only=True)))


class CompiledForward:
    """The forward of a model: compiled as a whole for small inputs, unchanged for large ones.

    A copy of the model has a copy of this object, which compiles the forward of that copy.

    Args:
        model: The model, with the forward that it had before.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        # None = the forward of the class, bound to the model that this object belongs to.
        self.replaced: Callable[..., Any] | None = vars(model).get("forward")
        self.compiled: Callable[..., Any] | None = None

    @staticmethod
    def remove(model: nn.Module) -> None:
        """Restore the forward of a model that was compiled before."""
        compiled_forward = getattr(model.forward, "__self__", None)
        if isinstance(compiled_forward, CompiledForward):
            del model.forward
            if compiled_forward.replaced is not None:
                set_forward(model, compiled_forward.replaced)

    def forward(self, images: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Call the forward of the model."""
        forward = self.replaced or MethodType(type(self.model).forward, self.model)
        # While a graph is recorded, there is nothing to compile.
        if records_graph(images) or not isinstance(images, Tensor):
            return forward(images, *args, **kwargs)
        if images.dim() != 4 or images.shape[0] * images.shape[-2] * images.shape[-1] > FEW_PIXELS:
            return forward(images, *args, **kwargs)
        if self.compiled is None:
            self.compiled = torch.compile(forward)
        return self.compiled(images, *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "compiled": None}
