"""`inlinevit demo`: softmax, linear and InLine attention side by side."""

from jsonargparse import ArgumentParser, Namespace

from .commands import Command
from .parsing import add_options, new_parser


def demo(output: str = "runs/demo", data: str = "embedded", seed: int = 0, steps: int = 900) -> None:
    """Train a small softmax, a plain linear and an InLine vision transformer side by side, and write a report.

    Args:
        output: Folder of the results: report.html, report.json, figures/, and a folder for each model.
        data: "embedded", the Fashion-MNIST images that come with this package; or fashion-mnist:FOLDER, with the
            folder of its four .gz files, for all of them.
        seed: Decides initial weights, order of the data and augmentation.
        steps: Training steps of each model.
    """
    from ..experiments import demo as experiment

    experiment.demo(output, data, seed, steps)


def make_parser() -> ArgumentParser:
    """Return the parser: the arguments of demo()."""
    parser = new_parser("demo", "Train softmax, linear and InLine attention side by side, and write a report.")
    add_options(parser, demo)
    return parser


def run(settings: Namespace) -> None:
    """Run the demo."""
    demo(**vars(settings))


COMMAND = Command(make_parser, run)
