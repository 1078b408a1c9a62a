"""`--import MODULE`: code that the user names, and none that a file names."""

import json
import sys

import pytest

from inlinevit import cli
from inlinevit.engine.config import TrainConfig, check_unchanged, to_plain

ATTENTION = """
import inlinevit
from inlinevit.layers import LinearAttention

inlinevit.register_attention("mine", type("Mine", (LinearAttention,), {"__module__": __name__}))
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module into the current folder, which is not on Python's path."""
    monkeypatch.chdir(tmp_path)
    names = []

    def write(name, content=ATTENTION):
        names.append(name)
        (tmp_path / f"{name}.py").write_text(content)
        return name

    yield write
    for name in names:
        sys.modules.pop(name, None)


def test_a_module_of_the_current_folder_is_imported(module, capsys):
    path = list(sys.path)
    name = module("my_attention_of_this_folder")
    cli.main(["models", "--attentions", "--json", "--import", name])
    rows = json.loads(capsys.readouterr().out)
    assert {"attention": "mine", "class": f"{name}.Mine"} in rows
    assert sys.path == path


def test_several_modules_in_both_notations(module, capsys):
    first, second = module("first_of_two", "print('first')"), module("second_of_two", "print('second')")
    cli.main(["models", f"--import={first}", "--attentions", "--markdown", "--import", second])
    assert capsys.readouterr().out.startswith("first\nsecond\n| attention")


def test_modules_of_the_current_folder_replace_no_installed_ones(module):
    module("timm", "raise AssertionError")
    name = module("imports_timm", "import timm; assert timm.list_models")
    cli.main(["models", "--attentions", "--import", name])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("no_such_module", None, "--import no_such_module: there is no module no_such_module: install the package, or"),
        ("json.no_such_part", None, "--import json.no_such_part: there is no module json.no_such_part: install"),
        ("needs_another", "import no_such_module", "--import needs_another needs no_such_module, which is not inst"),
        ("fails", "1 / 0", "--import fails failed (ZeroDivisionError: division by zero): correct the module"),
        ("wrong", "(", "--import wrong failed (SyntaxError: "),
        ("file.py", None, "--import file.py: there is no module file"),
        ("folder/file.py", None, "--import 'folder/file.py' is not the name of a module: write it as in an import"),
        ("os; print(1)", None, "--import 'os; print(1)' is not the name of a module"),
        ("", None, "--import '' is not the name of a module"),
    ],
)
def test_what_cannot_be_imported_is_refused(module, refused, name, content, message):
    if content is not None:
        module(name, content)
    code, line = refused("train", "--import", name)
    assert code == 1
    assert line.startswith(f"error: {message}")


def test_an_unknown_attention_names_the_option(refused):
    options = ("--config", "embedded", "--run.output", "none", "--model.kwargs.attention", "mine")
    message = refused("train", *options)[1]
    assert "unknown attention 'mine': choose one of agent, " in message
    assert message.endswith("or import the module that registers it (on the command line: --import MODULE)")


@pytest.mark.parametrize("content", ["import: my_module", "import: [my_module]", "'==SUPPRESS==': my_module"])
def test_a_recipe_cannot_import(module, refused, tmp_path, content):
    module("my_module", "raise AssertionError('imported')")
    (tmp_path / "recipe.yaml").write_text(content)
    code, line = refused("train", "--config", "recipe.yaml")
    assert code == 2
    assert "no file may have code imported: use --import on the command line" in line


def test_a_record_in_a_recipe_imports_nothing(module, refused, tmp_path):
    """As in config.yaml of a run of somebody else."""
    module("my_module", "raise AssertionError('imported')")
    content = {"model": {"kwargs": {"attention": "mine"}}, "run": {"attention_modules": {"mine": "my_module"}}}
    (tmp_path / "recipe.yaml").write_text(json.dumps({**content, "data": {"path": "embedded"}}))
    code, line = refused("train", "--config", "recipe.yaml")
    assert code == 1
    assert line.startswith("error: the configuration needs attention 'mine' of the module my_module, which is not impo")
    assert "my_module" not in sys.modules


def test_models_does_not_ignore_it(module, refused):
    name = module("registers_nothing", "")
    assert refused("models", "--import", name)[1].endswith("use it with --attentions")
    assert refused("models", "--attentions", "--filter", "*swin*")[1].endswith("leave out --task and --filter")


def test_where_an_attention_comes_from_may_change_when_a_run_is_resumed():
    before, now = to_plain(TrainConfig()), TrainConfig()
    now.run.attention_modules = {"mine": "my_module"}
    check_unchanged(before, now)
    now.run.seed = 1
    with pytest.raises(ValueError, match=r"\(run\.seed was 0 and is 1\)"):
        check_unchanged(before, now)
