"""What is written when a loss, a gradient or a weight is NaN or infinite."""

import io
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from accelerate.utils import recursively_apply
from torch import Tensor

from ..utils.atomic import atomic_write_bytes, atomic_write_json


def write_nan_dump(folder: Path, facts: dict[str, Any], weights: dict[str, Tensor], batch: Any) -> str:
    """Write report.json with what is known about the step, model.safetensors and batch.pt.

    Returns:
        A description of the weights in a few words.
    """
    bad = [name for name, value in weights.items() if not value.isfinite().all()]
    largest = max(float(value.abs().max()) for value in weights.values() if value.numel())
    report = {
        **facts,
        "largest_weight": largest,
        "weights_not_finite": bad,
        "batch": recursively_apply(describe, batch),
    }
    atomic_write_json(folder / "report.json", report)
    atomic_write_bytes(folder / "model.safetensors", safetensors.torch.save(weights))
    stream = io.BytesIO()
    torch.save(batch, stream)
    atomic_write_bytes(folder / "batch.pt", stream.getvalue())
    return f"largest weight {largest:.3g}, {len(bad)} of {len(weights)} weights not finite"


def describe(value: Tensor) -> dict[str, Any]:
    """Shape and range of a tensor."""
    numbers = value.detach().float()
    ends = {"min": float(numbers.min()), "max": float(numbers.max())} if value.numel() else {}
    return {"shape": list(value.shape), "finite": bool(numbers.isfinite().all()), **ends}
