"""Weights into models: published names to ours, other sizes to the model's, and nothing that does not belong."""

import re
import warnings
from math import isqrt
from pathlib import Path
from typing import Any

import torch
from timm.layers import resize_rel_pos_bias_table_simple
from timm.models import adapt_input_conv
from torch import Tensor, nn

from ..layers import AgentAttention, ResamplePosEmbed
from ..layers.embed import resample_pos_embed
from ._weight_files import FLOATS, WRAPPERS, classes_of_head, describe, one_line, read_state_dict

# Buffers of published files, which our models compute.
IGNORED_BUFFERS = ("relative_position_index", "attn_mask")
FIRST_CONV = "stages.0.patch_embed.proj.weight"
NAMES_SHOWN = 3


def load_checkpoint(model: nn.Module, path: str | Path, *, new_head: bool = True) -> None:
    """Load published weights (.pth) or our own (.safetensors, .pth) into a model.

    Position embeddings and relative position tables are resized and the first convolution is adapted to the model's
    channels. A head for another number of classes is left out with a warning, so that the model keeps the head it has;
    a model without a head takes what it needs up to its last level.

    Args:
        model: A model of this library, or what `features_only=True`, DistributedDataParallel or torch.compile make of
            it.
        path: The file. It is refused if it holds anything but tensors, plain containers and the published config class.
        new_head: Whether the model may keep its own head, to be trained, if the file has one for another number of
            classes; False = such a file is refused.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is not a checkpoint, is not safe, or belongs to another model; the model is not changed.
    """
    inner = unwrap_model(model)
    state_dict = _adapt_channels(adapt_state_dict(read_state_dict(path), inner), inner)
    left_out = _left_out(state_dict, inner, path, new_head)
    loaded = {name: value for name, value in state_dict.items() if name not in left_out}
    own = {name: value for name, value in inner.state_dict().items() if name not in left_out}
    problem = _mismatch(loaded, own)
    if problem:
        raise ValueError(
            f"{path} does not hold the weights of this model ({type(inner).__name__}): {problem}. "
            "Choose the model that the file was made for."
        )
    if left_out and inner.num_classes > 0:
        warnings.warn(
            f"{path} is for {state_dict['head.weight'].shape[0]} classes and the model has {inner.num_classes}: the "
            "head is not loaded, so it starts from random weights",
            stacklevel=2,
        )
    # Not strict, because a head that is left out is missing.
    inner.load_state_dict(loaded, strict=False)


def unwrap_model(model: nn.Module) -> Any:
    """Return the model itself, out of its wrappers."""
    # On the class: a compiled model answers for the one within, but its parameters have other names.
    if hasattr(type(model), "published_names"):
        return model
    inner = next((child for name, child in model.named_children() if name in WRAPPERS), None)
    if inner is None:
        raise ValueError(f"load_checkpoint takes the models of this library, not {type(model).__name__}")
    return unwrap_model(inner)


def _adapt_channels(state_dict: dict[str, Tensor], model: Any) -> dict[str, Tensor]:
    """A first convolution for three channels, adapted to those of the model's images as timm does it."""
    weight = state_dict.get(FIRST_CONV)
    if weight is None or weight.dim() != 4 or weight.shape[1] != 3 or weight.dtype not in FLOATS:
        return state_dict
    return {**state_dict, FIRST_CONV: adapt_input_conv(model.in_chans, weight)}


def _left_out(state_dict: dict[str, Tensor], model: Any, path: str | Path, new_head: bool) -> set[str]:
    """Weights that the model has no use for: a head for other classes or, without a head, what follows its levels."""
    if model.num_classes == 0:
        return {name for name in state_dict if _follows_levels(name, model)}
    classes = classes_of_head(state_dict, "head", path)
    if classes in (None, model.num_classes):
        return set()
    # A head of other channels, or without a bias, is one of another model: that is reported with the other weights.
    if state_dict["head.weight"].shape[1:] != model.head.weight.shape[1:] or "head.bias" not in state_dict:
        return set()
    if not new_head:
        raise ValueError(
            f"{path} has a head for {classes} classes, but {model.num_classes} are needed: choose weights for these "
            "classes, or train the model on them first"
        )
    return {"head.weight", "head.bias"}


def _follows_levels(name: str, model: Any) -> bool:
    """Whether a weight is of a head, or of a norm or a level that the model lacks."""
    # A level is called stages.2 or stages.0.blocks.2.
    levels = model.feature_info[0]["module"].rpartition(".")[0]
    level = re.match(rf"{re.escape(levels)}\.(\d+)\.", name)
    return (
        name.startswith("head.")
        or (name.startswith("norm.") and isinstance(model.norm, nn.Identity))
        or (level is not None and int(level[1]) >= len(model.feature_info))
    )


def _mismatch(state_dict: dict[str, Tensor], own: dict[str, Tensor]) -> str:
    """In what weights differ from those of a model; "" if in nothing but their values and precision."""
    differences = {
        "missing": [name for name in own if name not in state_dict],
        "unexpected": [name for name in state_dict if name not in own],
        "of another shape or type": [
            f"{name} {describe(state_dict[name])} for {describe(value)}"
            for name, value in own.items()
            if name in state_dict and (state_dict[name].shape != value.shape or state_dict[name].dtype not in FLOATS)
        ],
    }
    if not any(differences.values()):
        return ""
    return "; ".join(_first_few(what, names) for what, names in differences.items())


