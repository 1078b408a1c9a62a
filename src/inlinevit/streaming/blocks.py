"""Blocks over the rows of a map that is never in memory as a whole with its queries, keys and values."""

from typing import cast

from torch import nn

from ..layers import BaseAttention, SquareWindows
from ..layers._inference_block import InferenceBlock, pack_block
from ..layers.block import Block
from ..layers.inline_attention import InLineAttention
from ..ops.windows import covers_map
from .attention_pass import AttentionPass, FoldedPass
from .native_pass import NativePass, NativeWindowPass
from .passes import ConvMlpPass, Pass, PositionsPass
from .states import STATES


def make_passes(block: Block, feat_size: tuple[int, int], num_prefix_tokens: int) -> list[Pass]:
    """Return the passes that a block needs over a map of size (H, W), in their order."""
    attn = cast(BaseAttention, block.attn)
    if type(attn) not in STATES:
        raise ValueError(
            f"{type(attn).__name__} cannot be streamed: use a model with attention of "
            f"{', '.join(kind.__name__ for kind in STATES)}"
        )
    passes: list[Pass] = [] if block.cpe is None else [PositionsPass(block)]
    passes.append(attention_pass(block, feat_size, num_prefix_tokens))
    if block.conv_mlp:
        passes.append(ConvMlpPass(block))
    return passes


def attention_pass(block: Block, feat_size: tuple[int, int], num_prefix_tokens: int) -> AttentionPass:
    """Return the fastest pass for the attention of a block, and its MLP if that has no convolution."""
    attn = cast(BaseAttention, block.attn)
    groups = attn.layout(feat_size)
    is_whole = len(groups) == 1 and covers_map(groups[0])
    is_inline = isinstance(attn, InLineAttention) and attn.feature_map.name == "identity"
    is_square = isinstance(attn.layout, SquareWindows) and not is_whole
    if (is_whole and is_inline) or is_square:
        packed = pack_block(block, int8=isinstance(block, InferenceBlock) and block.int8)
        if packed is not None:
            native = NativePass if is_whole else NativeWindowPass
            return native(block, feat_size, num_prefix_tokens, packed)
    is_folded = is_whole and is_inline and type(attn.qkv) is nn.Linear
    return (FoldedPass if is_folded else AttentionPass)(block, feat_size, num_prefix_tokens)
