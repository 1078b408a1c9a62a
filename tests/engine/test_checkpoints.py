import json
import os
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from inlinevit.engine.checkpoints import (
    CheckpointFolder,
    Progress,
    archive_folder,
    entry_of,
    find_damage,
    manifest_bytes,
    pack_state,
    pack_weights,
    read_manifest,
    read_state,
    read_weights,
)

WEIGHTS: dict[str, dict[str, Tensor]] = {"model": {"w": torch.arange(3.0)}, "ema": {"w": torch.ones(3)}}


def files_of(state: Any) -> dict[str, bytes]:
    """The files of a checkpoint with this state."""
    return {**{f"{name}.safetensors": pack_weights(weights) for name, weights in WEIGHTS.items()}, **pack_state(state)}


def save(folder: CheckpointFolder, step: int, best_step: int | None = None) -> Path:
    progress = Progress(step=step, best=None if best_step is None else 1.0, best_step=best_step)
    path = folder.save(progress, files_of({"step": torch.tensor(step)}))
    if best_step is not None:
        folder.save_evaluation(progress)
    return path


def names(folder: CheckpointFolder) -> list[str]:
    return sorted(path.name for path in folder.folder.iterdir())


def test_what_is_saved_is_read(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "new" / "checkpoints")
    progress = Progress(step=3, metrics={"top1": 0.1 + 0.2}, best=1 / 3, best_step=2, loss_sum=0.7, loss_count=2)
    state = {"optimizer": {"lr": 0.1, 3: {"m": torch.ones(2)}, "betas": (0.9, 0.1 + 0.2)}, "scaler": None, "name": "x"}
    path = folder.save(progress, files_of(state))
    assert read_manifest(path)[0] == progress
    for name, weights in WEIGHTS.items():
        assert torch.equal(read_weights(path, name)["w"], weights["w"])
    read = read_state(path)
    assert torch.equal(read.pop("optimizer.3.m"), torch.ones(2))
    names = ("optimizer.lr", "optimizer.betas.0", "optimizer.betas.1", "scaler", "name")
    assert read == dict(zip(names, (0.1, 0.9, 0.1 + 0.2, None, "x"), strict=True))
    assert find_damage(path) is None
    assert folder.newest_good() == path


BEFORE = Progress(step=3, evaluated_step=1, metrics={"top1": 1.0}, best=1.0, best_step=1, loss_sum=0.7)
AFTER = Progress(step=3, evaluated_step=3, metrics={"top1": 0.1 + 0.2}, best=0.3, best_step=3, loss_sum=0.7)


@pytest.fixture
def evaluated(tmp_path: Path) -> Path:
    """A checkpoint with its evaluation."""
    folder = CheckpointFolder(tmp_path)
    path = folder.save(BEFORE, files_of({}))
    folder.save_evaluation(AFTER)
    assert folder.best.resolve() == path
    return path


def test_an_evaluation_is_added(evaluated: Path) -> None:
    assert read_manifest(evaluated)[0] == AFTER
    assert find_damage(evaluated) is None


def edit(path: Path, name: str, content: bytes) -> None:
    """Replace a file of a checkpoint together with its hash."""
    (path / name).write_bytes(content)
    progress, entries = read_manifest(path)
    (path / "manifest.json").write_bytes(manifest_bytes(progress, {**entries, name: entry_of(content)}))


def edit_progress(path: Path, content: Any) -> None:
    """Replace the progress in a manifest, together with the hash."""
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["sha256"]
    manifest["progress"] = content
    digest = entry_of(json.dumps(manifest).encode())["sha256"]
    (path / "manifest.json").write_text(json.dumps({**manifest, "sha256": digest}))


PROGRESSES: dict[str, Any] = {
    "not a dict": [1],
    "empty": {},
    "another field": {**asdict(BEFORE), "more": 1},
    **{
        f"{name} {value!r}": {**asdict(BEFORE), name: value}
        for name, values in {
            "step": (-1, 2.0, True, "3", None, 10**30, 2, 4),
            "evaluated_step": (-1, 4, None),
            "metrics": (None, [1], {"a": None}, {"a": True}, {"a": "high"}),
            "best": ("1", float("nan"), False, None),
            "best_step": (-1, 1.5, 4),
            "loss_sum": (None, float("inf"), "0"),
            "loss_count": (-1, 0.5, 4),
            "total_batch": (-1, None),
            "steps_per_epoch": (-1, [3]),
            "processes": (0, -1, "2"),
            "batch_size": (-1, 1e300),
            "workers": (-1, {}),
        }.items()
        for value in values
    },
}


