import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from inlinevit.engine.lock import RUN_LOCK, RunLock
from tests.engine.running import Server, assert_same_run
from tests.engine.toy import make_trainer, settings

HOLD = """
import sys, time
from pathlib import Path
from inlinevit.engine.lock import RunLock
lock = RunLock(Path(sys.argv[1]))
lock.acquire()
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Any:
    """A process that holds the lock of a folder."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_a_lock_is_held_once(tmp_path: Path) -> None:
    with RunLock(tmp_path):
        owner = json.loads((tmp_path / RUN_LOCK).read_text())
        assert (owner["host"], owner["pid"]) == (socket.gethostname(), os.getpid())
        with pytest.raises(ValueError, match="in use by another run of this process"):
            RunLock(tmp_path).acquire()
    assert list(tmp_path.iterdir()) == []
    with RunLock(tmp_path):
        pass


def test_a_lock_names_its_owner(tmp_path: Path, holder: Any) -> None:
    where = rf"process {holder.pid} on {socket.gethostname()} \(since .*\)"
    with pytest.raises(ValueError, match=rf"in use by {where}: wait until it has ended, stop it, or choose another"):
        RunLock(tmp_path).acquire()


def test_a_stale_lock_is_reported_and_taken_over(tmp_path: Path, holder: Any) -> None:
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert (tmp_path / RUN_LOCK).exists()
    with pytest.warns(UserWarning, match=rf"is stale: process {holder.pid} on .* has ended without removing it"):
        RunLock(tmp_path).acquire()
    assert json.loads((tmp_path / RUN_LOCK).read_text())["pid"] == os.getpid()


@pytest.mark.parametrize("content", [b"\xff", b"[1]", b"{", b'{"pid": {"a": 1}}'])
def test_a_lock_with_any_content_is_taken_over(tmp_path: Path, content: bytes) -> None:
    (tmp_path / RUN_LOCK).write_bytes(content)
    with pytest.warns(UserWarning, match="is stale"), RunLock(tmp_path):
        pass


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("photo")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / RUN_LOCK).symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic links"):
        RunLock(tmp_path / "run").acquire()
    assert (tmp_path / "precious").read_text() == "photo"


@pytest.mark.integration
@pytest.mark.parametrize("resume", ["auto", "never"])
def test_a_second_run_is_refused(server: Server, reference: Path, tmp_path: Path, resume: str) -> None:
    output = tmp_path / "run"
    forked = server.start(settings(output, toy__pause=0.02))
    while not list((output / "checkpoints").glob("step-*")):
        time.sleep(0.01)
    with pytest.raises(ValueError, match=rf"{output} is in use by process {forked.ids[0]} on"):
        make_trainer(settings(output, run__resume=resume))
    assert forked.wait() == 0, forked.printed
    assert not output.with_name("run.1").exists()
    assert_same_run(output, reference)
    assert not (output / RUN_LOCK).exists()


@pytest.mark.integration
def test_two_runs_at_once(server: Server, reference: Path, tmp_path: Path) -> None:
    """They find nothing in the folder, and only one of them trains."""
    output = tmp_path / "run"
    first, second = make_trainer(settings(output)), make_trainer(settings(output))
    with first.folder.locked(), pytest.raises(ValueError, match="in use by another run of this process"):
        second.run()
    first.run()
    with pytest.raises(ValueError, match="was used by another run since this one was set up: start it again"):
        second.run()
    assert_same_run(output, reference)


@pytest.mark.integration
def test_a_killed_run_is_resumed_and_its_lock_reported(server: Server, reference: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    # Data workers outlive a killed run for a while: they do not hold its lock.
    assert server.start(settings(output, toy__kill="rename:3", toy__workers=2)).wait() == -signal.SIGKILL
    assert (output / RUN_LOCK).exists()
    forked = server.run(settings(output))
    assert "is stale: process" in forked.printed
    assert_same_run(output, reference)


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_the_lock_of_another_program_is_kept(tmp_path: Path, resume: str) -> None:
    (tmp_path / RUN_LOCK).write_text("mine")
    with pytest.raises(ValueError, match="is not the lock of a training run and would be replaced: choose another"):
        make_trainer(settings(tmp_path, run__resume=resume))
    assert (tmp_path / RUN_LOCK).read_text() == "mine"


@pytest.mark.parametrize("output", [".", "checkpoints/.."])
def test_a_folder_that_cannot_be_renamed_by_its_name(
    reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str
) -> None:
    shutil.copytree(reference, tmp_path / "run", symlinks=True)
    monkeypatch.chdir(tmp_path / "run")
    with pytest.raises(ValueError, match=r"cannot be renamed under this name, .*: write --run\.output /.*/run from"):
        make_trainer(settings(Path(output), run__resume="never"))
    assert os.listdir(tmp_path) == ["run"]
    assert not (tmp_path / "run" / RUN_LOCK).exists()


@pytest.mark.parametrize("name", ["photo.jpg", "config.yaml", "notes/a.txt"])
def test_a_folder_that_is_not_a_run_is_not_renamed(tmp_path: Path, name: str) -> None:
    output = tmp_path / "photos"
    (output / name).parent.mkdir(parents=True)
    (output / name).write_text("mine")
    with pytest.raises(
        ValueError, match=r"is not the folder of a training run, so --run.resume never does not rename it"
    ):
        make_trainer(settings(output, run__resume="never"))
    assert [path.name for path in tmp_path.iterdir()] == ["photos"]
    assert (output / name).read_text() == "mine"


@pytest.mark.parametrize("name", ["config.yaml", "model.safetensors", "metrics.jsonl", "results.json", "classes.json"])
def test_files_that_are_not_of_a_run_are_not_replaced(tmp_path: Path, name: str) -> None:
    output = tmp_path / "mine"
    output.mkdir()
    (output / name).write_text("mine")
    with pytest.raises(ValueError, match=rf"mine holds {name}, which is not of a training run and would be replaced"):
        make_trainer(settings(output))
    assert {path.name for path in output.iterdir()} == {name}


def test_a_folder_with_other_files_may_hold_a_run(tmp_path: Path) -> None:
    output = tmp_path / "run"
    output.mkdir()
    (output / "notes.txt").write_text("log")
    make_trainer(settings(output, schedule__epochs=1)).run()
    assert (output / "notes.txt").read_text() == "log"
