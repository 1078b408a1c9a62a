"""Classification as a task: losses, mixing, teachers, and whole runs from folders of images."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import timm
import torch
import torch.nn.functional as F
from PIL import Image

from inlinevit import cli
from inlinevit.cli.train import parse_config
from inlinevit.engine.trainer import Trainer
from inlinevit.tasks.classification.config import (
    AugmentConfig,
    ClassificationConfig,
    ClassificationDataConfig,
    DistillationConfig,
    ModelConfig,
)
from inlinevit.tasks.classification.task import Classification, Teacher, make_mixup

STUDENT = ModelConfig("inline_deit_tiny", img_size=32, in_chans=3)
SMALL = [
    "--model.img_size",
    "16",
    "--model.kwargs.patch_size",
    "8",
    "--model.kwargs.embed_dim",
    "32",
    "--model.kwargs.depth",
    "1",
    "--model.kwargs.num_heads",
    "2",
    "--data.batch_size",
    "4",
    "--data.workers",
    "0",
    "--schedule.epochs",
    "1",
    "--schedule.warmup",
    "0",
]


def images(folder: Path, classes: str = "ab", count: int = 4, size: int = 20) -> Path:
    """A folder with train and val, a folder of noise a class."""
    generator = np.random.default_rng(0)
    for part in ("train", "val"):
        for name in classes:
            for index in range(count):
                file = folder / part / name / f"{index}.jpg"
                file.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(generator.integers(0, 256, (size, size, 3), dtype=np.uint8)).save(file)
    return folder


def train(capsys, *arguments: object) -> tuple[int, str]:
    """The exit code of `inlinevit train` and what it says."""
    try:
        cli.main(["train", *SMALL, *map(str, arguments)])
    except SystemExit as ended:
        return int(ended.code or 0), capsys.readouterr().err
    return 0, capsys.readouterr().out


@pytest.fixture
def teacher_file(tmp_path: Path) -> str:
    torch.manual_seed(0)
    model = timm.create_model("test_vit", num_classes=10, img_size=32)
    safetensors.torch.save_file(model.state_dict(), tmp_path / "teacher.safetensors")
    return str(tmp_path / "teacher.safetensors")


@pytest.mark.parametrize("kind", ["soft", "hard"])
def test_a_teacher_is_content_with_its_own_answers(kind: str, teacher_file: str) -> None:
    teacher = Teacher(DistillationConfig("test_vit", teacher_file, kind, temperature=2.0), STUDENT, 10)
    seen = torch.randn(4, 3, 32, 32)
    # What the student sees is normalised with ImageNet's mean and spread; test_vit is used to 0.5 and 0.5.
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    pixels = seen * std.view(3, 1, 1) + mean.view(3, 1, 1)
    own = teacher.model((pixels - 0.5) / 0.5)
    answers = own if kind == "soft" else 100 * F.one_hot(own.argmax(dim=1), 10).float()
    assert teacher(seen, answers).item() == pytest.approx(0, abs=1e-5)
    assert teacher(seen, -answers).item() > 0.01
    assert not any(parameter.requires_grad for parameter in teacher.parameters())


def test_soft_distillation_is_the_divergence_of_softened_probabilities(teacher_file: str) -> None:
    teacher = Teacher(DistillationConfig("test_vit", teacher_file, "soft", temperature=3.0), STUDENT, 10)
    seen, logits = torch.randn(2, 3, 32, 32), torch.randn(2, 10)
    taught = teacher.model(seen * teacher.scale + teacher.shift)
    p, q = (taught / 3).softmax(1), (logits / 3).softmax(1)
    expected = 9 * (p * (p / q).log()).sum(1).mean()
    assert teacher(seen, logits).item() == pytest.approx(expected.item(), rel=1e-4)


def test_a_teacher_of_other_classes_is_refused(teacher_file: str) -> None:
    with pytest.raises(ValueError, match=r"has 10 classes, but the data have 7: .*--distillation\.checkpoint"):
        Teacher(DistillationConfig("test_vit", teacher_file), STUDENT, 7)
    with pytest.raises(ValueError, match="has 1000 classes, but the data have 10"):
        Teacher(DistillationConfig("inline_deit_tiny"), STUDENT, 10)
    with pytest.raises(ValueError, match=r"no model called 'test_vitt': did you mean test_vit"):
        Teacher(DistillationConfig("test_vitt"), STUDENT, 10)


def task(**changes: object) -> Classification:
    model = ModelConfig(img_size=28, in_chans=1, kwargs={"patch_size": 14, "embed_dim": 32, "depth": 1, "num_heads": 2})
    return Classification(
        ClassificationConfig(data=ClassificationDataConfig(batch_size=4, workers=0), model=model, **changes)
    )


def test_the_loss_is_cross_entropy_with_smoothed_labels() -> None:
    job = task(augment=AugmentConfig(mixup=0, cutmix=0, label_smoothing=0.2))
    logits, labels = torch.randn(4, 10), torch.tensor([1, 2, 3, 4])
    targets = 0.8 * F.one_hot(labels, 10) + 0.02
    expected = -(targets * logits.log_softmax(1)).sum(1).mean()
    loss = job.loss(lambda seen: logits, (torch.zeros(4, 1, 28, 28), labels, []))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


def test_labels_are_smoothed_once_with_mixup() -> None:
    job = task(augment=AugmentConfig(mixup=0.8, cutmix=1.0, label_smoothing=0.2))
    # Images of one class: their mixed labels are the smoothed ones, whatever they are mixed by.
    logits, labels = torch.randn(4, 10), torch.full((4,), 3)
    targets = 0.8 * F.one_hot(labels, 10) + 0.02
    expected = -(targets * logits.log_softmax(1)).sum(1).mean()
    loss = job.loss(lambda seen: logits, (torch.zeros(4, 1, 28, 28), labels, []))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


def test_the_teachers_share_of_the_loss(teacher_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = task(augment=AugmentConfig(mixup=0, cutmix=0))
    logits, batch = torch.randn(4, 10), (torch.zeros(4, 1, 28, 28), torch.tensor([1, 2, 3, 4]), [])
    alone = job.loss(lambda seen: logits, batch).item()
    job.config.distillation.weight = 0.25
    job.teacher = type("Seven", (torch.nn.Module,), {"forward": lambda self, seen, answers: torch.tensor(7.0)})()
    assert job.loss(lambda seen: logits, batch).item() == pytest.approx(0.75 * alone + 0.25 * 7, rel=1e-6)


def test_mixed_images_come_with_mixed_labels() -> None:
    assert make_mixup(AugmentConfig(mixup=0, cutmix=0), 10) is None
    mixup = make_mixup(AugmentConfig(mixup=0.8, cutmix=1.0, label_smoothing=0.1), 10)
    _, targets = mixup(torch.randn(4, 1, 8, 8), torch.tensor([0, 1, 2, 3]))
    assert targets.shape == (4, 10)
    assert torch.allclose(targets.sum(1), torch.ones(4))
    job = task(augment=AugmentConfig())
    assert job.mixup is not None
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10))
    assert job.loss(model, (torch.randn(4, 1, 28, 28), torch.arange(4), [])).isfinite()


def test_a_run_on_a_folder_then_fine_tuning_it_at_another_size_for_other_classes(tmp_path: Path, capsys) -> None:
    code, said = train(capsys, "--data.path", images(tmp_path / "two"), "--run.output", tmp_path / "first")
    assert code == 0
    assert "done: top1" in said
    assert json.loads((tmp_path / "first" / "classes.json").read_text()) == ["a", "b"]
    weights = tmp_path / "first" / "model.safetensors"
    other = images(tmp_path / "three", "abc")
    code, said = train(
        capsys, "--data.path", other, "--run.output", tmp_path / "second", "--model.checkpoint", weights,
        "--model.img_size", 24, "--optimizer.lr", 0, "--schedule.min_lr", 0, "--schedule.warmup_lr", 0,
    )  # fmt: skip
    assert code == 0
    before, after = (safetensors.torch.load_file(tmp_path / run / "model.safetensors") for run in ("first", "second"))
    assert after["head.weight"].shape[0] == 3
    name = "stages.0.blocks.0.mlp.fc1.weight"
    assert torch.equal(before[name], after[name])


@pytest.mark.parametrize("trouble", ["truncated", "one pixel", "no image"])
def test_an_image_that_cannot_be_used_stops_the_run_or_is_skipped(trouble: str, tmp_path: Path, capsys) -> None:
    data = images(tmp_path / "data")
    file = data / "train" / "b" / "1.jpg"
    if trouble == "truncated":
        file.write_bytes(file.read_bytes()[:300])
    elif trouble == "one pixel":
        Image.new("RGB", (1, 1)).save(file)
    else:
        file.write_text("no image")
    code, said = train(capsys, "--data.path", data, "--run.output", tmp_path / "run", "--schedule.epochs", 2)
    assert code == 1
    assert str(file) in said
    assert "--data.max_unreadable 1" in said
    assert "Traceback" not in said
    options = ["--data.max_unreadable", 1, "--schedule.epochs", 2, "--run.resume", "never"]
    code, said = train(capsys, "--data.path", data, "--run.output", tmp_path / "run", *options)
    assert code == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data.path", "{folder}/empty"], "no images|no class"),
        (["--data.path", "{folder}/one"], "one class|two"),
        (["--data.path", "{folder}/nowhere"], "no folder or file at"),
        (["--data.path", "{folder}/three", "--model.num_classes", "2"], "num_classes is 2, but .*three has 3 classes"),
        (["--data.path", "{folder}/three", "--data.batch_size", "100"], "choose a smaller --data.batch_size"),
        (["--data.path", "{folder}/three", "--data.batch_size", "3"], "choose an even one"),
        (["--data.path", "{folder}/three", "--model.name", "inline_deit_tyni"], "did you mean inline_deit_tiny"),
        (["--data.path", "{folder}/three", "--model.kwargs.dept", "2"], "did you mean depth"),
        (["--data.path", "{folder}/three", "--model.checkpoint", "nowhere.pth"], "no file at nowhere.pth"),
        (["--data.path", "{folder}/three", "--optimizer.name", "adamv"], "did you mean"),
        (["--data.path", "{folder}/three", "--schedule.name", "cosin"], "no schedule called 'cosin'"),
        (["--data.path", "{folder}/three", "--run.precision", "fp16"], "fp16"),
    ],
)  # fmt: skip
def test_bad_input_gets_one_sentence(options: list[str], message: str, tmp_path: Path, capsys) -> None:
    (tmp_path / "empty").mkdir()
    images(tmp_path / "one", "a")
    images(tmp_path / "three", "abc")
    filled = [option.format(folder=tmp_path) for option in options]
    code, said = train(capsys, *filled, "--run.output", tmp_path / "run")
    assert code == 1
    lines = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert re.search(message, lines[0]), lines[0]
    assert "Traceback" not in said


def test_a_loss_that_is_no_number_stops_the_run(tmp_path: Path, capsys) -> None:
    options = ["--optimizer.lr", 1e30, "--optimizer.lr_base_size", 0, "--schedule.epochs", 3]
    code, said = train(capsys, "--data.path", images(tmp_path / "two"), "--run.output", tmp_path / "run", *options)
    assert code == 1
    assert "try a lower learning rate" in said
    assert list((tmp_path / "run").glob("diverged-step-*/report.json"))


def test_a_task_learns(tmp_path: Path) -> None:
    """Some steps on the embedded images lower the loss."""
    config = parse_config(
        [
            "--config",
            "embedded",
            "--run.output",
            str(tmp_path / "run"),
            "--schedule.steps",
            "40",
            "--schedule.warmup",
            "4",
            "--data.max_train_samples",
            "400",
            "--run.log_every",
            "5",
            "--run.eval_every",
            "40",
        ]
    )
    Trainer(Classification(config), config).run()
    losses = [json.loads(line).get("loss") for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [loss for loss in losses if loss is not None]
    assert losses[-1] < 0.85 * losses[0]
