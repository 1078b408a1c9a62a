"""What the attention layers of a model computed from one image, kept for as long as the image is explored."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from ..analysis.hooks import run_masked, watch
from ..analysis.layer import Layer, MaskFunction
from ..analysis.masking import hide_at_random, hide_near
from .rows import KINDS, local_weights, locate, weights_of_query

# Tokens of a map, and bytes of queries, keys and values of all layers, beyond which an image is refused.
MOST_TOKENS = 2**14
MOST_BYTES = 2**30
# Attention weights of all layers beyond which nothing is masked, because that computes all of them: for minutes.
MOST_MASKED_WEIGHTS = 2**28
# Queries of a layer that its locality is measured on, and of maps with more than so many tokens.
LOCALITY_QUERIES = 24
LARGE_MAP = 1024
LOCALITY_QUERIES_OF_LARGE_MAPS = 12
SMALLER = "choose a smaller --img_size"


@dataclass
class Locality:
    """The weight of the 3×3 neighbourhood of queries in one layer: means over heads and some of the queries.

    Attributes:
        uniform: In uniform attention.
        weights: By kind of attention, without any convolution.
        total: In the model's own attention, with the convolution that it adds.
    """

    uniform: float
    weights: dict[str, float]
    total: float


@dataclass
class Capture:
    """One image in one model.

    Attributes:
        layers: Layers whose keys are the tokens of the map, from the first to the last.
        logits: (classes,).
        reduced: How many layers are left out, because their keys come from a reduced map.
    """

    layers: list[Layer]
    logits: Tensor
    reduced: int
    _locality: dict[int, Locality] = field(default_factory=dict)

    def locality(self, index: int) -> Locality:
        """Return the locality of a layer; it is computed once."""
        if index not in self._locality:
            layer = self.layers[index]
            is_large = layer.size[0] * layer.size[1] > LARGE_MAP
            self._locality[index] = layer_locality(
                layer, LOCALITY_QUERIES_OF_LARGE_MAPS if is_large else LOCALITY_QUERIES
            )
        return self._locality[index]


def capture(model: nn.Module, image: Tensor) -> Capture:
    """Run a model on an image (channels, H, W), and keep what its attention layers compute with.

    Raises:
        ValueError: The model has no attention that can be shown, or the image has too many tokens.
    """
    layers: list[Layer] = []
    reduced, size = 0, 0

    def keep(layer: Layer) -> None:
        nonlocal reduced, size
        if not layer.sees_map:
            reduced += 1
            return
        height, width = layer.size
        if height * width > MOST_TOKENS:
            raise ValueError(f"{layer.name} has a map of {height} × {width} tokens, too many to explore: {SMALLER}")
        size += sum(part.numel() * part.element_size() for part in (layer.q, layer.k, layer.v))
        if size > MOST_BYTES:
            raise ValueError(f"the queries and keys of all layers take more than {MOST_BYTES >> 30} GB: {SMALLER}")
        layers.append(layer)

    logits = watch(model, image.unsqueeze(0), keep)[0].float().cpu()
    if not layers:
        raise ValueError("the keys of all its layers come from a reduced map, where they have no place to be shown")
    return Capture(layers, logits, reduced)


def layer_locality(layer: Layer, queries: int) -> Locality:
    """Measure the locality of a layer on queries that are spread evenly over its map."""
    height, width = layer.size
    step = max(1, height * width // queries)
    # From the middle of the first step on, so that borders are not preferred.
    chosen = range(step // 2, height * width, step)
    kinds = dict.fromkeys((*KINDS, layer.attention))
    uniform, total, sums = 0.0, 0.0, dict.fromkeys(kinds, 0.0)
    for place in chosen:
        window, token = locate(layer, (place // width, place % width))
        near = near_query(layer, window, token)
        uniform += float(near.sum() / layer.is_real[window].sum())
        for kind in kinds:
            sums[kind] += float(weights_of_query(layer, window, token, kind)[:, near].sum(dim=-1).mean())
        added = local_weights(layer, window, token)
        total += 0.0 if added is None else float(added.weights.sum(dim=-1).mean())
    count = len(chosen)
    means = {kind: value / count for kind, value in sums.items()}
    return Locality(uniform / count, means, means[layer.attention] + total / count)


def near_query(layer: Layer, window: int, token: int, side: int = 3) -> Tensor:
    """Return which tokens of a window are in the neighbourhood of one query, (tokens,)."""
    places, width = layer.places[window], layer.size[1]
    row, column = places // width - places[token] // width, places % width - places[token] % width
    return (torch.maximum(row.abs(), column.abs()) <= side // 2) & (places >= 0)


def masked_sides(found: Capture, sides: Sequence[int] = (3, 5, 7)) -> list[int]:
    """Return the side lengths of neighbourhoods that can be hidden; none if queries have no neighbourhood."""
    # (windows, heads, tokens, width)
    weights = sum(layer.q.shape[0] * layer.q.shape[1] * layer.q.shape[2] ** 2 for layer in found.layers)
    if found.reduced or weights > MOST_MASKED_WEIGHTS:
        return []
    smallest = min(min(layer.size) for layer in found.layers)
    return [side for side in sides if side < smallest]


def masked_logits(
    model: nn.Module, image: Tensor, side: int, check: Callable[[], object] = lambda: None
) -> dict[str, Tensor]:
    """Return the logits (classes,) with each query's neighbourhood, or as many random tokens, hidden in all layers.

    Args:
        model: See capture().
        image: (channels, H, W).
        side: Side length of the neighbourhood.
        check: Called often; what it raises ends the computation.
    """
    generator = torch.Generator().manual_seed(0)
    masks = {
        "near": partial(hide_near, side=side),
        "random": partial(hide_at_random, side=side, generator=generator),
    }

    def checked(mask: MaskFunction, layer: Layer, first: int, last: int) -> Tensor:
        check()
        return mask(layer, first, last)

    return {
        name: run_masked(model, image.unsqueeze(0), partial(checked, mask))[0].float().cpu()
        for name, mask in masks.items()
    }
