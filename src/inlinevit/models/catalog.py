"""Size, cost and published accuracy of each model."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import timm
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ..utils.files import read_json


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a model with 1000 classes, at its own input size.

    Attributes:
        input_size: Side of the images.
        parameters: Number of parameters.
        gmacs: Multiply-adds for one image, in 10⁹, as measure() counts them.
        top1: Published ImageNet-1K accuracy in percent, if there is one.
    """

    input_size: int
    parameters: int
    gmacs: float
    top1: float | None


# Stored for `inlinevit models`; tools/model_tables.py measures and writes it. Accuracies are those of the papers.
FILE = Path(__file__).with_name("catalog.json")
CATALOG = {name: ModelFacts(**facts) for name, facts in read_json(FILE).items()}


def measure(model: nn.Module, size: tuple[int, int], in_chans: int = 3) -> tuple[int, float]:
    """Count a model's parameters and its multiply-adds for one image, in 10⁹.

    Args:
        model: The model; on the meta device this takes no memory.
        size: (H, W) of the image.
        in_chans: Its channels.
    """
    image = torch.zeros(1, in_chans, *size, device=next(model.parameters()).device)
    return count_parameters(model), count_macs(lambda: model.eval()(image)) / 1e9


def count_parameters(model: nn.Module) -> int:
    """Return the number of parameters of a model."""
    return sum(parameter.numel() for parameter in model.parameters())


def count_macs(call: Callable[[], object]) -> float:
    """Count the multiply-adds of a call without gradients.

    Matrix products, convolutions and fused attention count. The nine scaled shifts of the local residual, the products
    of hydra attention and the Fourier transforms of circulant attention do not count; they would add less than 1 %.
    """
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        call()
    return counter.get_total_flops() / 2


def measure_by_name(name: str) -> tuple[int, float]:
    """Return measure() of a model in the catalog, at its own input size."""
    size = CATALOG[name].input_size
    return measure(timm.create_model(name, device="meta"), (size, size))


def measure_facts(name: str) -> ModelFacts:
    """Return what CATALOG should hold; the published accuracy is taken from it."""
    parameters, gmacs = measure_by_name(name)
    return replace(CATALOG[name], parameters=parameters, gmacs=round(gmacs, 2))
