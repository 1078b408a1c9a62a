"""Maps: the attention row of one query as a picture."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .hooks import watch
from .layer import Layer


@dataclass
class AttentionMap:
    """The weights that one query gives to the tokens of the map.

    Attributes:
        layer: The layer's name.
        query: (row, column) of the query on the map.
        weights: (heads, H, W); NaN where the query's window does not reach. They may be negative.
        total: (heads, H, W) with the convolution that the layer adds, averaged over the channels of a head; the same as
            weights if it adds none.
    """

    layer: str
    query: tuple[int, int]
    weights: Tensor
    total: Tensor


def attention_maps(model: nn.Module, image: Tensor, queries: Sequence[tuple[float, float]]) -> list[AttentionMap]:
    """The rows of chosen queries in every layer, from the first to the last; those of one layer side by side.

    Layers whose keys are of a reduced map are left out.

    Args:
        model: See watch.
        image: (channels, H, W).
        queries: Where they are, as shares of the image's height and width: (0.5, 0.5) is its middle.
    """
    for query in queries:
        if not all(0 <= share <= 1 for share in query):
            raise ValueError(f"a query is at {query}: both numbers should be from 0 to 1, shares of height and width")
    found: list[AttentionMap] = []

    def visit(layer: Layer) -> None:
        if layer.sees_map:
            found.extend(layer_map(layer, query) for query in queries)

    watch(model, image.unsqueeze(0), visit)
    return found


def layer_map(layer: Layer, query: tuple[float, float]) -> AttentionMap:
    """The row of the query at (share of the height, share of the width), in the first image of the batch."""
    row, column = (min(int(share * length), length - 1) for share, length in zip(query, layer.size, strict=True))
    window, token = torch.nonzero(layer.places == row * layer.size[1] + column)[0].tolist()
    weights, total = (
        on_map(rows[window, :, 0], layer.places[window], layer.size)
        for rows in (layer.attention_weights(token, token + 1), layer.total_weights(token, token + 1))
    )
    return AttentionMap(layer.name, (row, column), weights, total)


def on_map(weights: Tensor, places: Tensor, size: tuple[int, int]) -> Tensor:
    """Weights of the tokens of a window (heads, tokens) at their places (tokens) on the map, (heads, H, W); or NaN."""
    out = torch.full((weights.shape[0], size[0] * size[1]), torch.nan, dtype=weights.dtype, device=weights.device)
    is_place = places >= 0
    out[:, places[is_place]] = weights[:, is_place]
    return out.unflatten(1, size)
