"""Recipes: how --config finds and reads them, and `inlinevit recipes`."""

import itertools
import os
import re
import threading
import time
from functools import partial

import pytest
import yaml

from inlinevit import cli
from inlinevit.cli import train
from inlinevit.cli.train import parse_config
from inlinevit.recipes import COMMANDS, HOME, describe_recipe, load_recipe, recipe_names
from inlinevit.tasks import TASKS
from inlinevit.tasks.classification.config import ClassificationConfig

PARSE = {task: partial(train.parse_config, task=task) for task in TASKS}


@pytest.mark.parametrize(
    ("content", "right"),
    [
        ("data:\n  batch_sise: 3\n", "data.batch_size"),
        ("optimiser:\n  lr: 3\n", "optimizer.lr"),
        ("run:\n  precision: bf61\n", "bf16"),
    ],
)
def test_a_wrong_key_of_a_recipe_is_refused_with_the_nearest_right_one(content, right, tmp_path, refused):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(content)
    code, line = refused("train", "--config", recipe)
    assert code == 2
    assert line.endswith(f"did you mean {right}?")


def test_a_missing_recipe_is_refused_with_the_nearest_file(tmp_path, refused):
    (tmp_path / "inline_swin_tiny.yaml").write_text("")
    code, line = refused("train", "--config", tmp_path / "inline_swin_tin.yaml")
    assert code == 2
    assert line.endswith(f"did you mean {tmp_path / 'inline_swin_tiny.yaml'}?")
    code, line = refused("train", "--config", tmp_path / "nowhere" / "a.yaml")
    assert "`inlinevit recipes` lists the shipped ones" in line


def test_a_recipe_that_is_not_yaml_is_refused(tmp_path, refused):
    (tmp_path / "a.yaml").write_text("run: [")
    assert refused("train", "--config", tmp_path / "a.yaml")[0] == 2


def test_options_override_the_recipe(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("data:\n  batch_size: 32\n  workers: 3\nmodel:\n  kwargs: {attention: inline, depth: 3}\n")
    config = parse_config(["--config", str(recipe), "--data.batch_size", "64", "--model.kwargs.attention", "softmax"])
    assert (config.data.batch_size, config.data.workers) == (64, 3)
    assert config.model.kwargs == {"attention": "softmax", "depth": 3}


def test_a_later_recipe_overrides_an_earlier_one(tmp_path):
    for name, content in {"a": "{batch_size: 32, workers: 3}", "b": "{batch_size: 64}"}.items():
        (tmp_path / f"{name}.yaml").write_text(f"data: {content}\n")
    config = parse_config(["--config", str(tmp_path / "a.yaml"), "--config", str(tmp_path / "b.yaml")])
    assert (config.data.batch_size, config.data.workers) == (64, 3)


def test_print_config_prints_a_recipe(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "--run.seed", "7", "--print_config"])
    assert not ended.value.code
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(capsys.readouterr().out)
    assert parse_config(["--config", str(recipe)]) == parse_config(["--run.seed", "7"])


LAUGHS = "a: &a [x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefghij", "bcdefghijk", strict=True)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (LAUGHS, "it repeats itself too often"),
        ("optimizer: [1]", r"\[1\] stands for optimizer: write fields there, such as name"),
        ("data: 3", "3 stands for data"),
        ("model: null", "None stands for model"),
        ("- 1", r"\[1\] stands for all of it"),
        ("", "None stands for all of it"),
        ("a: !!timestamp x", "is not a valid recipe"),
        ("[" * 1500, "is not a valid recipe"),
        ("optimizer: {lr: null}", "lr"),
    ],
    ids=["laughs", "list", "number", "null", "top list", "empty", "timestamp", "deep", "null field"],
)
def test_recipes_of_another_form_are_refused_at_once(text, message, tmp_path, refused):
    (tmp_path / "a.yaml").write_text(text)
    start = time.monotonic()
    code, line = refused("train", "--config", tmp_path / "a.yaml")
    assert code in (1, 2)
    assert re.search(message, line)
    assert time.monotonic() - start < 20


def test_a_recipe_may_come_through_a_pipe(tmp_path):
    pipe = tmp_path / "a.yaml"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_text("optimizer: {lr: 0.25}"))
    writer.start()
    assert parse_config(["--config", str(pipe)]).optimizer.lr == 0.25
    writer.join()


def test_base_files_are_checked_as_the_recipe_is(tmp_path, refused):
    (tmp_path / "good.yaml").write_text("base: bad\n")
    for text, message in [
        (LAUGHS, "it repeats itself too often"),
        ("optimizer: [1]", r"\[1\] stands for optimizer: write fields there, such as name"),
        ("", "None stands for all of it"),
        ("run: [", "is not a valid recipe"),
        ("data: {batch_sise: 3}", "did you mean data.batch_size"),
        ("base: good", "is its own base: good → bad → …"),
        ("base: ../good", "base is '../good': it should be the name of a recipe"),
        ("base: [good]", "it should be the name of a recipe"),
        ("base: inline_swin_tini", "did you mean inline_swin_tiny"),
    ]:
        (tmp_path / "bad.yaml").write_text(text)
        code, line = refused("train", "--config", tmp_path / "good.yaml")
        assert code == 2
        assert re.search(message, line), line


def test_a_device_is_not_read_as_a_recipe(refused):
    code, line = refused("train", "--config", "/dev/zero")
    assert code == 2
    assert "is a character device, not a regular file" in line


