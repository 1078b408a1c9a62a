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
    def fraction(self) -> float:
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
    def fraction(self) -> float:
        """The fraction of pairs that are confused."""
        return self.confused / max(self.pairs, 1)


def measure_confusion(
    model: nn.Module, batches: Iterable[Tensor], *, epsilon: float = EPSILON, delta: float = DELTA
) -> Confusion:
    """Count confused pairs of queries, which differ and have the same weights, in every layer of a model.

    Args:
        model: See watch.
        batches: Images (batch, channels, H, W).
        epsilon: Rows of weights nearer than this, relative to the larger norm, are the same; 0.01 by default.
        delta: Queries farther apart than this, relative to the larger norm, are different; 0.1 by default.
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
    """Count pairs of different queries of one head and window, and those of them that have the same row, per image."""
    pairs = torch.zeros(layer.images, dtype=torch.long, device=layer.q.device)
    confused = torch.zeros_like(pairs)
    places = torch.arange(layer.tokens, device=layer.q.device)
    real = layer.is_real.repeat(layer.images, 1).unsqueeze(1)
    pieces = list(layer.chunks())
    for i, (first, last) in enumerate(pieces):
        rows = layer.attention_weights(first, last).double()
        for other_first, other_last in pieces[i:]:
            others = rows if other_first == first else layer.attention_weights(other_first, other_last).double()
            differ = distances(layer.q[:, :, first:last], layer.q[:, :, other_first:other_last]) > delta
            # Each pair once, without padding.
            differ &= places[first:last, None] < places[None, other_first:other_last]
            differ &= real[:, :, first:last, None] & real[:, :, None, other_first:other_last]
            same = differ & (distances(rows, others) <= epsilon)
            pairs += differ.flatten(1).sum(dim=1).view(layer.images, -1).sum(dim=1)
            confused += same.flatten(1).sum(dim=1).view(layer.images, -1).sum(dim=1)
    return pairs, confused


def distances(x: Tensor, y: Tensor) -> Tensor:
    """Return the distances of vectors (..., n, width) and (..., m, width), relative to the larger norm of the two.

    They are (..., n, m), and 0 between two vectors that are zero.
    """
    x, y = x.double(), y.double()
    longer = torch.maximum(x.norm(dim=-1).unsqueeze(-1), y.norm(dim=-1).unsqueeze(-2))
    # Rows of one head are similar: without their mean, the difference of squares is precise.
    middle = x.mean(dim=-2, keepdim=True)
    apart = torch.cdist(x - middle, y - middle, compute_mode="use_mm_for_euclid_dist")
    return apart / longer.clamp(min=torch.finfo(x.dtype).tiny)
