"""Consoles write text in notebooks, too."""

import re
from pathlib import Path

import pytest
from rich import console as rich_console

import inlinevit
from inlinevit.utils.console import new_console


def test_text_in_a_notebook(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(rich_console, "_is_jupyter", lambda: True)
    assert rich_console.Console().is_jupyter
    console = new_console(stderr=True)
    assert not console.is_jupyter
    console.print("a line")
    assert capsys.readouterr().err == "a line\n"


def test_all_consoles_do() -> None:
    calls = []
    for file in Path(inlinevit.__file__).parent.rglob("*.py"):
        calls += [(file.name, call) for call in re.findall(r"\bConsole\(.*", file.read_text())]
    assert len(calls) >= 3
    assert [(name, call) for name, call in calls if "force_jupyter=False" not in call] == []
