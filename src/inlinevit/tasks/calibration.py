"""Calibration: whether what has a probability of 70 % is right in 70 % of the cases."""

from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

if TYPE_CHECKING:
    from ..report import Section

CALIBRATION_BINS = 15


class CalibrationBins:
    """Counts predictions by their probability, in bins of equal width.

    Attributes:
        bins: (bins, 3) float64: predictions, the sum of their probabilities, and how many of them are right.
    """

    def __init__(self, bins: int = CALIBRATION_BINS) -> None:
        self.bins = torch.zeros(bins, 3, dtype=torch.float64)

    def update(self, probabilities: Tensor, right: Tensor) -> None:
        """Add predictions, of any equal shapes on the CPU; those without a finite probability are left out."""
        counted = probabilities.isfinite()
        chosen, outcome = probabilities[counted], right[counted].double()
        # The borders of bins are those of torchmetrics; 1 is in the last bin.
        borders = torch.linspace(0, 1, len(self.bins) + 1, dtype=chosen.dtype)
        places = (torch.bucketize(chosen, borders, right=True) - 1).clamp(max=len(self.bins) - 1)
        self.bins.index_add_(0, places, torch.stack([torch.ones_like(outcome), chosen.double(), outcome], dim=1))

    def gather(self) -> Tensor:
        """Return the bins over all processes; all of them call this."""
        return torch.stack(gather_object([self.bins])).sum(dim=0)


def expected_calibration_error(bins: Tensor) -> float:
    """Return the mean distance between probability and outcome in bins, weighted by their predictions, 0 … 1."""
    count, probability, right = bins.unbind(dim=1)
    return float((probability - right).abs().sum() / count.sum())


def calibration_details(bins: Tensor | None) -> dict[str, Any]:
    """Return the bins as a field of evaluation.json, if there are any."""
    if bins is None:
        return {}
    keys = ("predictions", "probability", "right")
    rows = [(int(count), probability / count, right / count) for count, probability, right in bins.tolist() if count]
    return {"calibration": [dict(zip(keys, row, strict=True)) for row in rows]}


def calibration_section(bins: Tensor, error: float, unit: str, outcome: str) -> "Section":
    """Return the section of evaluation.html.

    Args:
        bins: See CalibrationBins.
        error: The expected calibration error, 0 … 1.
        unit: What has a probability, such as "images".
        outcome: What the probability is of, such as "right".
    """
    # Imported here: matplotlib is slow to import, and training draws nothing.
    from ..report import Picture, Section, Text, reliability_figure

    count, probability, happened = bins.sum(dim=0).tolist()
    text = (
        f"Expected calibration error {100 * error:.2f} %. The mean probability is {100 * probability / count:.2f} %; "
        f"{100 * happened / count:.2f} % of the {unit} are {outcome}."
    )
    figure = Picture(
        reliability_figure(bins.tolist(), outcome),
        f"Reliability diagram with {len(bins)} bins; the expected calibration error is {100 * error:.2f} %.",
        "Where the curve is below the dashed line, the model is too sure; where it is above, not sure enough. Below: "
        f"how many {unit} have which probability.",
    )
    return Section("calibration", "Calibration", [Text(text), figure])
