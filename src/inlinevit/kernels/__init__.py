"""Compiled kernels for CPUs: InLine attention, forward and backward; the block and int8 layers for inference.

The C++ sources are in native/. They are compiled when the package is installed (build.py), to one library that does
not depend on the versions of Python and torch; `status()` tells whether it is used.
"""

from ._eager import is_compiled_training, is_eager, is_plain, needs_gradient
from ._library import Status, available, status, unavailable_reason
from .attention import DTYPES, inline_attention
from .block import PackedBlock, pack_block
from .gelu import computes_gelu, gelu
from .linear import linear
from .local import local_kernels
from .packing import PackedLinear, pack_linear
from .stream import StreamedBlock, TokenMoments

__all__ = [
    "DTYPES",
    "PackedBlock",
    "PackedLinear",
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
    "pack_linear",
    "status",
    "unavailable_reason",
]
