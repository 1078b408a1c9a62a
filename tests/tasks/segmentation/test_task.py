"""Segmentation as a job of the training loop, through the command line."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml

from inlinevit.cli import main
from inlinevit.cli.train import parse_config as parse_task_config
from inlinevit.tasks.segmentation.labels import IGNORED
from inlinevit.tasks.segmentation.task import Segmentation, pixel_loss
from tests.tasks.segmentation.conftest import DrawAde
from tests.tasks.training import assert_resumed_run_is_the_same, small_pvt
from tests.tasks.training import train as train_task

parse_config = partial(parse_task_config, task="segmentation")

SMALL: dict[str, Any] = {
    "model": {
        "kwargs": small_pvt(64, 8),
        "drop_path_rate": 0.0,
        "channels": 64,
        "num_classes": 4,
    },
    "data": {"batch_size": 4, "workers": 0},
    "augment": {"crop_size": 64, "min_size": None, "scale": [0.75, 1.5]},
    "inference": {"min_size": None},
    "optimizer": {"lr": 3e-3, "lr_base_size": 0, "clip_grad": 5.0},
    "schedule": {"name": "poly", "steps": 4, "warmup": 1, "min_lr": 0.0, "warmup_lr": 1e-4, "decay_rate": 0.9},
    "run": {"checkpoint_minutes": 1000.0},
}


def test_the_loss_is_the_mean_over_pixels_that_count() -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 4, 5)
    labels = torch.randint(3, (2, 4, 5), dtype=torch.uint8)
    labels[0, :2] = IGNORED
    counted = labels != IGNORED
    expected = F.cross_entropy(logits.permute(0, 2, 3, 1)[counted], labels[counted].long())
    torch.testing.assert_close(pixel_loss(logits, labels), expected)


def test_a_batch_without_labels_teaches_nothing() -> None:
    logits = torch.randn(1, 3, 4, 5, requires_grad=True)
    loss = pixel_loss(logits, torch.full((1, 4, 5), IGNORED, dtype=torch.uint8))
    loss.backward()
    assert loss == 0
    assert (logits.grad == 0).all()


train = partial(train_task, "segment", SMALL)


@pytest.mark.integration
def test_shapes_are_learned(ade_folder: DrawAde, tmp_path: Path) -> None:
    options = ["--schedule.steps", "80", "--schedule.warmup", "5", "--run.eval_every", "80"]
    results = train(ade_folder(), tmp_path / "run", *options)
    # On images that it was not trained on.
    assert results["metrics"]["miou"] > 0.7
    assert results["metrics"]["pixel_accuracy"] > 0.9


@pytest.mark.integration
def test_an_upernet_with_all_options_learns(ade_folder: DrawAde, tmp_path: Path) -> None:
    options = {
        "--model.arch": "upernet",
        "--model.drop_path_rate": "0.1",
        "--inference.window_size": "48",
        "--inference.scales": "[0.75, 1.0]",
        "--inference.flip": "true",
        "--run.grad_checkpointing": "true",
        "--run.precision": "bf16",
        "--run.ema_decay": "0.9",
        "--data.max_eval_samples": "1",
        "--schedule.steps": "2",
    }
    output = tmp_path / "run"
    results = train(ade_folder(), output, *(word for pair in options.items() for word in pair))
    assert set(results["metrics"]) == {"miou", "macc", "pixel_accuracy"}
    classes = json.loads((output / "labels.json").read_text())
    assert [record["values"] for record in classes["classes"]] == [[1], [2], [3], [4]]
    assert classes["ignored"] == [0]


def test_the_auxiliary_loss_has_its_weight(ade_folder: DrawAde) -> None:
    words = ["--data.path", str(ade_folder()), "--model.num_classes", "4", "--model.arch", "upernet"]
    task = Segmentation(parse_config(words))

    def model(images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(0)
        return torch.randn(1, 4, 8, 8), torch.randn(1, 4, 8, 8)

    labels = torch.randint(4, (1, 8, 8), dtype=torch.uint8)
    images = torch.zeros(1, 3, 8, 8, dtype=torch.uint8)
    logits, auxiliary = model(images)
    expected = pixel_loss(logits, labels) + 0.4 * pixel_loss(auxiliary, labels)
    torch.testing.assert_close(task.loss(model, (images, labels)), expected)  # type: ignore[arg-type]


def test_a_resumed_run_that_counts_steps_ends_with_the_same_weights(ade_folder: DrawAde, tmp_path: Path) -> None:
    options = {
        "--run.checkpoint_steps": "1",
        "--run.keep_checkpoints": "5",
        "--run.eval_every": "4",
        "--model.drop_path_rate": "0.1",
    }
    words = [word for pair in options.items() for word in pair]
    # Two steps an epoch: it is interrupted in the middle of the second.
    assert_resumed_run_is_the_same("segment", SMALL, ade_folder(), tmp_path, 3, *words)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model.num_classes", "null"], r"set --model\.num_classes \(150 for ADE20K\), or name a file of labels"),
        (["--model.num_classes", "3"], r"pixels of the value 4"),
        (["--inference.stride", "20"], r"inference\.stride is 20"),
        (["--model.channels", "100"], "multiple of 64"),
        (["--model.arch", "upernet", "--data.batch_size", "1"], "choose 2 or more"),
        (["--optimizer.layer_decay", "0.9"], "leave it out"),
        (["--data.train_split", "trainning"], r"check --data\.path and --data\.train_split"),
        (["--data.batch_size", "100"], r"choose a smaller --data\.batch_size"),
    ],
)
def test_what_makes_no_sense_is_refused(
    options: list[str], message: str, ade_folder: DrawAde, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(SMALL))
    words = ["--config", str(recipe), "--data.path", str(ade_folder()), "--run.output", str(tmp_path / "run")]
    with pytest.raises(SystemExit):
        main(["segment", "train", *words, *options])
    error = capsys.readouterr().err
    assert re.search(message, error.splitlines()[-1]), error
