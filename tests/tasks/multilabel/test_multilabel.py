"""Multi-label classification: the CSV file, losses and metrics, and the commands from training to predictions."""

import csv
import io
import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from accelerate import Accelerator
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from inlinevit.cli import main
from inlinevit.cli.train import parse_config
from inlinevit.engine.evaluator import evaluate_model
from inlinevit.tasks.classification.config import AugmentConfig, ImageDataOptions
from inlinevit.tasks.classification.transforms import InputSpec
from inlinevit.tasks.multilabel.config import (
    MultilabelConfig,
    MultilabelDataConfig,
    MultilabelEvalOptions,
    MultilabelLossConfig,
)
from inlinevit.tasks.multilabel.dataset import open_csv
from inlinevit.tasks.multilabel.metrics import MultilabelEvaluation, MultilabelEvaluator, multilabel_loss

COLORS = {"red": 0, "green": 1, "blue": 2}
SPEC = InputSpec(size=4, mean=(0.0,) * 3, std=(1.0,) * 3, interpolation="nearest", crop_pct=1.0, crop_mode="center")


def draw(path: Path, labels: list[str], seed: int) -> None:
    """A dark image in which a patch of each colour of its labels is bright."""
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 60, (32, 32, 3), np.uint8)
    for label in labels:
        top, left = rng.integers(0, 16, 2)
        pixels[top : top + 16, left : left + 16, COLORS[label]] = 250
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


@pytest.fixture
def write_csv(tmp_path: Path) -> Callable[[str], MultilabelDataConfig]:
    """Writes a CSV file beside three images, and gives the configuration of its data."""
    for number in range(3):
        draw(tmp_path / "data" / "images" / f"{number}.png", ["red"], number)
    Image.new("RGB", (8, 8)).save(tmp_path / "outside.png")

    def write(content: str) -> MultilabelDataConfig:
        (tmp_path / "data" / "all.csv").write_text(content)
        return MultilabelDataConfig(path=str(tmp_path / "data" / "all.csv"), workers=0)

    return write


def test_rows_and_labels(write_csv: Callable[[str], MultilabelDataConfig]) -> None:
    config = write_csv(
        "split,image,labels\ntrain,images/0.png,red blue\ntrain,images/1.png,green|red;tall\nval,images/2.png,\n"
    )
    source = open_csv(config, training=True)
    assert source.classes == ["blue", "green", "red", "tall"]
    assert source.targets.tolist() == [[1, 0, 1, 0], [0, 1, 1, 1]]
    assert [Path(source.name(index)).name for index in range(len(source))] == ["0.png", "1.png"]
    held_out = open_csv(config, training=False, classes=source.classes)
    assert held_out.targets.tolist() == [[0, 0, 0, 0]]
    assert held_out.read(0)[0].size == (32, 32)


def test_files_without_splits(write_csv: Callable[[str], MultilabelDataConfig]) -> None:
    config = write_csv("image,labels\nimages/0.png,red\nimages/1.png,blue\n")
    assert len(open_csv(config, training=True)) == 2
    with pytest.raises(ValueError, match=r"has no column split: add it, or name the images .* --data\.eval_path"):
        open_csv(config, training=False)
    # The data of `eval` stand for themselves.
    assert len(open_csv(ImageDataOptions().applied_to(config, None), training=False)) == 2
    config.train_split = "fold1"
    with pytest.raises(ValueError, match="has no column split"):
        open_csv(config, training=True)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("image,labels\nimages/0.png,red\nimages/9.png,red\n", r"line 3: there is no image at .*9\.png: correct or"),
        ("image,labels\n../outside.png,red\n", r"line 2: \.\./outside\.png leads out of the folder of the file"),
        ("image,labels\n/etc/passwd,red\n", r"line 2: /etc/passwd leads out of"),
        ("image,labels\nimages/0.png,red\nimages/../images/0.png,blue\n", "line 3: the image is already in line 2"),
        ("image,labels\nimages/0.png,red red\n", "line 2: a label occurs twice"),
        ("image,labels\nimages/0.png\n", "line 2: it needs 2 fields"),
        ("image,labels\nimages/0.png,red,blue\n", "line 2: it needs 2 fields"),
        ("file,labels\nimages/0.png,red\n", r"line 1: the columns are .*: write image,labels\[,split\]"),
        ("image,labels,split\nimages/0.png,red,val\n", r"has no images of the split train: .* --data\.train_split"),
        ("", "line 1: the columns are"),
    ],
)
def test_wrong_files_are_refused_with_the_line(
    content: str, message: str, write_csv: Callable[[str], MultilabelDataConfig]
) -> None:
    with pytest.raises(ValueError, match=message):
        open_csv(write_csv(content), training=True)


