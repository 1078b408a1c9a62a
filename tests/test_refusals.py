"""What makes no sense is refused in one sentence, before anything is computed or written."""

import json
import shlex
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
import safetensors.torch
import timm
import torch
from accelerate.state import AcceleratorState
from PIL import Image

from inlinevit import cli
from inlinevit.analysis.analyze import AnalysisSettings
from inlinevit.engine.config import OptimizerConfig, RunConfig, ScheduleConfig
from inlinevit.engine.trainer import Trainer
from inlinevit.tasks.classification.config import (
    AugmentConfig,
    ClassificationDataConfig,
    DistillationConfig,
    ModelConfig,
)
from inlinevit.tasks.detection.config import DetectionAugmentConfig, DetectionDataConfig, DetectorConfig
from inlinevit.tasks.multilabel.config import MultilabelDataConfig, MultilabelLossConfig
from inlinevit.tasks.segmentation.config import (
    InferenceConfig,
    SegmentationAugmentConfig,
    SegmentationDataConfig,
    SegmenterConfig,
)
from inlinevit.utils.validation import has_type, numbers_in

CONFIGS: tuple[Any, ...] = (
    OptimizerConfig,
    ScheduleConfig,
    RunConfig,
    ClassificationDataConfig,
    AugmentConfig,
    ModelConfig,
    DistillationConfig,
    DetectionDataConfig,
    DetectionAugmentConfig,
    DetectorConfig,
    SegmentationDataConfig,
    SegmentationAugmentConfig,
    SegmenterConfig,
    InferenceConfig,
    MultilabelDataConfig,
    MultilabelLossConfig,
    AnalysisSettings,
)
NAN, INFINITE = float("nan"), float("inf")
SENSELESS = ["", " ", NAN, INFINITE, -INFINITE, 10**30, -(10**30), -1, {"a": {"b": 1}}, [[]], object(), 3 + 4j]
# Learning rates and such may be as large as somebody likes: training says when a loss is no longer finite.
UNBOUNDED = {"lr", "weight_decay", "clip_grad", "min_lr", "warmup_lr"}


def default(config: Any, name: str) -> Any:
    (field,) = [field for field in fields(config) if field.name == name]
    return field.default if field.default is not MISSING else field.default_factory()


@pytest.mark.parametrize(
    ("config", "name"),
    [pytest.param(kind, field.name, id=f"{kind.__name__}.{field.name}") for kind in CONFIGS for field in fields(kind)],
)
def test_every_field_refuses_senseless_values(config: Any, name: str) -> None:
    hint, usual = get_type_hints(config)[name], default(config, name)
    values: list[Any] = list(SENSELESS)
    if not has_type(None, hint):
        values.append(None)
    if not isinstance(usual, bool):
        values += [True, False]
    # Each number of a list in its turn.
    if isinstance(usual, tuple | list) and list(numbers_in(usual)):
        for value in (NAN, INFINITE, 10**30, -1, "abc"):
            values += [[*usual[:place], value, *usual[place + 1 :]] for place in range(len(usual))]
        values.append([])
    for value in values:
        if value == 10**30 and name in UNBOUNDED:
            continue
        if value == {"a": {"b": 1}} and name == "kwargs":
            continue
        with pytest.raises(ValueError, match=name) as refusal:
            config(**{name: value})
        assert "\n" not in str(refusal.value)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training run with two classes, and images of them."""
    home = tmp_path_factory.mktemp("home")
    rng = np.random.default_rng(0)
    for name in ("ant", "bee"):
        (home / "data" / "val" / name).mkdir(parents=True)
        for number in range(2):
            pixels = rng.integers(0, 255, (40, 50, 3), np.uint8)
            Image.fromarray(pixels).save(home / "data" / "val" / name / f"{number}.png")
    folder = home / "run"
    folder.mkdir()
    torch.manual_seed(0)
    options = {"patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}
    model = timm.create_model("inline_deit_tiny", num_classes=2, img_size=32, **options)
    safetensors.torch.save_file(model.state_dict(), folder / "model.safetensors")
    config = {
        "model": {"name": "inline_deit_tiny", "img_size": 32, "kwargs": options},
        "data": {"path": str(home / "data"), "workers": 0},
    }
    (folder / "config.yaml").write_text(json.dumps(config))
    (folder / "classes.json").write_text('["ant", "bee"]')
    (folder / "task.json").write_text('{"name": "classification", "command": "inlinevit", "files": ["classes.json"]}')
    return folder


@pytest.fixture(autouse=True)
def nothing_is_trained(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever is not refused must not train for hours."""

    def begin(trainer: Trainer) -> None:
        raise AssertionError("training begins")

    monkeypatch.setattr(Trainer, "run", begin)
    yield
    AcceleratorState._reset_state()


