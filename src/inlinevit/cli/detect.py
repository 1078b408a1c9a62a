"""`inlinevit detect`: object detection and instance segmentation."""

from collections.abc import Sequence
from typing import Literal

from jsonargparse import ArgumentParser, Namespace

from ..tasks.detection.config import DetectionConfig, DetectionDataOptions
from .commands import Command
from .dense import call, predict_command, subcommands
from .parsing import add_options, new_parser, parse_as, to_config, train_parser
from .training import run_training


def make_train_parser() -> ArgumentParser:
    """Return the parser of `train`: a recipe, and the fields of DetectionConfig."""
    return train_parser(
        "detect train", "Train a detector.", "detection", DetectionConfig, "mask_rcnn_inline_pvt_tiny_1x"
    )


def parse_config(arguments: Sequence[str]) -> DetectionConfig:
    """Return the configuration that the command would use for these arguments."""
    return parse_as(DetectionConfig, make_train_parser(), arguments)


def train(settings: Namespace) -> None:
    """Train a detector."""
    from ..tasks.detection.task import Detection

    config = to_config(settings, DetectionConfig)
    run_training(Detection(config), config)


def evaluate(
    run: str | None,
    data: DetectionDataOptions,
    checkpoint: str | None = None,
    output: str | None = None,
    precision: Literal["no", "bf16", "fp16"] = "no",
    results: list[str] | None = None,
) -> None:
    """Evaluate a detector, or stored results.

    Args:
        run: The folder of a training run; null = none, if results and their data are named.
        data: The images; those of the training run, if no others are named.
        checkpoint: "best" or a checkpoint of the run; null = the final weights.
        output: Folder for evaluation.json, per_class.csv and, of a model, its results in COCO's format:
            results_bbox.json and results_segm.json.
        precision: Mixed precision: no, bf16 or fp16.
        results: Evaluate what is stored in these files, in COCO's results format, instead of a model; boxes and masks
            may be in files of their own.
    """
    from ..tasks.detection.evaluate import evaluate_command

    evaluate_command(run, data, checkpoint, output, precision, results)


def make_eval_parser() -> ArgumentParser:
    """Return the parser of `eval`: the arguments of evaluate()."""
    parser = new_parser("detect eval", "Evaluate a detector.", "[RUN] [options]")
    about = "folder of a training run, unless --results"
    parser.add_argument("run", nargs="?", type=str, default=None, metavar="RUN", help=about)
    about = "evaluate results in COCO's format instead of a model; boxes and masks may be in separate files"
    parser.add_argument("--results", nargs="+", type=str, default=None, metavar="FILE", help=about)
    add_options(parser, evaluate, skip=["run", "results"])
    return parser


def predict(
    run: str,
    images: list[str],
    output: str,
    checkpoint: str | None = None,
    threshold: float = 0.5,
    device: str | None = None,
) -> int:
    """Detect objects in images, and draw them.

    Args:
        run: The folder of a training run.
        images: Images, folders of them, or glob patterns.
        output: Folder for a drawing of each image, NAME.png, and predictions.json.
        checkpoint: "best" or a checkpoint of the run; null = the final weights.
        threshold: Objects with lower scores are left out.
        device: Where to compute, such as cpu or cuda; null = the best one available.

    Returns:
        The exit code: 1 if an image could not be used, else 0.
    """
    from ..tasks.detection.predict import predict_command

    return predict_command(run, images, output, checkpoint, threshold, device)


COMMAND = subcommands(
    Command(make_train_parser, train),
    Command(make_eval_parser, call(evaluate)),
    predict_command("detect", predict),
)
