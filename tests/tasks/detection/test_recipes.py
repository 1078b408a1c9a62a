"""The recipes for detectors against the table of settings, through the parser of `inlinevit detect train`."""

from functools import partial
from typing import NamedTuple

import pytest
import timm

from inlinevit.recipes import HOME, describe_recipe, recipe_names
from tests.tasks.recipes import model_title, parse_recipe, stated_settings

# Fits a small detector to ten images.
SMALL = ("ten_images",)
KINDS = {"mask_rcnn": "Mask R-CNN", "cascade_mask_rcnn": "Cascade Mask R-CNN"}
DROP_PATH = {
    "inline_pvt_tiny": 0.1,
    "inline_pvt_small": 0.1,
    "inline_pvt_medium": 0.3,
    "inline_pvt_large": 0.3,
    "inline_swin_tiny": 0.2,
    "inline_swin_small": 0.2,
    "inline_swin_base": 0.3,
}


class Schedule(NamedTuple):
    """What differs from schedule to schedule."""

    epochs: int
    milestones: list[int]
    min_sizes: list[int]


class Rates(NamedTuple):
    """What differs from family to family, and for the learning rate from schedule to schedule."""

    lr: float
    warmup_lr: float
    weight_decay: float


SCHEDULES = {
    "1x": Schedule(12, [8, 11], [800]),
    "3x": Schedule(36, [27, 33], list(range(480, 801, 32))),
}
RATES = {
    ("pvt", "1x"): Rates(2e-4, 2e-7, 1e-4),
    ("pvt", "3x"): Rates(1e-4, 1e-7, 1e-4),
    ("swin", "1x"): Rates(1e-4, 1e-7, 0.05),
    ("swin", "3x"): Rates(1e-4, 1e-7, 0.05),
}
TABLE = {
    f"{kind}_{backbone}_{schedule}": (kind, backbone, schedule)
    for kind in KINDS
    for backbone in DROP_PATH
    for schedule in SCHEDULES
}


parse = partial(parse_recipe, "detection")
stated = partial(stated_settings, "detection")


def test_one_recipe_for_each_detector_backbone_and_schedule() -> None:
    assert len(TABLE) == 28
    assert recipe_names("detection") == sorted([*TABLE, *SMALL])


@pytest.mark.parametrize("name", TABLE)
def test_recipe_is_the_tables(name: str) -> None:
    kind, backbone, schedule = TABLE[name]
    config = parse(name)
    assert (config.model.arch, config.model.backbone) == (kind, backbone)
    assert (config.model.pretrained, config.model.drop_path_rate) == (True, DROP_PATH[backbone])
    assert (config.model.min_size, config.model.max_size) == (800, 1333)

    assert config.schedule.name == "multistep"
    assert (config.schedule.steps, config.schedule.cooldown, config.schedule.decay_rate) == (None, 0, 0.1)
    assert config.augment.max_size == 1333
    assert (config.augment.hflip, config.augment.scale_jitter, config.augment.copy_paste) == (0.5, None, 0.0)
    assert SCHEDULES[schedule] == Schedule(config.schedule.epochs, config.schedule.milestones, config.augment.min_sizes)

    optimizer = config.optimizer
    assert (optimizer.name, optimizer.lr_base_size, optimizer.clip_grad) == ("adamw", 16, None)
    family = backbone.split("_")[1]
    assert RATES[family, schedule] == Rates(optimizer.lr, config.schedule.warmup_lr, optimizer.weight_decay)
    assert config.data.batch_size == 2


@pytest.mark.parametrize("name", TABLE)
def test_warmup_takes_about_500_steps(name: str) -> None:
    images_with_objects = 117_266
    assert parse(name).schedule.warmup * images_with_objects / 16 == pytest.approx(500, rel=0.05)


@pytest.mark.parametrize("name", TABLE)
def test_recipe_states_its_settings_itself(name: str) -> None:
    """Every setting is in the recipe or its bases, at the same place in each, and not in defaults that may change."""
    settings = stated(name)
    assert list(settings) == list(stated("mask_rcnn_inline_swin_tiny_1x"))
    expected = {
        "optimizer.weight_decay",
        "schedule.milestones",
        "augment.min_sizes",
        "model.drop_path_rate",
        "model.pretrained",
    }
    assert expected <= set(settings)
    assert settings["run.output"] == f"runs/{name}"


@pytest.mark.parametrize("name", TABLE)
def test_first_line_says_what_it_is(name: str) -> None:
    kind, backbone, schedule = TABLE[name]
    first = describe_recipe(HOME / "detection" / f"{name}.yaml")
    assert first.startswith(f"{KINDS[kind]} on {model_title(backbone)}, COCO, {SCHEDULES[schedule].epochs} epochs")
    assert first.endswith(f"({schedule[0]}×).")


@pytest.mark.parametrize("backbone", DROP_PATH)
def test_backbones_have_published_weights_and_the_strides_of_a_pyramid(backbone: str) -> None:
    config = timm.get_pretrained_cfg(backbone)
    assert config is not None
    assert config.has_weights
    features = timm.create_model(backbone, features_only=True, device="meta")
    assert features.feature_info.reduction() == [4, 8, 16, 32]
