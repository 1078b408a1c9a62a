"""The command line."""

import errno
import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from inlinevit import cli
from inlinevit.models.catalog import CATALOG


def test_models_prints_a_row_a_model(capsys):
    cli.main(["models"])
    output = capsys.readouterr().out
    for name, facts in CATALOG.items():
        (row,) = [line for line in output.splitlines() if f" {name} " in line]
        assert f"{facts.parameters / 1e6:.2f}" in row
        assert f"{facts.gmacs:.2f}" in row


def test_models_as_json(capsys):
    cli.main(["models", "--json", "--filter", "inline_swin*"])
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == [name for name in CATALOG if name.startswith("inline_swin")]
    assert rows[0] == {
        "name": "inline_swin_tiny",
        "input_size": 224,
        "parameters": 29_223_544,
        "gmacs": 4.45,
        "top1": 82.4,
    }


def test_models_of_detectors_are_listed_on_demand(capsys):
    cli.main(["models", "--task", "detection", "--json", "--filter", "*pvt_tiny"])
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == ["inline_pvt_tiny", "pvt_tiny"]
    assert rows[0] == {
        "name": "inline_pvt_tiny",
        "parameters": 31_690_997,
        "gmacs": 210.2,
        "cascade_parameters": 65_599_681,
        "cascade_gmacs": 344.9,
    }
    cli.main(["models", "--task", "detection", "--markdown", "--filter", "inline_swin_tiny"])
    assert capsys.readouterr().out.splitlines()[-1] == "| inline_swin_tiny | 48.73 | 261.7 | 82.64 | 396.4 |"
    cli.main(["models", "--task", "detection"])
    output = capsys.readouterr().out
    for name in ("inline_cswin_base", "cswin_base", "swin_base_patch4_window7_224"):
        assert f" {name} " in output


def refused(capsys, *arguments):
    """The exit code and the one line that a command ends with."""
    with pytest.raises(SystemExit) as ended:
        cli.main([str(argument) for argument in arguments])
    output = capsys.readouterr()
    assert output.out == ""
    (line,) = [line for line in output.err.splitlines() if not line.startswith("warning:")]
    return ended.value.code, line


def test_a_filter_without_matches_says_what_to_do(capsys):
    code, line = refused(capsys, "models", "--filter", "resnet*")
    assert code == 1
    assert "no model matches 'resnet*'" in line
    assert "inlinevit models" in line
    _, line = refused(capsys, "models", "--task", "detection", "--filter", "inline_deit*")
    assert "`inlinevit models --task detection` lists all of them" in line


def test_without_a_command_all_commands_are_listed(capsys):
    cli.main([])
    output = capsys.readouterr().out
    for name, command in cli.COMMANDS.items():
        assert name in output
        assert command.help.split()[0] in output


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help(name, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([name, "--help"])
    assert ended.value.code == 0
    assert "usage: inlinevit" in capsys.readouterr().out


@pytest.mark.parametrize("what", ["layer", "model", "accuracy", "window", "resolution", "scaling", "detection", "loop"])
def test_each_bench_has_help_of_its_own(what, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", what, "--help"])
    assert ended.value.code == 0
    output = capsys.readouterr().out
    assert f"{what} [" in " ".join(output.split())
    assert ("--tokens" in output) == (what == "layer")
    assert ("--data.path" in output) == (what == "loop")


TINY = "inline_deit_tiny:depth=1,embed_dim=16,num_heads=2"
TINY_BENCH = f"bench model --quick --rounds 2 --threads 1 --models {TINY} --sizes 32 --batches 1 --modes eager"


def test_bench_prints_a_table_and_writes_a_report(tmp_path, capsys):
    cli.main([*TINY_BENCH.split(), "--output", str(tmp_path), "--name", "a"])
    output = capsys.readouterr().out
    assert "1 thread of" in output
    assert TINY in output
    assert f"the report is {tmp_path / 'a.html'}" in output
    assert {path.name for path in tmp_path.iterdir()} == {"a.html", "a.json", "a.png", "a.svg"}


def test_bench_reports_nothing_if_answers_differ(tmp_path, capsys, monkeypatch):
    from inlinevit.benchmark.measure import MODES

    monkeypatch.setitem(MODES, "compiled", lambda module: lambda x: module(x) + 1)
    code, line = refused(capsys, *TINY_BENCH.split(), "compiled", "--output", tmp_path)
    assert code == 1
    assert "(eager) and" in line
    assert "should answer alike, but differ by" in line
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ("layr", "did you mean layer?"),
        ("model --sises 224", "did you mean sizes?"),
        ("model --models deit_tiny_patch16_244", "did you mean deit_tiny_patch16_224?"),
        ("model --sizes 225", "224 or 256 would be"),
        ("model --batches -1", "it should be at least 1"),
        ("model --threads 0", "threads is 0: it should be at least 1"),
        ("layer --tokens 50", "49 or 64 would"),
        ("detection --width 1333", "width 1333 is no multiple of 32: 1312 or 1344 would be"),
        ("detection --detectors mask_rcn", "did you mean mask_rcnn?"),
        ("detection --backbones inline_deit_tiny", "choose a hierarchical"),
        ("resolution --modes egaer", "did you mean eager?"),
        ("window --device tpu", "it should be cpu or cuda"),
    ],
)
def test_mistakes_in_a_bench_are_answered_in_a_sentence(options, remedy, capsys):
    assert remedy in refused(capsys, "bench", *options.split())[1]


