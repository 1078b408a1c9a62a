"""Weights from files: published ones and our own, read without running any code that a file may hold."""

import pickle
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from timm.layers import resample_abs_pos_embed, resize_rel_pos_bias_table_simple
from timm.models import adapt_input_conv, clean_state_dict
from torch import Tensor, nn

# Where checkpoints keep their weights: averaged ones first, then plain ones.
WEIGHT_KEYS = ("state_dict_ema", "model_ema", "state_dict", "model")
# Published files carry their configuration as an object of this class. It is read as a plain dictionary.
CONFIG_CLASS = "yacs.config.CfgNode"
NAMES_SHOWN = 4


def load_checkpoint(model: nn.Module, path: str | Path) -> None:
    """Load published weights (.pth) or our own (.safetensors, .pth) into a model.

    Position embeddings and relative position tables are resized, the first convolution is adapted to the model's
    channels, and a head of another width is left out, so that the model keeps the head it has.

    Args:
        model: A model of this library, or what `features_only=True` makes of it.
        path: The file. It is refused if it holds anything but tensors, plain containers and the published config class.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is no checkpoint, is not safe, or belongs to another model; the model is left as it was.
    """
    model = backbone_of(model)
    state_dict = adapt_state_dict(read_state_dict(path), model)
    if "head.weight" not in state_dict and model.num_classes > 0:
        state_dict["head.weight"], state_dict["head.bias"] = model.head.weight.detach(), model.head.bias.detach()
    own = model.state_dict()
    missing = [name for name in own if name not in state_dict]
    unexpected = [name for name in state_dict if name not in own]
    reshaped = [
        f"{name} {tuple(state_dict[name].shape)} for {tuple(own[name].shape)}"
        for name in own
        if name in state_dict and state_dict[name].shape != own[name].shape
    ]
    if missing or unexpected or reshaped:
        raise ValueError(
            f"{path} does not hold the weights of this model ({type(model).__name__}): "
            f"{_first_few('missing', missing)}; {_first_few('unexpected', unexpected)}; "
            f"{_first_few('of another shape', reshaped)}. Choose the model that the file was made for."
        )
    model.load_state_dict(state_dict)


def backbone_of(model: nn.Module) -> Any:
    """The model itself, out of the wrapper that `features_only=True` puts around it."""
    inner = model if hasattr(model, "published_names") else getattr(model, "model", None)
    if inner is None or not hasattr(inner, "published_names"):
        raise ValueError(f"load_checkpoint takes the models of this library, not {type(model).__name__}")
    return inner


def read_state_dict(path: str | Path) -> dict[str, Tensor]:
    """The weights in a file, under the names they have there."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint at {path}")
    if path.suffix == ".safetensors":
        try:
            return safetensors.torch.load_file(path)
        except SafetensorError as error:
            raise ValueError(f"{path} is not a whole safetensors file ({error}): fetch it again") from error
    try:
        with torch.serialization.safe_globals([(OrderedDict, CONFIG_CLASS)]):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} was refused, since it is no plain checkpoint: only tensors, plain containers and {CONFIG_CLASS} "
            f"are read, because anything else could run code. {_reason(error)}"
        ) from error
    except (RuntimeError, EOFError, OSError, KeyError, ValueError, IndexError) as error:
        raise ValueError(f"{path} is not a whole checkpoint ({_reason(error)}): fetch it again") from error
    return _find_weights(content, path)


def _find_weights(content: Any, path: Path) -> dict[str, Tensor]:
    """The dictionary of tensors in a checkpoint."""
    if isinstance(content, dict):
        content = next((content[key] for key in WEIGHT_KEYS if content.get(key)), content)
    if not isinstance(content, dict) or not content or not all(isinstance(value, Tensor) for value in content.values()):
        raise ValueError(f"{path} holds no weights: expected tensors by name, alone or under {', '.join(WEIGHT_KEYS)}")
    return clean_state_dict(content)


def _reason(error: Exception) -> str:
    """The first sentence of an error."""
    return str(error).strip().split("\n")[0].split(". ")[0].strip()


def _first_few(what: str, names: list[str]) -> str:
    shown = ", ".join(names[:NAMES_SHOWN])
    return f"{len(names)} {what}" + (f" ({shown}{', …' if len(names) > NAMES_SHOWN else ''})" if names else "")


def adapt_state_dict(state_dict: dict[str, Tensor], model: Any) -> dict[str, Tensor]:
    """Weights under the model's names and, where only the input size or the channels differ, in its shapes."""
    if not any(name.startswith("stages.") for name in state_dict):
        state_dict = rename(state_dict, model)
    own = model.state_dict()
    adapted = {}
    for name, value in state_dict.items():
        if name.startswith("head.") and (name not in own or own[name].shape != value.shape):
            continue
        if name in own and own[name].shape != value.shape:
            value = _adapt(name, value, own[name], model)
        adapted[name] = value
    return adapted


def rename(state_dict: dict[str, Tensor], model: Any) -> dict[str, Tensor]:
    """Published names to the model's own; parts of what is one parameter here are joined, buffers dropped."""
    renamed: dict[str, dict[int, Tensor]] = {}
    for published, value in state_dict.items():
        if published.endswith(("relative_position_index", "attn_mask")):
            continue
        name, _, part = _own_name(published, model.published_names).partition("#")
        renamed.setdefault(name, {})[int(part or 0)] = value
    return {name: torch.cat([parts[i] for i in sorted(parts)]) for name, parts in renamed.items()}


def _own_name(name: str, rules: tuple[tuple[str, str], ...]) -> str:
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name


def _adapt(name: str, value: Tensor, own: Tensor, model: Any) -> Tensor:
    """A parameter made for another input size or other channels, in the shape of the model's own."""
    if name.endswith("positions.table") and value.shape[2] == own.shape[2]:
        positions = model.get_submodule(name.removesuffix(".table"))
        old = round((value.shape[1] - positions.num_prefix_tokens) ** 0.5)
        if positions.num_prefix_tokens + old**2 == value.shape[1]:
            return resample_abs_pos_embed(
                value,
                list(positions.grid),
                [old, old],
                num_prefix_tokens=positions.num_prefix_tokens,
                interpolation=positions.interpolation,
            )
    if name.endswith("relative_position_bias_table") and value.shape[1] == own.shape[1]:
        window = (round(own.shape[0] ** 0.5) + 1) // 2
        return resize_rel_pos_bias_table_simple(value, (window, window), tuple(own.shape))
    if name == model.pretrained_cfg["first_conv"] + ".weight" and value.shape[0] == own.shape[0]:
        return adapt_input_conv(model.in_chans, value)
    return value
