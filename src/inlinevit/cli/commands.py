"""The table of commands. Their modules are imported when they are called, because some take seconds to load."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from ..tasks import TASKS, TaskEntry

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


def of_task(task: TaskEntry) -> dict[str, Entry]:
    """Return the commands of a task: make_command(task) of the modules train, eval and predict."""

    def from_task(module: str) -> Callable[[], Command]:
        return lambda: import_module(f"{__package__}.{module}").make_command(task)

    return {
        "train": Entry(f"train a model for {task.description}", from_task("train")),
        "eval": Entry(f"evaluate a model for {task.description}", from_task("eval")),
        "predict": Entry(f"predict images with a model for {task.description}", from_task("predict")),
    }


def with_command(task: TaskEntry) -> Entry:
    """Return the entry of a task with a command of its own."""
    return Entry(f"{task.description}: train, eval, predict", lambda: of_task(task))


COMMANDS: dict[str, Entry] = {
    "demo": from_module("demo", "train softmax, linear and InLine attention side by side, in minutes"),
    "models": from_module("models", "list all models with their size, cost and accuracy"),
    "info": from_module("info", "print versions, devices, and whether the native CPU kernels are used"),
    "recipes": from_module("recipes", "list the recipes that --config takes, or print one of them"),
    **of_task(TASKS["classification"]),
    **{task.command: with_command(task) for task in TASKS.values() if task.command},
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