@pytest.mark.parametrize("case", PROGRESSES)
def test_edited_progress_is_refused(tmp_path: Path, case: str) -> None:
    path = save(CheckpointFolder(tmp_path), 3)
    edit_progress(path, PROGRESSES[case])
    with pytest.raises(ValueError, match=r"^manifest.json (has changed|is of step) "):
        read_manifest(path)
    problem = find_damage(path)
    assert problem is not None
    assert "\n" not in problem


@pytest.mark.parametrize(
    "name", ["../state.json", "/dev/zero", "state.pt", "model.safetensors/x", "", "evil.safetensors"]
)
def test_a_manifest_names_known_files_only(tmp_path: Path, name: str) -> None:
    path = save(CheckpointFolder(tmp_path), 1)
    progress, entries = read_manifest(path)
    (path / "manifest.json").write_bytes(manifest_bytes(progress, {**entries, name: entry_of(b"")}))
    assert find_damage(path) == "manifest.json has changed since it was written"


def test_tensors_beside_the_manifest_are_damage(tmp_path: Path) -> None:
    path = save(CheckpointFolder(tmp_path), 1)
    (path / "shard-00009-model-00001-of-00001.safetensors").write_bytes(pack_weights({}))
    assert find_damage(path) == "shard-00009-model-00001-of-00001.safetensors is not in manifest.json"


def test_a_pipe_in_place_of_a_file_is_damage(tmp_path: Path) -> None:
    for name in ("model.safetensors", "state.json", "manifest.json"):
        path = save(CheckpointFolder(tmp_path), 1)
        (path / name).unlink()
        os.mkfifo(path / name)
        assert find_damage(path) == f"{name} is a named pipe, not a regular file"


