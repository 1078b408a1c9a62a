"""`inlinevit predict`: classify images."""

from typing import Literal

from jsonargparse import ArgumentParser, Namespace

from .commands import Command
from .parsing import add_options, new_parser


def predict(
    model: str,
    images: list[str],
    checkpoint: str | None = None,
    img_size: int | None = None,
    top: int = 5,
    format: Literal["table", "json", "csv"] = "table",
    output: str | None = None,
    batch_size: int = 32,
) -> int:
    """Classify images.

    Args:
        model: The folder of a training run, or the name of a model of ours or of timm's.
        images: Images, folders of them, or glob patterns.
        checkpoint: With a name, the file of its weights (default: the published ones); with a run, "best" or a
            checkpoint (default: the final weights).
        img_size: Side of the images that the model sees; null = what it was trained for.
        top: Number of classes to print for each image.
        format: Format of the output.
        output: File for the predictions; null = print them.
        batch_size: Images that are computed together.

    Returns:
        The exit code: 1 if an image could not be used, else 0.
    """
    from ..tasks.classification.predict import predict_command

    return predict_command(model, images, checkpoint, img_size, top, format, output, batch_size)


def make_parser() -> ArgumentParser:
    """Return the parser: the arguments of predict()."""
    parser = new_parser("predict", "Classify images.", "MODEL IMAGE... [options]")
    parser.add_argument("model", type=str, metavar="MODEL", help="folder of a training run, or name of a model")
    about = "images, folders of images, or patterns such as '*.jpg'"
    parser.add_argument("images", nargs="+", type=str, metavar="IMAGE", help=about)
    add_options(parser, predict, skip=["model", "images"])
    return parser


def run(settings: Namespace) -> int:
    """Classify images."""
    return predict(**vars(settings))


COMMAND = Command(make_parser, run)
