"""The block for inference: computed natively where that is possible, else with compiled branches."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, cast

import torch
from timm.layers import DropPath, Mlp
from torch import Tensor, nn

from .. import kernels
from ..kernels.block import TILE_TOKENS
from ..ops.windows import merge_heads
from ._chunks import has_hooks, has_own_hooks, records_graph
from ._native_linear import Int8Linear
from ._packed import PackedWeights, is_plain
from .base_attention import BaseAttention
from .block import GELU, Block
from .feature_map import FeatureMap
from .inline_attention import InLineAttention, LocalResidual
from .layouts import CrossStripes, SquareWindows, WholeMap
from .softmax_attention import SoftmaxAttention


class InferenceBlock(Block):
    """A block that is computed by one native kernel, or by compiled branches; it can compute prefix tokens alone."""

    compile_branches: bool
    int8: bool
    packed: PackedWeights[kernels.PackedBlock]

    @classmethod
    def replace(cls, block: Block, *, compile_branches: bool = False, int8: bool = False) -> None:
        """Change a block in place into one of this class; its parameters, hooks and names stay.

        Args:
            block: The block.
            compile_branches: Whether to compile attention and MLP where the block does not compute natively.
            int8: Whether the native kernel and the linear layers compute in int8.
        """
        block.__class__ = cls
        block = cast(InferenceBlock, block)
        block.compile_branches = compile_branches
        block.int8 = int8
        block.packed = PackedWeights(partial(pack_block, int8=int8))

    def forward(self, x: Tensor, feat_size: tuple[int, int], prefix_only: bool = False) -> Tensor:
        """Map tokens (batch, prefix + H·W, dim) to the same shape or, with prefix_only, to (batch, prefix, dim)."""
        prefix = x.shape[1] - feat_size[0] * feat_size[1]
        packed = self.packed.get(self, x)
        if packed is not None:
            attn = cast(BaseAttention, self.attn)
            attn.check_tokens(x, feat_size, None)
            if prefix_only and prefix <= TILE_TOKENS:
                return packed(x, attn.windows(x, feat_size), prefix_only=True)
            x = packed(x, attn.windows(x, feat_size))
            return x[:, :prefix] if prefix_only else x
        if not prefix_only:
            return super().forward(x, feat_size)
        # Hooks of attention get all tokens.
        if has_hooks(self.attn) or not isinstance(self.attn, BaseAttention) or not self.attn.row_wise:
            return super().forward(x, feat_size)[:, :prefix]
        x = self.encode_positions(x, feat_size)
        x = x[:, :prefix] + self.call_branch(attend_prefix, x, feat_size)
        return x + self.mlp_branch(x, (0, 0))

    def attention_branch(self, x: Tensor, feat_size: tuple[int, int]) -> Tensor:
        """See Block.attention_branch."""
        return self.call_branch(Block.attention_branch, x, feat_size)

    def mlp_branch(self, x: Tensor, feat_size: tuple[int, int]) -> Tensor:
        """See Block.mlp_branch."""
        return self.call_branch(Block.mlp_branch, x, feat_size)

    def call_branch(self, branch: Callable[..., Tensor], x: Tensor, feat_size: tuple[int, int]) -> Tensor:
        """Return branch(self, x, feat_size), compiled unless a graph is being recorded or layers compute in int8."""
        if self.compile_branches and not records_graph(x) and not (self.int8 and is_plain(x)):
            branch = compiled(branch)
        return branch(self, x, feat_size)


def run_native(blocks: Sequence[nn.Module], x: Tensor, feat_size: tuple[int, int]) -> Tensor | None:
    """Run consecutive blocks by one call of the native kernels, or return None if they must be called one by one.

    Args:
        blocks: The blocks.
        x: Tokens (batch, prefix + H·W, dim).
        feat_size: (H, W) of the map.
    """
    packed, windows = [], []
    for block in blocks:
        # A block with hooks, or with a forward of its own, must be called.
        if type(block) is not InferenceBlock or "forward" in vars(block) or has_own_hooks(block):
            return None
        weights = block.packed.get(block, x)
        if weights is None:
            return None
        attn = cast(BaseAttention, block.attn)
        attn.check_tokens(x, feat_size, None)
        packed.append(weights)
        windows.append(attn.windows(x, feat_size))
    return kernels.run_blocks(packed, x, windows) if packed else None


@cache
def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a compiled function, the same one for all blocks; importing the compiler takes seconds."""
    return torch.compile(function)


