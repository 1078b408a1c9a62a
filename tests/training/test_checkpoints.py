import json
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from inlinevit.training.checkpoints import (
    CheckpointFolder,
    Progress,
    damage,
    read_progress,
    read_state,
    read_weights,
    set_aside,
)

WEIGHTS: dict[str, dict[str, Tensor]] = {"model": {"w": torch.arange(3.0)}, "ema": {"w": torch.ones(3)}}


def save(folder: CheckpointFolder, step: int, best_step: int | None = None) -> Path:
    progress = Progress(step=step, best=1.0, best_step=best_step)
    path = folder.save(progress, WEIGHTS, {"step": torch.tensor(step)})
    if best_step is not None:
        folder.note_evaluation(progress)
    return path


def names(folder: CheckpointFolder) -> list[str]:
    return sorted(path.name for path in folder.folder.iterdir())


def test_what_is_saved_is_read(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "new" / "checkpoints")
    progress = Progress(step=3, metrics={"top1": 0.1 + 0.2}, best=1 / 3, best_step=2, loss_sum=0.7, loss_count=2)
    path = folder.save(progress, WEIGHTS, {"optimizer": {"lr": 0.1, "m": torch.ones(2)}})
    assert read_progress(path) == progress
    for name, weights in WEIGHTS.items():
        assert torch.equal(read_weights(path, name)["w"], weights["w"])
    assert torch.equal(read_state(path)["optimizer"]["m"], torch.ones(2))
    assert damage(path) is None
    assert folder.newest_good() == path


def test_an_evaluation_is_added(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    before = Progress(step=3, evaluated_step=1, metrics={"top1": 1.0}, best=1.0, best_step=1, loss_sum=0.7)
    path = folder.save(before, WEIGHTS, {})
    after = Progress(step=3, evaluated_step=3, metrics={"top1": 0.1 + 0.2}, best=0.3, best_step=3, loss_sum=0.7)
    folder.note_evaluation(after)
    assert read_progress(path) == after
    assert damage(path) is None
    assert folder.best.resolve() == path
    for content in ("", "[1]", "5", '{"nonsense": 1}', "{"):
        (path / "evaluation.json").write_text(content)
        assert read_progress(path) == before


def test_an_evaluation_of_a_checkpoint_elsewhere_makes_no_checkpoint(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.note_evaluation(Progress(step=3, best_step=3))
    assert list(tmp_path.iterdir()) == []


def test_state_that_would_run_code_is_not_read(tmp_path: Path) -> None:
    path = CheckpointFolder(tmp_path).save(Progress(step=1), WEIGHTS, {"code": os.system})
    with pytest.raises(Exception, match="weights_only"):
        read_state(path)


def test_last_and_best_are_kept(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)
    for step in range(1, 7):
        save(folder, step, best_step=2 if step >= 2 else 1)
    assert names(folder) == ["best", "step-00000002", "step-00000005", "step-00000006"]
    assert folder.best.resolve() == tmp_path / "step-00000002"
    save(folder, 7, best_step=7)
    assert names(folder) == ["best", "step-00000006", "step-00000007"]
    assert folder.best.resolve() == tmp_path / "step-00000007"


def test_run_that_goes_another_way(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=3)
    for step in (10, 20, 30):
        save(folder, step, best_step=step)
    folder = CheckpointFolder(tmp_path, keep=3)
    folder.go_on_from(Progress(step=10, best_step=10))
    # Nothing is lost before there is something new.
    assert folder.newest_good() == tmp_path / "step-00000030"
    assert folder.best.resolve() == tmp_path / "step-00000010"
    save(folder, 15, best_step=10)
    assert names(folder) == ["best", "step-00000010", "step-00000015"]


def test_best_does_not_point_to_nothing(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=3)
    for step in (10, 20):
        save(folder, step, best_step=step)
    folder.go_on_from(Progress(step=10, best_step=5))
    save(folder, 15, best_step=5)
    assert names(folder) == ["step-00000010", "step-00000015"]


def test_what_a_kill_leaves_is_cleaned_up(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    (tmp_path / ".unfinished-step-00000009").mkdir()
    (tmp_path / ".unfinished-step-00000009" / "model.safetensors").write_bytes(b"half")
    (tmp_path / ".unfinished-best").symlink_to("step-00000001")
    assert folder.newest_good() is None
    folder.go_on_from(Progress())
    assert names(folder) == []


@pytest.mark.parametrize("manifest", ["", "{", "{}", "[]", "5", "null", '{"progress.json": 1}', '["progress.json"]'])
def test_broken_manifest_is_damage(tmp_path: Path, manifest: str) -> None:
    path = save(CheckpointFolder(tmp_path), 1)
    (path / "manifest.json").write_text(manifest)
    assert damage(path) is not None


@pytest.mark.parametrize("file", ["model.safetensors", "ema.safetensors", "state.pt", "progress.json"])
def test_every_byte_counts(tmp_path: Path, file: str) -> None:
    path = save(CheckpointFolder(tmp_path), 1)
    content = (path / file).read_bytes()
    for position in (0, len(content) // 2, len(content) - 1):
        spoilt = bytearray(content)
        spoilt[position] ^= 0x10
        (path / file).write_bytes(spoilt)
        assert damage(path) == f"{file} has changed since it was written"
    (path / file).write_bytes(content)
    assert damage(path) is None


def test_manifest_names_all_files(tmp_path: Path) -> None:
    path = save(CheckpointFolder(tmp_path), 1)
    manifest = json.loads((path / "manifest.json").read_text())
    assert sorted([*manifest, "manifest.json"]) == sorted(file.name for file in path.iterdir())


def test_set_aside(tmp_path: Path) -> None:
    assert set_aside(tmp_path / "run") is None
    (tmp_path / "run").mkdir()
    assert set_aside(tmp_path / "run") is None
    for number in (1, 2):
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "run" / "file").write_text(str(number))
        assert set_aside(tmp_path / "run") == tmp_path / f"run.{number}"
    assert (tmp_path / "run.1" / "file").read_text() == "1"
    assert not (tmp_path / "run").exists()