def test_an_evaluation_of_a_checkpoint_elsewhere_makes_no_checkpoint(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.save_evaluation(Progress(step=3, best=1.0, best_step=3))
    assert list(tmp_path.iterdir()) == []


def test_state_is_not_a_pickle(tmp_path: Path) -> None:
    path = save(CheckpointFolder(tmp_path), 1)
    assert {file.suffix for file in path.iterdir()} == {".json", ".safetensors"}
    with pytest.raises(TypeError, match=r"^code is of builtin_function_or_method, which a checkpoint cannot hold"):
        pack_state({"code": os.system})


@pytest.mark.parametrize("tree", [[], 3, None, {"x": 1}])
def test_edited_state_is_refused(tmp_path: Path, tree: Any) -> None:
    path = CheckpointFolder(tmp_path).save(Progress(step=1), files_of({"x": torch.ones(2)}))
    edit(path, "state.json", json.dumps(tree).encode())
    with pytest.raises(ValueError, match=r"state\.json should have values by name, and none of optimizer\.safetensors"):
        read_state(path)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[" * 100_000])
def test_state_that_is_not_json_is_refused(tmp_path: Path, content: bytes) -> None:
    path = save(CheckpointFolder(tmp_path), 1)
    edit(path, "state.json", content)
    with pytest.raises(ValueError, match=r"checkpoint .* is not valid \(state.json is not valid JSON"):
        read_state(path)


@pytest.mark.parametrize("content", [b"", b"\xff" * 100, safetensors.torch.save({"w": torch.ones(9)})[:-1]])
def test_tensors_that_are_not_safetensors_are_refused(tmp_path: Path, content: bytes) -> None:
    path = save(CheckpointFolder(tmp_path), 1)
    edit(path, "model.safetensors", content)
    with pytest.raises(
        ValueError, match=r"model.safetensors is not valid .*: resume from another checkpoint"
    ) as caught:
        read_weights(path, "model")
    assert "\n" not in str(caught.value)


def test_last_and_best_are_kept(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)
    for step in range(1, 7):
        save(folder, step, best_step=2 if step >= 2 else 1)
    assert names(folder) == ["best", "step-00000002", "step-00000005", "step-00000006"]
    assert folder.best.resolve() == tmp_path / "step-00000002"
    save(folder, 7, best_step=7)
    assert names(folder) == ["best", "step-00000006", "step-00000007"]
    assert folder.best.resolve() == tmp_path / "step-00000007"


def test_what_lies_beside_checkpoints_is_no_checkpoint(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    save(folder, 1)
    # What an evaluation of a sharded checkpoint leaves, and somebody's copy.
    (tmp_path / "step-00000001.safetensors").touch()
    (tmp_path / "step-00000001-kept").mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert folder.newest_good() == tmp_path / "step-00000001"
    folder.save_evaluation(Progress(step=1, evaluated_step=1))
    assert names(folder) == ["step-00000001", "step-00000001-kept", "step-00000001.safetensors"]
    save(folder, 2)
    assert names(folder) == ["step-00000001-kept", "step-00000001.safetensors", "step-00000002"]


def test_run_that_goes_another_way(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=3)
    for step in (10, 20, 30):
        save(folder, step, best_step=step)
    folder = CheckpointFolder(tmp_path, keep=3)
    folder.resume_from(Progress(step=10, best=1.0, best_step=10))
    # Nothing is lost before there is something new.
    assert folder.newest_good() == tmp_path / "step-00000030"
    assert folder.best.resolve() == tmp_path / "step-00000010"
    save(folder, 15, best_step=10)
    assert names(folder) == ["best", "step-00000010", "step-00000015"]


def test_best_does_not_point_to_nothing(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=3)
    for step in (10, 20):
        save(folder, step, best_step=step)
    folder.resume_from(Progress(step=10, best=1.0, best_step=5))
    save(folder, 15, best_step=5)
    assert names(folder) == ["step-00000010", "step-00000015"]


def test_what_a_kill_leaves_is_cleaned_up(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    (tmp_path / ".unfinished-step-00000009").mkdir()
    (tmp_path / ".unfinished-step-00000009" / "model.safetensors").write_bytes(b"half")
    (tmp_path / ".unfinished-best").symlink_to("step-00000001")
    assert folder.newest_good() is None
    folder.resume_from(Progress())
    assert names(folder) == []


@pytest.mark.parametrize("manifest", ["", "{", "{}", "[]", "5", "null", '{"state.json": 1}', '["state.json"]'])
def test_broken_manifest_is_damage(tmp_path: Path, manifest: str) -> None:
    path = save(CheckpointFolder(tmp_path), 1)
    (path / "manifest.json").write_text(manifest)
    assert find_damage(path) is not None


@pytest.mark.parametrize(
    "file",
    [
        "model.safetensors",
        "ema.safetensors",
        "optimizer.safetensors",
        "state.json",
    ],
)
def test_every_byte_counts(tmp_path: Path, file: str) -> None:
    path = save(CheckpointFolder(tmp_path), 1, best_step=1)
    content = (path / file).read_bytes()
    for position in (0, len(content) // 2, len(content) - 1):
        spoilt = bytearray(content)
        spoilt[position] ^= 0x10
        (path / file).write_bytes(spoilt)
        assert find_damage(path) == f"{file} has changed since it was written"
    (path / file).write_bytes(content)
    assert find_damage(path) is None


def test_manifest_names_all_files(tmp_path: Path) -> None:
    path = save(CheckpointFolder(tmp_path), 1)
    manifest = json.loads((path / "manifest.json").read_text())
    assert sorted([*manifest["files"], "manifest.json"]) == sorted(file.name for file in path.iterdir())


def test_every_bit_of_a_manifest_counts(tmp_path: Path) -> None:
    path = save(CheckpointFolder(tmp_path), 1, best_step=1)
    content = (path / "manifest.json").read_bytes()
    expected = read_manifest(path)
    undetected = []
    for position in range(len(content)):
        # Another bit of each byte: all of them would take eight times as long.
        for bit in [position % 8]:
            spoilt = bytearray(content)
            spoilt[position] ^= 1 << bit
            (path / "manifest.json").write_bytes(spoilt)
            # White space in place of white space means the same.
            if find_damage(path) is None and read_manifest(path) != expected:
                undetected.append((position, bit))
    assert undetected == []


def test_archive_folder(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "file").write_text(str(number))
        assert archive_folder(tmp_path / "run") == tmp_path / f"run.{number}"
    assert (tmp_path / "run.1" / "file").read_text() == "1"
    assert not (tmp_path / "run").exists()
