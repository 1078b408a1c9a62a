"""`inlinevit eval`: evaluate a classifier."""

from typing import Literal

from jsonargparse import ArgumentParser, Namespace

from ..tasks.classification.config import ClassificationDataOptions
from .commands import Command
from .parsing import add_options, new_parser


def evaluate(
    model: str,
    data: ClassificationDataOptions,
    checkpoint: str | None = None,
    img_size: int | None = None,
    crop_pct: float | None = None,
    output: str | None = None,
    precision: Literal["no", "bf16", "fp16"] = "no",
) -> None:
    """Evaluate a classifier.

    Args:
        model: The folder of a training run, or the name of a model of ours or of timm's.
        data: The images; those of the training run, if none are named.
        checkpoint: With a name, the file of its weights (default: the published ones); with a run, "best" or a
            checkpoint (default: the final weights).
        img_size: Side of the images that the model sees; null = what it was trained for.
        crop_pct: Share of an image's side that the model sees; null = what it was trained for.
        output: Folder for evaluation.json, per_class.csv and confusion.png.
        precision: Mixed precision: no, bf16 or fp16.
    """
    from ..tasks.classification.evaluate import evaluate_command

    evaluate_command(model, data, checkpoint, img_size, crop_pct, output, precision)


def make_parser() -> ArgumentParser:
    """Return the parser: the arguments of evaluate()."""
    parser = new_parser("eval", "Evaluate a classifier.", "MODEL [options]")
    parser.add_argument("model", type=str, metavar="MODEL", help="folder of a training run, or name of a model")
    add_options(parser, evaluate, skip=["model"])
    return parser


def run(settings: Namespace) -> None:
    """Evaluate a classifier."""
    evaluate(**vars(settings))


COMMAND = Command(make_parser, run)
