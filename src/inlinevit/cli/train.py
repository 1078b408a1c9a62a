"""`inlinevit train`: train a classifier."""

from collections.abc import Sequence

from jsonargparse import ArgumentParser, Namespace

from ..tasks.classification.config import ClassificationConfig
from .commands import Command
from .parsing import parse_as, to_config, train_parser
from .training import run_training


def make_parser() -> ArgumentParser:
    """Return the parser: a recipe, and the fields of ClassificationConfig."""
    return train_parser("train", "Train a classifier.", "classification", ClassificationConfig, "inline_swin_tiny")


def parse_config(arguments: Sequence[str]) -> ClassificationConfig:
    """Return the configuration that the command would use for these arguments."""
    return parse_as(ClassificationConfig, make_parser(), arguments)


def run(settings: Namespace) -> None:
    """Train a classifier."""
    from ..tasks.classification.task import Classification

    config = to_config(settings, ClassificationConfig)
    run_training(Classification(config), config)


COMMAND = Command(make_parser, run)
