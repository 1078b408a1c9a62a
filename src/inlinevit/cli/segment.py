"""`inlinevit segment`: semantic segmentation."""

from collections.abc import Sequence
from typing import Literal

from jsonargparse import ArgumentParser, Namespace

from ..tasks.segmentation.config import InferenceOptions, SegmentationConfig, SegmentationDataOptions
from .commands import Command
from .dense import call, predict_command, subcommands
from .parsing import add_options, new_parser, parse_as, to_config, train_parser
from .training import run_training


def make_train_parser() -> ArgumentParser:
    """Return the parser of `train`: a recipe, and the fields of SegmentationConfig."""
    example = "semantic_fpn_inline_pvt_tiny"
    return train_parser("segment train", "Train a segmentation model.", "segmentation", SegmentationConfig, example)


def parse_config(arguments: Sequence[str]) -> SegmentationConfig:
    """Return the configuration that the command would use for these arguments."""
    return parse_as(SegmentationConfig, make_train_parser(), arguments)


def train(settings: Namespace) -> None:
    """Train a segmentation model."""
    from ..tasks.segmentation.task import Segmentation

    config = to_config(settings, SegmentationConfig)
    run_training(Segmentation(config), config)


def evaluate(
    run: str,
    data: SegmentationDataOptions,
    inference: InferenceOptions,
    checkpoint: str | None = None,
    output: str | None = None,
    precision: Literal["no", "bf16", "fp16"] = "no",
) -> None:
    """Evaluate a segmentation model.

    Args:
        run: The folder of a training run.
        data: The images and their label maps; what is not given is as in the training run.
        inference: Inference settings.
        checkpoint: "best" or a checkpoint of the run; null = the final weights.
        output: Folder for evaluation.json, per_class.csv and confusion.png.
        precision: Mixed precision: no, bf16 or fp16.
    """
    from ..tasks.segmentation.evaluate import evaluate_command

    evaluate_command(run, data, inference, checkpoint, output, precision)


def make_eval_parser() -> ArgumentParser:
    """Return the parser of `eval`: the arguments of evaluate()."""
    parser = new_parser("segment eval", "Evaluate a segmentation model.", "RUN [options]")
    parser.add_argument("run", type=str, metavar="RUN", help="folder of a training run")
    add_options(parser, evaluate, skip=["run"])
    return parser


def predict(
    run: str,
    images: list[str],
    output: str,
    inference: InferenceOptions,
    checkpoint: str | None = None,
    device: str | None = None,
) -> int:
    """Predict the class of each pixel of images, and draw it.

    Args:
        run: The folder of a training run.
        images: Images, folders of them, or glob patterns.
        output: Folder for the label map of each image, NAME_labels.png with the values of the training data, a drawing,
            NAME_overlay.png, and predictions.json.
        inference: Inference settings. Images that are too large to be processed whole are processed in windows.
        checkpoint: "best" or a checkpoint of the run; null = the final weights.
        device: Where to compute, such as cpu or cuda; null = the best one available.

    Returns:
        The exit code: 1 if an image could not be used, else 0.
    """
    from ..tasks.segmentation.predict import predict_command

    return predict_command(run, images, output, inference, checkpoint, device)


COMMAND = subcommands(
    Command(make_train_parser, train),
    Command(make_eval_parser, call(evaluate)),
    predict_command("segment", predict),
)
