"""Weights out of files, without running any code that a file may hold."""

import re
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

# Where checkpoints keep their weights: averaged ones first, then plain ones.
WEIGHT_KEYS = ("state_dict_ema", "model_ema", "state_dict", "model")
# Published files carry their configuration as an object of this class. It is read as a plain dictionary.
CONFIG_CLASS = "yacs.config.CfgNode"
# What models are wrapped in: by DistributedDataParallel, by torch.compile, by features_only=True.
WRAPPERS = ("module", "_orig_mod", "model")
LONGEST_NAME = 100

# torch has one list of allowed classes for all threads.
_READING = threading.Lock()


def read_state_dict(path: str | Path) -> dict[str, Tensor]:
    """The weights in a file, under the names they have there."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is a directory: name a file in it" if path.is_dir() else f"no file at {path}")
    read = safetensors.torch.load_file if path.suffix == ".safetensors" else _read_pickle
    try:
        content = read(path)
    # Damaged files fail in many ways, and torch's advice is to run the code in them: the cause is told in our words.
    except Exception as error:
        raise ValueError(_why_unreadable(path, error)) from None
    return _unwrap(_find_weights(content, path))


def _read_pickle(path: Path) -> Any:
    """What torch.save has written."""
    with _only_config_class():
        return torch.load(path, map_location="cpu", weights_only=True)


@contextmanager
def _only_config_class() -> Iterator[None]:
    """Allow torch.load the published config class, and for the moment nothing of what other code has allowed."""
    with _READING:
        others = torch.serialization.get_safe_globals()
        torch.serialization.clear_safe_globals()
        try:
            with torch.serialization.safe_globals([(OrderedDict, CONFIG_CLASS)]):
                yield
        finally:
            torch.serialization.add_safe_globals(others)


def _why_unreadable(path: Path, error: Exception) -> str:
    """One sentence on a file that was not read, and what to do about it."""
    forbidden = re.search(r"GLOBAL (\S+)", str(error))
    if forbidden:
        return (
            f"{path} was refused, because it holds {shorten(forbidden[1])}, which could run code: only tensors, plain "
            f"containers and {CONFIG_CLASS} are read, so save the weights alone, with torch.save(model.state_dict(), …)"
        )
    # torch wraps what went wrong in advice.
    reason = str(error.__context__ or error).strip().partition("\n")[0]
    kind = "safetensors" if path.suffix == ".safetensors" else "PyTorch"
    return (
        f"{path} is not a whole {kind} file ({type(error).__name__}: {shorten(reason)}): delete it and fetch it "
        "again, or name it .safetensors if it is one and .pth if not"
    )


def _find_weights(content: Any, path: Path) -> dict[str, Tensor]:
    """The dictionary of tensors in a checkpoint."""
    if isinstance(content, dict):
        content = next((content[key] for key in WEIGHT_KEYS if isinstance(content.get(key), dict)), content)
    if not isinstance(content, dict) or not content or not all(map(_is_weight, content.keys(), content.values())):
        raise ValueError(
            f"{path} holds no weights: expected dense tensors by name, alone or under {', '.join(WEIGHT_KEYS)}"
        )
    return content


def _is_weight(name: Any, value: Any) -> bool:
    """Whether this is a tensor by name, with its values at hand."""
    return isinstance(name, str) and isinstance(value, Tensor) and value.layout is torch.strided and not value.is_meta


def _unwrap(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """The names without those of the wrappers that the model had when it was saved."""
    for wrapper in WRAPPERS:
        if all(name.startswith(f"{wrapper}.") for name in state_dict):
            return _unwrap({name.removeprefix(f"{wrapper}."): value for name, value in state_dict.items()})
    return state_dict


def shorten(text: str) -> str:
    """Text from a file, cut to what fits into a message."""
    return text if len(text) <= LONGEST_NAME else f"{text[: LONGEST_NAME - 1]}…"
