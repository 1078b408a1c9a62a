"""The compiled library: found, loaded and described. Without it, everything is computed by torch."""

import ctypes
import os
from collections.abc import Callable
from ctypes import POINTER, Structure, c_char_p, c_double, c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .build import LIBRARY

# Which variant to use (avx512_vnni, avx512, avx2, generic), or "off"; by default the best that the CPU supports.
VARIANT_VARIABLE = "INLINEVIT_KERNELS"
# Another library, for tests of sanitized builds.
LIBRARY_VARIABLE = "INLINEVIT_KERNELS_LIBRARY"

# Of native/api.h.
API_VERSION = 8


class CWindows(Structure):
    """InlinevitWindows."""

    _fields_ = [
        (name, c_int64)
        for name in (
            "map_height",
            "map_width",
            "height",
            "width",
            "shift_up",
            "shift_left",
            "head_group",
            "num_head_groups",
        )
    ]


class CAttention(Structure):
    """InlinevitAttention."""

    _fields_ = [
        *((name, c_int64) for name in ("batch", "prefix", "num_heads", "head_dim", "threads")),
        ("scale", c_double),
        ("windows", CWindows),
    ]


class CLinear(Structure):
    """InlinevitLinear."""

    _fields_ = [
        ("inputs", c_int64),
        ("outputs", c_int64),
        *((name, c_void_p) for name in ("weight", "bias", "scales", "sums")),
    ]


class CBlock(Structure):
    """InlinevitBlock."""

    _fields_ = [
        *((name, c_int64) for name in ("batch", "prefix", "num_heads", "head_dim", "threads")),
        *((name, c_int64) for name in ("prefix_only", "kernels_before_norm", "softmax", "relative_window")),
        *((name, c_double) for name in ("scale", "norm1_eps", "norm2_eps")),
        ("num_head_groups", c_int64),
        ("windows", CWindows * 2),
        *((name, c_void_p) for name in ("norm1_weight", "norm1_bias", "norm2_weight", "norm2_bias")),
        *((name, CLinear) for name in ("qkv", "proj", "fc1", "fc2")),
        *((name, c_void_p) for name in ("local1_weight", "local1_bias", "local2_weight", "local2_bias")),
        *((name, c_void_p) for name in ("lepe_weight", "lepe_bias", "relative_bias")),
    ]


class CPatches(Structure):
    """InlinevitPatches."""

    _fields_ = [
        *((name, c_int64) for name in ("batch", "height", "width", "threads")),
        *((name, c_int64) for name in ("batch_stride", "row_stride", "column_stride")),
        *((name, c_int64) for name in ("outer", "outer_stride", "inner", "inner_stride", "length")),
        *((name, c_double) for name in ("norm_in_eps", "norm_out_eps")),
        *((name, c_void_p) for name in ("norm_in_weight", "norm_in_bias", "norm_out_weight", "norm_out_bias")),
        ("layer", CLinear),
    ]


class CRows(Structure):
    """InlinevitRows."""

    _fields_ = [
        ("height", c_int64),
        ("width", c_int64),
        ("attention", CLinear),
        ("values", CLinear),
        *((name, c_void_p) for name in ("taps", "above", "below", "mask", "mask_above", "mask_below")),
    ]


ARGUMENTS: dict[str, list[Any]] = {
    "attention_f32": [POINTER(CAttention), *[c_void_p] * 5],
    "attention_f64": [POINTER(CAttention), *[c_void_p] * 5],
    "attention_backward_f32": [POINTER(CAttention), *[c_void_p] * 7],
    "attention_backward_f64": [POINTER(CAttention), *[c_void_p] * 7],
    "local_kernels_f32": [POINTER(CAttention), *[c_void_p] * 8],
    "local_kernels_f64": [POINTER(CAttention), *[c_void_p] * 8],
    "local_kernels_backward_f32": [POINTER(CAttention), *[c_void_p] * 10],
    "local_kernels_backward_f64": [POINTER(CAttention), *[c_void_p] * 10],
    "gelu": [c_int64, c_int64, c_void_p, c_void_p],
    "gelu_backward": [c_int64, c_int64, c_void_p, c_void_p, c_void_p],
    "blocks": [POINTER(CBlock), c_int64, c_void_p, c_void_p],
    "linear": [POINTER(CLinear), c_int64, c_int64, c_int64, c_void_p, c_void_p],
    "patches": [POINTER(CPatches), c_void_p, c_void_p],
    "summarize": [POINTER(CBlock), c_int64, *[c_void_p] * 6],
    "apply": [POINTER(CBlock), POINTER(CRows), c_void_p, c_void_p],
}


