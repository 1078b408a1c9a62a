"""`inlinevit demo`: softmax, linear and InLine attention side by side."""

from jsonargparse import ArgumentParser, Namespace

from ..experiments.demo import demo
from .parsing import add_options, new_parser


def make_parser() -> ArgumentParser:
    """Return the parser: the arguments of demo()."""
    parser = new_parser("demo", "Train softmax, linear and InLine attention side by side, and write a report.")
    add_options(parser, demo)
    return parser


def run(settings: Namespace) -> None:
    """Run the demo."""
    demo(**vars(settings))
