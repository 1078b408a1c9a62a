"""Masking: accuracy when each query's neighbourhood, or as many random tokens, are hidden from it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .hooks import run_masked
from .layer import Layer, See


@dataclass
class MaskedAccuracy:
    """Accuracy with tokens hidden in every layer.

    Attributes:
        side: Side length of the neighbourhood.
        hidden: "near" = each query's neighbourhood; "random" = as many random tokens of the feature map.
        top1: Top-1 accuracy in percent.
        loss: Mean cross entropy.
    """

    side: int
    hidden: Literal["near", "random"]
    top1: float
    loss: float


@dataclass
class Masking:
    """Accuracy with more and more tokens hidden.

    Attributes:
        images: Number of images.
        top1: Top-1 accuracy with nothing hidden, in percent.
        loss: Mean cross entropy with nothing hidden.
        masked: The same with tokens hidden.
    """

    images: int
    top1: float
    loss: float
    masked: list[MaskedAccuracy]


@dataclass
class Score:
    """Number of correct predictions, and the sum of losses."""

    correct: int = 0
    loss: float = 0.0

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Add a batch."""
        self.correct += int((logits.argmax(dim=1) == labels).sum())
        self.loss += float(F.cross_entropy(logits.float(), labels, reduction="sum"))


def measure_masking(
    model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], *, sides: tuple[int, ...] = (3, 5, 7), seed: int = 0
) -> Masking:
    """Evaluate a model with tokens hidden from its queries in every layer.

    Class tokens attend to all tokens, and are visible to all.

    Args:
        model: See watch.
        batches: Images (batch, channels, H, W) and labels (batch), iterated once.
        sides: Side lengths of the neighbourhoods, odd.
        seed: Seed of the random tokens.
    """
    ways: dict[tuple[int, Literal["near", "random"]], tuple[See, Score]] = {}
    for side in sides:
        ways[side, "near"] = hide_near(side), Score()
        ways[side, "random"] = hide_at_random(side, torch.Generator().manual_seed(seed)), Score()
    whole, count = Score(), 0
    for images, labels in batches:
        count += len(labels)
        with torch.no_grad():
            whole.add(model(images), labels)
        for see, score in ways.values():
            score.add(run_masked(model, images, see), labels)
    if count == 0:
        raise ValueError("there are no images to measure accuracy on: give at least one batch")
    masked = [
        MaskedAccuracy(side, hidden, 100 * score.correct / count, score.loss / count)
        for (side, hidden), (_, score) in ways.items()
    ]
    return Masking(count, 100 * whole.correct / count, whole.loss / count, masked)


def hide_near(side: int) -> See:
    """Hide each query's neighbourhood of side × side tokens, itself included."""

    def see(layer: Layer, first: int, last: int) -> Tensor:
        return ~layer.near(first, last, side)

    return see


def hide_at_random(side: int, generator: torch.Generator) -> See:
    """Hide as many random tokens of the feature map as each query's neighbourhood has."""

    def see(layer: Layer, first: int, last: int) -> Tensor:
        near = layer.near(first, last, side)
        # The tokens with the highest random numbers are hidden. In float64, two are hardly ever equal.
        numbers = torch.rand(near.shape, generator=generator, dtype=torch.float64).to(near.device)
        numbers = numbers.masked_fill(layer.places[:, None, :] < 0, -1.0)
        count = near.sum(dim=-1, keepdim=True)
        lowest_hidden = numbers.sort(dim=-1, descending=True).values.gather(-1, (count - 1).clamp(min=0))
        return (numbers < lowest_hidden) | (count == 0)

    return see
