"""Weights out of files, without running any code that a file may hold."""

import warnings
from pathlib import Path
from typing import Any, BinaryIO

import safetensors.torch
import torch
from torch import Tensor

from ..utils.files import NotRegularFileError, open_regular
from ..utils.validation import shorten
from ._torch_files import CONFIG_CLASS, Damaged, ForbiddenName, Opaque, TensorRecord, TorchFile

# Where checkpoints keep their weights: averaged ones first, then plain ones.
WEIGHT_KEYS = ("state_dict_ema", "model_ema", "state_dict", "model")
# What models are wrapped in: by DistributedDataParallel, by torch.compile, by features_only=True.
WRAPPERS = ("module", "_orig_mod", "model")
MOST_WRAPPERS = 8
LONGEST_NAME = 100

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Buffers may be whole numbers.
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)
# Tensors may share numbers, but not so that a small file stands for more than a machine can hold.
SHARED_TIMES = 4
SHARED_BYTES = 2**30


def read_state_dict(path: str | Path) -> dict[str, Tensor]:
    """The weights in a file, under the names they have there.

    Every one is a dense tensor on the CPU, of floating-point numbers, integers or booleans.

    Raises:
        FileNotFoundError: There is no such file.
        OSError: It is not a regular file, or cannot be read.
        ValueError: It is damaged, could run code, or holds something else than weights.
    """
    path = Path(path)
    with _open(path) as stream:
        if path.suffix == ".safetensors":
            return _unwrap(_find_weights(_read_safetensors(stream, path), path))
        return _read_torch_file(stream, path)


def _open(path: Path) -> BinaryIO:
    try:
        return open_regular(path)
    except FileNotFoundError:
        raise FileNotFoundError(f"no file at {path}: check the path") from None
    except NotRegularFileError as error:
        if path.is_dir():
            raise FileNotFoundError(f"{path} is a directory: name a file in it") from None
        raise error


def _read_safetensors(stream: BinaryIO, path: Path) -> dict[str, Tensor]:
    content = stream.read()
    try:
        return safetensors.torch.load(content)
    except MemoryError:
        raise
    # Damaged files fail in many ways.
    except Exception as error:
        raise ValueError(_why_damaged(path, "safetensors", f"{type(error).__name__}: {error}")) from None


def _read_torch_file(stream: BinaryIO, path: Path) -> dict[str, Tensor]:
    try:
        file = TorchFile(stream)
        records = _find_weights(file.content, path)
        _refuse_inflated(records, file.size, path)
        weights = {name: file.tensor(record) for name, record in records.items()}
    except ForbiddenName as error:
        raise ValueError(
            f"{path} was refused, because it holds {one_line(str(error))}, which could run code: only tensors, plain "
            f"containers and {CONFIG_CLASS} are read, so save the weights alone, with torch.save(model.state_dict(), …)"
        ) from None
    except Damaged as error:
        raise ValueError(_why_damaged(path, "PyTorch", str(error))) from None
    if file.damaged_records:
        warnings.warn(
            f"{len(file.damaged_records)} tensors in {path} do not match their checksums, so the file is probably "
            "damaged: fetch it again, unless it was written with torch.serialization.set_crc32_options(False)",
            stacklevel=4,
        )
    return _unwrap(weights)


def _why_damaged(path: Path, kind: str, reason: str) -> str:
    """One sentence on a file that was not read, and what to do about it."""
    if "TorchScript" in reason:
        return f"{path} is a TorchScript program, which holds code: save the weights alone, model.state_dict()"
    return (
        f"{path} is not a whole {kind} file ({one_line(reason.strip().partition(chr(10))[0])}): delete it and fetch it "
        "again, or name it .safetensors if it is one and .pth if not"
    )


def _find_weights(content: Any, path: Path) -> dict[str, Any]:
    """The dictionary of tensors in a checkpoint."""
    if isinstance(content, dict):
        content = next((content[key] for key in WEIGHT_KEYS if isinstance(content.get(key), dict)), content)
    expected = f"save model.state_dict(), dense tensors by name, alone or under {', '.join(WEIGHT_KEYS)}"
    if not isinstance(content, dict) or not content:
        raise ValueError(f"{path} holds no weights: {expected}")
    for name, value in content.items():
        problem = _what_is_wrong(name, value)
        if problem:
            raise ValueError(f"{path} holds no weights that can be loaded ({problem}): {expected}")
    return content


