"""Models that label pixels, out of training runs."""

from pathlib import Path
from typing import Any

import pytest
import torch

from inlinevit.engine.checkpoints import CheckpointFolder, Progress, pack_state, pack_weights
from inlinevit.tasks.segmentation.predictor import load_segmenter
from tests.tasks.segmentation.runs import make_run


def assert_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


@pytest.mark.parametrize("options", [{}, {"arch": "upernet"}])
def test_opening_a_run(options: dict[str, Any], tmp_path: Path) -> None:
    weights = make_run(tmp_path / "run", **options)
    segmenter = load_segmenter(str(tmp_path / "run"))
    assert_same(segmenter.model.state_dict(), weights)
    assert not segmenter.model.training
    assert [kind.name for kind in segmenter.labels.classes] == ["red", "green [b]", "blue"]
    assert segmenter.labels.to_values(torch.tensor([[0, 1, 2, 255]])).tolist() == [[7, 2, 9, 0]]
    assert segmenter.name == f"{options.get('arch', 'semantic_fpn')} on test_convnext"
    assert segmenter.config.inference.min_size == 48
    # Its own, not those of most backbones.
    assert segmenter.mean_std == ((0.5,) * 3, (0.5,) * 3)


def test_which_checkpoint_is_meant(tmp_path: Path) -> None:
    run = tmp_path / "run"
    weights = make_run(run)
    others = {name: value + 1 for name, value in weights.items()}
    progress = Progress(step=1, best=1.0, best_step=1)
    folder = CheckpointFolder(run / "checkpoints")
    path = folder.save(progress, {"model.safetensors": pack_weights(others), **pack_state({})})
    folder.mark_best(progress)
    for checkpoint in ("best", str(path), str(path / "model.safetensors")):
        assert_same(load_segmenter(str(run), checkpoint=checkpoint).model.state_dict(), others)
    assert_same(load_segmenter(str(run)).model.state_dict(), weights)


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    make_run(run)
    make_run(other, channels=128)
    with pytest.raises(ValueError, match=r"does not hold the weights of this model .*: choose"):
        load_segmenter(str(run), checkpoint=str(other / "model.safetensors"))


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    weights = make_run(tmp_path / "run")
    name = next(name for name in weights if name.endswith("weight"))
    weights[name].view(-1)[3] = torch.nan
    (tmp_path / "nan.safetensors").write_bytes(pack_weights(weights))
    with pytest.raises(ValueError, match=rf"holds weights that are not finite numbers, such as {name}: choose others"):
        load_segmenter(str(tmp_path / "run"), checkpoint=str(tmp_path / "nan.safetensors"))


def test_what_is_wrong_with_a_run_is_told(tmp_path: Path) -> None:
    run = tmp_path / "run"
    make_run(run)
    with pytest.raises(FileNotFoundError, match=r"no folder at .*nothing: name the folder of a segmentation run"):
        load_segmenter(str(tmp_path / "nothing"))
    with pytest.raises(FileNotFoundError, match=r"holds no config\.yaml: name the folder"):
        load_segmenter(str(tmp_path))
    for content in ("{", "[]", '["cat", "dog"]', '{"classes": [{"name": "a"}]}', "null"):
        (run / "labels.json").write_text(content)
        with pytest.raises(ValueError, match=r"labels\.json cannot be used .*: restore it"):
            load_segmenter(str(run))
    (run / "labels.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"labels\.json is missing"):
        load_segmenter(str(run))
