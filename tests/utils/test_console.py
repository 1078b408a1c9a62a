"""Consoles write text in notebooks, too."""

import io
import re
import sys
from pathlib import Path

import pytest
from rich import console as rich_console

import inlinevit
from inlinevit.engine.progress import job_progress
from inlinevit.utils.console import new_console


class Stream(io.StringIO):
    """The stream of a notebook, which claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def test_plain_text_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream()
    monkeypatch.setattr(sys, "stderr", stream)
    assert new_console(stderr=True).is_terminal
    monkeypatch.setattr(rich_console, "_is_jupyter", lambda: True)
    console = new_console(stderr=True)
    assert not console.is_jupyter
    assert not console.is_terminal
    console.print("[bold]a line[/]")
    with job_progress("counting", 100, "steps") as advance:
        for _ in range(100):
            advance()
    assert stream.getvalue() == "a line\n"


def test_all_consoles_are_such() -> None:
    for file in Path(inlinevit.__file__).parent.rglob("*.py"):
        calls = re.findall(r"(?<!def )\bConsole\(", file.read_text())
        assert not calls or file.name == "console.py", file
