"""Parsers of arguments that the commands share."""

import json
import sys
from argparse import SUPPRESS, Action, ArgumentError
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, TypeVar, cast, get_args

from jsonargparse import ActionConfigFile, ArgumentParser, Namespace, set_parsing_settings

from ..recipes import find_recipe, merge_recipe_files, read_recipe_files
from ..tasks import TaskEntry
from ..utils.validation import has_type

AnyConfig = TypeVar("AnyConfig")

PRINT_CONFIG = "--print_config"
# The docstrings under the fields of configuration classes are the help of the options.
set_parsing_settings(docstring_parse_attribute_docstrings=True)


class NestedParser(ArgumentParser):
    """A parser for options inside dicts at any depth, as in `--model.kwargs.attn_kwargs.lepe 3`.

    jsonargparse would replace a dict inside a dict by one with this option alone, whose value is text.
    """

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Namespace | None = None, **options: Any
    ) -> Namespace:
        """See ArgumentParser.parse_args; options inside dicts have the last word."""
        plain, nested = self.split_nested(sys.argv[1:] if args is None else args)
        if not nested:
            return super().parse_args(plain, namespace, **options)
        # Printing ends the program: first without it, for the dicts that are changed.
        silent = [word for word in plain if word.partition("=")[0] != PRINT_CONFIG]
        settings = super().parse_args(silent, namespace, **options)
        # Whole dicts before options inside them.
        for dest, keys, value in sorted(nested, key=lambda one: len(one[1])):
            settings[dest] = merge_value(settings[dest], keys, value, f"--{dest}")
        if silent != plain:
            changed = [f"--{dest}={json.dumps(settings[dest])}" for dest in {dest: None for dest, _, _ in nested}]
            super().parse_args([*plain, *changed], **options)
        return settings

    def split_nested(self, args: Sequence[str]) -> tuple[list[str], list[tuple[str, list[str], Any]]]:
        """Return the words of other options, and those inside dicts as the name of the dict, the keys and the value."""
        plain: list[str] = []
        nested: list[tuple[str, list[str], Any]] = []
        words = iter(args)
        for word in words:
            name, equals, text = word.partition("=")
            dest = next((one for one in self.dict_options() if name.startswith(f"--{one}.")), None)
            if dest is None:
                plain.append(word)
                continue
            value = text if equals else next(words, None)
            if value is None:
                raise ArgumentError(None, f"{name} has no value: write {name} VALUE")
            rest = name.removeprefix(f"--{dest}.")
            if self.dict_options()[dest]:
                nested.append((dest, rest.split("."), typed(value)))
                continue
            # Values are numbers, and dots belong to the key, as in --optimizer.lr_scales.head.weight 10.
            if not has_type(typed(value), float):
                raise ArgumentError(None, f"{name} is {value}: it should be a number")
            nested.append((dest, [rest], float(typed(value))))
        return plain, nested

    def dict_options(self) -> dict[str, bool]:
        """Return the names of the options that are dicts, and whether their values may be dicts, too."""
        hints = {action.dest: getattr(action, "_typehint", None) for action in self._actions}
        dicts = [action.dest for action in self._actions if isinstance(action.default, dict)]
        return {dest: Any in get_args(hints[dest]) for dest in dicts}


