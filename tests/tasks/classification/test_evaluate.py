"""Evaluation: the numbers, several processes, labels, and the command with its files."""

import csv
import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import timm
import torch
import torch.nn.functional as F
import yaml
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from PIL import Image
from torch import Tensor, nn

from inlinevit.engine.config import to_plain
from inlinevit.engine.evaluator import eval_command as evaluate_task
from inlinevit.engine.evaluator import evaluate_model
from inlinevit.tasks.classification.config import (
    ClassificationConfig,
    ClassificationDataConfig,
    ClassificationDataOptions,
    ClassificationEvalOptions,
    ModelConfig,
)
from inlinevit.tasks.classification.metrics import ClassificationEvaluation, ClassificationEvaluator
from inlinevit.tasks.classification.predictor import (
    ClassificationPredictor,
    find_classification_run,
    imagenet_classes,
)
from inlinevit.tasks.classification.task import Classification
from inlinevit.tasks.classification.transforms import InputSpec
from tests import ROOT

SPEC = InputSpec(size=4, mean=(0.0,), std=(1.0,), interpolation="bilinear", crop_pct=1.0, crop_mode="center")


class Numbers:
    """An image source: image i is all of brightness i."""

    def __init__(self, labels: list[int], classes: list[str] | None = None, broken: tuple[int, ...] = ()) -> None:
        self.labels, self.classes, self.broken = labels, classes, broken

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> tuple[Image.Image, int]:
        if index in self.broken:
            raise OSError("broken")
        return Image.new("L", (4, 4), index), self.labels[index]

    def name(self, index: int) -> str:
        return f"image {index}"


