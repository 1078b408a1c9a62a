"""`inlinevit figure1`: the paper's first figure."""

from jsonargparse import ArgumentParser, Namespace

from .commands import Command
from .parsing import add_options, new_parser


def figure1(output: str = "runs/figure1") -> None:
    """Redraw the paper's first figure from computed numbers.

    Args:
        output: Folder for figure1.png, figure1.svg and figure1.json.
    """
    from ..analysis.figure1 import figure1

    figure1(output)


def make_parser() -> ArgumentParser:
    """Return the parser: the arguments of figure1()."""
    parser = new_parser("figure1", "Redraw the paper's first figure from computed numbers.")
    add_options(parser, figure1)
    return parser


def run(settings: Namespace) -> None:
    """Redraw the paper's first figure."""
    figure1(**vars(settings))


COMMAND = Command(make_parser, run)