def _what_is_wrong(name: Any, value: Any) -> str:
    """Why this is no weight, in a few words; "" if it is one."""
    if not isinstance(name, str):
        return f"a name in it is not text, but {type(name).__name__}"
    if isinstance(value, Opaque) and value.tensor_kind:
        return f"{one_line(name)} is a {value.tensor_kind} tensor"
    if not isinstance(value, Tensor | TensorRecord):
        return f"{one_line(name)} is not a tensor"
    if value.dtype not in (*FLOATS, *INTEGERS):
        return f"{one_line(name)} is of the type {str(value.dtype).removeprefix('torch.')}"
    return ""


def _refuse_inflated(records: dict[str, TensorRecord], size: int, path: Path) -> None:
    """Refuse tensors that repeat few numbers so often that a copy of them would fill the memory."""
    total = sum(record.nbytes for record in records.values())
    if total > SHARED_TIMES * size + SHARED_BYTES:
        raise ValueError(
            f"{path} holds no weights that can be loaded (tensors of {total} bytes in a file of {size}, by repeating "
            "numbers): save contiguous tensors"
        )


def _unwrap(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """The names without those of the wrappers that the model had when it was saved."""
    for _ in range(MOST_WRAPPERS):
        wrapper = next((one for one in WRAPPERS if all(name.startswith(f"{one}.") for name in state_dict)), None)
        if wrapper is None:
            break
        state_dict = {name.removeprefix(f"{wrapper}."): value for name, value in state_dict.items()}
    return state_dict


def one_line(text: str) -> str:
    """Text from a file, cut to what fits into a message."""
    return shorten(text, LONGEST_NAME)


def require_floats(weights: dict[str, Tensor], path: str | Path) -> None:
    """Refuse parameters that are not floating-point numbers: a model would take integers for them without a word.

    Args:
        weights: Weights by name; buffers may be integers.
        path: Their file, for messages.
    """
    for name, value in weights.items():
        if name.endswith(("weight", "bias")) and value.dtype not in FLOATS:
            raise ValueError(
                f"{path} holds no weights that can be loaded ({one_line(name)} is of the type "
                f"{str(value.dtype).removeprefix('torch.')}): save them in floating point"
            )


def require_finite(weights: dict[str, Tensor], path: str | Path) -> None:
    """Refuse weights that are not finite numbers: a model would answer nonsense without a word.

    Args:
        weights: Weights by name.
        path: Their file, for messages.
    """
    for name, value in weights.items():
        if value.dtype in FLOATS and not value.isfinite().all():
            raise ValueError(
                f"{path} holds weights that are not finite numbers, such as {one_line(name)}: choose others, such as "
                "those of an earlier checkpoint"
            )


def classes_of_head(weights: dict[str, Tensor], head: str, path: str | Path) -> int | None:
    """For how many classes weights have a head.

    Args:
        weights: Weights by name.
        head: What the head is called.
        path: Their file, for messages.

    Returns:
        The number of classes; None if there is no such head.

    Raises:
        ValueError: The head is none: a scalar, empty, or with a bias for other classes.
    """
    weight, bias = weights.get(f"{head}.weight"), weights.get(f"{head}.bias")
    if weight is None and bias is None:
        return None
    tensors = {f"{head}.weight": weight, f"{head}.bias": bias}
    found = " and ".join(f"{one_line(name)} {describe(value)}" for name, value in tensors.items() if value is not None)
    is_head = (
        weight is not None
        and weight.dim() >= 2
        and weight.numel() > 0
        and weight.dtype in FLOATS
        and (bias is None or (tuple(bias.shape) == (weight.shape[0],) and bias.dtype in FLOATS))
    )
    if not is_head or weight is None:
        raise ValueError(
            f"{path} has a malformed head, {found}: expected a weight (classes, channels) and a bias (classes) of "
            "floating-point numbers, so fetch the file again, or save the weights again"
        )
    return weight.shape[0]


def describe(value: Tensor) -> str:
    """Type and shape of a tensor."""
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