class Table(nn.Module):
    """A model that gives image i row i of a table."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, images: Tensor) -> Tensor:
        return self.logits[(255 * images.mean(dim=(1, 2, 3))).round().long()]


def run(logits: Tensor, labels: list[int], **options: object) -> ClassificationEvaluation:
    config = ClassificationDataConfig(batch_size=3, workers=0, max_unreadable=len(labels))
    evaluator = ClassificationEvaluator(Numbers(labels, **options), SPEC, config, logits.shape[1])
    return evaluate_model(Table(logits), evaluator, Accelerator(cpu=True))


def eval_command(model: str, data: ClassificationDataOptions, **options: Any) -> None:
    evaluate_task(Classification, model, ClassificationEvalOptions(data=data, **options))


def evaluation_data(model: str, options: ClassificationDataOptions) -> ClassificationDataConfig:
    run = find_classification_run(model)
    return options.applied_to(None if run is None else run.config.data, ClassificationDataConfig())


def expected_calibration(logits: Tensor, labels: Tensor) -> float:
    """The expected calibration error, from its definition."""
    confidence, choice = logits.softmax(dim=1).max(dim=1)
    bins = (confidence * 15).ceil().clamp(1, 15)
    gaps = [
        (bins == b).float().mean() * ((choice == labels)[bins == b].float().mean() - confidence[bins == b].mean()).abs()
        for b in bins.unique()
    ]
    return float(sum(gaps))


@pytest.mark.parametrize("classes", [2, 4, 9])
def test_numbers_are_those_of_the_definitions(classes: int) -> None:
    generator = torch.Generator().manual_seed(classes)
    logits = 2 * torch.randn(50, classes, generator=generator)
    labels = torch.randint(classes, (50,), generator=generator)
    outcome = run(logits, labels.tolist())
    ranks = logits.argsort(dim=1, descending=True) == labels[:, None]
    assert outcome.images == 50
    assert outcome.top1 == pytest.approx(100 * ranks[:, 0].float().mean().item())
    assert outcome.top5 == pytest.approx(100 * ranks[:, :5].any(dim=1).float().mean().item())
    assert outcome.loss == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-5)
    assert outcome.calibration_error == pytest.approx(100 * expected_calibration(logits, labels), rel=1e-4)
    choice = logits.argmax(dim=1)
    for label in range(classes):
        of_class = labels == label
        assert outcome.confusion[label].tolist() == torch.bincount(choice[of_class], minlength=classes).tolist()
        accuracy = outcome.class_accuracy[label]
        assert accuracy == pytest.approx(100 * (choice == labels)[of_class].float().mean().item())
    assert set(outcome.numbers()) == {"top1", "top5", "calibration_error", "loss"}


def test_first_batch_does_not_decide_for_the_others() -> None:
    """All right in the first batch, only among the first five in the second."""
    # Besides the one chosen, classes come in their order.
    logits = F.one_hot(torch.tensor([0, 1, 2, 1, 2, 3]), 7) - torch.arange(7) / 10
    outcome = run(logits, [0, 1, 2, 0, 0, 0])
    assert (outcome.top1, outcome.top5) == (50.0, 100.0)


def test_logits_between_0_and_1_are_no_probabilities() -> None:
    outcome = run(torch.zeros(4, 10), [0, 0, 0, 1])
    # All are sure to a tenth, and three of four are right.
    assert outcome.calibration_error == pytest.approx(65.0, abs=1e-3)


def test_ranks_hold_where_probabilities_underflow() -> None:
    logits = torch.arange(20.0).flip(0)[None] * 200
    assert run(logits, [4]).top5 == 100.0
    assert run(logits, [5]).top5 == 0.0


def test_class_without_images() -> None:
    assert run(torch.eye(3), [0, 1, 1]).class_accuracy == [100.0, 100.0 / 2, None]


def test_loss_that_is_no_number_is_told() -> None:
    logits = torch.eye(3)
    logits[1] = torch.nan
    assert np.isnan(run(logits, [0, 1, 2]).loss)


@pytest.mark.filterwarnings("ignore:image")
def test_images_that_cannot_be_used_are_not_counted() -> None:
    outcome = run(torch.eye(6), [0, 1, 2, 3, 4, 5], broken=(0, 1, 2, 4))
    assert outcome.images == 2
    assert outcome.top1 == 100.0
    with pytest.raises(ValueError, match="not one image"):
        run(torch.eye(3), [0, 1, 2], broken=(0, 1, 2))


def test_stops_at_the_first_bad_image_if_none_are_allowed() -> None:
    source, config = Numbers([0, 1], broken=(1,)), ClassificationDataConfig(workers=0)
    with pytest.raises(ValueError, match="image 1 cannot be used"):
        evaluate_model(Table(torch.eye(2)), ClassificationEvaluator(source, SPEC, config, 2), Accelerator(cpu=True))


def test_labels_are_translated() -> None:
    source, config = Numbers([0, 1, 1]), ClassificationDataConfig(workers=0)
    evaluator = ClassificationEvaluator(source, SPEC, config, 9, labels=[7, 3])
    outcome = evaluate_model(Table(torch.eye(9)[[7, 3, 4]]), evaluator, Accelerator(cpu=True))
    assert outcome.confusion[7, 7] == outcome.confusion[3, 3] == outcome.confusion[3, 4] == 1
    assert outcome.images == 3


SEVERAL_PROCESSES = """
import json
import sys
import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import fully_shard
from inlinevit.tasks.classification.config import ClassificationDataConfig
from inlinevit.engine.evaluator import evaluate_model
from inlinevit.tasks.classification.metrics import ClassificationEvaluator

sys.path.insert(0, {folder!r})
from tests.tasks.classification.test_evaluate import SPEC, Numbers, Table

class Normed(nn.Module):
    def __init__(self, logits):
        super().__init__()
        # Its buffers make DistributedDataParallel talk, also in evaluation.
        self.table, self.norm = Table(logits), nn.BatchNorm1d(logits.shape[1])

    def forward(self, images):
        return self.norm(self.table(images))

accelerator = Accelerator(cpu=True)
assert accelerator.num_processes == 2
torch.manual_seed(0)
logits, labels = torch.randn(25, 7), torch.randint(7, (25,)).tolist()
outcomes = []
for images in (25, 1):
    for kind in ("plain", "ddp", "sharded"):
        model = Normed(logits).eval()
        if kind == "ddp":
            model = accelerator.prepare(model)
            assert type(model).__name__ == "DistributedDataParallel"
        if kind == "sharded":
            fully_shard(model, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (2,)))
        config = ClassificationDataConfig(batch_size=3, workers=0)
        outcome = evaluate_model(model, ClassificationEvaluator(Numbers(labels[:images]), SPEC, config, 7), accelerator)
        outcomes.append([images, kind, outcome.confusion.tolist(), outcome.numbers()])
