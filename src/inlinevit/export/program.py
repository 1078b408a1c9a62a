"""Models as graphs of torch.export, for any batch size, height and width."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any, cast

import torch
from timm.layers import DropPath
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from ..engine.exported import MOST_PIXELS
from ..layers import ResamplePosEmbed
from ..layers.embed import resample_by_products
from ..ops._common import is_symbolic
from ..ops.pooling import bin_matrix
from ..utils.validation import require

# The shape of the example that is recorded: nothing depends on it, and no two of its lengths are equal.
EXAMPLE_BATCH, EXAMPLE_SIZE = 2, (235, 299)
# Maps at stride 32 have at least two rows and columns then, which spares conditions on maps of a single one.
LEAST = 33
FIX = "fix its input with --static 1,CHANNELS,HEIGHT,WIDTH"


class RecordingError(Exception):
    """A module cannot be recorded by torch.export."""


class ResampleByProducts(ResamplePosEmbed):
    """ResamplePosEmbed as matrix products, also for sizes that are known when the graph is recorded."""

    def forward(self, pos_embed: Tensor, feat_size: tuple[int, int]) -> Tensor:
        """See ResamplePosEmbed.forward."""
        if not is_symbolic(*feat_size) and feat_size == self.grid:
            return pos_embed
        return resample_by_products(pos_embed, self.grid, feat_size, self.num_prefix_tokens, self.interpolation)


class AdaptivePoolByProducts(nn.Module):
    """nn.AdaptiveAvgPool2d as a matrix product for each axis: ONNX has no such operator for maps of any size.

    Args:
        output_size: (rows, columns) of the result.
    """

    def __init__(self, output_size: tuple[int, int]) -> None:
        super().__init__()
        self.output_size = output_size

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, channels, H, W) to (batch, channels, rows, columns)."""
        rows, columns = (
            bin_matrix(length, count, x) for length, count in zip(x.shape[-2:], self.output_size, strict=True)
        )
        return rows @ x @ columns.transpose(0, 1)


def exportable(model: nn.Module) -> nn.Module:
    """Return a copy of a model, in evaluation mode, without modules that runtimes have no operators for."""
    with torch.inference_mode(False):
        model = deepcopy(model).eval().requires_grad_(False)
    for module in list(model.modules()):
        if type(module) is ResamplePosEmbed:
            module.__class__ = ResampleByProducts
        for name, child in module.named_children():
            if type(child) in (DropPath, nn.Dropout):
                module.add_module(name, nn.Identity().eval())
            elif type(child) is nn.AdaptiveAvgPool2d:
                size = child.output_size if isinstance(child.output_size, tuple) else (child.output_size,) * 2
                if None not in size and size != (1, 1):
                    module.add_module(name, AdaptivePoolByProducts(cast(tuple[int, int], size)))
    return model


def export_program(model: nn.Module, channels: int, static: Sequence[int] | None = None) -> ExportedProgram:
    """Record a model as a graph of torch.export.

    Args:
        model: In evaluation mode, from images (batch, channels, height, width) to a tensor or several.
        channels: Of the images.
        static: The shape of the input; None = any batch size, height and width.

    Raises:
        ValueError: It cannot be recorded for all sizes.
    """
    shape = static or (EXAMPLE_BATCH, channels, *EXAMPLE_SIZE)
    sides = (Dim.AUTO(min=LEAST, max=MOST_PIXELS), Dim.AUTO(min=LEAST, max=MOST_PIXELS))
    dynamic: Any = None if static else ({0: Dim.AUTO(min=1, max=MOST_PIXELS), 2: sides[0], 3: sides[1]},)
    try:
        program = record(exportable(model), torch.zeros(*shape), dynamic)
    except RecordingError as error:
        remedy = FIX if static is None else "choose another shape, or another model"
        raise ValueError(f"the model cannot be recorded by torch.export ({error}): {remedy}") from error
    is_dynamic = static is not None or len(symbols_of(program, (0, 2, 3))) == 3
    require(is_dynamic, f"the model cannot be recorded for all sizes: {FIX}")
    return program


def record(module: nn.Module, example: Tensor, dynamic: Any) -> ExportedProgram:
    """Call torch.export; RecordingError with the cause, in a line, where that is not possible."""
    try:
        with torch.no_grad():
            return torch.export.export(module, (example,), dynamic_shapes=dynamic, strict=False)
    # Code of other packages raises whatever it likes where it depends on the size.
    except (AssertionError, RuntimeError, TypeError, ValueError, torch._dynamo.exc.TorchDynamoException) as error:
        cause = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        raise RecordingError(cause[:200]) from error


def symbols_of(program: ExportedProgram, places: Sequence[int]) -> set[str]:
    """Return the symbols of dimensions of the input of a graph that may have any length, independently of others."""
    (images,) = (node for node in program.graph.nodes if node.name in program.graph_signature.user_inputs)
    lengths = [images.meta["val"].shape[place] for place in places]
    return {
        str(length.node.expr) for length in lengths if isinstance(length, torch.SymInt) and length.node.expr.is_symbol
    }
