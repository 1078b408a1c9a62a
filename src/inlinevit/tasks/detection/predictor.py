"""Detectors that are ready to use, out of a training run."""

from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from ...engine.runs import RUN_CATEGORIES, run_config, run_weights
from ...models._weight_files import read_state_dict, require_finite
from ...models.factory import load_weights
from ...utils.files import read_json
from .coco import Category
from .config import DetectionConfig, DetectorConfig
from .model import build_detector


@dataclass
class DetectionPredictor:
    """A detector that is ready to use.

    Attributes:
        model: In evaluation mode, on the CPU.
        categories: What its labels 1, 2, … mean, with the ids of the data that it was trained on.
        name: Its kind and its backbone.
        config: What it was made with.
    """

    model: nn.Module
    categories: list[Category]
    name: str
    config: DetectorConfig


def load_detector(run: str, *, checkpoint: str | None = None) -> DetectionPredictor:
    """The detector of a training run.

    Args:
        run: The folder of the run.
        checkpoint: "best" for its best checkpoint, the folder of another one, or a file; None = the final weights.
    """
    config = run_config(DetectionConfig, run).model
    categories = read_categories(Path(run) / RUN_CATEGORIES)
    file = run_weights(Path(run), checkpoint)
    weights = read_state_dict(file)
    require_finite(weights, file)
    # Everything is in the file: nothing is fetched.
    bare = replace(config, pretrained=False, checkpoint=None, drop_path_rate=0.0)
    model = build_detector(bare, config.num_classes or len(categories))
    load_weights(model, weights, file)
    return DetectionPredictor(model.eval(), categories, f"{config.arch} on {config.backbone}", config)


def read_categories(file: Path) -> list[Category]:
    """The categories that a run was trained on, in the order of their labels."""
    remedy = "restore it from the run, or train anew"
    try:
        records = read_json(file)
        categories = [Category(int(record["id"]), str(record["name"])) for record in records]
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{file} is missing: {remedy}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{file} is no list of categories with id and name: {remedy}") from error
    if not categories:
        raise ValueError(f"{file} names no category: {remedy}")
    return categories
