"""What is measured: modules with inputs and reproducible weights, and their numbers of operations."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass

import torch
from timm.layers import DropPath
from torch import Tensor, nn

from ..layers import InLineAttention, project_parameters
from ..models.catalog import count_macs
from ..models.catalog import measure as count_for_catalog

# The InLine path whose operations are counted, whichever path is taken.
REFERENCE_PATH = "covariance"
SEED = 0

# From a module and its input to the floating-point operations of a forward call.
Count = Callable[[nn.Module, Tensor], float]


def count_flops(module: nn.Module, x: Tensor) -> float:
    """Return the floating-point operations of a forward call; models are counted as in the catalog."""
    module = deepcopy(module).to("meta").eval()
    if x.dim() == 4:
        batch, in_chans, height, width = x.shape
        return 2e9 * batch * count_for_catalog(module, (height, width), in_chans)[1]
    return 2 * count_macs(lambda: module(torch.empty_like(x, device="meta")))


def nominal_flops(module: nn.Module, x: Tensor, count: Count = count_flops) -> float:
    """Return the floating-point operations of a forward call in which InLine attention takes REFERENCE_PATH."""
    module = deepcopy(module)
    for layer in module.modules():
        if isinstance(layer, InLineAttention):
            layer.path = REFERENCE_PATH
    return count(module, x)


class LeftOut(Exception):
    """A candidate cannot be measured; the message is the reason."""


@dataclass(frozen=True)
class Candidate:
    """A module to measure.

    Attributes:
        name: The same in all comparisons.
        size: Side length or height of its images, or its number of tokens.
        make: From a device to the module and its input.
        output_group: Candidates of one group have the same weights and must give the same outputs; "" = its name.
        is_optional: Whether it is left out, with a note, if it refuses its input by a ValueError.
        width: Width of its images if they are not square.
        count: Counts its floating-point operations.
        modes: The modes that it is measured in; None = those of the benchmark.
    """

    name: str
    size: int
    make: Callable[[torch.device], tuple[nn.Module, Tensor]]
    output_group: str = ""
    is_optional: bool = False
    width: int | None = None
    count: Count = count_flops
    modes: Sequence[str] | None = None


@dataclass(frozen=True)
class Comparison:
    """Candidates that are timed in alternation.

    Attributes:
        title: What they have in common.
        batch: Images per call.
        candidates: The others are compared with the first.
    """

    title: str
    batch: int
    candidates: Sequence[Candidate]


def disable_dropout(module: nn.Module) -> nn.Module:
    """Turn off dropout and stochastic depth in place, and return the module."""
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        elif isinstance(part, DropPath):
            part.drop_prob = 0.0
    return module


def draw_weights(module: nn.Module) -> nn.Module:
    """Draw weights from SEED in place, and return the module.

    With the usual initialisation, queries and keys are so small that errors of the attention hardly change the output.
    These weights are large enough to show them.
    """
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.device)
            if parameter.dim() > 1:
                parameter.copy_(2 * noise / parameter[0].numel() ** 0.5)
            else:
                parameter.copy_(0.2 * noise + (0 if name.endswith("bias") else 1))
    # Some have a range that training keeps them in.
    project_parameters(module)
    return module


def draw_input(*shape: int, device: torch.device) -> Tensor:
    """Draw a tensor of normal values from SEED."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(SEED)).to(device)
