"""What all sections share: the analysis of a model, and formatting."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from math import isfinite
from typing import Any

from torch import Tensor

from ...report import Table
from ..confusion import Confusion
from ..locality import LayerLocality
from ..map_plots import View
from ..masking import Masking

# Significant digits of weights in JSON, as many as float32 has.
DIGITS = 7
MISSING = "–"


@dataclass
class Analysis:
    """The analysis of a model.

    Attributes:
        label: Name of the model in the report.
        attention: Name of its attention; several names are joined by +.
        confusion: See measure_confusion.
        locality: See measure_locality; empty if no layer's keys are the tokens of the feature map.
        views: Attention maps of some queries, which are the same for all models.
        masking: See measure_masking; None if it could not be measured.
        no_masking: The reason why it could not.
    """

    label: str
    attention: str
    confusion: Confusion
    locality: list[LayerLocality]
    views: list[View]
    masking: Masking | None = None
    no_masking: str = ""


def layers_table(columns: Mapping[str, Sequence[str]], caption: str) -> Table:
    """Return one row per layer and one column per model; models may have different numbers of layers."""
    depth = max(len(cells) for cells in columns.values())
    rows = [
        (str(layer + 1), *(cells[layer] if layer < len(cells) else MISSING for cells in columns.values()))
        for layer in range(depth)
    ]
    return Table(("layer", *columns), rows, caption)


def percent(share: float) -> str:
    """Format a fraction in percent, without the sign; small fractions have a significant digit."""
    if share == 0:
        return "0"
    return f"{100 * share:.1f}" if share >= 0.001 else f"{100 * share:.1g}"


def join_words(items: Iterable[str]) -> str:
    """Return "one, two and three"; there is at least one item."""
    *first, last = items
    return f"{', '.join(first)} and {last}" if first else last


def to_json(value: Any) -> Any:
    """Return dataclasses, tensors and numbers as JSON values; NaN and Inf become None."""
    if is_dataclass(value) and not isinstance(value, type):
        return to_json(asdict(value))
    if isinstance(value, Tensor):
        return to_json(value.tolist())
    if isinstance(value, dict):
        return {name: to_json(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(part) for part in value]
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if isfinite(value) else None
    return value
