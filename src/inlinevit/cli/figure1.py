"""`inlinevit figure1`: the paper's first figure."""

from jsonargparse import ArgumentParser, Namespace

from .parsing import new_parser


def make_parser() -> ArgumentParser:
    """Return the parser of `inlinevit figure1`."""
    parser = new_parser("figure1", "Redraw the paper's first figure from computed numbers.")
    about = "folder for figure1.png, figure1.svg and figure1.json"
    parser.add_argument("--output", type=str, default="runs/figure1", help=about)
    return parser


def run(settings: Namespace) -> None:
    """Redraw the paper's first figure."""
    from ..analysis.figure1 import figure1

    figure1(settings.output)