def typed(text: str) -> Any:
    """Return the value that jsonargparse makes of a text where any type may stand."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--values", type=dict[str, Any])
    return parser.parse_args([f"--values.one={text}"])["values"]["one"]


def merge_value(values: Any, keys: Sequence[str], value: Any, name: str) -> dict[str, Any]:
    """Return a dict with a value at the place that keys lead to; `name` is that of the dict, for messages."""
    if not isinstance(values, dict | None):
        raise ArgumentError(None, f"{name} is {values!r}, which has no {keys[0]!r}: leave out one of both")
    first, *rest = keys
    before = (values or {}).get(first)
    return {**(values or {}), first: merge_value(before, rest, value, f"{name}.{first}") if rest else value}


def new_parser(name: str, description: str, arguments: str = "[options]") -> ArgumentParser:
    """Return a parser for `inlinevit NAME` that raises its errors.

    Args:
        name: Name of the command, such as "detect train".
        description: What the command does.
        arguments: What follows the name in the usage line, which would otherwise list all options.
    """
    usage = f"inlinevit {name} {arguments}"
    return NestedParser(prog=f"inlinevit {name}", usage=usage, description=description, exit_on_error=False)


class ImportAction(Action):
    """`--import MODULE`: collects modules in `imports` of the parser. It is no field, so that no recipe can set it."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        """See argparse.Action."""
        parser.imports = [*getattr(parser, "imports", ()), values]


def add_import(parser: ArgumentParser) -> None:
    """Add `--import MODULE`, for modules that register attentions or models of timm."""
    about = "a module to import first, which registers attentions (docs/attentions.md); can be given several times"
    parser.add_argument("--import", action=ImportAction, dest=SUPPRESS, default=SUPPRESS, metavar="MODULE", help=about)


def add_stream(parser: ArgumentParser) -> None:
    """Add `--stream`, a flag of StreamOptions."""
    about = "process one image of any size as a whole, by rows, in bounded memory; it is not resized"
    parser.add_argument("--stream", action="store_true", help=about)


def add_options(parser: ArgumentParser, source: Callable[..., Any], skip: Sequence[str] = ()) -> None:
    """Add the fields of a dataclass or the arguments of a function as options, but those to skip.

    There is one group for each section, a field that is a dataclass.
    """
    if isinstance(source, type):
        files = [one.name for one in fields(cast(Any, source)) if one.type == list[str] | None]
        parser.add_class_arguments(source, skip={*skip, *files})
        # jsonargparse takes lists as YAML, as in --results "[a, b]"; files are easier to give as --results a b.
        described = new_parser("", "")
        described.add_class_arguments(source)
        for name in files:
            about = next(action.help for action in described._actions if action.dest == name)
            parser.add_argument(f"--{name}", nargs="+", type=str, default=None, metavar="FILE", help=about)
    else:
        parser.add_function_arguments(source, skip=set(skip))
    for action in parser._actions:
        # All other commands that compute call it so.
        if action.dest == "run.device":
            action.option_strings = [*action.option_strings, "--device"]
            parser._option_string_actions["--device"] = action
    sections = {action.dest for action in parser._actions if "." in action.dest}
    for name, group in (parser.groups or {}).items():
        group.title = f"{name} options" if any(dest.startswith(f"{name}.") for dest in sections) else "command options"
        for action in group._group_actions:
            # --SECTION FILE reads a whole section; --config does so for all of them.
            if action.dest == name:
                action.help = SUPPRESS
            # The limit has a short name, which messages mention, whatever the command.
            if action.dest == "data.max_pixels":
                action.option_strings = [*action.option_strings, "--max-pixels"]
                parser._option_string_actions["--max-pixels"] = action


def add_model(parser: ArgumentParser, task: TaskEntry, nargs: str | None = None) -> None:
    """Add the model that a command of a task is given; nargs "?" makes it optional."""
    kinds = ["folder of a training run", *(["exported model (.onnx, .xml)"] if task.is_exportable else [])]
    kinds += ["name of a model"] if task.accepts_names else []
    about = " or ".join([", ".join(kinds[:-1]), kinds[-1]]) if len(kinds) > 1 else kinds[0]
    parser.add_argument("model", nargs=nargs, type=str, metavar="MODEL", help=about)


class RecipeAction(ActionConfigFile):
    """`--config RECIPE`: the name of a shipped recipe of a task, or a file.

    All files of the recipe are checked before the parser reads them, because some YAML would keep it busy forever.

    Attributes:
        task: The task of the command, set by add_recipe.
    """

    task: str

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        """See argparse.Action."""
        import yaml

        options = [action.dest for action in parser._actions]
        try:
            file = find_recipe(values, self.task)
        except ValueError as error:
            raise ArgumentError(self, str(error)) from error
        try:
            files = read_recipe_files(file, self.task)
            for one in files:
                require_sections(one.content, options)
            recipe = yaml.safe_dump(merge_recipe_files(files), sort_keys=False)
        except (OSError, ValueError) as error:
            raise ArgumentError(self, f"{values} is not a valid recipe ({error})") from error
        super().__call__(parser, namespace, recipe, option_string)
        # Which recipes were given, instead of their content.
        namespace[self.dest][-1] = values


def require_sections(recipe: Any, options: Sequence[str], section: str = "") -> None:
    """Raise a ValueError, without the name of the file, for a recipe with something else where fields are expected.

    Args:
        recipe: The content of the recipe, or of one of its sections.
        options: The options of the command: data.path, ….
        section: Which one of it this is, such as "data."; "" = all of it.
    """
    if not isinstance(recipe, dict):
        example = next(option for option in options if option.startswith(section) and "." in option)
        raise ValueError(
            f"{recipe!r:.80} stands for {section.removesuffix('.') or 'all of it'}: write fields there, such as "
            f"{example.removeprefix(section)}"
        )
    for key, value in recipe.items():
        if not section and key in ("import", SUPPRESS):
            raise ValueError("it names modules, but no file may have code imported: use --import on the command line")
        if any(option.startswith(f"{section}{key}.") for option in options):
            require_sections(value, options, f"{section}{key}.")


def add_recipe(parser: ArgumentParser, task: str, example: str) -> None:
    """Add `--config RECIPE`, where recipes of the task are found by name; one of them is the example in the help."""
    about = f"name of a recipe, such as {example} (`inlinevit recipes` lists them), or a YAML file"
    action = parser.add_argument("--config", action=RecipeAction, metavar="RECIPE", help=about)
    cast(RecipeAction, action).task = task


def to_config(settings: Namespace, kind: type[AnyConfig]) -> AnyConfig:
    """Return the parsed fields of a configuration as one object."""
    return kind(**{field.name: settings[field.name] for field in fields(cast(Any, kind))})
