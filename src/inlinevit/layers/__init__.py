"""Modules with parameters: token mixers, the local residual, layouts, embeddings, the block."""

from .block import Block
from .embed import ConvEmbed, PatchMerging, PositionEmbedding
from .inline_attention import InLineAttention
from .layouts import CrossStripes, SquareWindows, WholeMap
from .linear_attention import LinearAttention
from .local_residual import LocalResidual
from .softmax_attention import SoftmaxAttention
from .token_mixer import TokenMixer

# The words by which models name their attention.
ATTENTIONS: dict[str, type[TokenMixer]] = {
    "inline": InLineAttention,
    "linear": LinearAttention,
    "softmax": SoftmaxAttention,
}

__all__ = [
    "ATTENTIONS",
    "Block",
    "ConvEmbed",
    "CrossStripes",
    "InLineAttention",
    "LinearAttention",
    "LocalResidual",
    "PatchMerging",
    "PositionEmbedding",
    "SoftmaxAttention",
    "SquareWindows",
    "TokenMixer",
    "WholeMap",
]
