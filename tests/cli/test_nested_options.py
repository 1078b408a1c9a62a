"""Options inside dicts, at any depth."""

from argparse import ArgumentError
from pathlib import Path
from typing import Any

import pytest
import yaml

from inlinevit.cli.train import parse_config

NAME = "--model.kwargs.attn_kwargs"


def kwargs_of(*arguments: str, recipe: str = "comparison") -> dict[str, Any]:
    return parse_config(["--config", recipe, *arguments]).model.kwargs


def test_a_nested_option_leaves_its_neighbours() -> None:
    before = kwargs_of()
    after = kwargs_of(f"{NAME}.lepe", "3", f"{NAME}.gate=true", "--model.kwargs.depth", "4")
    assert after == {**before, "depth": 4, "attn_kwargs": {**before["attn_kwargs"], "lepe": 3, "gate": True}}
    assert before["attn_kwargs"]["lepe"] == 0


def test_a_nested_option_needs_no_dict_before_it(tmp_path: Path) -> None:
    assert kwargs_of(f"{NAME}.lepe", "3", recipe="embedded")["attn_kwargs"] == {"lepe": 3}
    assert kwargs_of("--model.kwargs.a.b.c", "[1, 2]", "--model.kwargs.a.b.d=x")["a"] == {"b": {"c": [1, 2], "d": "x"}}


def test_a_nested_option_changes_a_dict_that_is_given_as_a_whole() -> None:
    for arguments in ([NAME, '{"gate": true}', f"{NAME}.lepe", "3"], [f"{NAME}.lepe", "3", NAME, '{"gate": true}']):
        assert kwargs_of(*arguments)["attn_kwargs"] == {"gate": True, "lepe": 3}


def test_options_inside_dicts_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        kwargs_of(f"{NAME}.lepe", "3", "--optimizer.lr_scales.head.*", "10", "--print_config", "--model.kwargs.depth=5")
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["model"]["kwargs"]["depth"] == 5
    assert printed["model"]["kwargs"]["attn_kwargs"]["lepe"] == 3
    assert printed["optimizer"]["lr_scales"] == {"head.*": 10.0}


def test_dots_belong_to_names_of_parameters() -> None:
    options = ["--optimizer.lr_scales.head.weight", "10", "--optimizer.lr_scales", '{"*.blocks.0.*": 2}']
    for arguments in (options, [*options[2:], *options[:2]]):
        found = parse_config(["--config", "embedded", *arguments]).optimizer.lr_scales
        assert found == {"head.weight": 10.0, "*.blocks.0.*": 2.0}
    with pytest.raises(ArgumentError, match=r"^--optimizer\.lr_scales\.head\.weight is much: it should be a number$"):
        parse_config(["--config", "embedded", "--optimizer.lr_scales.head.weight", "much"])


@pytest.mark.parametrize(
    ("text", "value"),
    [("3", 3), ("1e-3", 0.001), ("true", True), ("null", None), ("relu", "relu"), ("a=b", "a=b")],
)
def test_values_have_the_types_of_options_that_are_not_nested(text: str, value: Any) -> None:
    assert kwargs_of("--model.kwargs.depth", text)["depth"] == value
    for arguments in ([f"{NAME}.x", text], [f"{NAME}.x={text}"]):
        found = kwargs_of(*arguments)["attn_kwargs"]["x"]
        assert found == value
        assert type(found) is type(value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([f"{NAME}.lepe"], r"^--model\.kwargs\.attn_kwargs\.lepe has no value: write .*lepe VALUE$"),
        (["--model.kwargs.attention.x", "1"], r"^--model\.kwargs\.attention is 'softmax', which has no 'x': leave out"),
        ([f"{NAME}.lepe.x", "1"], r"attn_kwargs\.lepe is 0, which has no 'x'"),
        (["--model.kwarg.attn_kwargs.lepe", "3"], "unrecognized arguments: --model.kwarg.attn_kwargs.lepe"),
    ],
)
def test_mistakes_are_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        kwargs_of(*arguments)
