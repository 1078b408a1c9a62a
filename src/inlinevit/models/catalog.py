"""What is known of each model: its size, its cost and its published accuracy."""

from collections.abc import Callable
from dataclasses import dataclass

import timm
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a model with 1000 classes, at its own input size.

    Attributes:
        input_size: Side of the images.
        parameters: Number of parameters.
        gmacs: Multiply-adds for an image, in 10⁹, as measure() counts them.
        top1: Published ImageNet-1K accuracy in percent, if there is one.
    """

    input_size: int
    parameters: int
    gmacs: float
    top1: float | None


# Measured by measure(); a test measures them again. Accuracies are those of the papers.
CATALOG = {
    "inline_deit_tiny": ModelFacts(224, 6_477_736, 1.10, 74.5),
    "inline_deit_small": ModelFacts(288, 16_734_760, 4.95, 80.2),
    "inline_deit_base": ModelFacts(448, 23_797_096, 17.13, 82.3),
    "inline_pvt_tiny": ModelFacts(224, 12_032_232, 1.97, 78.2),
    "inline_pvt_small": ModelFacts(224, 21_556_136, 3.90, 82.0),
    "inline_pvt_medium": ModelFacts(224, 37_618_856, 6.84, 83.2),
    "inline_pvt_large": ModelFacts(224, 51_154_280, 10.10, 83.6),
    "inline_swin_tiny": ModelFacts(224, 29_223_544, 4.45, 82.4),
    "inline_swin_small": ModelFacts(224, 49_793_296, 8.71, 83.6),
    "inline_swin_base": ModelFacts(224, 88_350_120, 15.38, 84.1),
    "inline_swin_base_384": ModelFacts(384, 88_465_320, 46.16, None),
    "inline_cswin_tiny": ModelFacts(224, 20_604_520, 4.30, 83.2),
    "inline_cswin_small": ModelFacts(224, 33_032_872, 6.75, 83.8),
    "inline_cswin_base": ModelFacts(224, 73_413_640, 14.85, 84.5),
    "inline_cswin_base_384": ModelFacts(384, 73_413_640, 46.12, 85.7),
    "softmax_deit_tiny": ModelFacts(224, 5_717_416, 1.25, 72.2),
    "linear_deit_tiny": ModelFacts(224, 5_717_416, 1.13, 69.8),
    "hydra_deit_tiny": ModelFacts(224, 5_717_416, 1.07, 68.3),
    "efficient_deit_tiny": ModelFacts(224, 5_717_416, 1.13, 70.2),
    "angular_deit_tiny": ModelFacts(224, 5_717_740, 1.14, 70.8),
    "enhanced_deit_tiny": ModelFacts(224, 5_809_576, 1.15, 72.9),
    "focused_deit_tiny": ModelFacts(224, 6_193_576, 1.14, 74.1),
    "pvt_tiny": ModelFacts(224, 13_229_288, 1.93, 75.1),
    "pvt_small": ModelFacts(224, 24_485_864, 3.82, 79.8),
    "pvt_medium": ModelFacts(224, 44_208_104, 6.66, None),
    "pvt_large": ModelFacts(224, 61_369_320, 9.81, None),
    "cswin_tiny": ModelFacts(224, 22_320_552, 4.32, 82.7),
    "cswin_small": ModelFacts(224, 34_643_304, 6.80, 83.6),
    "cswin_base": ModelFacts(224, 77_382_184, 14.96, 84.2),
}


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
    """Numbers that a model has learned, or could."""
    return sum(parameter.numel() for parameter in model.parameters())


def count_macs(call: Callable[[], object]) -> float:
    """Count the multiply-adds of a call without gradients.

    Matrix products, convolutions and fused attention count. The nine scaled shifts of the local residual and the
    products of hydra attention are elementwise, and do not; they would add less than 1 %.
    """
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        call()
    return counter.get_total_flops() / 2


def measure_by_name(name: str) -> tuple[int, float]:
    """measure() of a model in the catalog, at its own input size."""
    size = CATALOG[name].input_size
    return measure(timm.create_model(name, device="meta"), (size, size))


HEADINGS = ("model", "input", "params M", "GMACs", "top-1 %")


def cells(name: str) -> tuple[str, ...]:
    """A model's row in a table with HEADINGS."""
    facts = CATALOG[name]
    top1 = "–" if facts.top1 is None else f"{facts.top1:.1f}"
    return name, f"{facts.input_size}²", f"{facts.parameters / 1e6:.2f}", f"{facts.gmacs:.2f}", top1
