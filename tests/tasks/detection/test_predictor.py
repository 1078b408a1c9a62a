"""Detectors out of training runs."""

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from inlinevit.engine.checkpoints import CheckpointFolder, Progress, pack_state, pack_weights
from inlinevit.tasks.detection.coco import Category
from inlinevit.tasks.detection.predictor import load_detector
from tests.tasks.detection.runs import make_run


def assert_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


@pytest.mark.parametrize(
    "options", [{}, {"arch": "cascade_mask_rcnn", "class_agnostic_boxes": True}, {"num_classes": 5}]
)
def test_opening_a_run(options: dict[str, Any], tmp_path: Path) -> None:
    weights = make_run(tmp_path / "run", **options)
    detector = load_detector(str(tmp_path / "run"))
    assert_same(detector.model.state_dict(), weights)
    assert not detector.model.training
    assert detector.categories == [Category(3, "disc"), Category(7, "square"), Category(90, "triangle")]
    assert detector.name == f"{options.get('arch', 'mask_rcnn')} on test_convnext"
    assert detector.config.min_size == 64


def test_which_checkpoint_is_meant(tmp_path: Path) -> None:
    run = tmp_path / "run"
    weights = make_run(run)
    others = {name: value + 1 for name, value in weights.items()}
    progress = Progress(step=1, best=1.0, best_step=1)
    folder = CheckpointFolder(run / "checkpoints")
    path = folder.save(progress, {"model.safetensors": pack_weights(others), **pack_state({})})
    folder.mark_best(progress)
    for checkpoint in ("best", str(path), str(path / "model.safetensors")):
        assert_same(load_detector(str(run), checkpoint=checkpoint).model.state_dict(), others)
    assert_same(load_detector(str(run)).model.state_dict(), weights)


def test_weights_of_another_detector_are_refused(tmp_path: Path) -> None:
    run, wider = tmp_path / "run", tmp_path / "wider"
    make_run(run)
    make_run(wider, num_classes=4)
    with pytest.raises(ValueError, match=r"does not hold the weights of this model .*predictor.*: choose"):
        load_detector(str(run), checkpoint=str(wider / "model.safetensors"))
    safetensors.torch.save_file({"a": torch.zeros(1)}, wider / "model.safetensors")
    with pytest.raises(ValueError, match=r"a, which is \(1,\) in place of nothing"):
        load_detector(str(run), checkpoint=str(wider / "model.safetensors"))


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    weights = make_run(tmp_path / "run")
    name = next(name for name in weights if name.endswith("weight"))
    weights[name].view(-1)[3] = torch.nan
    (tmp_path / "nan.safetensors").write_bytes(pack_weights(weights))
    with pytest.raises(ValueError, match=rf"holds weights that are not finite numbers, such as {name}: choose others"):
        load_detector(str(tmp_path / "run"), checkpoint=str(tmp_path / "nan.safetensors"))


def test_what_is_wrong_with_a_run_is_told(tmp_path: Path) -> None:
    run = tmp_path / "run"
    make_run(run)
    with pytest.raises(FileNotFoundError, match=r"no folder at .*nothing: name the folder of a detection run"):
        load_detector(str(tmp_path / "nothing"))
    with pytest.raises(FileNotFoundError, match=r"holds no config\.yaml: name the folder"):
        load_detector(str(tmp_path))
    for content in ("{", "[]", "[3]", '[{"id": 3}]', "null"):
        (run / "categories.json").write_text(content)
        with pytest.raises(ValueError, match=r"categories\.json cannot be used .*: restore it"):
            load_detector(str(run))
    (run / "categories.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"categories\.json is missing"):
        load_detector(str(run))
    (run / "task.json").write_text('{"name": "classification", "command": "inlinevit"}')
    (run / "config.yaml").write_text("model: {name: inline_deit_tiny}")
    with pytest.raises(ValueError, match="holds a classification run, not a detection run: use inlinevit eval"):
        load_detector(str(run))
