"""What the predictors and the evaluation of every task make of a training run."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch
from accelerate.state import AcceleratorState

from inlinevit.engine.checkpoints import CheckpointFolder, Progress, pack_state, pack_weights
from inlinevit.engine.evaluator import eval_command
from inlinevit.tasks import TASKS
from tests.tasks.runs import MAKE, Weights, load

# What each task has stored beside the weights, and contents that are not what it should be.
METADATA = {
    "classification": ("classes.json", ("{", "[3]", "3")),
    "multilabel": ("classes.json", ("{", "[3]", "3")),
    "detection": ("categories.json", ("{", "[]", "[3]", '[{"id": 3}]', "null")),
    "segmentation": ("labels.json", ("{", "[]", '["cat", "dog"]', '{"classes": [{"name": "a"}]}', "null")),
}
every_task = pytest.mark.parametrize("task", MAKE)


@pytest.fixture
def run(task: str, tmp_path: Path) -> Path:
    MAKE[task](tmp_path)
    return tmp_path / f"{task}_run"


@pytest.fixture(autouse=True)
def no_precision() -> Iterator[None]:
    """No precision of an earlier test."""
    AcceleratorState._reset_state()
    yield
    AcceleratorState._reset_state()


def assert_same(first: Weights, second: Weights) -> None:
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


@every_task
def test_which_checkpoint_is_meant(task: str, run: Path) -> None:
    weights = safetensors.torch.load_file(run / "model.safetensors")
    others = {name: value + 1 for name, value in weights.items()}
    progress = Progress(step=1, best=1.0, best_step=1)
    folder = CheckpointFolder(run / "checkpoints")
    path = folder.save(progress, {"model.safetensors": pack_weights(others), **pack_state({})})
    folder.mark_best(progress)
    for checkpoint in ("best", str(path), str(path / "model.safetensors")):
        assert_same(load(task, run, checkpoint).model.state_dict(), others)
    predictor = load(task, run)
    assert_same(predictor.model.state_dict(), weights)
    assert not predictor.model.training


@every_task
def test_weights_that_are_not_finite_are_refused(task: str, run: Path) -> None:
    weights = safetensors.torch.load_file(run / "model.safetensors")
    name = next(name for name in weights if name.endswith("weight"))
    weights[name].view(-1)[3] = torch.nan
    (run / "nan.safetensors").write_bytes(pack_weights(weights))
    with pytest.raises(ValueError, match=rf"holds weights that are not finite numbers, such as {name}: choose others"):
        load(task, run, str(run / "nan.safetensors"))


@every_task
def test_weights_of_another_model_are_refused(task: str, run: Path) -> None:
    file = run / "other.safetensors"
    safetensors.torch.save_file({"a": torch.zeros(1)}, file)
    with pytest.raises(ValueError, match=r"other\.safetensors does not hold the weights of .*: choose"):
        load(task, run, str(file))


@every_task
def test_what_is_wrong_with_a_run_is_reported(task: str, run: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no folder at .*nothing: name the folder of a"):
        load(task, run / "nothing")
    with pytest.raises((FileNotFoundError, ValueError), match=r"holds no config\.yaml: name the folder"):
        load(task, run.parent)
    name, contents = METADATA[task]
    for content in contents:
        (run / name).write_text(content)
        with pytest.raises(ValueError, match=rf"{re.escape(name)} cannot be used .*: restore it"):
            load(task, run)
    (run / name).unlink()
    if task != "classification":
        with pytest.raises(FileNotFoundError, match=rf"{re.escape(name)} is missing"):
            load(task, run)
    other = "detection" if task == "classification" else "classification"
    (run / "task.json").write_text(json.dumps({"name": other, "command": "inlinevit other"}))
    with pytest.raises(ValueError, match=f"holds a {other} run, not a {task} run: use inlinevit other eval"):
        load(task, run)


@pytest.mark.integration
@every_task
def test_half_precision(task: str, run: Path, tmp_path: Path) -> None:
    entry = TASKS[task]
    options = entry.load_eval_options()
    eval_command(entry.load_task(), str(run), options(output=str(tmp_path / "out"), precision="bf16"))
    assert json.loads((tmp_path / "out" / "evaluation.json").read_text())["images"] > 0
    AcceleratorState._reset_state()
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="fp16 needs a GPU"):
            eval_command(entry.load_task(), str(run), options(precision="fp16"))


@every_task
def test_which_tasks_share_images_between_processes(task: str) -> None:
    assert TASKS[task].load_task().supports_sequence == (task in ("classification", "multilabel"))
