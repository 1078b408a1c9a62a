"""Compiled kernels for CPUs: InLine attention, forward and backward; the block and int8 layers for inference.

The C++ sources are in native/. They are compiled when the package is installed (build.py), to one library that does
not depend on the versions of Python and torch; `status()` tells whether it is used.
"""

from ._library import Status, available, status
from .attention import inline_attention
from .block import PackedBlock, pack_block
from .linear import linear
from .packing import PackedLinear, pack_linear

__all__ = [
    "PackedBlock",
    "PackedLinear",
    "Status",
    "available",
    "inline_attention",
    "linear",
    "pack_block",
    "pack_linear",
    "status",
]
