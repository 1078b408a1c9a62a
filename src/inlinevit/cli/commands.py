"""The table of commands. Their modules are imported when they are called, because some take seconds to load."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace


@dataclass(frozen=True)
class Command:
    """A command that can be run.

    Attributes:
        make_parser: Returns the parser of its arguments.
        run: From the parsed arguments to an exit code (None = 0).
    """

    make_parser: Callable[[], "ArgumentParser"]
    run: Callable[["Namespace"], int | None]


@dataclass(frozen=True)
class Entry:
    """A line in the table of commands.

    Attributes:
        help: What the command does, in a few words.
        load: Returns the command, or the table of its subcommands.
    """

    help: str
    load: Callable[[], "Command | Mapping[str, Entry]"]


def from_module(name: str, help: str) -> Entry:
    """An entry whose command is COMMAND in a module of this package, imported on demand."""
    return Entry(help, lambda: import_module(f"{__package__}.{name}").COMMAND)


COMMANDS: dict[str, Entry] = {
    "demo": from_module("demo", "train softmax, linear and InLine attention side by side, in minutes"),
    "models": from_module("models", "list all models with their size, cost and accuracy"),
    "recipes": from_module("recipes", "list the recipes that --config takes, or print one of them"),
    "train": from_module("train", "train a classifier"),
    "eval": from_module("eval", "evaluate a classifier"),
    "predict": from_module("predict", "classify images"),
    "detect": from_module("detect", "object detection: train, evaluate, predict"),
    "segment": from_module("segment", "semantic segmentation: train, evaluate, predict"),
    "analyze": from_module("analyze", "measure what the attention of models does"),
    "figure1": from_module("figure1", "redraw the paper's first figure"),
    "bench": from_module("bench", "measure speed and memory"),
    "reproduce": from_module("reproduce", "run the paper's ablations on CIFAR-10"),
}


@dataclass(frozen=True)
class Resolved:
    """How far the words of a command line name a command.

    Attributes:
        prefix: The words that do, such as ("detect", "train").
        target: The command, or the table from which the next word has to be chosen.
        arguments: The words after them.
    """

    prefix: tuple[str, ...]
    target: Command | Mapping[str, Entry]
    arguments: tuple[str, ...]


def resolve(words: Sequence[str]) -> Resolved:
    """Find the command that a command line names."""
    prefix: list[str] = []
    target: Command | Mapping[str, Entry] = COMMANDS
    for word in words:
        if isinstance(target, Command) or word not in target:
            break
        prefix.append(word)
        target = target[word].load()
    return Resolved(tuple(prefix), target, tuple(words[len(prefix) :]))
