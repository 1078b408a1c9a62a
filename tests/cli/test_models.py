"""`inlinevit models`."""

import json

import pytest

from inlinevit import cli
from inlinevit.cli.models import TABLES
from inlinevit.models.catalog import CATALOG


def test_models_prints_one_row_per_model(capsys):
    cli.main(["models"])
    output = capsys.readouterr().out
    for name, facts in CATALOG.items():
        (row,) = [line for line in output.splitlines() if f" {name} " in line]
        assert f" {facts.parameters:,} " in row
        assert f"{facts.gmacs:.2f}" in row


# One projection more or less would not show in millions.
DEIT_TINY = {
    "mala": "6,337,192",
    "rala": "6,337,192",
    "polaformer": "6,640,552",
    "agent": "6,015,640",
    "vit3": "6,149,416",
    "mhla": "5,793,832",
    "circulant": "6,140,200",
}


def test_parameters_are_those_of_the_publications_to_the_digit(capsys):
    cli.main(["models", "--filter", "*_deit_tiny"])
    lines = capsys.readouterr().out.splitlines()
    for name, count in DEIT_TINY.items():
        (row,) = [line for line in lines if f" {name}_deit_tiny " in line]
        assert f" {count} " in row


def test_models_as_json(capsys):
    cli.main(["models", "--json", "--filter", "inline_swin*"])
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == [name for name in CATALOG if name.startswith("inline_swin")]
    assert rows[0] == {
        "name": "inline_swin_tiny",
        "input_size": 224,
        "parameters": 29_223_544,
        "gmacs": 4.45,
        "top1": 82.4,
    }


def test_models_of_detectors_are_listed_on_demand(capsys):
    cli.main(["models", "--task", "detection", "--json", "--filter", "*pvt_tiny"])
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == ["inline_pvt_tiny", "pvt_tiny"]
    assert rows[0] == {
        "name": "inline_pvt_tiny",
        "parameters": 31_690_997,
        "gmacs": 210.2,
        "cascade_parameters": 65_599_681,
        "cascade_gmacs": 344.9,
    }
    cli.main(["models", "--task", "detection", "--markdown", "--filter", "inline_swin_tiny"])
    assert capsys.readouterr().out.splitlines()[-1] == "| inline_swin_tiny | 48.73 | 261.7 | 82.64 | 396.4 |"
    cli.main(["models", "--task", "detection"])
    output = capsys.readouterr().out
    for name in ("inline_cswin_base", "cswin_base", "swin_base_patch4_window7_224"):
        assert f" {name} " in output


def test_a_filter_without_matches_says_what_to_do(refused):
    code, line = refused("models", "--filter", "resnet*")
    assert code == 1
    assert "no model matches 'resnet*'" in line
    assert "inlinevit models" in line
    _, line = refused("models", "--task", "detection", "--filter", "inline_deit*")
    assert "`inlinevit models --task detection` lists all of them" in line


@pytest.mark.parametrize("task", TABLES)
def test_rows_have_a_cell_for_each_heading(task):
    table = TABLES[task]
    for name, facts in table.read().items():
        row = table.row(name, facts)
        assert row[0] == name
        assert len(row) == len(table.headings())
        assert all(row)
        # Every stored fact is shown.
        assert set(facts) == set(table.columns)