with open(sys.argv[1] + str(accelerator.process_index), "w") as stream:
    json.dump(outcomes, stream)
accelerator.end_training()
"""


@pytest.mark.slow
def test_two_processes_count_every_image_once(tmp_path: Path) -> None:
    """Parts of different sizes, and one of none: the same as alone, on both processes, whatever wraps the model."""
    script = tmp_path / "script.py"
    script.write_text(SEVERAL_PROCESSES.format(folder=str(ROOT)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run([*command, str(tmp_path / "outcome")], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    torch.manual_seed(0)
    logits, labels = torch.randn(25, 7), torch.randint(7, (25,)).tolist()
    outcomes = [json.loads((tmp_path / f"outcome{process}").read_text()) for process in range(2)]
    assert outcomes[0] == outcomes[1]
    assert len(outcomes[0]) == 6
    for images, kind, confusion, numbers in outcomes[0]:
        alone = run(logits / (1 + 1e-5) ** 0.5, labels[:images])
        assert confusion == alone.confusion.tolist(), kind
        assert numbers == pytest.approx(alone.numbers(), rel=1e-4), kind


def classifier(num_classes: int, classes: list[str] | None) -> ClassificationPredictor:
    return ClassificationPredictor(nn.Identity(), "model", ModelConfig(), num_classes, classes, SPEC)


def test_classes_are_matched_by_name() -> None:
    assert classifier(3, ["bird", "cat", "dog"]).match_classes(["dog", "cat"]) == [2, 1]
    assert classifier(3, ["bird", "cat", "dog"]).match_classes(None) is None
    with pytest.raises(ValueError, match=r"does not know 1 of the 2 classes of the images \(cow\)"):
        classifier(3, ["bird", "cat", "dog"]).match_classes(["cow", "cat"])
    with pytest.raises(ValueError, match="does not know 2 of the 2"):
        classifier(3, None).match_classes(["a", "b"])


def test_imagenet_is_matched_by_wordnet_ids_and_by_words() -> None:
    imagenet = classifier(1000, imagenet_classes(1000))
    assert imagenet.match_classes(["n01443537", "n15075141"]) == [1, 999]
    assert imagenet.match_classes(["tench, Tinca tinca", "bolete"]) == [0, 997]


def test_as_many_classes_under_other_names_are_matched_in_order() -> None:
    assert classifier(2, None).match_classes(["0", "1"]) == [0, 1]
    with pytest.warns(UserWarning, match="matched by their order"):
        assert classifier(2, ["cat", "dog"]).match_classes(["x", "y"]) == [0, 1]
    # One known name among unknown ones: most likely another data set.
    with pytest.raises(ValueError, match="does not know 1 of the 2"):
        classifier(2, ["cat", "dog"]).match_classes(["cat", "y"])


def image_folder(path: Path, classes: list[str], images: int = 2) -> Path:
    rng = np.random.default_rng(0)
    for name in classes:
        (path / name).mkdir(parents=True)
        for number in range(images):
            Image.fromarray(rng.integers(0, 255, (40, 50, 3), np.uint8)).save(path / name / f"{number}.png")
    return path


def test_command_on_some_classes_of_imagenet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = timm.create_model("test_vit")
    nn.init.zeros_(model.head.weight)
    # Whatever it is shown, the model sees a goldfish.
    model.head.bias.data = F.one_hot(torch.tensor(1), 1000).float()
    safetensors.torch.save_file(model.state_dict(), tmp_path / "weights.safetensors")
    data = ClassificationDataOptions(path=str(image_folder(tmp_path / "images", ["n01443537", "n02085620"])), workers=0)
    eval_command(
        "test_vit", data, checkpoint=str(tmp_path / "weights.safetensors"), img_size=48, output=str(tmp_path / "out")
    )
    shown = capsys.readouterr().out
    assert "50.00" in shown
    assert "48 × 48" in shown
    assert "goldfish" in shown
    told = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert (told["top1"], told["images"], told["img_size"]) == (50.0, 4, 48)
    assert [one["accuracy"] for one in told["per_class"][:2]] == [None, 100.0]
    assert told["confusion"][151][1] == 2
    with (tmp_path / "out" / "per_class.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == 1000
    assert rows[1] == {
        "index": "1", "class": "goldfish, Carassius auratus", "images": "2", "right": "2", "accuracy": "100.0"
    }  # fmt: skip
    assert rows[0]["accuracy"] == ""
    with Image.open(tmp_path / "out" / "confusion.png") as picture:
        assert min(picture.size) > 1000


def test_command_on_the_data_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Labels are those of the run's classes, and the images those that it was evaluated on."""
    image_folder(tmp_path / "data" / "train", ["ant", "bee"])
    image_folder(tmp_path / "data" / "val", ["ant", "bee"], images=3)
    run_folder = tmp_path / "run"
    run_folder.mkdir()
    model = timm.create_model("test_vit", num_classes=2, img_size=32)
    nn.init.zeros_(model.head.weight)
    model.head.bias.data = torch.tensor([1.0, 0.0])
    safetensors.torch.save_file(model.state_dict(), run_folder / "model.safetensors")
    config = f"model: {{name: test_vit, img_size: 32}}\ndata: {{path: {tmp_path / 'data'}, workers: 0}}\n"
    (run_folder / "config.yaml").write_text(config)
    (run_folder / "classes.json").write_text('["bee", "ant"]')
    eval_command(str(run_folder), ClassificationDataOptions(workers=0), output=str(tmp_path / "out"))
    told = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert told["classes"] == ["bee", "ant"]
    assert told["confusion"] == [[3, 0], [3, 0]]
    # Other images, in a plain folder.
    other = image_folder(tmp_path / "other", ["ant", "bee"], images=1)
    eval_command(
        str(run_folder), ClassificationDataOptions(eval_path=str(other), workers=0), output=str(tmp_path / "out")
    )
    assert json.loads((tmp_path / "out" / "evaluation.json").read_text())["confusion"] == [[1, 0], [1, 0]]
    assert "32 × 32" in capsys.readouterr().out


