"""Models that are ready to use: out of a training run, of a file, or as published."""

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from timm.data import ImageNetInfo, infer_imagenet_subset
from timm.models import get_pretrained_cfg, is_model
from torch import nn

from ...engine.runs import RUN_CLASSES, RUN_CONFIG, load_config, run_weights
from ...models._weight_files import read_state_dict, require_finite
from ...utils.files import read_json
from ...utils.validation import require
from .config import ClassificationConfig, ModelConfig
from .model import build_model, channels_of_weights, check_model_name, classes_of_weights
from .transforms import InputSpec, input_spec

WORDNET_ID = re.compile(r"n\d{8}")


@dataclass
class ClassificationPredictor:
    """A model that is ready to use.

    Attributes:
        model: In evaluation mode, on the CPU.
        num_classes: Width of its head.
        classes: What its classes are called, by index, as the folders of its images were; None if that is not known.
        spec: What it wants to see.
        name: What timm calls it.
    """

    model: nn.Module
    num_classes: int
    classes: list[str] | None
    spec: InputSpec
    name: str

    def readable_classes(self) -> list[str]:
        """What to show for each class: words for WordNet ids, the index where no name is known."""
        if self.classes is None:
            return [str(index) for index in range(self.num_classes)]
        return wordnet_names(self.classes)


def load_classifier(
    model: str, *, checkpoint: str | None = None, img_size: int | None = None, crop_pct: float | None = None
) -> ClassificationPredictor:
    """A model with its weights and what is known of its classes.

    Args:
        model: The folder of a training run, or the name of a model of ours or of timm's.
        checkpoint: With a name, the file of its weights; without one, the published ones are fetched. With a run,
            "best" for its best checkpoint, the folder of another one, or a file; without one, the final weights.
        img_size: Side of the images that it is to see; None = what it was trained for.
        crop_pct: Share of an image's side that it is to see; None = what it was trained for.
    """
    run = run_config(model)
    classes: list[str] | None = None
    if run is None:
        check_name_or_run(model)
        config, file = ModelConfig(name=model), checkpoint
    else:
        check_model_name(run.model.name)
        config, file = run.model, str(run_weights(Path(model), checkpoint))
        classes = _read_classes(Path(model) / RUN_CLASSES)
    config = dataclasses.replace(
        config,
        checkpoint=file,
        pretrained=file is None,
        drop_path_rate=0.0,
        img_size=config.img_size if img_size is None else img_size,
        crop_pct=config.crop_pct if crop_pct is None else crop_pct,
    )
    made_for = get_pretrained_cfg(config.name)
    num_classes = config.num_classes or (made_for.num_classes if made_for is not None else 0)
    if file is not None:
        weights = read_state_dict(file)
        require_finite(weights, file)
        num_classes = classes_of_weights(config.name, weights, file) or num_classes
        if channels_of_weights(config.name, weights) == 1:
            config = dataclasses.replace(config, in_chans=1)
        del weights
    if num_classes < 2:
        raise ValueError(f"{model} has no head to tell classes apart: name a checkpoint that has one")
    return ClassificationPredictor(
        model=build_model(config, num_classes, new_head=False).eval(),
        num_classes=num_classes,
        classes=_complete(classes, num_classes) if classes else imagenet_classes(num_classes),
        spec=input_spec(config),
        name=config.name,
    )


def check_name_or_run(model: str) -> None:
    """Refuse what is neither the folder of a training run nor the name of a model."""
    require(bool(model.strip()), "the model is empty: name the folder of a training run, or a model")
    if (Path(model) / RUN_CONFIG).is_file():
        return
    if Path(model).is_dir() and not is_model(model):
        raise ValueError(f"{model} holds no {RUN_CONFIG}: name the folder of a training run, or a model")
    if Path(model).name != model:
        raise FileNotFoundError(f"no folder at {model}: name the folder of a training run, or a model")
    check_model_name(model)


def run_config(model: str) -> ClassificationConfig | None:
    """The configuration of a training run, if this is the folder of one."""
    file = Path(model) / RUN_CONFIG
    return load_config(ClassificationConfig, file) if file.is_file() else None


def _read_classes(file: Path) -> list[str] | None:
    """The names of a run's classes, if it knew them."""
    if not file.is_file():
        return None
    try:
        classes = read_json(file)
    except ValueError as error:
        raise ValueError(f"{file} is no list of class names ({error}): mend or remove it") from error
    if classes is not None and not (isinstance(classes, list) and all(isinstance(name, str) for name in classes)):
        raise ValueError(f"{file} is no list of class names: mend or remove it")
    return classes


def _complete(classes: list[str], num_classes: int) -> list[str]:
    """Names for all classes of a head, which may be wider than the data had classes."""
    if len(classes) > num_classes:
        raise ValueError(
            f"{RUN_CLASSES} names {len(classes)} classes, but the weights are for {num_classes}: choose weights of "
            "this run"
        )
    return classes + [str(index) for index in range(len(classes), num_classes)]


def imagenet_classes(num_classes: int) -> list[str] | None:
    """The WordNet ids of ImageNet's classes, if one of its versions has so many."""
    subset = infer_imagenet_subset({"num_classes": num_classes})
    return None if subset is None else list(ImageNetInfo(subset).label_names())


def wordnet_names(classes: Sequence[str]) -> list[str]:
    """Words for WordNet ids, as they are the names of ImageNet's folders; other names as they are."""
    if not all(WORDNET_ID.fullmatch(name) for name in classes):
        return list(classes)
    info = ImageNetInfo()
    try:
        return [info.label_name_to_description(name) for name in classes]
    except KeyError:
        return list(classes)