class Status(NamedTuple):
    """Whether the kernels are used, and why or why not.

    Attributes:
        variant: The variant in use, such as "avx2"; None if the kernels are not used.
        supported: All variants that this CPU supports, best first.
        library: The file of the library.
        reason: One sentence.
    """

    variant: str | None
    supported: tuple[str, ...]
    library: Path
    reason: str


class Library(NamedTuple):
    """The functions of a loaded library, none if there is no library, and its status."""

    functions: dict[str, Callable[..., int]]
    status: Status


@cache
def load() -> Library:
    """Load the library and choose the variant, once per process."""
    path = Path(os.environ.get(LIBRARY_VARIABLE) or LIBRARY)
    wanted = os.environ.get(VARIANT_VARIABLE, "").strip().lower()

    def unused(reason: str, supported: tuple[str, ...] = ()) -> Library:
        return Library({}, Status(None, supported, path, reason))

    if wanted == "off":
        return unused(f"switched off by {VARIANT_VARIABLE}=off")
    if not path.exists():
        return unused("not compiled: there was no C++20 compiler when inlinevit was installed")
    try:
        handle = ctypes.CDLL(str(path))
        handle.inlinevit_variants.restype = c_char_p
        if (version := handle.inlinevit_api_version()) != API_VERSION:
            return unused(
                f"compiled from other sources (version {version}, not {API_VERSION}): install inlinevit again"
            )
        supported = tuple(handle.inlinevit_variants().decode().split(","))
        handle.inlinevit_use_openmp.argtypes, handle.inlinevit_use_openmp.restype = [c_void_p], None
        functions = {name: declare(handle, name, arguments) for name, arguments in ARGUMENTS.items()}
    except (OSError, AttributeError) as error:
        return unused(f"cannot be loaded: {error}")
    variant = wanted or supported[0]
    if handle.inlinevit_select(variant.encode()) != 0:
        return unused(f"{VARIANT_VARIABLE}={variant} is not one of {', '.join(supported)}, off", supported)
    handle.inlinevit_use_openmp(find_openmp())
    chosen = f"chosen by {VARIANT_VARIABLE}" if wanted else "the best that this CPU supports"
    return Library(functions, Status(variant, supported, path, f"variant {variant}, {chosen}"))


def find_openmp() -> c_void_p | None:
    """Return the function GOMP_parallel of the OpenMP runtime that torch has loaded, or None.

    With threads of their own, the kernels would compete with those of torch, which wait actively after each operator.
    """
    folder = Path(torch.__file__).parent
    for path in (*folder.glob("lib/lib*omp*.so*"), *folder.parent.glob("torch.libs/lib*omp*.so*"), "libgomp.so.1"):
        try:
            # Only if it is loaded already: a second runtime would have threads of its own as well.
            runtime = ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
            return ctypes.cast(runtime.GOMP_parallel, c_void_p)
        except (OSError, AttributeError):
            continue
    return None


def declare(handle: ctypes.CDLL, name: str, arguments: list[Any]) -> Callable[..., int]:
    """Return a function of the library with the types of its arguments."""
    function = handle[f"inlinevit_{name}"]
    function.argtypes, function.restype = arguments, c_int
    return function


def status() -> Status:
    """Return whether the kernels are used, and why or why not."""
    return load().status


def available() -> bool:
    """Return whether the kernels can be used."""
    return bool(load().functions)


# torch.compile takes the result as it is, rather than looking for the library in a graph.
@torch.compiler.assume_constant_result
def unavailable_reason() -> str:
    """Return why the kernels cannot be used; "" if they can."""
    return "" if available() else f"the native kernels are not available: {status().reason}"


def call(name: str, *arguments: object) -> None:
    """Call a function of the library.

    Raises:
        RuntimeError: There is no library.
        MemoryError: There was not enough memory for intermediate results.
    """
    functions = load().functions
    if not functions:
        raise RuntimeError(unavailable_reason())
    if functions[name](*arguments) != 0:
        raise MemoryError(f"not enough memory for the native kernel {name}")
