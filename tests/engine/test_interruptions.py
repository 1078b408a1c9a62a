"""Runs that are killed, stopped or damaged end just as one that never was."""

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from inlinevit.engine.checkpoints import entry_of, manifest_bytes, read_manifest
from inlinevit.engine.trainer import Stopped
from tests.engine.running import Server, assert_same_run, final_tensors, metric_lines
from tests.engine.toy import make_trainer, settings

pytestmark = pytest.mark.integration

CODE_OF_SIGKILL = -signal.SIGKILL


def test_reference_is_what_the_tests_need(reference: Path) -> None:
    lines = metric_lines(reference)
    # 52 samples make 13 batches, so 6 steps of 2: the last batch of an epoch is left out.
    assert [line["step"] for line in lines if "loss" in line] == [4, 6, 8, 12, 16, 18, 20, 24]
    assert [line["step"] for line in lines if "eval_error" in line] == [6, 12, 18, 24]
    tensors = final_tensors(reference)
    assert not torch.equal(tensors["model fc1.weight"], tensors["ema fc1.weight"])
    assert torch.equal(tensors["export fc1.weight"], tensors["ema fc1.weight"])
    assert any(name.startswith("optimizer") for name in tensors)
    assert (reference / "config.yaml").exists()
    assert json.loads((reference / "classes.json").read_text()) == [0, 1, 2]


def test_another_seed_makes_another_run(server: Server, reference: Path, tmp_path: Path) -> None:
    server.run(settings(tmp_path / "run", run__seed=1))
    assert not torch.equal(
        final_tensors(tmp_path / "run")["model fc1.weight"], final_tensors(reference)["model fc1.weight"]
    )


