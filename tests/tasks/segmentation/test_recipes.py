"""The recipes for segmentation against the table of settings, through the parser of `inlinevit segment train`."""

from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
from torch import nn

from inlinevit.cli.train import parse_config as parse_classification_config
from inlinevit.engine.setup import make_optimizer, make_scheduler
from inlinevit.recipes import HOME, describe_recipe, recipe_names
from inlinevit.tasks.segmentation.labels import read_labels
from tests.tasks.recipes import model_title, parse_recipe, stated_settings

# Small ones, for other data, and the files of labels that they name.
SMALL = ("camvid",)
LABELS = ("camvid",)
# As all published results: eight processes.
PROCESSES = 8


class Kind(NamedTuple):
    """What differs from one kind of model to the other."""

    title: str
    steps: int
    total_batch: int
    lr: float
    weight_decay: float
    power: float
    warmup: int
    eval_every: int


KINDS = {
    "semantic_fpn": Kind("SemanticFPN", 40_000, 32, 1e-4, 1e-4, 0.9, 0, 4_000),
    "upernet": Kind("UperNet", 160_000, 16, 6e-5, 0.01, 1.0, 1_500, 16_000),
}
# The kind of model, and its drop path.
BACKBONES = {
    "inline_pvt_tiny": ("semantic_fpn", 0.1),
    "inline_pvt_small": ("semantic_fpn", 0.1),
    "inline_pvt_medium": ("semantic_fpn", 0.3),
    "inline_pvt_large": ("semantic_fpn", 0.3),
    "inline_swin_tiny": ("upernet", 0.2),
    "inline_swin_small": ("upernet", 0.3),
    "inline_swin_base": ("upernet", 0.3),
}
TABLE = {
    f"{kind}_{backbone}": (kind, backbone, drop_path_rate) for backbone, (kind, drop_path_rate) in BACKBONES.items()
}


parse = partial(parse_recipe, "segmentation")
stated = partial(stated_settings, "segmentation")


def test_one_recipe_for_each_backbone() -> None:
    assert recipe_names("segmentation") == sorted([*TABLE, *SMALL])
    assert sorted(path.stem for path in (HOME / "segmentation" / "labels").iterdir()) == sorted(LABELS)


@pytest.mark.parametrize("name", TABLE)
def test_recipe_is_the_tables(name: str) -> None:
    kind, backbone, drop_path_rate = TABLE[name]
    config = parse(name)
    expected = KINDS[kind]
    model = config.model
    assert (model.arch, model.backbone, model.drop_path_rate) == (kind, backbone, drop_path_rate)
    assert (model.pretrained, model.num_classes, model.channels) == (True, 150, None)
    assert (model.dropout, model.aux_weight) == (0.1, 0.4)

    optimizer = config.optimizer
    assert (optimizer.name, optimizer.lr, optimizer.weight_decay) == ("adamw", expected.lr, expected.weight_decay)
    assert (optimizer.betas, optimizer.clip_grad) == ((0.9, 0.999), None)
    assert optimizer.lr_base_size == expected.total_batch == PROCESSES * config.data.batch_size

    schedule = config.schedule
    assert (schedule.name, schedule.steps, schedule.decay_rate) == ("poly", expected.steps, expected.power)
    assert (schedule.warmup, schedule.min_lr, schedule.cooldown) == (expected.warmup, 0, 0)

    augment = config.augment
    assert (augment.scale, augment.min_size, augment.crop_size) == ((0.5, 2.0), 512, 512)
    assert (augment.cat_max_ratio, augment.hflip, augment.photometric_distortion) == (0.75, 0.5, True)
    inference = config.inference
    assert (inference.min_size, inference.window_size, inference.scales, inference.flip) == (512, None, [1.0], False)
    assert config.data.labels is None
    assert config.run.eval_every == expected.eval_every
    # UperNet has batch norms, and few images a process.
    assert config.run.sync_batch_norm == (config.model.arch == "upernet")
    assert expected.steps % expected.eval_every == 0


@pytest.mark.parametrize("name", [name for name in TABLE if name.startswith("semantic_fpn")])
def test_drop_path_is_that_of_the_classifier(name: str) -> None:
    _, backbone, drop_path_rate = TABLE[name]
    classifier = parse_classification_config(["--config", backbone])
    assert classifier.model.drop_path_rate == drop_path_rate


@pytest.mark.parametrize("name", TABLE)
def test_the_rate_is_what_the_polynomial_says(name: str) -> None:
    expected = KINDS[TABLE[name][0]]
    config = parse(name)
    optimizer = make_optimizer(nn.Linear(2, 2), config.optimizer, expected.total_batch)
    # However long an epoch is, the schedule counts steps.
    schedule, steps = make_scheduler(optimizer, config.schedule, config.optimizer, expected.total_batch, 631)
    assert steps == expected.steps

    def rate(step: int) -> float:
        schedule.step_update(step)
        return optimizer.param_groups[0]["lr"]

    for step in (expected.warmup, steps // 4, steps // 2, steps - 1):
        assert rate(step) == pytest.approx(expected.lr * (1 - step / steps) ** expected.power, rel=1e-9)
    assert rate(steps) == 0
    assert rate(0) == pytest.approx(expected.lr * (1e-6 if expected.warmup else 1), rel=1e-9)
    for step in (1, expected.warmup // 3, expected.warmup - 1) if expected.warmup else ():
        share = 1e-6 + (1 - 1e-6) * step / expected.warmup
        assert rate(step) == pytest.approx(expected.lr * share, rel=1e-9)


@pytest.mark.parametrize("name", LABELS)
def test_files_of_labels_are_understood(name: str) -> None:
    assert len(read_labels(HOME / "segmentation" / "labels" / f"{name}.yaml").classes) > 1


@pytest.mark.parametrize("name", TABLE)
def test_recipe_states_its_settings_itself(name: str) -> None:
    """Every setting is in the recipe or its bases, in the same order for a kind, and not in changing defaults."""
    settings = stated(name)
    example = {"semantic_fpn": "semantic_fpn_inline_pvt_tiny", "upernet": "upernet_inline_swin_tiny"}
    assert list(settings) == list(stated(example[TABLE[name][0]]))
    assert {"optimizer.weight_decay", "schedule.decay_rate", "augment.crop_size", "model.pretrained"} <= set(settings)
    assert settings["run.output"] == f"runs/{name}"


@pytest.mark.parametrize("name", TABLE)
def test_first_line_says_what_it_is(name: str) -> None:
    kind, backbone, _ = TABLE[name]
    first = describe_recipe(HOME / "segmentation" / f"{name}.yaml")
    assert first == f"{KINDS[kind].title} on {model_title(backbone)}, ADE20K, {KINDS[kind].steps:,} steps."


def test_labels_are_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    labels = parse("camvid").data.labels
    assert labels is not None
    assert len(read_labels(labels).classes) == 11
    # An option is relative to the working directory, as all paths on the command line.
    assert parse("camvid", "--data.labels", "own.yaml").data.labels == "own.yaml"
