"""Candidates: attention layers on square feature maps, and models of timm."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from math import isqrt
from typing import Any

import timm  # noqa: F401  # before our layers: it registers our models, which need them
import torch
from torch import Tensor, nn

from ..layers import BaseAttention, InLineAttention, LinearAttention, SoftmaxAttention
from ..layers.inline_attention import PATHS
from ..models import factory
from ..utils.memory import FLOAT_BYTES, require_memory, require_memory_for_images, require_memory_for_model
from ..utils.validation import MOST_PIXELS, Range, check_value, did_you_mean, require
from .options import ALL_MODES
from .workload import Candidate, Comparison, draw_input, draw_weights

# Side lengths of images are multiples of the coarsest stride of most models.
STRIDE = 32
# Models for larger images may have more weights than fit into memory.
MAX_UNCHECKED = 4096


class OnGrid(nn.Module):
    """An attention layer on square feature maps of one size."""

    def __init__(self, layer: BaseAttention, side: int) -> None:
        super().__init__()
        self.layer = layer
        self.side = side

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens (batch, side², dim) to the same shape."""
        return self.layer(x, (self.side, self.side))


class Projections(nn.Module):
    """The four projections of an attention layer, without the attention."""

    def __init__(self, layer: BaseAttention) -> None:
        super().__init__()
        self.qkv = layer.qkv
        self.proj = layer.proj

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Map tokens (batch, tokens, dim) to (batch, tokens, 3 · dim) and (batch, tokens, dim)."""
        return self.qkv(x), self.proj(x)


def layer_comparisons(tokens: Sequence[int], dim: int, heads: int, batch: int) -> list[Comparison]:
    """Return comparisons of InLine attention (by its default path and each path), its projections, linear, softmax."""
    for count in tokens:
        side = isqrt(max(count, 1))
        require(side**2 == count, f"{count} tokens are not a square map: use {side**2} or {(side + 1) ** 2}")
        check_value("tokens", count, int, Range(1, MOST_PIXELS**2))
    for name, value in {"dim": dim, "heads": heads, "batch": batch}.items():
        check_value(name, value, int, Range(1, MOST_PIXELS))
    require(dim % heads == 0, f"dim is {dim} and heads is {heads}: heads should divide dim")
    largest = max(tokens, default=0)
    what = f"{batch} map{'' if batch == 1 else 's'} of {largest} tokens"
    require_memory(FLOAT_BYTES * batch * largest * dim, what, "choose fewer tokens, or a smaller batch")

    def candidate(name: str, kind: type[BaseAttention], count: int, path: str | None = None) -> Candidate:
        def make(device: torch.device) -> tuple[nn.Module, Tensor]:
            layer = kind(dim, heads, device=device)
            draw_weights(layer)
            if isinstance(layer, InLineAttention):
                layer.path = path
            module = Projections(layer) if name == "projections" else OnGrid(layer, isqrt(count))
            return module, draw_input(batch, count, dim, device=device)

        is_inline = name.startswith("InLine")
        return Candidate(name, count, make, output_group="InLine" if is_inline else "", is_optional=path is not None)

    return [
        Comparison(
            f"{count:,} tokens",
            batch,
            [
                candidate("projections", InLineAttention, count),
                candidate("InLine", InLineAttention, count),
                *(candidate(f"InLine, {path}", InLineAttention, count, path) for path in PATHS),
                candidate("linear", LinearAttention, count),
                candidate("softmax", SoftmaxAttention, count),
            ],
        )
        for count in tokens
    ]


def model_comparisons(models: Sequence[str], sizes: Sequence[int], batches: Sequence[int]) -> list[Comparison]:
    """Return one comparison of models, as in the options of `bench model`, per image size and batch size."""
    found = parse_modes(models)
    return [
        Comparison(
            f"{size}², batch {batch}",
            batch,
            [replace(model_candidate(model, size, batch), modes=modes) for model, modes in found.items()],
        )
        for batch in batches
        for size in sizes
    ]


def parse_modes(models: Sequence[str]) -> dict[str, list[str] | None]:
    """Return the modes of each model: [MODE, MODE] for MODEL@MODE and MODEL@MODE, None for MODEL alone."""
    found: dict[str, list[str] | None] = {}
    for text in models:
        model, _, mode = text.partition("@")
        if "@" not in text:
            require(found.setdefault(model, None) is None, f"{model} is also given with a mode: choose one of the two")
            continue
        check_names("mode", [mode], ALL_MODES)
        modes = found.setdefault(model, [])
        require(modes is not None, f"{model} is also given without a mode: choose one of the two")
        assert modes is not None
        modes.append(mode)
    return found


def model_candidate(text: str, size: int, batch: int) -> Candidate:
    """Return a model, NAME or NAME:OPTION=VALUE,OPTION=VALUE, on random images."""
    name, options = factory.parse_model(text)
    check_side("size", size)
    check_value("batch", batch, int, Range(1, MOST_PIXELS))
    require_memory_for_images(batch, 3, size, size, "choose smaller sizes or batches")
    if options or size > MAX_UNCHECKED:
        # A model that cannot be built is refused before others are measured.
        require_memory_for_model(lambda: create_model(name, options, size), text, "choose smaller values")

    def make(device: torch.device) -> tuple[nn.Module, Tensor]:
        model = draw_weights(create_model(name, options, size)).to(device)
        return model, draw_input(batch, 3, size, size, device=device)

    return Candidate(text, size, make)


def check_names(what: str, names: Sequence[str], known: Collection[str]) -> None:
    """Raise a ValueError for names that are not known."""
    for name in names:
        remedy = did_you_mean(name, known) or f"choose among {', '.join(known)}"
        require(name in known, f"there is no {what} {name!r}: {remedy}")


def check_side(name: str, pixels: int) -> None:
    """Raise a ValueError if a side length of images is not a multiple of STRIDE."""
    lower = max(pixels // STRIDE, 1) * STRIDE
    remedy = f"use {lower} or {lower + STRIDE}"
    require(pixels > 0 and pixels % STRIDE == 0, f"{name} {pixels} is not a multiple of {STRIDE}: {remedy}")
    check_value(name, pixels, int, Range(1, MOST_PIXELS))


def create_model(name: str, options: dict[str, Any], size: int) -> nn.Module:
    """Create a model of timm's for images of a size, which not all models take as an argument."""
    try:
        return factory.create_model(name, {}, optional={"img_size": size}, options=options, config_fields={})
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{name} cannot be made with {options} for images of {size}² ({error}): choose other options or sizes"
        ) from error
