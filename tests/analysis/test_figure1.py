"""The paper's first figure: our numbers are the printed ones."""

import json

import pytest
import torch

from inlinevit.analysis import figure1 as module
from inlinevit.analysis.figure1 import ATTENTIONS, figure1, figure1_cases, plot_figure1
from tests import GOLDEN

PRINTED = json.loads((GOLDEN / "figure1.json").read_text())


def test_coordinates_are_those_of_the_data():
    assert [list(point) for point in module.KEYS] == PRINTED["K"]
    assert [list(point) for point in module.COLLINEAR_QUERIES] == PRINTED["Qa"]
    assert [list(point) for point in module.OTHER_QUERIES] == PRINTED["Qb"]
    assert [list(row) for row in module.A] == PRINTED["A"]
    assert list(module.B) == PRINTED["b"]


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("letter", ["a", "b"])
def test_scores_are_the_printed_ones(letter, attention):
    (case,) = [case for case in figure1_cases() if case.letter == letter]
    printed = torch.tensor(PRINTED["printed"][f"{attention}_{letter}"], dtype=torch.float64).expand(4, 4)
    torch.testing.assert_close(case.scores[attention].round(decimals=2), printed, rtol=0, atol=1e-9)


def test_queries_lie_on_one_ray_where_they_should():
    for case in figure1_cases():
        directions = case.mapped / case.mapped.norm(dim=1, keepdim=True)
        torch.testing.assert_close(directions, directions[:1].expand(4, 2), rtol=1e-3, atol=1e-3)


def test_figure_shows_every_number_and_which_rows_are_the_same():
    cases = figure1_cases()
    axes = plot_figure1(cases).axes
    assert len(axes) == 8
    texts = [text.get_text() for panel in axes for text in panel.texts]
    numbers = [float(text) for text in texts if text.startswith("0.")]
    expected = [score for case in cases for scores in case.scores.values() for score in scores.flatten().tolist()]
    assert numbers == [round(score, 2) for score in expected]
    verdicts = {panel.get_title(): panel.get_xlabel() for panel in axes if panel.get_title()}
    assert verdicts == {
        "softmax": "all rows different",
        "linear": "all rows the same",
        "InLine": "all rows different",
    }


@pytest.mark.integration
def test_command_writes_figure_and_numbers_and_prints_them(tmp_path, capsys):
    figure1(str(tmp_path / "new"))
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"figure1.png", "figure1.svg", "figure1.json"}
    content = json.loads((tmp_path / "new" / "figure1.json").read_text())
    assert content["b"]["queries"] == PRINTED["Qb"]
    assert round(content["b"]["scores"]["inline"][3][0], 2) == 0.45
    output = capsys.readouterr().out
    assert output.count("0.32 0.23 0.25 0.19") == 4
    assert "0.45 0.22 0.24 0.10" in output