def test_the_comments_under_fields_are_the_help_of_options(capsys):
    with pytest.raises(SystemExit):
        cli.main(["train", "--help"])
    assert "Largest norm of the gradients." in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("arguments", "right"),
    [
        (["--data.batch_sise", "3"], "data.batch_size"),
        (["--dat.batch_size", "3"], "data.batch_size"),
        (["--optimizer.weight-decay", "3"], "optimizer.weight_decay"),
        (["--run.precision", "bf61"], "bf16"),
        (["--run.precison", "bf16"], "run.precision"),
    ],
)
def test_a_wrong_option_or_value_is_refused_with_the_nearest_right_one(arguments, right, capsys):
    code, line = refused(capsys, "train", *arguments)
    assert code == 2
    assert line.endswith(f"did you mean {right}?")


@pytest.mark.parametrize(
    ("content", "right"),
    [
        ("data:\n  batch_sise: 3\n", "data.batch_size"),
        ("optimiser:\n  lr: 3\n", "optimizer.lr"),
        ("run:\n  precision: bf61\n", "bf16"),
    ],
)
def test_a_wrong_key_of_a_recipe_is_refused_with_the_nearest_right_one(content, right, tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(content)
    code, line = refused(capsys, "train", "--config", recipe)
    assert code == 2
    assert line.endswith(f"did you mean {right}?")


def test_a_missing_recipe_is_refused_with_the_nearest_file(tmp_path, capsys):
    (tmp_path / "inline_swin_tiny.yaml").write_text("")
    code, line = refused(capsys, "train", "--config", tmp_path / "inline_swin_tin.yaml")
    assert code == 2
    assert line.endswith(f"did you mean {tmp_path / 'inline_swin_tiny.yaml'}?")
    code, line = refused(capsys, "train", "--config", tmp_path / "nowhere" / "a.yaml")
    assert "recipes/" in line


def test_a_recipe_that_is_no_yaml_is_refused(tmp_path, capsys):
    (tmp_path / "a.yaml").write_text("run: [")
    assert refused(capsys, "train", "--config", tmp_path / "a.yaml")[0] == 2


def test_a_wrong_command_is_refused_with_the_nearest_right_one(capsys):
    assert refused(capsys, "tran")[1].endswith("did you mean train?")


def test_values_that_make_no_sense_are_refused(capsys):
    assert refused(capsys, "train", "--data.batch_size", -3) == (
        1,
        "error: data.batch_size is -3: it should be at least 1",
    )


def test_options_override_the_recipe(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("data:\n  batch_size: 32\n  workers: 3\nmodel:\n  options: {attention: inline, depth: 3}\n")
    config = cli.parse_config(
        ["--config", str(recipe), "--data.batch_size", "64", "--model.kwargs.attention", "softmax"]
    )
    assert (config.data.batch_size, config.data.workers) == (64, 3)
    assert config.model.kwargs == {"attention": "softmax", "depth": 3}


def test_a_later_recipe_overrides_an_earlier_one(tmp_path):
    for name, content in {"a": "{batch_size: 32, workers: 3}", "b": "{batch_size: 64}"}.items():
        (tmp_path / f"{name}.yaml").write_text(f"data: {content}\n")
    config = cli.parse_config(["--config", str(tmp_path / "a.yaml"), "--config", str(tmp_path / "b.yaml")])
    assert (config.data.batch_size, config.data.workers) == (64, 3)


def test_print_config_prints_a_recipe(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "--run.seed", "7", "--print_config"])
    assert not ended.value.code
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(capsys.readouterr().out)
    assert cli.parse_config(["--config", str(recipe)]) == cli.parse_config(["--run.seed", "7"])


def test_a_full_disk_is_told_with_what_to_do(monkeypatch, capsys):
    def run(settings):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setitem(cli.COMMANDS, "models", cli.COMMANDS["models"]._replace(run=run))
    code, line = refused(capsys, "models")
    assert code == 1
    assert "free some and run the same command again" in line


def test_a_process_whose_neighbour_has_gone_says_so(monkeypatch, capsys):
    def run(settings):
        raise RuntimeError("[pair.cc:561] Connection closed by peer [127.0.0.1]:7053")

    monkeypatch.setitem(cli.COMMANDS, "models", cli.COMMANDS["models"]._replace(run=run))
    code, line = refused(capsys, "models")
    assert code == 1
    assert "another process has ended before this one: see what that one says" in line


def test_an_error_of_the_system_is_told_in_a_sentence(monkeypatch, capsys):
    def run(settings):
        Path("/proc/nowhere/file").write_text("")

    monkeypatch.setitem(cli.COMMANDS, "models", cli.COMMANDS["models"]._replace(run=run))
    code, line = refused(capsys, "models")
    assert (code, line) == (1, "error: /proc/nowhere/file cannot be used (No such file or directory): check the path")


def test_a_reader_that_has_seen_enough_is_no_error():
    command = f"{sys.executable} -m inlinevit models --json | head -n 1"
    ended = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=120)
    assert ended.stdout == "[\n"
    assert ended.stderr == ""