# A checkpoint is 5 files: model, ema, optimizer, state, manifest. The first ones of a run are those of steps 5 and 6.
@pytest.mark.parametrize(
    "places",
    [
        ["write:1", "write:6", "write:2"],
        pytest.param(["write:11", "write:5", "write:4"], marks=pytest.mark.slow),
        ["rename:2", "rename:1"],
        # The first mark is set when a run begins, the others when it has evaluated.
        ["best:2", "best:3", "prune:1"],
        ["evaluation:1", "evaluation:3", "noted:2"],
        pytest.param(["prune:3", "write:3", "rename:3"], marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_killed_while_a_checkpoint_is_written(
    server: Server, reference: Path, tmp_path: Path, places: list[str]
) -> None:
    output = tmp_path / "run"
    for place in places:
        assert server.start(settings(output, toy__kill=place)).wait() == CODE_OF_SIGKILL
        if place.startswith(("write", "rename")):
            assert list((output / "checkpoints").glob(".unfinished-step-*"))
    server.run(settings(output))
    assert not list((output / "checkpoints").glob(".unfinished*"))
    assert (output / "checkpoints" / "best").resolve() == (output / "checkpoints" / best_of(reference)).resolve()
    assert_same_run(output, reference)


def best_of(output: Path) -> str:
    return os.readlink(output / "checkpoints" / "best")


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_random_moments(server: Server, reference: Path, tmp_path: Path, seed: int) -> None:
    output, generator = tmp_path / "run", random.Random(seed)
    slow = settings(output, toy__workers=1, toy__pause=0.01)
    kills, last = 0, -1
    while True:
        forked = server.start(slow)
        # At least one checkpoint further than last time, so that this comes to an end.
        deadline = time.monotonic() + 60
        while kills < 6 and newest(output) <= last and time.monotonic() < deadline and alive(forked.ids[0]):
            time.sleep(0.005)
        if kills == 6 or newest(output) <= last:
            break
        last = newest(output)
        time.sleep(generator.uniform(0, 0.15))
        if not alive(forked.ids[0]):
            break
        forked.kill(signal.SIGKILL, workers=generator.random() < 0.5)
        if forked.wait() != CODE_OF_SIGKILL:
            break
        kills += 1
    assert forked.wait() == 0, forked.printed
    assert kills >= 3
    assert_same_run(output, reference)


def alive(process: int) -> bool:
    """Whether a process runs; one that has ended and was not asked about is no more."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def newest(output: Path) -> int:
    steps = [int(path.name.removeprefix("step-")) for path in (output / "checkpoints").glob("step-*")]
    return max(steps, default=-1)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_stopped_by_a_signal(reference: Path, tmp_path: Path, name: str) -> None:
    output = tmp_path / "run"
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    # Each step has two batches: the 3rd falls into step 2 and, after that, into step 4.
    for step, calls in ((2, 3), (4, 3), (11, 14)):
        with pytest.raises(Stopped, match=f"stopped after step {step} of 24") as caught:
            make_trainer(settings(output, toy__events={str(calls): name})).run()
        assert caught.value.signal_number == signal.Signals[name]
        assert newest(output) == step
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    make_trainer(settings(output)).run()
    assert_same_run(output, reference)


def test_second_ctrl_c_does_not_wait(reference: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        make_trainer(settings(output, toy__events={"15": "SIGINT", "16": "SIGINT"})).run()
    assert newest(output) == 6
    make_trainer(settings(output)).run()
    assert_same_run(output, reference)


def test_second_sigterm_ends_at_once(server: Server, reference: Path, tmp_path: Path) -> None:
    """Even in a step that takes for ever, and with its workers."""
    output = tmp_path / "run"
    forked = server.start(settings(output, toy__workers=2, toy__pause=1000))
    deadline = time.monotonic() + 60
    while len(processes_of(forked.ids[0])) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(1)
    forked.kill(signal.SIGTERM)
    time.sleep(0.5)
    assert alive(forked.ids[0])
    started = time.monotonic()
    forked.kill(signal.SIGTERM)
    assert forked.wait() == -signal.SIGTERM
    assert time.monotonic() - started < 5
    while processes_of(forked.ids[0]) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert processes_of(forked.ids[0]) == []
    server.run(settings(output))
    assert_same_run(output, reference)


def test_signal_in_the_last_step_lets_the_run_finish(reference: Path, tmp_path: Path) -> None:
    make_trainer(settings(tmp_path / "run", toy__events={"48": "SIGTERM"})).run()
    assert_same_run(tmp_path / "run", reference)


def test_stopped_run_leaves_no_workers(server: Server, tmp_path: Path) -> None:
    output = tmp_path / "run"
    forked = server.start(settings(output, toy__workers=2, toy__pause=0.02))
    while newest(output) < 5:
        time.sleep(0.01)
    workers = processes_of(forked.ids[0])
    assert len(workers) >= 3
    # Ctrl-C reaches the whole group.
    forked.kill(signal.SIGINT, workers=True)
    assert forked.wait() == 128 + signal.SIGINT, forked.printed
    assert "stopped after step" in forked.printed
    assert "Traceback" not in forked.printed
    assert processes_of(forked.ids[0]) == []


def processes_of(session: int) -> list[int]:
    """All processes of a session."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, owner = stat.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(owner) == session and state != "Z":
            found.append(int(stat.parent.name))
    return found


def flip(path: Path) -> None:
    content = bytearray((path / "model.safetensors").read_bytes())
    content[-3] ^= 1
    (path / "model.safetensors").write_bytes(content)


def truncate(path: Path) -> None:
    content = (path / "optimizer.safetensors").read_bytes()
    (path / "optimizer.safetensors").write_bytes(content[: len(content) // 2])


DAMAGES: dict[str, Any] = {
    "flipped": flip,
    "truncated": truncate,
    "no ema": lambda path: (path / "ema.safetensors").unlink(),
    "no manifest": lambda path: (path / "manifest.json").unlink(),
    "empty manifest": lambda path: (path / "manifest.json").write_text("{}"),
    "manifest of a number": lambda path: (path / "manifest.json").write_text("5"),
    "manifest of garbage": lambda path: (path / "manifest.json").write_bytes(b"\xff\xfe{"),
    "state of garbage": lambda path: (path / "state.json").write_text("[1, 2"),
    "empty": lambda path: [file.unlink() for file in path.iterdir()],
}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after step 11, with checkpoints of steps 10 and 11."""
    output = tmp_path_factory.mktemp("stopped") / "run"
    with pytest.raises(Stopped):
        make_trainer(settings(output, toy__events={"21": "SIGTERM"})).run()
    assert newest(output) == 11
    return output


@pytest.fixture
def copy(stopped: Path, tmp_path: Path) -> Path:
    """A copy of the stopped run, to damage."""
    shutil.copytree(stopped, tmp_path / "run", symlinks=True)
    return tmp_path / "run"


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint_is_skipped(copy: Path, damage: str) -> None:
    DAMAGES[damage](copy / "checkpoints" / "step-00000011")
    with pytest.warns(UserWarning, match="step-00000011 is skipped, because it is damaged"):
        assert make_trainer(settings(copy)).progress.step == 10


@pytest.mark.parametrize("damage", ["truncated", "no manifest"])
def test_run_is_the_same_after_a_damaged_checkpoint(reference: Path, copy: Path, damage: str) -> None:
    DAMAGES[damage](copy / "checkpoints" / "step-00000011")
    with pytest.warns(UserWarning, match="step-00000011 is skipped"):
        make_trainer(settings(copy)).run()
    assert_same_run(copy, reference)


def test_damaged_checkpoint_goes_with_the_next_one(copy: Path) -> None:
    flip(copy / "checkpoints" / "step-00000011")
    # Without a checkpoint at step 11, the damaged one would stay until the end.
    with pytest.warns(UserWarning, match="skipped"), pytest.raises(Stopped):
        make_trainer(settings(copy, run__checkpoint_steps=100, toy__events={"3": "SIGTERM"})).run()
    kept = {path.name for path in (copy / "checkpoints").glob("step-*")}
    assert kept >= {"step-00000010", "step-00000012"}
    assert "step-00000011" not in kept


def test_all_checkpoints_damaged(copy: Path) -> None:
    for path in (copy / "checkpoints").glob("step-*"):
        flip(path)
    before = contents(copy)
    with pytest.raises(ValueError, match=r"every checkpoint in .* is damaged") as caught:
        make_trainer(settings(copy))
    message = str(caught.value)
    assert "step-00000011: model.safetensors has changed" in message
    assert "step-00000010: model.safetensors has changed" in message
    assert "--run.resume never" in message
    # Averaged weights are not damaged.
    assert f"--model.checkpoint {copy / 'checkpoints' / 'step-00000011' / 'ema.safetensors'}" in message
    assert contents(copy) == before


def test_started_over_where_all_checkpoints_are_damaged(reference: Path, copy: Path) -> None:
    for path in (copy / "checkpoints").glob("step-*"):
        (path / "manifest.json").unlink()
    with pytest.raises(
        ValueError, match=r"manifest.json is missing.*: restore one, or start over with --run.resume never"
    ):
        make_trainer(settings(copy))
    before = contents(copy)
    with pytest.warns(UserWarning, match="held a run: it is now"):
        make_trainer(settings(copy, run__resume="never")).run()
    assert contents(copy.with_name("run.1")) == before
    assert_same_run(copy, reference)


def edited(path: Path, name: str, change: Any) -> None:
    """Change the tensors of a file of a checkpoint, and its hash with it."""
    tensors = safetensors.torch.load_file(path / name)
    change(tensors)
    content = safetensors.torch.save(tensors)
    (path / name).write_bytes(content)
    progress, entries = read_manifest(path)
    (path / "manifest.json").write_bytes(manifest_bytes(progress, {**entries, name: entry_of(content)}))


EDITS: dict[str, tuple[str, Any, str]] = {
    "a weight is missing": ("model", lambda tensors: tensors.pop("fc2.bias"), "fc2.bias is missing"),
    "a weight is unknown": ("model", lambda tensors: tensors.update(x=torch.ones(1)), "x is unknown"),
    "another shape": ("model", lambda tensors: tensors.update({"fc2.bias": torch.ones(4)}), "in place of float32"),
    "another type": ("ema", lambda tensors: tensors.update({"fc2.bias": torch.ones(3).int()}), "int32"),
    "no moments": ("optimizer", lambda tensors: tensors.pop("optimizer.state.0.exp_avg"), "exp_avg is missing"),
    "unknown moments": (
        "optimizer",
        lambda tensors: tensors.update({"optimizer.state.77.exp_avg": torch.ones(2)}),
        "optimizer.state.77.exp_avg is unknown",
    ),
    "other moments": (
        "optimizer",
        lambda tensors: tensors.update({"optimizer.state.0.exp_avg": torch.ones(2)}),
        "optimizer.state.0.exp_avg is float32",
    ),
}


@pytest.mark.parametrize("edit", EDITS)
def test_edited_tensors_are_refused(copy: Path, edit: str) -> None:
    name, change, message = EDITS[edit]
    edited(copy / "checkpoints" / "step-00000011", f"{name}.safetensors", change)
    with pytest.raises(ValueError, match=message) as caught:
        make_trainer(settings(copy)).run()
    assert "resume" in str(caught.value)
    assert "\n" not in str(caught.value)


def edit_state(path: Path, old: str, new: str) -> None:
    content = (path / "state.json").read_text()
    assert old in content
    (path / "state.json").write_text(content.replace(old, new, 1))
    progress, entries = read_manifest(path)
    entries["state.json"] = entry_of((path / "state.json").read_bytes())
    (path / "manifest.json").write_bytes(manifest_bytes(progress, entries))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('1.weight_decay": 0.05', '1.weight_decay": "x"', "weight_decay is 'x' in place of 0.05"),
        ('1.weight_decay": 0.05', '1.weight_decay": NaN', "weight_decay is nan in place of a finite number"),
        ('1.weight_decay": 0.05', '1.weight_decay": Infinity', "weight_decay is inf in place of a finite number"),
        ('0.betas.0"', '0.betas.2"', "betas.0 is missing"),
        ('0.amsgrad": false', '0.amsgrad": 1', "amsgrad is 1 in place of False"),
        ('0.amsgrad": false', '0.evil": 1, "optimizer.param_groups.0.amsgrad": false', "0.evil is unknown"),
        ('"scaler"', '"other"', "scaler is missing"),
    ],
)
def test_edited_state_is_refused(copy: Path, old: str, new: str, message: str) -> None:
    edit_state(copy / "checkpoints" / "step-00000011", old, new)
    with pytest.raises(ValueError, match=message) as caught:
        make_trainer(settings(copy)).run()
    assert "resume" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_state_without_names_of_parameters_is_resumed(copy: Path, reference: Path) -> None:
    """Older versions did not store them."""
    path = copy / "checkpoints" / "step-00000011"
    progress, entries = read_manifest(path)
    values = json.loads((path / "state.json").read_text())
    older = {name: value for name, value in values.items() if ".param_names." not in name}
    assert len(older) < len(values)
    (path / "state.json").write_text(json.dumps(older))
    entries["state.json"] = entry_of((path / "state.json").read_bytes())
    (path / "manifest.json").write_bytes(manifest_bytes(progress, entries))
    make_trainer(settings(copy)).run()
    assert_same_run(copy, reference)


def test_a_checkpoint_beyond_the_end_is_refused(copy: Path, tmp_path: Path) -> None:
    path = copy / "checkpoints" / "step-00000011"
    with pytest.raises(ValueError, match=r"is at step 11, and this run has 6: make the schedule longer"):
        make_trainer(settings(tmp_path / "other", run__resume=str(path), schedule__epochs=1))


def contents(folder: Path) -> dict[str, bytes]:
    """All files of a folder."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
