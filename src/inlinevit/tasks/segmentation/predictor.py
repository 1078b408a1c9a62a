"""Models that label pixels and are ready to use, out of a training run."""

from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from ...engine.runs import RUN_LABELS, run_config, run_weights
from ...models._weight_files import read_state_dict, require_finite
from ...models.factory import load_weights
from ...utils.files import read_json
from ..backbone import mean_and_std
from .config import SegmentationConfig
from .inference import MeanStd
from .labels import LabelMap
from .model import build_segmenter


@dataclass
class SegmentationPredictor:
    """A model that labels pixels and is ready to use.

    Attributes:
        model: In evaluation mode, on the CPU.
        labels: Its classes, and the values that stand for them in files.
        name: Its kind and its backbone.
        config: The run that it comes from; `config.inference` are the default inference settings.
        mean_std: What its images are normalised by.
    """

    model: nn.Module
    labels: LabelMap
    name: str
    config: SegmentationConfig
    mean_std: MeanStd


def load_segmenter(run: str, *, checkpoint: str | None = None) -> SegmentationPredictor:
    """The model of a training run.

    Args:
        run: The folder of the run.
        checkpoint: "best" for its best checkpoint, the folder of another one, or a file; None = the final weights.
    """
    config = run_config(SegmentationConfig, run)
    labels = read_run_labels(Path(run) / RUN_LABELS)
    file = run_weights(Path(run), checkpoint)
    weights = read_state_dict(file)
    require_finite(weights, file)
    # Everything is in the file: nothing is fetched.
    bare = replace(config.model, pretrained=False, checkpoint=None, drop_path_rate=0.0)
    model = build_segmenter(bare, len(labels.classes))
    load_weights(model, weights, file)
    name = f"{config.model.arch} on {config.model.backbone}"
    return SegmentationPredictor(model.eval(), labels, name, config, mean_and_std(config.model.backbone))


def read_run_labels(file: Path) -> LabelMap:
    """The classes that a run was trained on, in the order of their indices, and their values in files."""
    remedy = "restore it from the run, or train anew"
    try:
        return LabelMap.from_plain(read_json(file), file)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{file} is missing: {remedy}") from error
    except ValueError as error:
        raise ValueError(f"{file} does not say which classes there are ({error}): {remedy}") from error