def test_a_bug_is_no_mistake_of_the_user(monkeypatch):
    def run(settings):
        raise KeyError("a bug")

    monkeypatch.setitem(cli.COMMANDS, "models", cli.COMMANDS["models"]._replace(run=run))
    with pytest.raises(KeyError):
        cli.main(["models"])


def test_a_traceback_is_shown_on_demand(monkeypatch):
    monkeypatch.setenv("INLINEVIT_TRACEBACK", "1")
    with pytest.raises(ValueError, match="no model matches"):
        cli.main(["models", "--filter", "resnet*"])


def test_without_its_extra_the_command_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "jsonargparse", None)
    monkeypatch.delitem(sys.modules, "inlinevit.cli")
    with pytest.raises(SystemExit, match=r"pip install 'inlinevit\[cli\]'"):
        import inlinevit.cli  # noqa: F401


def test_a_missing_package_is_named_with_its_extra(monkeypatch, capsys):
    def fail(settings):
        raise ModuleNotFoundError("No module named 'pycocotools'", name="pycocotools")

    monkeypatch.setitem(cli.COMMANDS, "models", cli.COMMANDS["models"]._replace(run=fail))
    with pytest.raises(SystemExit):
        cli.main(["models"])
    assert "pip install 'inlinevit[detection]'" in capsys.readouterr().err


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
        ("[" * 5000, "is not a valid recipe"),
        ("optimizer: {lr: null}", "lr"),
    ],
    ids=["laughs", "list", "number", "null", "top list", "empty", "timestamp", "deep", "null field"],
)
def test_recipes_of_another_form_are_refused_at_once(text, message, tmp_path, capsys):
    (tmp_path / "a.yaml").write_text(text)
    start = time.monotonic()
    code, line = refused(capsys, "train", "--config", tmp_path / "a.yaml")
    assert code in (1, 2)
    assert re.search(message, line)
    assert time.monotonic() - start < 20


def test_a_recipe_may_come_through_a_pipe(tmp_path):
    pipe = tmp_path / "a.yaml"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_text("optimizer: {lr: 0.25}"))
    writer.start()
    assert cli.parse_config(["--config", str(pipe)]).optimizer.lr == 0.25
    writer.join()
