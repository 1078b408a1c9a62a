"""The recipes against the published table, through the parser of `inlinevit train`."""

from functools import cache
from typing import Any, NamedTuple

import pytest

from inlinevit.cli.train import parse_config
from inlinevit.engine.config import flattened
from inlinevit.experiments.demo import ATTENTIONS, demo_config
from inlinevit.models.catalog import CATALOG
from inlinevit.recipes import HOME, describe_recipe, load_recipe, recipe_names
from inlinevit.tasks.classification.config import AugmentConfig, ClassificationConfig
from inlinevit.tasks.classification.model import build_model
from inlinevit.tasks.classification.transforms import input_spec

SMALL = ("cifar10", "embedded")
# Held by tests/experiments/reproduce/test_studies.py.
REPRODUCED = ("reproduce", "reproduce_16x16", "comparison", "recall", "connectivity")
FINE_TUNING = {"inline_swin_base_384": "inline_swin_base", "inline_cswin_base_384": "inline_cswin_base"}


class Row(NamedTuple):
    """What differs from model to model in the published recipes."""

    size: int
    epochs: int
    cooldown: int
    warmup: float
    weight_decay: float
    clip_grad: float | None
    min_lr: float
    warmup_lr: float
    drop_path_rate: float
    ema: bool = False
    lr: float = 5e-4


TABLE = {
    "inline_deit_tiny": Row(224, 300, 0, 20, 0.05, 5.0, 5e-6, 5e-7, 0.1),
    "inline_deit_small": Row(288, 300, 0, 20, 0.05, 5.0, 5e-6, 5e-7, 0.1),
    "inline_deit_base": Row(448, 300, 0, 20, 0.05, 5.0, 5e-6, 5e-7, 0.1),
    "inline_pvt_tiny": Row(224, 300, 10, 5, 0.05, None, 1e-5, 1e-6, 0.1),
    "inline_pvt_small": Row(224, 300, 10, 5, 0.05, None, 1e-5, 1e-6, 0.1),
    "inline_pvt_medium": Row(224, 300, 10, 5, 0.05, 1.0, 1e-5, 1e-6, 0.3),
    "inline_pvt_large": Row(224, 300, 10, 5, 0.05, 1.0, 1e-5, 1e-6, 0.3),
    "inline_swin_tiny": Row(224, 300, 0, 20, 0.05, 5.0, 5e-6, 5e-7, 0.2),
    "inline_swin_small": Row(224, 300, 0, 20, 0.05, 5.0, 5e-6, 5e-7, 0.3),
    "inline_swin_base": Row(224, 300, 0, 20, 0.05, 5.0, 5e-6, 5e-7, 0.5),
    "inline_swin_base_384": Row(384, 30, 0, 5, 1e-8, 5.0, 2e-7, 2e-8, 0.5, lr=2e-5),
    "inline_cswin_tiny": Row(224, 300, 10, 20, 0.05, None, 1e-5, 1e-6, 0.2, ema=True),
    "inline_cswin_small": Row(224, 300, 10, 20, 0.05, None, 1e-5, 1e-6, 0.4, ema=True),
    "inline_cswin_base": Row(224, 300, 10, 20, 0.1, None, 1e-5, 1e-6, 0.5, ema=True),
    "inline_cswin_base_384": Row(384, 20, 10, 0, 1e-8, None, 5e-7, 5e-6, 0.7, ema=True, lr=5e-6),
}

# What all published recipes have in common.
PUBLISHED_AUGMENTATION = AugmentConfig(
    scale=(0.08, 1.0),
    ratio=(3 / 4, 4 / 3),
    hflip=0.5,
    color_jitter=0.4,
    auto_augment="rand-m9-mstd0.5-inc1",
    random_erasing=0.25,
    random_erasing_mode="pixel",
    mixup=0.8,
    cutmix=1.0,
    mixup_switch=0.5,
    label_smoothing=0.1,
    repeats=1,
)


@cache
def parse(name: str, *overrides: str) -> ClassificationConfig:
    """A recipe, as `inlinevit train` reads it."""
    return parse_config(["--config", name, *overrides])


def stated(name: str) -> dict[str, Any]:
    """The fields of a recipe with those of its bases, in their order."""
    return flattened(load_recipe(name, "classification"))


