"""What configurations refuse, and that they come back from YAML as they were."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from inlinevit.cli.train import parse_config
from inlinevit.engine.config import (
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    ScheduleConfig,
    TrainConfig,
    check_unchanged,
    flattened,
    to_plain,
)
from inlinevit.engine.runs import open_run
from inlinevit.tasks.classification.config import (
    AugmentConfig,
    ClassificationConfig,
    ClassificationDataConfig,
    DistillationConfig,
    ModelConfig,
)
from inlinevit.tasks.detection.config import DetectionConfig
from inlinevit.tasks.multilabel.config import MultilabelConfig
from inlinevit.tasks.segmentation.config import SegmentationConfig

SECTIONS: dict[str, Callable[..., Any]] = {
    "data": ClassificationDataConfig,
    "augment": AugmentConfig,
    "model": ModelConfig,
    "distillation": DistillationConfig,
    "optimizer": OptimizerConfig,
    "schedule": ScheduleConfig,
    "run": RunConfig,
    "parallel": ParallelConfig,
}

NAN, INFINITE = float("nan"), float("inf")

# Values that are refused, by field.
REFUSED: dict[str, list[Any]] = {
    "data.batch_size": [0, -1],
    "data.workers": [-1],
    "data.max_unreadable": [-1],
    "data.max_train_samples": [0, -5],
    "data.eval_share": [0.0, 1.0, -0.1, NAN],
    "augment.scale": [(0.0, 1.0), (0.5, 0.1), (0.1, 1.5), (NAN, 1.0)],
    "augment.ratio": [(0.0, 1.0), (2.0, 0.5), (1.0, NAN)],
    "augment.crop_padding": [-1],
    "augment.hflip": [-0.1, 1.1, NAN],
    "augment.color_jitter": [-0.1, NAN],
    "augment.random_erasing": [-0.1, 1.1],
    "augment.mixup": [-0.1, NAN],
    "augment.cutmix": [-0.1, NAN],
    "augment.mixup_switch": [-0.1, 1.1],
    "augment.label_smoothing": [-0.1, 1.1],
    "augment.repeats": [0],
    "model.num_classes": [0, 1, -3],
    "model.img_size": [0, -224],
    "model.crop_pct": [0.0, 1.1, NAN],
    "model.drop_path_rate": [-0.1, 1.0, NAN],
    "distillation.checkpoint": ["teacher.pth"],
    "distillation.weight": [-0.1, 1.1],
    "distillation.temperature": [0.0, -1.0],
    "optimizer.lr": [-1e-3, NAN, INFINITE],
    "optimizer.lr_base_size": [-1],
    "optimizer.weight_decay": [-0.05, NAN],
    "optimizer.betas": [(0.9, 1.0), (-0.1, 0.999)],
    "optimizer.eps": [-1e-8],
    "optimizer.momentum": [1.0, -0.1],
    "optimizer.layer_decay": [0.0, 1.1],
    "optimizer.lr_scales": [{"head.*": 0.0}, {"head.*": 1e7}, {"head.*": NAN}, {"head.*": "much"}, ["head.*"]],
    "optimizer.clip_grad": [0.0, -1.0, NAN],
    "schedule.epochs": [0, -1],
    "schedule.steps": [0, -1],
    "schedule.warmup": [-1, 301, NAN],
    "schedule.cooldown": [-1],
    "schedule.min_lr": [-1e-6, NAN],
    "schedule.warmup_lr": [-1e-6, INFINITE],
    "schedule.milestones": [[10, 0], [-1]],
    "schedule.decay_rate": [0.0, -0.1],
    "run.seed": [-1],
    "run.checkpoint_minutes": [-1.0, NAN],
    "run.checkpoint_steps": [0],
    "run.keep_checkpoints": [0],
    "run.eval_every": [0],
    "run.grad_accum_steps": [0],
    "run.log_every": [0],
    "run.ema_decay": [-0.1, 1.0],
    "run.ema_batch_size": [-1],
    "parallel.sequence": [0, -1, 2000],
    "parallel.timeout_minutes": [0.0, -1.0, NAN],
}

# Values at the edge that are still good.
ACCEPTED: dict[str, list[Any]] = {
    "data.batch_size": [1],
    "data.workers": [0],
    "augment.scale": [None, (1.0, 1.0)],
    "augment.hflip": [0.0, 1.0],
    "model.num_classes": [None, 2],
    "model.crop_pct": [None, 1.0],
    "model.drop_path_rate": [0.0],
    "optimizer.lr": [0.0],
    "optimizer.lr_base_size": [0],
    "optimizer.layer_decay": [None, 1.0],
    "optimizer.clip_grad": [None],
    "schedule.warmup": [0, 300],
    "run.ema_decay": [None, 0.0],
    "run.checkpoint_minutes": [0.0],
}


def cases(table: dict[str, list[Any]]) -> list[Any]:
    """The table as parameters of a test."""
    return [pytest.param(name, value, id=f"{name}={value}") for name, values in table.items() for value in values]


def make(name: str, value: Any) -> Any:
    """The section of a field, with one value in it."""
    section, _, field = name.partition(".")
    return SECTIONS[section](**{field: value})


@pytest.mark.parametrize(("name", "value"), cases(REFUSED))
def test_a_bad_value_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"\b{name}\b") as refusal:
        make(name, value)
    assert "\n" not in str(refusal.value)
    # What is wrong and what to do.
    assert "should" in str(refusal.value) or ": " in str(refusal.value)


@pytest.mark.parametrize(("name", "value"), cases(ACCEPTED))
def test_a_value_at_the_edge_is_good(name: str, value: Any) -> None:
    make(name, value)


def test_every_number_has_bounds() -> None:
    """A new field that is a number gets bounds, or stands here."""
    unbounded: set[str] = set()
    numbers = {
        f"{section}.{name}"
        for section, kind in SECTIONS.items()
        for name, value in vars(kind()).items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    # Of two values for grey and colour images; a Literal, which the parser holds.
    unbounded.add("model.in_chans")
    assert numbers - set(REFUSED) == unbounded


@pytest.mark.parametrize("augment", [AugmentConfig(), AugmentConfig(mixup=0), AugmentConfig(cutmix=0)])
def test_mixup_wants_pairs(augment: AugmentConfig) -> None:
    with pytest.raises(ValueError, match=r"data\.batch_size is 3, but mixup pairs"):
        ClassificationConfig(data=ClassificationDataConfig(batch_size=3), augment=augment)


def test_without_mixup_any_batch_will_do() -> None:
    augment = AugmentConfig(mixup=0, cutmix=0)
    assert not augment.mixes
    ClassificationConfig(data=ClassificationDataConfig(batch_size=3), augment=augment)


def test_sharded_weights_are_not_averaged() -> None:
    with pytest.raises(ValueError, match=r"run\.fsdp .* --run\.ema_decay null"):
        RunConfig(fsdp=True, ema_decay=0.999)


def test_warm_up_is_measured_in_the_unit_of_the_schedule() -> None:
    ScheduleConfig(steps=1000, warmup=500)
    with pytest.raises(ValueError, match=r"schedule\.warmup is 20: it should be from 0 to 10"):
        ScheduleConfig(steps=10)


def test_defaults_are_those_of_the_command_line() -> None:
    assert parse_config([]) == ClassificationConfig()


FULL = ClassificationConfig(
    data=ClassificationDataConfig(path="images", eval_path="others", batch_size=6, max_train_samples=100),
    augment=AugmentConfig(scale=None, ratio=(0.5, 2.0), auto_augment=None, random_erasing_mode="const", mixup=1e-3),
    model=ModelConfig(
        name="inline_pvt_tiny", in_chans=1, kwargs={"attention": ["inline", "softmax"], "drop_rate": 0.1}
    ),
    distillation=DistillationConfig(teacher="resnet18", kind="hard", temperature=2.5),
    optimizer=OptimizerConfig(
        name="sgd", lr=1e-5, betas=(0.8, 0.95), eps=1e-12, layer_decay=0.75, clip_grad=1.0, lr_scales={"head.*": 10.0}
    ),
    schedule=ScheduleConfig(name="multistep", steps=100, warmup=0.5, milestones=[50, 80], min_lr=1e-9),
    run=RunConfig(output="runs/null", resume="never", precision="bf16", ema_decay=0.999, trackers=["tensorboard"]),
)


@pytest.mark.parametrize("config", [ClassificationConfig(), FULL], ids=["defaults", "full"])
def test_a_configuration_comes_back_from_yaml(config: ClassificationConfig, tmp_path: Path) -> None:
    """The file that a run leaves is read back alike by the command line and by evaluation."""
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(to_plain(config), sort_keys=False))
    assert parse_config(["--config", str(file)]) == config
    assert open_run(ClassificationConfig, str(tmp_path)).config == config


@settings(deadline=None, max_examples=25, derandomize=True)
@given(lr=st.floats(0, 1e3), warmup=st.floats(0, 300), seed=st.integers(0, 2**63))
def test_numbers_come_back_from_yaml_to_the_last_bit(lr: float, warmup: float, seed: int) -> None:
    plain = to_plain(
        ClassificationConfig(
            optimizer=OptimizerConfig(lr=lr), schedule=ScheduleConfig(warmup=warmup), run=RunConfig(seed=seed)
        )
    )
    assert yaml.safe_load(yaml.safe_dump(plain)) == plain


def test_a_run_goes_on_with_the_same_settings_only() -> None:
    check_unchanged(to_plain(FULL), FULL)
    for name, value in flattened(to_plain(FULL)).items():
        section, _, field = name.partition(".")
        before = to_plain(FULL)
        if isinstance(value, dict) or field.startswith("options."):
            continue
        before[section][field] = "another"
        if name in FULL.free_on_resume:
            check_unchanged(before, FULL)
        else:
            with pytest.raises(ValueError, match=rf"\b{name} was another and is "):
                check_unchanged(before, FULL)


def test_options_of_the_model_may_not_change_either() -> None:
    before = to_plain(FULL)
    before["model"]["kwargs"]["attention"] = "linear"
    with pytest.raises(ValueError, match=r"model\.kwargs\.attention was linear and is "):
        check_unchanged(before, FULL)


def test_a_diagnostic_goes_on_with_the_same_images_only() -> None:
    config = ClassificationConfig(data=ClassificationDataConfig(path="recall:pairs=32"))
    before = to_plain(config)
    check_unchanged(before, config)
    before["data"]["path"] = "recall:pairs=8"
    with pytest.raises(ValueError, match=r"data\.path was recall:pairs=8 and is recall:pairs=32"):
        check_unchanged(before, config)


@pytest.mark.parametrize("config", [ClassificationConfig, MultilabelConfig, DetectionConfig, SegmentationConfig])
def test_what_may_change_exists(config: type[TrainConfig]) -> None:
    # The modules of attentions are an empty dict by default.
    settings = {*flattened(to_plain(config())), "run.attention_modules"}
    assert set(config.free_on_resume) <= settings
