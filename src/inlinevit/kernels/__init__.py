"""Compiled kernels for CPUs: InLine attention, forward and backward; for inference, the block, int8 layers and patches.

The C++ sources are in native/. They are compiled when the package is installed (build.py), to one library that does
not depend on the versions of Python and torch; `status()` tells whether it is used.
"""

from ._eager import is_compiled_training, is_eager, is_plain, needs_gradient
from ._library import Status, available, status, unavailable_reason
from .attention import DTYPES, inline_attention
from .block import PackedBlock, pack_block, run_blocks
from .gelu import computes_gelu, gelu
from .linear import linear
from .local import local_kernels
from .packing import PackedLinear, pack_linear
from .patches import PackedPatches, pack_conv, pack_merging
from .stream import StreamedBlock, TokenMoments

__all__ = [
    "DTYPES",
    "PackedBlock",
    "PackedLinear",
    "PackedPatches",
    "Status",
    "StreamedBlock",
    "TokenMoments",
    "available",
    "computes_gelu",
    "gelu",
    "inline_attention",
    "is_compiled_training",
    "is_eager",
    "is_plain",
    "linear",
    "local_kernels",
    "needs_gradient",
    "pack_block",
    "pack_conv",
    "pack_linear",
    "pack_merging",
    "run_blocks",
    "status",
    "unavailable_reason",
]
