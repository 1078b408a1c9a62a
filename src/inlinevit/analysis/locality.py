"""Locality: the attention that a query gives its own 3×3 neighbourhood."""

from collections.abc import Iterable
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from .hooks import watch
from .layer import Layer


@dataclass
class LayerLocality:
    """What was found in one layer, averaged over the queries of the map, heads and images.

    Attributes:
        layer: The layer's name.
        size: (H, W) of the map.
        uniform: What attention that is the same everywhere would give: 9 / tokens, less at borders.
        attention: The weights of a query's neighbourhood, summed, without any convolution that the layer adds.
        total: The same with it: with InLine's local residual, for instance.
        attention_share: The share of the neighbourhood in the absolute weights of the row, without the convolution.
        total_share: The same with it.
    """

    layer: str
    size: tuple[int, int]
    uniform: float
    attention: float
    total: float
    attention_share: float
    total_share: float


def measure_locality(model: nn.Module, batches: Iterable[Tensor], *, side: int = 3) -> list[LayerLocality]:
    """How local each layer is, from the first to the last. Layers whose keys are of a reduced map are left out.

    Args:
        model: See watch.
        batches: Images (batch, channels, H, W), all of one size.
        side: Side of the neighbourhood, odd.
    """
    sums: dict[str, tuple[LayerLocality, int]] = {}

    def visit(layer: Layer) -> None:
        if layer.sees_map:
            now = layer_locality(layer, side)
            before, images = sums.get(layer.name, (now, 0))
            sums[layer.name] = weighted_mean(before, images, now, layer.images), images + layer.images

    for images in batches:
        watch(model, images, visit)
    return [locality for locality, _ in sums.values()]


def layer_locality(layer: Layer, side: int = 3) -> LayerLocality:
    """How local a layer is.

    Args:
        layer: Which one; its keys are the tokens of the map.
        side: Side of the neighbourhood, odd.
    """
    totals = torch.zeros(5, dtype=torch.float64)
    # Padding is no token that attention could be spread over.
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
    """The weights of all neighbourhoods, summed; of rows (batch · windows, heads, queries, tokens)."""
    return ((rows * near).sum(dim=-1) * is_query).sum()


def weighted_mean(one: LayerLocality, weight: int, other: LayerLocality, other_weight: int) -> LayerLocality:
    """The mean of what was found in two batches of images."""
    if one.size != other.size:
        raise ValueError(f"{one.layer} has maps of {one.size} and {other.size}: use images of one size")
    names = [field.name for field in fields(LayerLocality)[2:]]
    total = weight + other_weight
    means = {name: (weight * vars(one)[name] + other_weight * vars(other)[name]) / total for name in names}
    return LayerLocality(one.layer, one.size, **means)