def test_unknown_labels_and_missing_files_are_refused(write_csv: Callable[[str], MultilabelDataConfig]) -> None:
    config = write_csv("image,labels\nimages/0.png,red\nimages/1.png,huge\n")
    with pytest.raises(ValueError, match=r"line 3: training does not know \['huge'\]"):
        open_csv(config, training=True, classes=["red"])
    with pytest.raises(FileNotFoundError, match="no CSV file at nothing"):
        open_csv(MultilabelDataConfig(path="nothing"), training=True)


def test_options_that_do_not_apply_are_refused() -> None:
    with pytest.raises(ValueError, match=r"augment\.mixup and augment\.cutmix do not apply"):
        MultilabelConfig(augment=AugmentConfig(label_smoothing=0))
    with pytest.raises(ValueError, match=r"loss\.clip is 1\.0: it should be from 0 to below 1"):
        MultilabelLossConfig(clip=1.0)
    with pytest.raises(ValueError, match=r"threshold is -0\.1: it should be at least 0"):
        MultilabelEvalOptions(threshold=-0.1)


def test_losses() -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(5, 7, requires_grad=True), torch.randint(2, (5, 7)).float()
    bce = binary_cross_entropy_with_logits(logits, targets)
    assert torch.equal(multilabel_loss(logits, targets, MultilabelLossConfig()), bce)
    # Without focusing and clipping, the asymmetric loss is the sum of the cross-entropies of an image.
    plain = MultilabelLossConfig(name="asymmetric", gamma_neg=0, gamma_pos=0, clip=0)
    torch.testing.assert_close(multilabel_loss(logits, targets, plain), 7 * bce)
    asymmetric = MultilabelLossConfig(name="asymmetric", gamma_neg=4, gamma_pos=1, clip=0.05)
    p = logits.detach().sigmoid().double()
    m = (p - 0.05).clamp(min=0)
    expected = -(targets * (1 - p) * p.log() + (1 - targets) * m**4 * (1 - m).log()).sum(1).mean()
    torch.testing.assert_close(multilabel_loss(logits, targets, asymmetric).double(), expected)
    extreme = torch.tensor([[-200.0, 200.0]], requires_grad=True)
    multilabel_loss(extreme, torch.tensor([[1.0, 0.0]]), asymmetric).backward()
    assert extreme.grad is not None
    assert extreme.grad.isfinite().all()


class Brightness(nn.Module):
    """Takes the mean of each channel for a logit."""

    def forward(self, images: Tensor) -> Tensor:
        return 4 * (images.mean(dim=(2, 3)) - 0.5)


def average_precision(scores: list[float], truth: list[bool]) -> float:
    """Mean over the positives of the precision at their rank."""
    ranked = [hit for _, hit in sorted(zip(scores, truth, strict=True), reverse=True)]
    return float(np.mean([sum(ranked[: rank + 1]) / (rank + 1) for rank, hit in enumerate(ranked) if hit]))


