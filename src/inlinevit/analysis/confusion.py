"""Confusion: different queries of one image that have the same attention weights."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .hooks import watch
from .layer import Layer

# Rows of weights nearer than EPSILON are the same, queries farther apart than DELTA differ; relative to their norms.
EPSILON = 1e-2
DELTA = 0.1


@dataclass
class LayerConfusion:
    """Confusion in one layer.

    Attributes:
        layer: Name of the layer.
        pairs: Pairs of different queries per image, over all heads and windows.
        confused: How many of them have the same row of weights.
    """

    layer: str
    pairs: list[int]
    confused: list[int]

    @property
    def share(self) -> float:
        """The fraction of pairs that are confused."""
        return sum(self.confused) / max(sum(self.pairs), 1)


@dataclass
class Confusion:
    """Confusion in a model.

    Attributes:
        epsilon: Rows nearer than this, relative to the larger norm, are the same.
        delta: Queries farther apart than this, relative to the larger norm, are different.
        layers: From the first to the last.
    """

    epsilon: float
    delta: float
    layers: list[LayerConfusion]

    @property
    def per_image(self) -> list[int]:
        """Confused pairs per image, over all layers."""
        return [sum(counts) for counts in zip(*(layer.confused for layer in self.layers), strict=True)]

    @property
    def pairs(self) -> int:
        """Pairs of different queries in all images and layers."""
        return sum(sum(layer.pairs) for layer in self.layers)

    @property
    def confused(self) -> int:
        """Confused pairs in all images and layers."""
        return sum(self.per_image)

    @property
    def share(self) -> float:
        """The fraction of pairs that are confused."""
        return self.confused / max(self.pairs, 1)


def measure_confusion(
    model: nn.Module, batches: Iterable[Tensor], *, epsilon: float = EPSILON, delta: float = DELTA
) -> Confusion:
    """Count confused pairs of queries in every layer.

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
    """Count pairs of different queries of one head and window, and those of them that have the same row.

    Args:
        layer: The layer.
        epsilon: See Confusion.
        delta: See Confusion.

    Returns:
        Both numbers per image, (images) and (images).
    """
    pairs = torch.zeros(layer.images, dtype=torch.long, device=layer.q.device)
    confused = torch.zeros_like(pairs)
    pieces = list(layer.chunks())
    for i, (first, last) in enumerate(pieces):
        rows = layer.attention_weights(first, last).double()
        for other_first, other_last in pieces[i:]:
            others = rows if other_first == first else layer.attention_weights(other_first, other_last).double()
            differ = distances(layer.q[:, :, first:last], layer.q[:, :, other_first:other_last]) > delta
            # Each pair once, without padding.
            places = torch.arange(layer.tokens, device=layer.q.device)
            differ &= places[first:last, None] < places[None, other_first:other_last]
            real = layer.is_real.repeat(layer.images, 1).unsqueeze(1)
            differ &= real[:, :, first:last, None] & real[:, :, None, other_first:other_last]
            same = differ & (distances(rows, others) <= epsilon)
            pairs += differ.flatten(1).sum(dim=1).view(layer.images, -1).sum(dim=1)
            confused += same.flatten(1).sum(dim=1).view(layer.images, -1).sum(dim=1)
    return pairs, confused


def distances(x: Tensor, y: Tensor) -> Tensor:
    """Return the distance of each vector of x from each of y, relative to the larger norm of the two.

    Args:
        x: (..., vectors, width).
        y: (..., other vectors, width).

    Returns:
        (..., vectors, other vectors); 0 between two that are zero.
    """
    x, y = x.double(), y.double()
    longer = torch.maximum(x.norm(dim=-1).unsqueeze(-1), y.norm(dim=-1).unsqueeze(-2))
    # Rows of one head are similar: without their mean, the difference of squares is precise.
    middle = x.mean(dim=-2, keepdim=True)
    x, y = x - middle, y - middle
    squares = x.square().sum(dim=-1).unsqueeze(-1) + y.square().sum(dim=-1).unsqueeze(-2)
    return (squares - 2 * x @ y.transpose(-2, -1)).clamp(min=0).sqrt() / longer.clamp(min=torch.finfo(x.dtype).tiny)
