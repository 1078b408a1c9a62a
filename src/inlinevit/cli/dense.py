"""Arguments that `inlinevit detect` and `inlinevit segment` share."""

from collections.abc import Callable
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from .commands import Command, Entry
from .parsing import add_options, new_parser


def predict_command(name: str, predict: Callable[..., int]) -> Command:
    """Return the command `inlinevit NAME predict`: a run, images, and the other arguments of a function."""

    def make_parser() -> ArgumentParser:
        parser = new_parser(f"{name} predict", "Predict images and draw the results.", "RUN IMAGE... [options]")
        parser.add_argument("run", type=str, metavar="RUN", help="folder of a training run")
        about = "images, folders of images, or patterns such as '*.jpg'"
        parser.add_argument("images", nargs="+", type=str, metavar="IMAGE", help=about)
        add_options(parser, predict, skip=["run", "images"])
        return parser

    return Command(make_parser, call(predict))


def call(function: Callable[..., Any]) -> Callable[[Namespace], Any]:
    """Return a function that takes the parsed arguments of another one."""
    return lambda settings: function(**vars(settings))


def subcommands(train: Command, evaluate: Command, predict: Command) -> dict[str, Entry]:
    """Return the table of subcommands of a dense task."""
    return {
        "train": Entry("train a model", lambda: train),
        "eval": Entry("evaluate a model", lambda: evaluate),
        "predict": Entry("predict images and draw the results", lambda: predict),
    }