def test_one_recipe_for_each_published_model() -> None:
    assert recipe_names("classification") == sorted([*TABLE, *SMALL, *REPRODUCED, "finetune"])
    assert set(TABLE) == {name for name in CATALOG if name.startswith("inline_")}


@pytest.mark.parametrize("name", TABLE)
def test_recipe_is_the_published_one(name: str) -> None:
    config = parse(name)
    assert config.model.name == name
    ema = config.run.ema_decay is not None
    assert TABLE[name] == Row(
        size=config.model.img_size or 0,
        epochs=config.schedule.epochs,
        cooldown=config.schedule.cooldown,
        warmup=config.schedule.warmup,
        weight_decay=config.optimizer.weight_decay,
        clip_grad=config.optimizer.clip_grad,
        min_lr=config.schedule.min_lr,
        warmup_lr=config.schedule.warmup_lr,
        drop_path_rate=config.model.drop_path_rate,
        ema=ema,
        lr=config.optimizer.lr,
    )
    assert (config.run.ema_decay, config.run.ema_batch_size) == ((0.9996, 4096) if ema else (None, 0))
    assert config.augment == PUBLISHED_AUGMENTATION
    optimizer = config.optimizer
    assert (optimizer.name, optimizer.betas, optimizer.eps) == ("adamw", (0.9, 0.999), 1e-8)
    assert (optimizer.lr_base_size, optimizer.layer_decay) == (512, None)
    assert (config.schedule.name, config.schedule.steps) == ("cosine", None)
    assert config.distillation.teacher is None


@pytest.mark.parametrize("name", TABLE)
def test_evaluation_sees_what_was_published(name: str) -> None:
    spec = input_spec(parse(name).model)
    assert spec.interpolation == "bicubic"
    assert (spec.crop_pct, spec.crop_mode) == ((1.0, "squash") if spec.size == 384 else (224 / 256, "center"))


@pytest.mark.parametrize("name", TABLE)
def test_recipe_states_the_published_settings_itself(name: str) -> None:
    """Every setting is in the recipe or its bases, at the same place in each, and not in defaults that may change."""
    start = {"model.checkpoint": f"path/to/{FINE_TUNING[name]}.safetensors"} if name in FINE_TUNING else {}
    settings = stated(name)
    assert {field: settings.pop(field) for field in start} == start
    assert list(settings) == list(stated("inline_swin_tiny"))
    expected = {"optimizer.weight_decay", "schedule.cooldown", "augment.mixup", "model.drop_path_rate", "run.ema_decay"}
    assert expected <= set(settings)
    assert settings["run.output"] == f"runs/{name}"


@pytest.mark.parametrize("name", TABLE)
def test_first_line_says_what_to_expect(name: str) -> None:
    first = describe_recipe(HOME / "classification" / f"{name}.yaml")
    top1 = CATALOG[name].top1
    assert first.startswith("InLine-")
    assert first.endswith("no published top-1." if top1 is None else f"published top-1 {top1} %.")


@pytest.mark.parametrize("name", FINE_TUNING)
def test_fine_tuning_does_not_start_without_weights(name: str) -> None:
    with pytest.raises(FileNotFoundError, match=FINE_TUNING[name]):
        build_model(parse(name, "--model.kwargs.embed_dim", "32").model, num_classes=1000)


def test_options_override_a_recipe() -> None:
    config = parse("inline_swin_tiny", "--data.path", "images", "--data.batch_size", "64", "--schedule.epochs", "100")
    assert (config.data.path, config.data.batch_size, config.schedule.epochs) == ("images", 64, 100)
    assert config.schedule.warmup == 20


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_embedded_recipe_is_the_demo(attention: str) -> None:
    assert parse("embedded", "--model.kwargs.attention", attention) == demo_config(attention)
    assert parse("embedded") == demo_config("inline")


@pytest.mark.parametrize("name", SMALL)
def test_small_recipes_compare_attentions_at_the_same_size(name: str) -> None:
    """Only what belongs to InLine's local residual tells the models apart."""
    shared = []
    for attention in ATTENTIONS:
        model = build_model(parse(name, "--model.kwargs.attention", attention).model, num_classes=10)
        shared.append({key: value.shape for key, value in model.named_parameters() if "local_residual" not in key})
    assert parse(name).model.kwargs["attention"] == "inline"
    assert shared[0] == shared[1] == shared[2]
