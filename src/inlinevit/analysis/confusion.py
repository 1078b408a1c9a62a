"""Confusion: queries of one image that differ, and yet get the same attention row."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .hooks import watch
from .layer import Layer

# How near rows must be to count as the same, and how far queries apart to count as different; relative to their length.
EPSILON = 1e-2
DELTA = 0.1


@dataclass
class LayerConfusion:
    """What was found in one layer.

    Attributes:
        layer: The layer's name.
        pairs: How many pairs of different queries were looked at, in each image: over all heads and windows.
        confused: How many of them got the same row, in each image.
    """

    layer: str
    pairs: list[int]
    confused: list[int]

    @property
    def share(self) -> float:
        """The share of pairs that are confused."""
        return sum(self.confused) / max(sum(self.pairs), 1)


@dataclass
class Confusion:
    """What was found in a model.

    Attributes:
        epsilon: Rows nearer than this, relative to the longer of them, count as the same.
        delta: Queries farther apart than this, relative to the longer of them, count as different.
        layers: From the first to the last.
    """

    epsilon: float
    delta: float
    layers: list[LayerConfusion]

    @property
    def per_image(self) -> list[int]:
        """How many pairs each image has in which queries are confused, over all layers."""
        return [sum(counts) for counts in zip(*(layer.confused for layer in self.layers), strict=True)]


def measure_confusion(
    model: nn.Module, batches: Iterable[Tensor], *, epsilon: float = EPSILON, delta: float = DELTA
) -> Confusion:
    """Count pairs of queries that are confused, in every layer.

    Args:
        model: See watch.
        batches: Images (batch, channels, H, W).
        epsilon: See Confusion.
        delta: See Confusion.
    """
    layers: dict[str, LayerConfusion] = {}

    def visit(layer: Layer) -> None:
        pairs, confused = count_confused_pairs(layer, epsilon, delta)
        found = layers.setdefault(layer.name, LayerConfusion(layer.name, [], []))
        found.pairs += pairs.tolist()
        found.confused += confused.tolist()

    for images in batches:
        watch(model, images, visit)
    return Confusion(epsilon, delta, list(layers.values()))


def count_confused_pairs(layer: Layer, epsilon: float = EPSILON, delta: float = DELTA) -> tuple[Tensor, Tensor]:
    """Pairs of different queries of one head and window, and those of them that get the same row.

    Args:
        layer: Where.
        epsilon: See Confusion.
        delta: See Confusion.

    Returns:
        How many of each there are in each image, (images) and (images).
    """
    pairs = torch.zeros(layer.images, dtype=torch.long, device=layer.q.device)
    confused = torch.zeros_like(pairs)
    pieces = list(layer.chunks())
    for i, (first, last) in enumerate(pieces):
        rows = layer.attention_weights(first, last).double()
        for other_first, other_last in pieces[i:]:
            others = rows if other_first == first else layer.attention_weights(other_first, other_last).double()
            differ = distances(layer.q[:, :, first:last], layer.q[:, :, other_first:other_last]) > delta
            # Each pair once, and no padding.
            places = torch.arange(layer.tokens, device=layer.q.device)
            differ &= places[first:last, None] < places[None, other_first:other_last]
            real = layer.is_real.repeat(layer.images, 1).unsqueeze(1)
            differ &= real[:, :, first:last, None] & real[:, :, None, other_first:other_last]
            same = differ & (distances(rows, others) <= epsilon)
            pairs += differ.flatten(1).sum(dim=1).view(layer.images, -1).sum(dim=1)
            confused += same.flatten(1).sum(dim=1).view(layer.images, -1).sum(dim=1)
    return pairs, confused


def distances(x: Tensor, y: Tensor) -> Tensor:
    """Distance of each vector of x from each of y, in terms of the longer of the two.

    Args:
        x: (..., vectors, width).
        y: (..., other vectors, width).

    Returns:
        (..., vectors, other vectors); 0 between two that are zero.
    """
    x, y = x.double(), y.double()
    longer = torch.maximum(x.norm(dim=-1).unsqueeze(-1), y.norm(dim=-1).unsqueeze(-2))
    # Rows of one head are much alike: about their middle, the difference of squares keeps its digits.
    middle = x.mean(dim=-2, keepdim=True)
    x, y = x - middle, y - middle
    squares = x.square().sum(dim=-1).unsqueeze(-1) + y.square().sum(dim=-1).unsqueeze(-2)
    return (squares - 2 * x @ y.transpose(-2, -1)).clamp(min=0).sqrt() / longer.clamp(min=torch.finfo(x.dtype).tiny)
