"""From exceptions to sentences and exit codes."""

import errno
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from inlinevit import cli
from inlinevit.cli import models


def test_a_full_disk_is_told_with_what_to_do(monkeypatch, refused):
    def run(settings):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(models, "COMMAND", replace(models.COMMAND, run=run))
    code, line = refused("models")
    assert code == 1
    assert "free some and run the same command again" in line


def test_a_process_whose_neighbour_has_gone_says_so(monkeypatch, refused):
    def run(settings):
        raise RuntimeError("[pair.cc:561] Connection closed by peer [127.0.0.1]:7053")

    monkeypatch.setattr(models, "COMMAND", replace(models.COMMAND, run=run))
    code, line = refused("models")
    assert code == 1
    assert "another process has ended before this one: see its message" in line


def test_an_error_of_the_system_is_told_in_a_sentence(monkeypatch, refused):
    def run(settings):
        Path("/proc/nowhere/file").write_text("")

    monkeypatch.setattr(models, "COMMAND", replace(models.COMMAND, run=run))
    code, line = refused("models")
    assert (code, line) == (1, "error: /proc/nowhere/file cannot be used (No such file or directory): check the path")


def test_a_reader_that_has_seen_enough_is_no_error():
    command = f"{sys.executable} -m inlinevit models --json | head -n 1"
    ended = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=120)
    assert ended.stdout == "[\n"
    assert ended.stderr == ""


def test_a_bug_is_no_mistake_of_the_user(monkeypatch):
    def run(settings):
        raise KeyError("a bug")

    monkeypatch.setattr(models, "COMMAND", replace(models.COMMAND, run=run))
    with pytest.raises(KeyError):
        cli.main(["models"])


def test_a_traceback_is_shown_on_demand(monkeypatch):
    monkeypatch.setenv("INLINEVIT_TRACEBACK", "1")
    with pytest.raises(ValueError, match="no model matches"):
        cli.main(["models", "--filter", "resnet*"])


def test_without_its_extra_the_command_line_says_what_to_install():
    code = "import sys; sys.modules['jsonargparse'] = None; from inlinevit.cli import main; main(['models'])"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    assert ended.stderr.rstrip().endswith("pip install 'inlinevit[cli]'")


def test_a_missing_package_is_named_with_its_extra(monkeypatch, capsys):
    def fail(settings):
        raise ModuleNotFoundError("No module named 'pycocotools'", name="pycocotools")

    monkeypatch.setattr(models, "COMMAND", replace(models.COMMAND, run=fail))
    with pytest.raises(SystemExit):
        cli.main(["models"])
    assert "pip install 'inlinevit[detection]'" in capsys.readouterr().err
