"""The table of commands. Their modules are imported when they are called, because some take seconds to load."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

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


def from_module(name: str, *arguments: TaskEntry) -> Command:
    """Import a command of this package: make_parser and run of its module, both with these arguments."""
    module = import_module(f"{__package__}.{name}")
    return Command(partial(module.make_parser, *arguments), partial(module.run, *arguments))


def of_task(task: TaskEntry) -> dict[str, Entry]:
    """Return the commands of a task."""
    about = {"train": "train a model", "eval": "evaluate a model", "predict": "predict images with a model"}
    return {
        name: Entry(f"{help} for {task.description}", partial(from_module, name, task)) for name, help in about.items()
    }


COMMANDS: dict[str, Entry] = {
    "demo": Entry("train softmax, linear and InLine attention side by side, in minutes", partial(from_module, "demo")),
    "models": Entry("list all models with their size, cost and accuracy", partial(from_module, "models")),
    "info": Entry("print versions, devices, and the state of the native CPU kernels", partial(from_module, "info")),
    "recipes": Entry("list the recipes that --config takes, or print one of them", partial(from_module, "recipes")),
    **of_task(TASKS["classification"]),
    **{
        task.command: Entry(f"{task.description}: train, eval, predict", partial(of_task, task))
        for task in TASKS.values()
        if task.command
    },
    "features": Entry("write the feature map of an image of any size", partial(from_module, "features")),
    "export": Entry("write a model as an ONNX file or an OpenVINO model", partial(from_module, "export")),
    "hub": Entry("write a training run as a model to share, and upload it", partial(from_module, "hub")),
    "analyze": Entry("measure what the attention of models does", partial(from_module, "analyze")),
    "explore": Entry("look at the attention of models in the browser", partial(from_module, "explore")),
    "figure1": Entry("redraw the paper's first figure", partial(from_module, "figure1")),
    "bench": Entry("measure speed and memory", lambda: import_module(f"{__package__}.bench").COMMANDS),
    "reproduce": Entry("run the paper's ablations on CIFAR-10", partial(from_module, "reproduce")),
}


class Resolved(NamedTuple):
    """How far the words of a command line name a command.

    Attributes:
        prefix: The words that do, such as ["detect", "train"].
        target: The command, or the table from which the next word has to be chosen.
        arguments: The words after them.
    """

    prefix: Sequence[str]
    target: Command | Mapping[str, Entry]
    arguments: Sequence[str]


def resolve(words: Sequence[str]) -> Resolved:
    """Find the command that a command line names."""
    target: Command | Mapping[str, Entry] = COMMANDS
    for place, word in enumerate(words):
        if isinstance(target, Command) or word not in target:
            return Resolved(words[:place], target, words[place:])
        target = target[word].load()
    return Resolved(words, target, ())
