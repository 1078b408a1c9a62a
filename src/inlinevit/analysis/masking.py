"""Masking: accuracy when each query's neighbourhood, or as many random tokens, are hidden from it."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .hooks import run_masked
from .layer import Layer, MaskFunction


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
    masks: dict[tuple[int, Literal["near", "random"]], MaskFunction] = {}
    for side in sides:
        masks[side, "near"] = partial(hide_near, side=side)
        masks[side, "random"] = partial(hide_at_random, side=side, generator=torch.Generator().manual_seed(seed))
    scores, count = np.zeros((1 + len(masks), 2)), 0
    for images, labels in batches:
        count += len(labels)
        with torch.no_grad():
            outputs = [model(images), *(run_masked(model, images, mask) for mask in masks.values())]
        scores += [score(logits, labels) for logits in outputs]
    if count == 0:
        raise ValueError("there are no images to measure accuracy on: give at least one batch")
    (top1, loss), *others = (scores / count).tolist()
    masked = [MaskedAccuracy(*key, *values) for key, values in zip(masks, others, strict=True)]
    return Masking(count, top1, loss, masked)


def score(logits: Tensor, labels: Tensor) -> tuple[float, float]:
    """Return the sums of top-1 accuracy, in percent, and of cross entropy over a batch."""
    correct = int((logits.argmax(dim=1) == labels).sum())
    return 100 * correct, float(F.cross_entropy(logits.float(), labels, reduction="sum"))


def hide_near(layer: Layer, first: int, last: int, side: int) -> Tensor:
    """Hide each query's neighbourhood of side × side tokens, itself included. See MaskFunction."""
    return ~layer.near(first, last, side)


def hide_at_random(layer: Layer, first: int, last: int, side: int, generator: torch.Generator) -> Tensor:
    """Hide as many random tokens of the feature map as each query's neighbourhood has. See MaskFunction."""
    near = layer.near(first, last, side)
    # The tokens with the highest random numbers are hidden. In float64, two are hardly ever equal.
    numbers = torch.rand(near.shape, generator=generator, dtype=torch.float64).to(near.device)
    numbers = numbers.masked_fill(layer.places[:, None, :] < 0, -1.0)
    count = near.sum(dim=-1, keepdim=True)
    highest = numbers.topk(max(1, int(count.max())), dim=-1).values
    lowest_hidden = highest.gather(-1, (count - 1).clamp(min=0))
    return (numbers < lowest_hidden) | (count == 0)