def test_a_recipe_overrides_its_base(tmp_path):
    (tmp_path / "own.yaml").write_text("base: middle\ndata: {path: images}\n")
    (tmp_path / "middle.yaml").write_text("base: embedded\nmodel: {kwargs: {depth: 5}}\ndata: {path: unused}\n")
    config = parse_config(["--config", str(tmp_path / "own.yaml")])
    expected = parse_config(["--config", "embedded", "--data.path", "images", "--model.kwargs.depth", "5"])
    assert config == expected
    assert config.model.kwargs["num_heads"] == 4


def test_a_file_wins_over_a_shipped_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # Results are often in a folder of this name.
    (tmp_path / "embedded").mkdir()
    assert parse_config(["--config", "embedded"]).data.batch_size == 50
    (tmp_path / "cifar10").write_text("data: {batch_size: 8}")
    assert parse_config(["--config", "cifar10"]).data.batch_size == 8
    (tmp_path / "embedded.yaml").write_text("base: inline_swin_tiny\ndata: {batch_size: 10}")
    config = parse_config(["--config", "embedded.yaml"])
    assert (config.data.batch_size, config.model.name) == (10, "inline_swin_tiny")
    # Beside it, a file of its own name is the base, not the shipped one.
    (tmp_path / "inline_swin_tiny.yaml").write_text("run: {seed: 5}")
    assert parse_config(["--config", "embedded.yaml"]).model == ClassificationConfig().model


def test_companion_files_are_relative_to_the_recipe_that_names_them(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "base.yaml").write_text("data: {labels: labels.yaml, path: images}\nrun: {output: runs/x}\n")
    (tmp_path / "a" / "own.yaml").write_text("base: base\n")
    monkeypatch.chdir(tmp_path)
    config = PARSE["segmentation"](["--config", "a/own.yaml"])
    assert config.data.labels == str(tmp_path / "a" / "labels.yaml")
    # Data and results are not parts of a recipe.
    assert (config.data.path, config.run.output) == ("images", "runs/x")


@pytest.mark.parametrize(
    ("command", "name", "message"),
    [
        ("train", "inline_swin_tini", "did you mean inline_swin_tiny?"),
        ("train", "recipes/inline_swin_tiny.yaml", "did you mean inline_swin_tiny?"),
        ("train", "nothing_like_it", "`inlinevit recipes` lists the shipped ones"),
        ("train", "mask_rcnn_inline_pvt_tiny_1x", "is a recipe for `inlinevit detect train`"),
        ("train", "_imagenet", "there is no recipe called '_imagenet'"),
        ("detect train", "mask_rcnn_inline_pvt_tiny_2x", "did you mean mask_rcnn_inline_pvt_tiny_"),
        ("segment train", "camvit", "did you mean camvid?"),
        ("bench loop", "embeded", "did you mean embedded?"),
    ],
)
def test_a_wrong_name_is_refused_with_the_nearest_recipe(command, name, message, tmp_path, monkeypatch, refused):
    monkeypatch.chdir(tmp_path)
    code, line = refused(*command.split(), "--config", name)
    assert code == 2
    assert message in line
    assert "see --help" not in line


def test_names_are_unique_and_every_file_is_a_recipe_or_a_base():
    names = [name for task in COMMANDS for name in recipe_names(task)]
    assert len(names) == len(set(names)) == 61
    for task in COMMANDS:
        files = {file.stem for file in (HOME / task).glob("*.yaml")}
        used = {yaml.safe_load(file.read_text()).get("base") for file in (HOME / task).glob("*.yaml")}
        assert {name for name in files if name.startswith("_")} <= used


def test_recipes_lists_all_by_task_with_descriptions(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    cli.main(["recipes"])
    output = capsys.readouterr().out
    starts = [output.index(f"{task}: {command} --config NAME") for task, command in COMMANDS.items()]
    assert starts == sorted(starts)
    for task, start, end in zip(COMMANDS, starts, [*starts[1:], None], strict=True):
        for name in recipe_names(task):
            (row,) = [line for line in output[start:end].splitlines() if line.startswith(f"  {name} ")]
            description = describe_recipe(HOME / task / f"{name}.yaml")
            assert row.removeprefix(f"  {name} ").strip() == description
            # The first line of a recipe is a whole sentence.
            assert description.endswith(".")
    assert "Mask R-CNN on InLine-PVT-T, COCO, 12 epochs at one scale (1×)." in output
    assert "_imagenet" not in output
    cli.main(["recipes", "--task", "detection"])
    output = capsys.readouterr().out
    assert "mask_rcnn_inline_pvt_tiny_1x" in output
    assert "inline_deit_tiny" not in output


def test_recipes_are_readable_in_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    cli.main(["recipes"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    names = [name for task in COMMANDS for name in recipe_names(task)]
    starts = [next(i for i, line in enumerate(lines) if line.startswith(f"  {name} ")) for name in names]
    # Descriptions take a few lines, where they took up to eight.
    assert max(b - a for a, b in itertools.pairwise(starts) if not lines[b - 1].startswith(" ──")) <= 4


@pytest.mark.parametrize(
    ("task", "name"),
    [
        ("classification", "embedded"),
        ("detection", "cascade_mask_rcnn_inline_pvt_large_3x"),
        ("segmentation", "camvid"),
    ],
)
def test_a_printed_recipe_is_the_recipe(task, name, tmp_path, capsys):
    cli.main(["recipes", name])
    (tmp_path / "copy.yaml").write_text(capsys.readouterr().out)
    assert "base" not in yaml.safe_load((tmp_path / "copy.yaml").read_text())
    assert PARSE[task](["--config", str(tmp_path / "copy.yaml")]) == PARSE[task](["--config", name])
    assert load_recipe(name, task)["run"]["output"] == f"runs/{name}"


def test_an_unknown_recipe_is_not_printed(refused):
    assert refused("recipes", "embeded") == (1, "error: there is no recipe called 'embeded': did you mean embedded?")