def refused(words: list[str], capfd: pytest.CaptureFixture[str]) -> str:
    """The sentence in which a command is refused."""
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    said = capfd.readouterr()
    assert ended.value.code not in (0, None)
    assert said.out == ""
    (line,) = [line for line in said.err.splitlines() if not line.startswith("warning:")]
    assert line.startswith("error: ")
    return line


def content(folder: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


TINY = "--model.img_size 28 --model.in_chans 1"
TRAIN = [
    ("--model.kwargs.patch_size 0", "patch_size is 0: it should be at least 1"),
    ("--model.kwargs.embed_dim 0", "embed_dim is 0: it should be at least 1"),
    ("--model.kwargs.embed_dim 1000000000", "embed_dim is 1000000000: it should be at most 65536"),
    ("--model.kwargs.depth 1000000000", "depth is 1000000000: it should be at most 1000"),
    ("--model.kwargs.embed_dim 65532 --model.kwargs.depth 9", "GB of memory, but"),
    ("--model.kwargs '{attention: 3}'", "attention is 3: it should be text"),
    ("--model.kwargs.attn_kwargs '{path: x}'", "unknown path 'x'"),
    ("--model.kwargs.mlp_ratio .nan", "mlp_ratio is nan: it should be finite"),
    ("--model.kwargs.features_only true", "features_only stands in model.kwargs"),
    ("--model.kwargs.device meta", "device stands in model.kwargs"),
    ("--model.kwargs.pretrained_cfg '{url: x}'", "pretrained_cfg stands in model.kwargs"),
    ("--model.name vit_tiny_patch16_224 --model.kwargs.embed_dim 0", "cannot be made with embed_dim 0"),
    ("--model.name vit_tiny_patch16_224 --model.kwargs.patch_size 0", "cannot be made with patch_size 0"),
    ("--model.name vit_tiny_patch16_224 --model.img_size 1", "does not support images of 1 pixels"),
    ("--model.img_size 1000000", "model.img_size is 1000000: it should be at most 65536"),
    ("--model.img_size 65536 --data.batch_size 2", "GB of memory, but"),
    ("--model.num_classes 3", "model.num_classes is 3, but embedded has 10 classes: leave it out, or raise it"),
    ("--model.num_classes 100000000000", "model.num_classes is 100000000000: it should be at most"),
    ("--model.checkpoint ''", "model.checkpoint is empty"),
    ("--data.path ''", "data.path is empty"),
    ("--data.path hfds/", "data.path is hfds/, which names no data set: write hfds/NAME"),
    ("--data.path torch/", "data.path is torch/, which names no data set"),
    ("--data.eval_path hfds/", "data.eval_path is hfds/, which names no data set"),
    ("--data.workers 1000000", "data.workers is 1000000: it should be at most 1024"),
    ("--data.batch_size 1000000000000", "are fewer than a batch of 1000000000000"),
    ("--augment.color_jitter .inf", "augment.color_jitter is inf: it should be finite"),
    ("--augment.mixup .inf", "augment.mixup is inf: it should be finite"),
    ("--augment.crop_padding 99999", "augment.crop_padding is 99999: it should be at most 65536"),
    ("--augment.scale null --augment.crop_padding 29", "augment.crop_padding is 29, but images have 28 pixels"),
    ("--augment.repeats 1000000000", "augment.repeats is 1000000000: it should be at most 1000"),
    ("--augment.auto_augment rand-m9-zzz", "rand has no part 'zzz': it has m, n, p, mstd, mmax, inc"),
    ("--augment.auto_augment rand-m9-q3", "rand has no part 'q3'"),
    ("--augment.auto_augment rand-m9-mstdinf", "rand has no part 'mstdinf'"),
    ("--augment.auto_augment rand-n1000000", "n should be followed by a whole number from 1 to 100"),
    ("--augment.auto_augment rand-m9.5", "m should be followed by a whole number from 0 to 100"),
    ("--augment.auto_augment rand-m9-m3", "which has m twice"),
    ("--augment.auto_augment rand-tzzz", "rand has no part 'tzzz'"),
    ("--augment.auto_augment rand-", "rand has no part ''"),
    ("--augment.auto_augment augmix-m5-z", "augmix has no part 'z'"),
    ("--augment.auto_augment original-zzz", "original has no part 'zzz'"),
    ("--augment.auto_augment random", "timm has no augmentation called 'random'"),
    ("--schedule.decay_rate .inf", "schedule.decay_rate is inf: it should be finite"),
    ("--schedule.epochs 1 --schedule.steps 2", "schedule.epochs is 1 and schedule.steps is 2, but only one"),
    ("--optimizer.clip_grad .inf", "optimizer.clip_grad is inf: it should be finite"),
    ("--run.output ''", "run.output is empty: give it a value, or leave it out"),
    ("--run.checkpoint_minutes .inf", "run.checkpoint_minutes is inf: it should be finite"),
    ("--run.grad_accum_steps 1000000000", "do not fill one step"),
    ("--run.trackers '[\"\"]'", "run.trackers is empty"),
    ("--distillation.teacher test_vit --distillation.temperature .inf", "distillation.temperature is inf"),
]


@pytest.mark.parametrize(("options", "sentence"), TRAIN)
def test_training(
    options: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert sentence in refused(["train", *shlex.split(f"{TINY} {options}")], capfd)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.integration
@pytest.mark.parametrize(
    "policy",
    [
        "rand-m9-mstd0.5-inc1",
        "rand-tweights",
        "rand-m9-n3-p0.5-t3a",
        "augmix-m5-w4-d2",
        "original-mstd0.5",
        "v0r",
        "3a",
    ],
)
def test_policies_of_timm_are_good(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AssertionError, match="training begins"):
        cli.main(["train", *TINY.split(), "--augment.auto_augment", policy])


COMMANDS = [
    # Numbers.
    ("eval RUN --img_size 0", "img_size is 0"),
    ("eval RUN --img_size 1000000", "img_size is 1000000: it should be at most 65536"),
    ("eval RUN --img_size 65536", "GB of memory, but"),
    ("eval RUN --crop_pct .nan", "crop_pct is nan: it should be finite"),
    ("eval RUN --data.batch_size 0", "data.batch_size is 0: it should be at least 1"),
    ("eval RUN --data.workers 1000000", "data.workers is 1000000: it should be at most 1024"),
    ("eval RUN --data.max_unreadable -1", "data.max_unreadable is -1"),
    ("eval RUN --data.path hfds/", "names no data set"),
    ("eval RUN --data.path ''", "data.path is empty"),
    ("eval ''", "the model is empty"),
    ("predict RUN IMAGE --top 0", "top is 0: it should be at least 1"),
    ("predict RUN IMAGE --batch_size 0", "batch_size is 0: it should be at least 1"),
    ("predict RUN IMAGE --batch_size 10000000000000000000", "it should be at most"),
    ("predict RUN IMAGE --img_size 1000000", "img_size is 1000000: it should be at most 65536"),
    ("analyze RUN --delta .inf", "delta is inf: it should be finite"),
    ("analyze RUN --epsilon .nan", "epsilon is nan: it should be finite"),
    ("analyze RUN --delta 3", "delta is 3.0: it should be at most 2"),
    ("analyze RUN --images 0", "images is 0: it should be at least 1"),
    ("analyze RUN --batch_size -1", "batch_size is -1: it should be at least 1"),
    ("analyze RUN --img_size 1000000", "img_size is 1000000: it should be at most 65536"),
    ("analyze inline_deit_tiny:patch_size=0 --untrained", "patch_size is 0: it should be at least 1"),
    ("analyze RUN --output ''", "--output is empty"),
    ("bench model --sizes 1048576", "size is 1048576: it should be at most 65536"),
    ("bench model --sizes 65536", "GB of memory, but"),
    ("bench model --batches 1000000000", "batch is 1000000000: it should be at most 65536"),
    ("bench model --models inline_deit_tiny:embed_dim=0", "embed_dim is 0: it should be at least 1"),
    ("bench model --models vit_tiny_patch16_224:num_heads=0", "cannot be made with {'num_heads': 0}"),
    ("bench model --threads 1000000000", "threads is 1000000000: it should be at most 1024"),
    ("bench model --rounds 1000000000000", "rounds is 1000000000000: it should be at most 1000000000"),
    ("bench layer --tokens 1000000000000000000", "it should be at most 4294967296"),
    ("bench layer --tokens 4294967296", "GB of memory, but"),
    ("bench layer --dim 0", "dim is 0: it should be at least 1"),
    ("bench window --windows 1000000000", "window is 1000000000: it should be at most 65536"),
    ("bench detection --height 65536 --width 65536", "GB of memory, but"),
    ("bench loop --steps 1", "steps is 1"),
    ("reproduce --jobs 1000000 --data .", "jobs is 1000000: it should be at most 1024"),
    ("reproduce --seeds 1000000000", "seeds is 1000000000: it should be at most 1000"),
    ("reproduce --steps 0", "steps is 0: it should be at least 1"),
    ("reproduce --output ''", "output is empty"),
    ("demo --steps 0", "steps is 0: it should be at least 1"),
    ("demo --steps 10000000000", "steps is 10000000000: it should be at most 1000000000"),
    ("demo --seed -1", "run.seed is -1"),
    ("demo --output ''", "output is empty"),
    ("figure1 --output ''", "--output is empty"),
    ("models --filter ''", "no model matches ''"),
    ("detect predict RUN IMAGE --output out --threshold .nan", "threshold is nan"),
    ("detect predict RUN IMAGE --output out --device tpu9", "device 'tpu9' cannot be used here"),
    ("detect predict RUN IMAGE --output out --device meta", "device 'meta' cannot be used here"),
    (
        "segment predict RUN IMAGE --output out --inference.scales [.inf]",
        "inference.scales is [inf]: it should be finite",
    ),
    ("segment predict RUN IMAGE --output out --inference.window_size 0", "inference.window_size is 0"),
    ("segment predict RUN IMAGE --output ''", "--output is empty"),
    ("segment eval RUN --inference.min_size 10000000", "inference.min_size is 10000000: it should be at most 65536"),
    # Options that would have no effect.
    ("eval RUN --data.train_split x", "data.train_split"),
    ("eval RUN --data.max_train_samples 3", "data.max_train_samples"),
    ("eval RUN --data.path a --data.eval_path b", "data.path and data.eval_path both name the images"),
    ("eval RUN --data.root downloads", "data.root is for data whose name begins with"),
    ("analyze inline_deit_tiny --untrained --checkpoint x", "choose one of them"),
    ("bench model --name x", "--name is for the files in --output"),
    ("bench model --output out --name a/b", "--name is 'a/b': it should be a plain name"),
    ("bench model --backward --modes optimized", "mode optimized is for inference"),
    ("bench layer --modes optimized", "mode optimized is for classifiers, not for layer"),
    ("bench loop --run.output out", "--run.output would have no effect: leave it out"),
    (
        "bench loop --run.keep_checkpoints 7 --run.log_every 3",
        "--run.keep_checkpoints and --run.log_every would have no effect",
    ),
    ("reproduce --jobs 2", "jobs has no effect without data"),
    ("reproduce --list --jobs 5", "--list trains nothing, so --jobs would have no effect"),
    (
        "reproduce injectivity --data generated",
        "injectivity cannot be trained on generated images: name the folder of CIFAR-10",
    ),
    ("train --config recall --data.path recall:pairs=64", "64 pairs and 1 of the query, but a grid of 8 has 64 cells"),
    ("reproduce --list nothing", "there is no study called 'nothing'"),
    ("models --json --markdown", "not allowed with argument"),
    ("detect eval --results a.json --precision bf16", "leave out --precision, or --results"),
    ("detect eval --results a.json --data.workers 2", "leave out --data.workers, or --results"),
    (
        "detect eval --data.path a --data.eval_annotations b --data.eval_folder c --results d",
        "data.path would not be used",
    ),
    # Outputs.
    ("predict RUN IMAGE --output ''", "--output is empty"),
    ("predict RUN IMAGE --output IMAGE", "is read by this command"),
    ("predict RUN IMAGE --output RUN/model.safetensors", "belongs to a training run"),
    ("predict RUN IMAGE --output RUN/config.yaml", "belongs to a training run"),
    ("predict RUN IMAGE --output RUN/classes.json", "belongs to a training run"),
    ("predict RUN IMAGE --output RUN", "is a folder"),
    ("predict inline_deit_tiny IMAGE --checkpoint IMAGE2 --output IMAGE2", "is read by this command"),
    ("eval RUN --output IMAGE", "cannot be a folder of results (File exists)"),
    ("eval RUN --output DATA/val/results", "whose images are read"),
    ("eval RUN --output DATA/val", "whose images are read"),
    ("analyze RUN --output DATA/val/ant", "whose images are read"),
    ("detect predict RUN RUN/predictions.json --output RUN", "is read by this command"),
    ("segment predict RUN RUN/predictions.json --output RUN", "is read by this command"),
    ("detect predict RUN IMAGE --output IMAGE", "cannot be a folder of results (File exists)"),
    ("bench model --output IMAGE", "cannot be a folder of results (File exists)"),
    ("figure1 --output IMAGE", "cannot be a folder of results (File exists)"),
]


@pytest.mark.parametrize(("words", "sentence"), COMMANDS)
def test_commands(
    words: str,
    sentence: str,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (run / "predictions.json").touch()
    before = content(run.parent)
    data = run.parent / "data"
    places = {"RUN": run, "DATA": data, "IMAGE2": data / "val/bee/1.png", "IMAGE": data / "val/ant/0.png"}
    for name, place in places.items():
        words = words.replace(name, str(place))
    assert sentence in refused(shlex.split(words), capfd)
    assert list(tmp_path.iterdir()) == []
    assert content(run.parent) == before


def test_large_images_are_good(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    image = run.parent / "data" / "val" / "ant" / "0.png"
    cli.main(["predict", str(run), str(image), "--img_size", "2048", "--format", "json"])
    assert len(json.loads(capfd.readouterr().out)) == 1