def test_metrics_are_those_of_the_definitions(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    values, truth = rng.integers(0, 255, (12, 3)), rng.integers(0, 2, (12, 3)).astype(bool)
    truth[:, 2] = False
    lines = ["image,labels"]
    for number, (value, row) in enumerate(zip(values, truth, strict=True)):
        Image.new("RGB", (4, 4), tuple(map(int, value))).save(tmp_path / f"{number}.png")
        lines.append(f"{number}.png,{' '.join(name for name, has in zip('abc', row, strict=True) if has)}")
    (tmp_path / "all.csv").write_text("\n".join(lines))
    config = MultilabelDataConfig(path=str(tmp_path / "all.csv"), batch_size=5, workers=0)
    source = open_csv(config, training=True, classes=["a", "b", "c"])
    outcome: MultilabelEvaluation = evaluate_model(
        Brightness(), MultilabelEvaluator(source, SPEC, config, threshold=0.6), Accelerator(cpu=True)
    )
    expected = [average_precision(values[:, label].tolist(), truth[:, label].tolist()) for label in range(2)]
    assert outcome.images == 12
    assert outcome.average_precision[:2].tolist() == pytest.approx(expected, abs=1e-5)
    # Labels without images have no precision, and do not count.
    assert math.isnan(outcome.average_precision[2])
    assert outcome.numbers()["map"] == pytest.approx(np.mean(expected), abs=1e-5)
    predicted = 1 / (1 + np.exp(-4 * (values / 255 - 0.5))) >= 0.6
    f1 = [2 * (predicted & truth)[:, label].sum() / (predicted.sum(0) + truth.sum(0))[label] for label in range(2)]
    assert outcome.numbers()["f1"] == pytest.approx(np.mean(f1))
    assert outcome.per_class()[2] == {
        "label": "c",
        "images": 0,
        "predicted": predicted[:, 2].sum(),
        "ap": None,
        "f1": None,
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has learned which colours are in small images."""
    folder = tmp_path_factory.mktemp("multilabel")
    rng = np.random.default_rng(0)
    lines = ["image,labels,split"]
    for number in range(80):
        labels = [name for name in COLORS if rng.random() < 0.5]
        draw(folder / "images" / f"{number}.png", labels, number)
        lines.append(f"images/{number}.png,{';'.join(labels)},{'train' if number < 64 else 'val'}")
    (folder / "labels.csv").write_text("\n".join(lines))
    recipe = {
        "data": {"path": str(folder / "labels.csv"), "batch_size": 16, "workers": 0},
        "augment": {"scale": None, "crop_padding": 0, "color_jitter": 0.0, "auto_augment": None, "random_erasing": 0.0},
        "model": {"name": "test_convnext", "img_size": 32, "drop_path_rate": 0.0},
        "loss": {"name": "asymmetric"},
        "optimizer": {"lr": 4e-3, "lr_base_size": 0, "weight_decay": 0.0},
        "schedule": {"epochs": 12, "warmup": 0},
        "run": {"output": str(folder / "run"), "eval_every": 12},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    main(["multilabel", "train", "--config", str(folder / "recipe.yaml")])
    return folder


def test_colours_are_learned(run: Path) -> None:
    results = json.loads((run / "run" / "results.json").read_text())
    assert results["metrics"]["map"] > 0.95
    assert json.loads((run / "run" / "classes.json").read_text()) == ["blue", "green", "red"]


def test_eval(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["multilabel", "eval", str(run / "run"), "--output", str(tmp_path / "out"), "--threshold", "0.4"])
    told = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert (told["images"], told["threshold"], told["classes"]) == (16, 0.4, ["blue", "green", "red"])
    assert told["map"] == json.loads((run / "run" / "results.json").read_text())["metrics"]["map"]
    with (tmp_path / "out" / "per_class.csv").open(newline="") as stream:
        assert [row["label"] for row in csv.DictReader(stream)] == ["blue", "green", "red"]
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("mAP %", "F1 %", "AP %", "green", "16 images"))
    main(["multilabel", "eval", str(run / "run"), "--data.eval_split", "train", "--output", str(tmp_path / "out")])
    assert json.loads((tmp_path / "out" / "evaluation.json").read_text())["images"] == 64


def test_predict(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, labels in {"both": ["red", "blue"], "none": []}.items():
        draw(tmp_path / f"{name}.png", labels, 99)
    (tmp_path / "broken.png").write_text("nothing")
    command = ["multilabel", "predict", str(run / "run"), str(tmp_path)]
    with pytest.raises(SystemExit) as ended:
        main([*command, "--format", "json"])
    assert ended.value.code == 1
    told = {Path(one["file"]).stem: one for one in json.loads(capsys.readouterr().out)}
    assert {one["class"] for one in told["both"]["predictions"]} == {"red", "blue"}
    assert all(one["probability"] >= 0.5 for one in told["both"]["predictions"])
    assert told["none"]["predictions"] == []
    assert "cannot be used" in told["broken"]["error"]
    with pytest.raises(SystemExit):
        main([*command, "--format", "csv", "--threshold", "0"])
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert len(rows) == 3 + 3 + 1


def test_the_run_of_another_task_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["eval", str(run / "run")])
    assert "holds a multilabel run, not a classification run: use inlinevit multilabel eval" in capsys.readouterr().err


def test_the_shipped_recipe() -> None:
    config = parse_config(["--config", "multilabel_inline_swin_tiny"], task="multilabel")
    assert config.loss == MultilabelLossConfig("asymmetric", 4.0, 0.0, 0.05)
    assert not config.augment.mixes
