"""An interrupted run continues after its last complete pass, with the same result."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import inlinevit
from inlinevit.streaming import TensorSink
from inlinevit.streaming.checkpoint import Checkpoint
from tests.streaming.models import make_image, make_model
from tests.streaming.test_stream import CountedSource


class Interrupted(Exception):
    """Raised in the middle of a run."""


def interrupt_at(fraction):
    def report(done):
        if done > fraction:
            raise Interrupted

    return report


@pytest.mark.parametrize("kind", ["deit", "swin"])
def test_an_interrupted_run_continues_with_the_same_result(kind, tmp_path):
    model, image, state = make_model(kind), make_image(150, 203), tmp_path / "state"
    names = ["stages.0.blocks.0", "stages.0", "norm"]
    plain = {name: TensorSink() for name in names}
    expected = inlinevit.stream(model, image, chunk_rows=7, features=plain)
    sinks = {name: TensorSink() for name in names}
    delivered: dict[str, torch.Tensor] = {}
    for fraction in (0.01, 0.3, 0.6, 0.8, 0.9):
        with pytest.raises(Interrupted):
            inlinevit.stream(model, image, chunk_rows=7, features=sinks, resume=state, progress=interrupt_at(fraction))
        assert {path.name for path in state.iterdir()} <= {"stream.json", "tokens-0.bin", "tokens-1.bin"}
        # A sink that was closed keeps its file; here, an interrupted run has dropped the map.
        delivered |= {name: plain[name].map for name in json_delivered(state)}
    out = inlinevit.stream(model, image, chunk_rows=7, features=sinks, resume=state)
    assert torch.equal(out, expected)
    for name in names:
        assert name in delivered or torch.equal(sinks[name].map, plain[name].map)
    assert not state.exists()


def json_delivered(state):
    path = state / "stream.json"
    return json.loads(path.read_text())["delivered"] if path.exists() else []


def test_nothing_is_read_again_after_the_first_layer(tmp_path):
    model, image = make_model("deit"), make_image(150, 203)
    source = CountedSource(image)
    with pytest.raises(Interrupted):
        inlinevit.stream(model, source, chunk_rows=3, resume=tmp_path / "state", progress=interrupt_at(0.7))
    again = CountedSource(image)
    inlinevit.stream(model, again, chunk_rows=3, resume=tmp_path / "state")
    assert source.read == list(range(150))
    assert again.read == []


CHILD = """
import sys, time, torch, inlinevit
from tests.streaming.models import make_image, make_model
def report(done):
    if done > 0.6:
        print("ready", flush=True)
        time.sleep(100)
inlinevit.stream(make_model("deit"), make_image(150, 203), chunk_rows=3, resume=sys.argv[1], progress=report)
"""

SPILLING = """
import pytest
from tests.streaming.models import spill_always
spill_always(pytest.MonkeyPatch())
"""


@pytest.mark.slow
def test_a_killed_process_is_resumed_by_another(tmp_path):
    command = [sys.executable, "-c", CHILD, str(tmp_path / "state")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        with pytest.raises(ValueError, match="another process streams with the state in"):
            inlinevit.stream(make_model("deit"), make_image(150, 203), chunk_rows=3, resume=tmp_path / "state")
        child.send_signal(signal.SIGKILL)
    assert (tmp_path / "state" / "stream.json").exists()
    out = inlinevit.stream(make_model("deit"), make_image(150, 203), chunk_rows=3, resume=tmp_path / "state")
    assert torch.equal(out, inlinevit.stream(make_model("deit"), make_image(150, 203), chunk_rows=3))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_killed_process_leaves_nothing_in_the_spill_folder(tmp_path):
    child_code = SPILLING + CHILD.replace("resume=sys.argv[1]", "spill=sys.argv[1]")
    with subprocess.Popen(
        [sys.executable, "-c", child_code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        links = [os.readlink(path) for path in Path(f"/proc/{child.pid}/fd").iterdir()]
        assert any(str(tmp_path) in link and link.endswith("(deleted)") for link in links)
        child.send_signal(signal.SIGKILL)
    assert list(tmp_path.iterdir()) == []


def test_the_state_of_another_run_is_refused(tmp_path):
    state, image = tmp_path / "state", make_image(64, 64)
    with pytest.raises(Interrupted):
        inlinevit.stream(make_model("deit"), image, resume=state, progress=interrupt_at(0.7))
    other = make_model("deit")
    with torch.no_grad():
        other.head.bias += 1
    mask = torch.ones(64, 64, dtype=torch.bool)
    for model, pixels, options in (
        (other, image, {}),
        (make_model("deit"), image + 1, {}),
        (make_model("deit"), image, {"mask": mask}),
    ):
        with pytest.raises(ValueError, match="has the state of another image, model or mask: remove it"):
            inlinevit.stream(model, pixels, resume=state, **options)
    (state / "stream.json").write_text("{}")
    with pytest.raises(ValueError, match=r"stream\.json is damaged: remove"):
        inlinevit.stream(make_model("deit"), image, resume=state)


def test_a_source_without_a_fingerprint_is_not_resumed(tmp_path):
    source = CountedSource(make_image(64, 64))
    source.fingerprint = None
    with pytest.raises(ValueError, match="has no fingerprint, by which it is recognised: leave out resume"):
        inlinevit.stream(make_model("deit"), source, resume=tmp_path)


def test_other_files_in_the_folder_are_kept(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    inlinevit.stream(make_model("deit"), make_image(64, 64), resume=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_an_empty_folder_has_no_state(tmp_path):
    checkpoint = Checkpoint(tmp_path, "fingerprint")
    assert checkpoint.load([8]) is None
    checkpoint.close()
