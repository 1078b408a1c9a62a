"""Models for inference only: modules are replaced by ones that compute the same results faster."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn

from .. import kernels
from ..layers import BaseAttention, Block, ConvEmbed, PatchMerging, ResamplePosEmbed
from ..layers._cached_pos_embed import CachedResamplePosEmbed
from ..layers._chunks import records_graph
from ..layers._inference_block import InferenceBlock, is_native, run_native
from ..layers._inference_embed import InferenceConvEmbed, InferencePatchMerging
from ..layers._native_linear import Int8Linear
from ..layers._packed import is_plain
from ._inline_vit import InLineViT, Stage, as_image

# Up to this many pixels per call, compiling the model as a whole is fastest; beyond, compiled branches in chunks are.
FEW_PIXELS = 2**19


def optimize_for_inference(
    model: nn.Module, *, dtype: str | torch.dtype | None = None, compile: bool = True
) -> nn.Module:
    """Return a copy of a model that gives the same outputs faster, without gradients.

    The copy is in evaluation mode. On a CPU in float32, native kernels compute patch embedding, downsampling and blocks
    with InLine or softmax attention and a plain MLP, where there are kernels (see `inlinevit info`). Hooks are called;
    with hooks in a block or between blocks, these are computed one by one. Resized positions are cached for each input
    size. A plain transformer whose head only uses the class token computes only that in its last block.

    What does not compute natively is compiled at the first call: attention and MLP of other blocks; on another device,
    in another precision or without kernels the whole model for small inputs, attention and MLP for large ones.

    The weights may change afterwards, by load_state_dict, in place, by half() or to(): outputs are those of the new
    weights. Only values that are written through `.data` or a NumPy array go unnoticed. Native blocks have a packed
    copy of their weights beside them, of the same size (int8: a quarter), which is not saved or copied.

    Args:
        model: A model with blocks of inlinevit, such as `timm.create_model("inline_deit_tiny")`, with or without
            `features_only`; or another one after `replace_attention`.
        dtype: "int8" to compute the linear layers in int8, with outputs that are almost the same: weights are
            quantised for each output channel, activations for each token as they come, without calibration. All else,
            and the head, stays in float32. By default, everything does.
        compile: Whether to compile what does not compute natively. Without compilation, the first call is as fast as
            the others.

    Returns:
        A model of the same class.
    """
    if dtype not in (None, "int8", torch.int8):
        raise ValueError(f'dtype is {dtype!r}: it should be "int8", or None for the precision of the weights')
    int8 = dtype is not None
    if int8 and not kernels.available():
        raise ValueError(
            f"int8 needs the native kernels, which are not in use ({kernels.status().reason}): change that, see "
            "`inlinevit info`, or leave out dtype"
        )
    # In inference mode, the copied weights would not count their changes.
    with torch.inference_mode(False):
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
            InferenceBlock.replace(cast(Block, module), compile_branches=compile, int8=int8)
        elif type(module) is Stage:
            module.__class__ = InferenceStage
        elif isinstance(module, InLineViT) and "forward" not in vars(module):
            set_forward(module, ClassTokenForward(module).forward)
    replace_linear_layers(model, int8=int8)
    if compile:
        set_forward(model, CompiledForward(model).forward)
    return model


def replace_linear_layers(model: nn.Module, *, int8: bool) -> None:
    """Replace embeddings by ones that compute natively, and linear layers, other than those of heads, by int8 ones.

    Args:
        model: The model; if parts of it are models of inlinevit, only these are changed.
        int8: Whether to compute in int8. If not, layers that did so before are restored.
    """
    parts: list[Any] = [part for part in model.modules() if isinstance(part, InLineViT)] or [model]
    for part in parts:
        heads = part.get_classifier() if hasattr(part, "get_classifier") else ()
        heads = heads if isinstance(heads, tuple) else (heads,)
        in_heads = {module for head in heads if isinstance(head, nn.Module) for module in head.modules()}
        for module in part.modules():
            if type(module) in (ConvEmbed, InferenceConvEmbed):
                InferenceConvEmbed.replace(cast(ConvEmbed, module), int8=int8)
            elif type(module) in (PatchMerging, InferencePatchMerging):
                InferencePatchMerging.replace(cast(PatchMerging, module), int8=int8)
            elif type(module) in (nn.Linear, Int8Linear) and module not in in_heads:
                Int8Linear.replace(module, int8=int8)


def set_forward(model: nn.Module, forward: Callable[..., Any]) -> None:
    """Replace the forward of one model by a bound method, which is copied and pickled together with the model."""
    model.forward = forward


class InferenceStage(Stage):
    """A stage whose blocks are computed by one call of the native kernels where that is possible."""

    def forward_blocks(
        self, x: Tensor, feat_size: tuple[int, int], take: Sequence[int] = (), last: int | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """See Stage.forward_blocks."""
        blocks = list(self.blocks) if last is None else list(self.blocks)[: last + 1]
        # Tokens between two blocks do not exist if they are computed together.
        if set(take) <= {len(blocks) - 1} and not self.grad_checkpointing:
            out = run_native(blocks, x, feat_size)
            if out is not None:
                return out, [out] * len(take)
        return super().forward_blocks(x, feat_size, take, last)


class ClassTokenForward:
    """The forward of a InLineViT; with global_pool="token", its last block computes the class token alone.

    A copy of the model has a copy of this object.

    Args:
        model: The model.
    """

    def __init__(self, model: InLineViT) -> None:
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
    """The forward of a model: compiled as a whole for small inputs, unchanged for large ones and for native blocks.

    A copy of the model has a copy of this object, which compiles the forward of that copy.

    Args:
        model: The model, with the forward that it had before.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        # None = the forward of the class, bound to the model that this object belongs to.
        self.replaced: Callable[..., Any] | None = vars(model).get("forward")
        self.compiled: Callable[..., Any] | None = None
        # A compiled model computes nothing natively, since packed weights could not follow the weights.
        self.is_native = any(
            isinstance(module, Int8Linear) or (isinstance(module, InferenceBlock) and is_native(module))
            for module in model.modules()
        )

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
        if records_graph(images) or not isinstance(images, Tensor) or (self.is_native and is_plain(images)):
            return forward(images, *args, **kwargs)
        if images.dim() != 4 or images.shape[0] * images.shape[-2] * images.shape[-1] > FEW_PIXELS:
            return forward(images, *args, **kwargs)
        if self.compiled is None:
            self.compiled = torch.compile(forward)
        return self.compiled(images, *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "compiled": None}
