"""Calibration: bins, the expected calibration error, and the section of the page."""

import pytest
import torch
from torchmetrics.functional.classification import binary_calibration_error

from inlinevit.tasks.calibration import (
    CalibrationBins,
    calibration_details,
    calibration_section,
    expected_calibration_error,
)


def test_error_by_hand() -> None:
    bins = CalibrationBins(bins=2)
    # Below 0.5: 0.2 and 0.4, one of them right. Above: 0.6, 0.9 and 1, two of them right.
    bins.update(torch.tensor([0.2, 0.9, 1.0]), torch.tensor([True, True, False]))
    bins.update(torch.tensor([[0.4, 0.6]]), torch.tensor([[False, True]]))
    found = bins.gather()
    assert found.tolist() == [[2, pytest.approx(0.6), 1], [3, pytest.approx(2.5), 2]]
    # |0.3 - 1/2| · 2/5 + |2.5/3 - 2/3| · 3/5
    assert expected_calibration_error(found) == pytest.approx(0.2 * 0.4 + 0.5 / 3 * 0.6)
    assert calibration_details(found)["calibration"] == [
        {"predictions": 2, "probability": pytest.approx(0.3), "right": 0.5},
        {"predictions": 3, "probability": pytest.approx(2.5 / 3), "right": pytest.approx(2 / 3)},
    ]
    assert calibration_details(None) == {}


def test_error_is_that_of_torchmetrics() -> None:
    generator = torch.Generator().manual_seed(0)
    probabilities = torch.rand(500, generator=generator)
    right = torch.rand(500, generator=generator) < probabilities**2
    bins = CalibrationBins()
    for part in range(0, 500, 77):
        bins.update(probabilities[part : part + 77], right[part : part + 77])
    theirs = binary_calibration_error(probabilities, right.long(), n_bins=15)
    assert expected_calibration_error(bins.gather()) == pytest.approx(float(theirs), abs=1e-6)


def test_probabilities_that_are_not_finite_are_left_out() -> None:
    bins = CalibrationBins()
    bins.update(torch.tensor([float("nan"), 0.5]), torch.tensor([True, True]))
    assert bins.gather()[:, 0].sum() == 1


def test_section() -> None:
    bins = CalibrationBins()
    bins.update(torch.tensor([0.7, 0.7, 0.2]), torch.tensor([True, False, False]))
    section = calibration_section(bins.gather(), 0.2, "images", "right")
    text, picture = (block.html() for block in section.blocks)
    assert "calibration error 20.00 %" in text
    assert "mean probability is 53.33 %; 33.33 % of the images are right" in text
    assert "data:image/svg+xml;base64," in picture