@pytest.fixture
def run_folder(tmp_path: Path) -> str:
    """A run of two classes, with data of its own."""
    image_folder(tmp_path / "data", ["ant", "bee"], images=3)
    folder = tmp_path / "run"
    folder.mkdir()
    torch.manual_seed(0)
    model = timm.create_model("test_vit", num_classes=2, img_size=32)
    safetensors.torch.save_file(model.state_dict(), folder / "model.safetensors")
    config = f"model: {{name: test_vit, img_size: 32}}\ndata: {{path: {tmp_path / 'data'}, workers: 0}}\n"
    (folder / "config.yaml").write_text(config)
    return str(folder)


def test_mistakes_are_told_before_the_work(run_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    data = ClassificationDataOptions(workers=0)
    with pytest.raises(OSError, match=r"file cannot be a folder of results \(File exists\): name another one"):
        eval_command(run_folder, data, output=str(tmp_path / "file"))
    with pytest.raises(ValueError, match="img_size is 0"):
        eval_command(run_folder, data, img_size=0)
    with pytest.raises(ValueError, match=r"crop_pct is 0\.0: it should be above 0"):
        eval_command(run_folder, data, crop_pct=0.0)
    with pytest.raises(FileNotFoundError, match="no folder at runs/nothing: name the folder of a training run"):
        eval_command("runs/nothing", data)
    assert capsys.readouterr().out == ""


@pytest.mark.skipif(torch.accelerator.is_available(), reason="float16 is for GPUs")
def test_float16_needs_a_gpu(run_folder: str) -> None:
    AcceleratorState._reset_state()
    with pytest.raises(ValueError, match="fp16 needs a GPU"):
        eval_command(run_folder, ClassificationDataOptions(workers=0), precision="fp16")
    AcceleratorState._reset_state()


RUN_DATA = ClassificationDataConfig(
    path="torch/cifar10", root="downloads", eval_split="test", batch_size=8, max_unreadable=3
)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, RUN_DATA),
        ({"eval_split": "validation"}, replace(RUN_DATA, eval_split="validation")),
        ({"root": "elsewhere"}, replace(RUN_DATA, root="elsewhere")),
        ({"batch_size": 128, "workers": 2}, replace(RUN_DATA, batch_size=128, workers=2)),
        ({"max_unreadable": 0}, replace(RUN_DATA, max_unreadable=0)),
        # Other data, for which the root and the split of the run mean nothing.
        ({"path": "embedded"}, ClassificationDataConfig(path="embedded")),
        ({"eval_path": "embedded"}, ClassificationDataConfig(path="embedded")),
        (
            {"path": "torch/mnist", "root": "there", "eval_split": "test"},
            ClassificationDataConfig(path="torch/mnist", root="there", eval_split="test"),
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_what_is_said_counts_even_if_it_is_the_default(
    said: dict[str, object], expected: ClassificationDataConfig, tmp_path: Path
) -> None:
    config = to_plain(ClassificationConfig(data=RUN_DATA))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    if said.keys() & {"path", "eval_path"}:
        # The images stand for themselves: a part for training is not looked for.
        expected = replace(expected, eval_path=expected.path)
    assert evaluation_data(str(tmp_path), ClassificationDataOptions(**said)) == expected
    # Without a run, the defaults are those of training.
    named = evaluation_data("test_vit", ClassificationDataOptions(path="images"))
    assert named == ClassificationDataConfig(path="images", eval_path="images")


def test_options_without_effect_are_refused(run_folder: str) -> None:
    with pytest.raises(ValueError, match=r"data\.path and data\.eval_path both name the images"):
        ClassificationDataOptions(path="a", eval_path="b")
    with pytest.raises(ValueError, match=r"data\.root is for data whose name begins with torch/, hfds/, wds/, not for"):
        evaluation_data(run_folder, ClassificationDataOptions(root="downloads"))
    for name in ("train_split", "max_train_samples"):
        with pytest.raises(TypeError):
            ClassificationDataOptions(**{name: 3})


def test_other_images_than_those_of_the_run(
    run_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A name that is the default of --data.path is another set of images, with other classes."""
    with pytest.raises(ValueError, match="the model does not know 10 of the 10 classes of the images"):
        eval_command(run_folder, ClassificationDataOptions(path="embedded", workers=0), output=str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    other = image_folder(tmp_path / "other", ["ant", "bee"], images=5)
    eval_command(run_folder, ClassificationDataOptions(path=str(other)), output=str(tmp_path / "out"))
    told = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert (told["images"], told["data"]) == (10, str(other))


def test_a_full_disk_leaves_the_evaluation_before(
    run_folder: str, tmp_path: Path, file_limit: Callable[[int], AbstractContextManager[None]]
) -> None:
    """Whatever file does not fit: here it is the picture."""
    output, data = tmp_path / "out", ClassificationDataOptions(workers=0)
    output.mkdir()
    for name in ("evaluation.json", "per_class.csv", "confusion.png"):
        (output / name).write_text("old")
    with file_limit(4096), pytest.raises(OSError, match=r"^no space left on the disk for .*confusion\.png: free some"):
        eval_command(run_folder, data, output=str(output))
    assert (output / "confusion.png").read_text() == "old"
    assert json.loads((output / "evaluation.json").read_text())["images"] == 6
    assert len(list(output.iterdir())) == 3


def test_results_do_not_go_among_images(run_folder: str, tmp_path: Path) -> None:
    for output in ("data", "data/ant", "data/new"):
        with pytest.raises(ValueError, match="whose images are read: name another folder"):
            eval_command(run_folder, ClassificationDataOptions(), output=str(tmp_path / output))
    with pytest.raises(ValueError, match="belongs to a training run"):
        eval_command(run_folder, ClassificationDataOptions(), output=f"{run_folder}/checkpoints/step-5")
