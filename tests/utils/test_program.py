"""Messages name a command that the user's shell finds."""

import sys
from pathlib import Path

import pytest

from inlinevit.utils.program import program_name


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed program, which started this process."""
    path = tmp_path / "my project" / ".venv" / "bin" / "inlinevit"
    path.parent.mkdir(parents=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    monkeypatch.setattr(sys, "argv", [str(path), "demo"])
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.chdir(tmp_path)
    return path


def test_a_program_in_the_path_is_called_by_its_name(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"/nowhere:{program.parent}")
    assert program_name() == "inlinevit"


def test_others_are_called_by_their_path(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert program_name() == "'my project/.venv/bin/inlinevit'"
    monkeypatch.chdir(program.parents[2])
    assert program_name() == ".venv/bin/inlinevit"
    monkeypatch.setattr(sys, "argv", [".venv/bin/inlinevit"])
    assert program_name() == ".venv/bin/inlinevit"
    (elsewhere := program.parents[3] / "elsewhere").mkdir()
    monkeypatch.setattr(sys, "argv", [str(program)])
    monkeypatch.chdir(elsewhere)
    assert program_name() == f"'{program}'"


def test_another_one_of_the_same_name_in_the_path(
    program: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = tmp_path / "inlinevit"
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert program_name() == "'my project/.venv/bin/inlinevit'"


def test_modules_and_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/inlinevit/__main__.py"])
    assert program_name() == "inlinevit"
