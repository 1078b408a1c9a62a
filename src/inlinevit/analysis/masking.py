"""Masking: what accuracy is left when queries may not see their neighbourhood, or as many tokens at random."""

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
    """How well a model does with something hidden, in every layer.

    Attributes:
        side: Side of the neighbourhood that is hidden, or whose number of tokens is.
        hidden: "near" = each query's neighbourhood; "random" = as many tokens of the map, drawn for each query.
        top1: Share of images told right, in percent.
        loss: Mean cross entropy.
    """

    side: int
    hidden: Literal["near", "random"]
    top1: float
    loss: float


@dataclass
class Masking:
    """How well a model does with more and more hidden.

    Attributes:
        images: How many images were looked at.
        top1: Share of images told right with nothing hidden, in percent.
        loss: Mean cross entropy with nothing hidden.
        masked: The same with something hidden.
    """

    images: int
    top1: float
    loss: float
    masked: list[MaskedAccuracy]


@dataclass
class Score:
    """Images told right, and the sum of their losses."""

    right: int = 0
    loss: float = 0.0

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Count the answers to a batch."""
        self.right += int((logits.argmax(dim=1) == labels).sum())
        self.loss += float(F.cross_entropy(logits.float(), labels, reduction="sum"))


def measure_masking(
    model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], *, sides: tuple[int, ...] = (3, 5, 7), seed: int = 0
) -> Masking:
    """Evaluate a model with tokens hidden from its queries, in every layer.

    Tokens before the map (class tokens) see everything, and are seen by all.

    Args:
        model: See watch.
        batches: Images (batch, channels, H, W) and labels (batch). Gone through once.
        sides: Sides of the neighbourhoods, odd.
        seed: Decides which tokens are drawn at random.
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
        raise ValueError("there are no images to measure accuracy on")
    masked = [
        MaskedAccuracy(side, hidden, 100 * score.right / count, score.loss / count)
        for (side, hidden), (_, score) in ways.items()
    ]
    return Masking(count, 100 * whole.right / count, whole.loss / count, masked)


def hide_near(side: int) -> See:
    """Hide each query's neighbourhood of side × side tokens, itself included."""

    def see(layer: Layer, first: int, last: int) -> Tensor:
        return ~layer.near(first, last, side)

    return see


def hide_at_random(side: int, generator: torch.Generator) -> See:
    """Hide as many tokens of the map as each query's neighbourhood has, drawn for each query anew."""

    def see(layer: Layer, first: int, last: int) -> Tensor:
        near = layer.near(first, last, side)
        # The tokens with the highest lots are hidden. In float64, two lots are hardly ever the same.
        lots = torch.rand(near.shape, generator=generator, dtype=torch.float64).to(near.device)
        lots = lots.masked_fill(layer.places[:, None, :] < 0, -1.0)
        count = near.sum(dim=-1, keepdim=True)
        lowest_hidden = lots.sort(dim=-1, descending=True).values.gather(-1, (count - 1).clamp(min=0))
        return (lots < lowest_hidden) | (count == 0)

    return see