def _first_few(what: str, names: list[str]) -> str:
    shown = ", ".join(one_line(name) for name in names[:NAMES_SHOWN])
    return f"{len(names)} {what}" + (f" ({shown}{', …' if len(names) > NAMES_SHOWN else ''})" if names else "")


def adapt_state_dict(state_dict: dict[str, Tensor], model: Any) -> dict[str, Tensor]:
    """Weights under the model's names and, where only the input size differs, in its shapes.

    This is the filter that timm's loading calls for. timm itself sees to the head and to the first convolution.
    """
    published = not any(name.startswith("stages.") for name in state_dict)
    if published:
        state_dict = rename(state_dict, model)
    own = model.state_dict()
    adapted = {}
    for name, value in state_dict.items():
        if name not in own or value.dtype not in FLOATS:
            # Reported with those of other shapes.
            pass
        elif name.endswith("pos_embed"):
            resample = getattr(model.get_submodule(name.rpartition(".")[0]), "resample_pos_embed", None)
            if isinstance(resample, ResamplePosEmbed):
                value = _fit_positions(value, own[name], resample, square=published)
        elif isinstance(module := model.get_submodule(name.rpartition(".")[0]), AgentAttention):
            value = module.fit_parameter(name.rpartition(".")[2], value)
        elif name.endswith("relative_position_bias_table"):
            value = _fit_relative_positions(value, own[name])
        adapted[name] = value
    return adapted


def rename(state_dict: dict[str, Tensor], model: Any) -> dict[str, Tensor]:
    """Published names to the model's own; parts of what is one parameter here are joined, buffers dropped."""
    renamed: dict[str, dict[int, Tensor]] = {}
    for published, value in state_dict.items():
        if published.endswith(IGNORED_BUFFERS):
            continue
        name, part = _own_name(published, model.published_names)
        parts = renamed.setdefault(name, {})
        if part in parts:
            raise ValueError(f"the weights hold {one_line(name)} twice, once under the name {one_line(published)}")
        parts[part] = value
    return {name: _join(name, [parts[i] for i in sorted(parts)]) for name, parts in renamed.items()}


def _own_name(name: str, rules: tuple[tuple[str, str], ...]) -> tuple[str, int]:
    """The model's name for a published parameter, and which part of the model's parameter it is."""
    # The mark of a part is ours; a file has no say in it.
    if "#" in name:
        return name, 0
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    part = re.search(r"#(\d)$", name)
    return (name[: part.start()], int(part[1])) if part else (name, 0)


def _join(name: str, parts: list[Tensor]) -> Tensor:
    """The parts of a parameter as one, along the first dimension."""
    if len(parts) == 1:
        return parts[0]
    if any(part.dim() == 0 or part.shape[1:] != parts[0].shape[1:] or part.dtype not in FLOATS for part in parts):
        raise ValueError(f"the parts of {one_line(name)} do not fit together: {', '.join(map(describe, parts))}")
    return torch.cat(parts)


def _fit_positions(pos_embed: Tensor, own: Tensor, resample: ResamplePosEmbed, *, square: bool) -> Tensor:
    """Resize position embeddings (1, prefix + H·W, dim) to the model's grid if they are of another one.

    Args:
        pos_embed: The embeddings in the file.
        own: The model's.
        resample: The model's grid and interpolation.
        square: Whether the file's grid is known to be square, as published ones are. Otherwise, as many positions as
            the model has are assumed to be of its grid, and any other number to be of a square.
    """
    height, width = resample.grid
    count = pos_embed.shape[1] - resample.num_prefix_tokens if pos_embed.dim() == 3 else 0
    side = isqrt(max(count, 0))
    # No square: it is of the model's grid, or the wrong shape is reported with those of other parameters.
    if side == 0 or side**2 != count or pos_embed.shape[::2] != own.shape[::2]:
        return pos_embed
    if count == height * width and height != width and not square:
        warnings.warn(
            f"the file does not say whether its {count} positions are of a grid of {height} × {width}, as the model's, "
            f"or {side} × {side}: the former is assumed",
            stacklevel=2,
        )
        return pos_embed
    return resample_pos_embed(
        pos_embed, (side, side), resample.grid, resample.num_prefix_tokens, resample.interpolation
    )


def _fit_relative_positions(table: Tensor, own: Tensor) -> Tensor:
    """A table of relative positions ((2·window - 1)², heads), resized to the model's window."""
    if table.shape == own.shape or table.dim() != 2 or table.shape[1] != own.shape[1]:
        return table
    # No square: the wrong shape is reported with those of other parameters.
    if table.shape[0] == 0 or isqrt(table.shape[0]) ** 2 != table.shape[0]:
        return table
    window = (isqrt(own.shape[0]) + 1) // 2
    return resize_rel_pos_bias_table_simple(table, (window, window), tuple(own.shape))
