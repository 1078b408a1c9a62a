"""Locality: the weight of the 3×3 neighbourhood of each query."""

from collections.abc import Iterable
from dataclasses import astuple, dataclass

import numpy as np
import torch
from torch import Tensor, nn

from .hooks import watch
from .layer import Layer


@dataclass
class LayerLocality:
    """Locality of one layer: means over the queries of the feature map, heads and images.

    Attributes:
        layer: Name of the layer.
        size: (H, W) of the feature map.
        uniform: The neighbourhood's weight in uniform attention: 9 / tokens, less at borders.
        attention: Sum of the weights of the neighbourhood, without any convolution that the layer adds.
        total: The same with the convolution, such as InLine's local residual.
        attention_share: The neighbourhood's fraction of the absolute weights, without the convolution.
        total_share: The same with the convolution.
    """

    layer: str
    size: tuple[int, int]
    uniform: float
    attention: float
    total: float
    attention_share: float
    total_share: float


def measure_locality(model: nn.Module, batches: Iterable[Tensor], *, side: int = 3) -> list[LayerLocality]:
    """Measure how much of the weights of queries goes to their neighbourhoods, in every layer of a model.

    Args:
        model: See watch.
        batches: Images (batch, channels, H, W) of one size.
        side: Side length of the neighbourhood, odd.

    Returns:
        The layers, from the first to the last. Those whose keys come from a reduced feature map are left out.
    """
    found: dict[str, list[tuple[LayerLocality, int]]] = {}

    def visit(layer: Layer) -> None:
        if layer.sees_map:
            found.setdefault(layer.name, []).append((layer_locality(layer, side), layer.images))

    for images in batches:
        watch(model, images, visit)
    return [mean_locality(parts) for parts in found.values()]


def layer_locality(layer: Layer, side: int = 3) -> LayerLocality:
    """Return the locality of a layer whose keys are the tokens of the feature map."""
    totals = torch.zeros(5, dtype=torch.float64)
    # Padding gets no attention.
    tokens = layer.is_real.sum(dim=1)
    for first, last in layer.chunks():
        near, is_query = layer.near(first, last, side), layer.places[:, first:last] >= 0
        uniform = (near.sum(dim=-1).double() / tokens[:, None])[is_query].sum()
        found = [uniform * layer.images * layer.q.shape[1]]
        near, is_query = near.repeat(layer.images, 1, 1).unsqueeze(1), is_query.repeat(layer.images, 1).unsqueeze(1)
        rows = layer.attention_weights(first, last).double()
        total_rows = rows if layer.convolution is None else layer.total_weights(first, last).double()
        found += [near_sum(rows, near, is_query), near_sum(total_rows, near, is_query)]
        for absolute in (rows.abs(), total_rows.abs()):
            found.append(near_sum(absolute / absolute.sum(dim=-1, keepdim=True).clamp(min=1e-300), near, is_query))
        totals += torch.stack(found).cpu()
    queries = int((layer.places >= 0).sum()) * layer.images * layer.q.shape[1]
    return LayerLocality(layer.name, layer.size, *(totals / max(queries, 1)).tolist())


def near_sum(rows: Tensor, near: Tensor, is_query: Tensor) -> Tensor:
    """Return the sum of the weights of all neighbourhoods; rows are (batch · windows, heads, queries, tokens)."""
    return ((rows * near).sum(dim=-1) * is_query).sum()


def mean_locality(batches: list[tuple[LayerLocality, int]]) -> LayerLocality:
    """Return the mean of the locality of a layer in several batches, with their numbers of images."""
    first = batches[0][0]
    for other, _ in batches:
        if other.size != first.size:
            raise ValueError(f"{first.layer} has feature maps of {first.size} and {other.size}: use images of one size")
    numbers, images = [astuple(one)[2:] for one, _ in batches], [count for _, count in batches]
    return LayerLocality(first.layer, first.size, *np.average(numbers, axis=0, weights=images).tolist())
