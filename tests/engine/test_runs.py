"""What a training run leaves in its folder."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import yaml

from inlinevit.engine.checkpoints import CheckpointFolder, Progress, pack_state, pack_weights
from inlinevit.engine.config import AnyConfig, config_from_dict, to_plain
from inlinevit.engine.runs import is_run, open_run, run_weights
from inlinevit.tasks.classification.config import AugmentConfig, ClassificationConfig, ModelConfig
from inlinevit.tasks.detection.config import DetectionConfig
from inlinevit.tasks.segmentation.config import SegmentationConfig


def test_configurations_come_back(tmp_path: Path) -> None:
    config = ClassificationConfig(
        augment=AugmentConfig(scale=None, ratio=(0.5, 2.0)), model=ModelConfig(kwargs={"attention": "softmax"})
    )
    config.optimizer.betas = (0.5, 0.6)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(asdict(config)))
    assert open_run(ClassificationConfig, str(tmp_path)).config == config
    assert config_from_dict(AugmentConfig, {"scale": [0.1, 0.2]}).scale == (0.1, 0.2)
    for content in ("- 1", "", "model: 3", "model: {img_size: -1}", "a: [", "model: {name: 'x'}\n\tb"):
        (tmp_path / "config.yaml").write_text(content)
        with pytest.raises(ValueError, match="not the configuration of a classification run"):
            open_run(ClassificationConfig, str(tmp_path))


@pytest.mark.parametrize(
    ("written", "read", "task", "command", "message"),
    [
        (
            ClassificationConfig(),
            DetectionConfig,
            "classification",
            "inlinevit",
            "holds a classification run, not a detection run",
        ),
        (DetectionConfig(), ClassificationConfig, "detection", "inlinevit detect", "use inlinevit detect eval"),
        (SegmentationConfig(), ClassificationConfig, "segmentation", "inlinevit segment", "use inlinevit segment eval"),
        (
            SegmentationConfig(),
            DetectionConfig,
            "segmentation",
            "inlinevit segment",
            "holds a segmentation run, not a detection run",
        ),
    ],
)
def test_a_run_of_another_task_is_told(
    written: object, read: type[AnyConfig], task: str, command: str, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(to_plain(written)))
    assert open_run(type(written), str(tmp_path)).config == written
    (tmp_path / "task.json").write_text(json.dumps({"name": task, "command": command}))
    assert open_run(type(written), str(tmp_path)).config == written
    with pytest.raises(ValueError, match=message):
        open_run(read, str(tmp_path))


def test_which_weights_are_meant(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor a good checkpoint"):
        run_weights(tmp_path, None)
    folder = CheckpointFolder(tmp_path / "checkpoints", keep=9)
    weights, state = pack_weights({"a": torch.zeros(1)}), pack_state({})
    first, second = Progress(step=1, best=1.0, best_step=1), Progress(step=2, best=1.0, best_step=1)
    older = folder.save(first, {"model.safetensors": weights, "ema.safetensors": weights, **state})
    folder.mark_best(first)
    newer = folder.save(second, {"model.safetensors": weights, **state})
    with pytest.warns(UserWarning, match="not finished: using its checkpoint step-00000002"):
        assert run_weights(tmp_path, None) == newer / "model.safetensors"
    # Averaged weights are preferred.
    assert run_weights(tmp_path, "best").resolve() == older.resolve() / "ema.safetensors"
    assert run_weights(tmp_path, str(newer)) == newer / "model.safetensors"
    assert run_weights(tmp_path, "some/file.pth") == Path("some/file.pth")
    (tmp_path / "model.safetensors").touch()
    assert run_weights(tmp_path, None) == tmp_path / "model.safetensors"
    (older / "ema.safetensors").write_bytes(b"spoilt")
    with pytest.raises(ValueError, match="best cannot be used"):
        run_weights(tmp_path, "best")
    with pytest.raises(ValueError, match=r"step-00000001 cannot be used \(ema\.safetensors has changed"):
        run_weights(tmp_path, str(older))
    with pytest.raises(ValueError, match="the checkpoint is empty"):
        run_weights(tmp_path, "")
    with pytest.raises(FileNotFoundError, match="holds no"):
        run_weights(tmp_path, str(tmp_path / "checkpoints"))


def test_checkpoints_of_others_make_no_run(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "step-1000.ckpt").touch()
    assert not is_run(tmp_path)
    (tmp_path / "checkpoints" / "step-00001000").mkdir()
    assert is_run(tmp_path)
