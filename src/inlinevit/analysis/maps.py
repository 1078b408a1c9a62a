"""Attention maps: the weights of one query as an image."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .hooks import watch
from .layer import Layer


@dataclass
class AttentionMap:
    """The weights of one query.

    Attributes:
        layer: Name of the layer.
        query: (row, column) of the query on the feature map.
        weights: (heads, H, W); NaN outside of the query's window. They may be negative.
        total: (heads, H, W) with the convolution that the layer adds, averaged over the channels of a head; equal to
            weights if it adds none.
    """

    layer: str
    query: tuple[int, int]
    weights: Tensor
    total: Tensor


def attention_maps(model: nn.Module, image: Tensor, queries: Sequence[tuple[float, float]]) -> list[AttentionMap]:
    """Compute the weights of some queries in every layer of a model.

    Args:
        model: See watch.
        image: (channels, H, W).
        queries: Positions in the image, as fractions of its height and width: (0.5, 0.5) is the center.

    Returns:
        One map for each layer and query, those of one layer next to each other. Layers whose keys come from a reduced
        feature map are left out.
    """
    for query in queries:
        if not all(0 <= fraction <= 1 for fraction in query):
            raise ValueError(f"a query is at {query}: both should be fractions of height and width, from 0 to 1")
    found: list[AttentionMap] = []

    def visit(layer: Layer) -> None:
        if layer.sees_map:
            found.extend(layer_map(layer, query) for query in queries)

    watch(model, image.unsqueeze(0), visit)
    return found


def layer_map(layer: Layer, query: tuple[float, float]) -> AttentionMap:
    """Return the weights of the query at (fraction of height, fraction of width) in the first image of the batch."""
    row, column = (min(int(part * length), length - 1) for part, length in zip(query, layer.size, strict=True))
    window, token = torch.nonzero(layer.places == row * layer.size[1] + column)[0].tolist()
    weights, total = (
        on_map(rows[window, :, 0], layer.places[window], layer.size)
        for rows in (layer.attention_weights(token, token + 1), layer.total_weights(token, token + 1))
    )
    return AttentionMap(layer.name, (row, column), weights, total)


def on_map(weights: Tensor, places: Tensor, size: tuple[int, int]) -> Tensor:
    """Place the weights of a window (heads, tokens) on the feature map, (heads, H, W), which is NaN elsewhere."""
    out = torch.full((weights.shape[0], size[0] * size[1]), torch.nan, dtype=weights.dtype, device=weights.device)
    is_place = places >= 0
    out[:, places[is_place]] = weights[:, is_place]
    return out.unflatten(1, size)
