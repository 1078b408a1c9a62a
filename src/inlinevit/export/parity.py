"""How far an exported file is from the model in torch, at sizes that the recorded example did not have."""

from collections.abc import Sequence
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..engine.exported import ExportedMetadata, Parity
from ..engine.exported_model import ExportedModel
from ..utils.validation import require
from .program import LEAST

TOLERANCE = {"float32": 1e-4, "float16": 1e-2}
# Images at a time in the comparison, beside one.
BATCH = 3
RUNTIMES = {"onnx": "onnxruntime", "openvino": "openvino"}


def parity_shapes(channels: int, size: int, static: Sequence[int] | None) -> list[list[int]]:
    """Return the shapes to compare: three sizes, each with one image and with BATCH.

    The sizes are the training size, one that is higher and narrower and that no patch divides, and about the smallest.

    Args:
        channels: Of the images.
        size: The training size.
        static: The only shape that the file takes; None = it takes any.
    """
    if static is not None:
        return [list(static)]
    least = least_size(size)
    sizes = [(size, size), (size * 5 // 4 + 1, max(size * 3 // 4 + 2, least + 3)), (least, least + 7)]
    return [[batch, channels, height, width] for height, width in sizes for batch in (1, BATCH)]


def least_size(size: int) -> int:
    """Return the smallest height and width that a model of a training size takes once it is exported."""
    return min(size, LEAST)


def measure_parity(file: Path, model: nn.Module, metadata: ExportedMetadata, shapes: Sequence[Sequence[int]]) -> Parity:
    """Compare an exported file with the model in float32, and refuse it if they differ.

    Args:
        file: The file, which has metadata.
        model: The model, in evaluation mode.
        metadata: What is in the file.
        shapes: Shapes of inputs, those of the same size one after the other. The model computes the largest batch of
            a size; the others are the first images of it.

    Raises:
        ValueError: They differ by more than the tolerance.
    """
    exported = ExportedModel(file)
    tolerance = TOLERANCE[metadata.precision]
    worst = 0.0
    for size, group in groupby(shapes, key=lambda shape: tuple(shape[1:])):
        batches = [shape[0] for shape in group]
        images = torch.randn(max(batches), *size, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            expected = as_list(model(images))
        for batch in batches:
            found = as_list(exported(images[:batch]))
            pairs = zip(found, expected, strict=True)
            difference = max(relative_difference(one, whole[:batch]) for one, whole in pairs)
            require(
                difference <= tolerance,
                f"the exported model differs from the model by {difference:.1e} for inputs of "
                f"{'×'.join(map(str, (batch, *size)))}, more than {tolerance:.0e}, so that nothing is written: report "
                "it, with the name of the model",
            )
            worst = max(worst, difference)
    runtime = RUNTIMES[metadata.format]
    return Parity(f"{runtime} {version(runtime)}", worst, tolerance, [list(shape) for shape in shapes])


def relative_difference(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest value of the same image; NaN becomes infinity."""
    if found.shape != expected.shape:
        return float("inf")
    scale = expected.abs().flatten(1).amax(dim=1).clamp(min=1e-12)
    difference = ((found - expected).abs().flatten(1).amax(dim=1) / scale).max()
    return float(difference.nan_to_num(nan=float("inf")))


def as_list(outputs: Any) -> list[Tensor]:
    """Return the outputs of a model as a list."""
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)