def attend_prefix(block: Block, x: Tensor, feat_size: tuple[int, int]) -> Tensor:
    """Compute norm → attention of a block for the prefix tokens alone, which have no local residual.

    Args:
        block: The block.
        x: Tokens (batch, prefix + H·W, dim), after the convolution at the beginning of the block, if there is one.
        feat_size: (H, W) of the map.

    Returns:
        (batch, prefix, dim).
    """
    attn = cast(BaseAttention, block.attn)
    prefix = x.shape[1] - feat_size[0] * feat_size[1]
    normed = block.norm1(x)
    ((q, k, v, windows),) = attn.partition(normed, feat_size)
    out = merge_heads(attn.attend(q[:, :, :prefix], k, v, windows))
    return block.drop_path1(attn.project_out(out, normed[:, :prefix]))


def pack_block(block: Block, *, int8: bool) -> kernels.PackedBlock | None:
    """Pack the weights of a block for the native kernel, or return None if the kernel does not compute this block.

    Args:
        block: The block, with float32 weights on the CPU.
        int8: Quantise the linear layers.
    """
    if not is_native(block):
        return None
    attn, mlp = cast(InLineAttention | SoftmaxAttention, block.attn), block.mlp
    options: dict[str, Any] = {}
    if isinstance(attn, SoftmaxAttention):
        options = {"softmax": True, "relative_window": attn.relative_window}
        options["relative_position_bias_table"] = attn.relative_position_bias_table
    elif attn.local_residual is not None:
        options["local_residual"] = (attn.local_residual.fc1, attn.local_residual.fc2)
    return kernels.pack_block(
        norm1=block.norm1,
        qkv=attn.qkv,
        proj=attn.proj,
        norm2=block.norm2,
        fc1=cast(nn.Linear, mlp.fc1),
        fc2=cast(nn.Linear, mlp.fc2),
        num_heads=attn.num_heads,
        lepe=attn.lepe,
        kernels_before_norm=block.kernels_before_norm,
        int8=int8,
        **options,
    )


# Modules in blocks that the native kernel computes; subclasses of them may compute something else.
NATIVE_PARTS = {
    *(InLineAttention, FeatureMap, LocalResidual, SoftmaxAttention, WholeMap, SquareWindows, CrossStripes),
    *(Mlp, GELU, DropPath, Int8Linear),
    *(nn.LayerNorm, nn.Linear, nn.Conv1d, nn.Conv2d, nn.GELU, nn.Dropout, nn.Identity),
}


def is_native(block: Block) -> bool:
    """Return whether the native kernel computes a block: with InLine or softmax attention, and a plain MLP."""
    attn, mlp = cast(Any, block.attn), block.mlp
    return (
        kernels.available()
        and {type(part) for child in block.children() for part in child.modules()} <= NATIVE_PARTS
        and (is_native_inline(attn) or is_native_softmax(attn))
        and (attn.lepe is None or attn.lepe.kernel_size == (3, 3))
        and attn.gate is None
        and not attn.rope
        and block.cpe is None
        and all(isinstance(norm, nn.LayerNorm) and norm.bias is not None for norm in (block.norm1, block.norm2))
        and isinstance(mlp, Mlp)
        and isinstance(mlp.act, nn.GELU)
        and mlp.act.approximate == "none"
        and isinstance(mlp.norm, nn.Identity)
    )


def is_native_inline(attn: nn.Module) -> bool:
    """Return whether the native kernel computes an attention: InLine with φ = identity."""
    return isinstance(attn, InLineAttention) and attn.feature_map.name == "identity" and attn.path in (None, "native")


def is_native_softmax(attn: nn.Module) -> bool:
    """Return whether the native kernel computes an attention: softmax of all keys in a window."""
    return isinstance(attn, SoftmaxAttention) and attn.reduce is None and not attn.unit_queries
