"""From exceptions to sentences and exit codes."""

import errno
import subprocess
import sys
from unittest.mock import Mock

import pytest

from inlinevit import cli
from inlinevit.cli import models

FULL_DISK = OSError(errno.ENOSPC, "No space left on device")
NO_FILE = FileNotFoundError(errno.ENOENT, "No such file or directory", "/nowhere/file")
NO_PEER = RuntimeError("[pair.cc:561] Connection closed by peer [127.0.0.1]:7053")
NO_ANSWER = RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation")
NO_PACKAGE = ModuleNotFoundError("No module named 'pycocotools'", name="pycocotools")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (FULL_DISK, "free some and run the same command again"),
        (NO_FILE, "error: /nowhere/file cannot be used (No such file or directory): check the path"),
        (NO_PEER, "another process has ended before this one: see its message"),
        (NO_ANSWER, "another process has not answered within the time-out: look for it on its machine"),
        (NO_PACKAGE, "pip install 'inlinevit[detection]'"),
    ],
)
def test_an_error_is_reported_in_a_sentence(error, message, monkeypatch, refused):
    monkeypatch.setattr(models, "run", Mock(side_effect=error))
    code, line = refused("models")
    assert code == 1
    assert message in line


def test_a_reader_that_has_seen_enough_is_no_error():
    command = f"{sys.executable} -m inlinevit models --json | head -n 1"
    ended = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=120)
    assert ended.stdout == "[\n"
    assert ended.stderr == ""


def test_a_bug_is_no_mistake_of_the_user(monkeypatch):
    monkeypatch.setattr(models, "run", Mock(side_effect=KeyError("a bug")))
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
