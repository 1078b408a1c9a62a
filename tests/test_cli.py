"""The command line."""

import json
import sys

import pytest

from inlinevit import cli
from inlinevit.models.catalog import CATALOG


def test_models_prints_a_row_a_model(capsys):
    cli.main(["models"])
    output = capsys.readouterr().out
    for name, facts in CATALOG.items():
        (row,) = [line for line in output.splitlines() if f" {name} " in line]
        assert f"{facts.parameters / 1e6:.2f}" in row
        assert f"{facts.gmacs:.2f}" in row


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


def test_a_filter_without_matches_says_what_to_do():
    with pytest.raises(SystemExit, match=r"no model matches 'resnet\*'.*inlinevit models"):
        cli.main(["models", "--filter", "resnet*"])


def test_without_its_extra_the_command_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "jsonargparse", None)
    monkeypatch.delitem(sys.modules, "inlinevit.cli")
    with pytest.raises(SystemExit, match=r"pip install 'inlinevit\[cli\]'"):
        import inlinevit.cli  # noqa: F401
