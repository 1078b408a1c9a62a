"""Models with their weights: to begin a training run with, or out of one to use."""

import dataclasses
import difflib
import inspect
import json
import re
import types
import typing
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import timm
import yaml
from timm.data import ImageNetInfo, infer_imagenet_subset
from timm.models import get_pretrained_cfg, is_model, model_entrypoint, split_model_name_tag
from torch import Tensor, nn

from ..models import load_checkpoint
from ..models._weight_files import read_state_dict
from ..training.checkpoints import CheckpointFolder, damage
from .config import ClassificationConfig, ModelConfig
from .inputs import InputSpec, input_spec

# What a training run leaves in its folder.
RUN_CONFIG = "config.yaml"
RUN_CLASSES = "classes.json"
RUN_WEIGHTS = "model.safetensors"
RUN_CHECKPOINTS = "checkpoints"
BEST = "best"
# In a checkpoint, averaged weights are the better ones.
CHECKPOINT_WEIGHTS = ("ema.safetensors", "model.safetensors")

# Arguments of models that ModelConfig has its own words for.
OWN_WORDS = {
    "num_classes": "num_classes",
    "in_chans": "in_chans",
    "img_size": "img_size",
    "drop_path_rate": "drop_path",
    "pretrained": "pretrained",
    "checkpoint_path": "checkpoint",
}
WORDNET_ID = re.compile(r"n\d{8}")

Config = TypeVar("Config")


@dataclass
class Classifier:
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
        return in_words(self.classes)


def build_model(config: ModelConfig, num_classes: int) -> nn.Module:
    """The model of a configuration, with the weights that it starts from.

    Models that cannot leave out branches are built without; so are those that take images of any size as they are.

    Raises:
        FileNotFoundError: There is no checkpoint.
        OSError: The published weights cannot be fetched.
        ValueError: There is no such model or option, or the checkpoint is of another model.
    """
    check_model_name(config.name)
    if config.checkpoint is None:
        return _create_published(config, num_classes) if config.pretrained else _create(config, num_classes)
    if _is_ours(config.name):
        model = _create(config, num_classes)
        load_checkpoint(model, config.checkpoint)
        return model
    weights = read_state_dict(config.checkpoint)
    classes = classes_of_weights(config.name, weights) or num_classes
    # timm's own way to published weights: it knows how each family's are resized and which channels they are for.
    overlay = {"state_dict": weights, "num_classes": classes, "label_offset": 0}
    try:
        model = _create(config, classes, pretrained=True, pretrained_cfg_overlay=overlay)
    except (RuntimeError, KeyError) as error:
        problem = " ".join(str(error).split())
        raise ValueError(
            f"{config.checkpoint} does not hold the weights of {config.name} ({problem[:200]}): choose the model that "
            "the file was made for"
        ) from error
    if classes != num_classes:
        # Only now, because timm takes any file at all if it must leave out the head.
        cast(Any, model).reset_classifier(num_classes)
    return model


def check_model_name(name: str) -> None:
    """Refuse a model that neither we nor timm have, and name those that are called alike."""
    if not is_model(name):
        alike = difflib.get_close_matches(split_model_name_tag(name)[0], timm.list_models(), n=3)
        hint = (
            f"did you mean {' or '.join(alike)}?" if alike else "`inlinevit models` lists ours, timm.list_models() all"
        )
        raise ValueError(f"there is no model called {name!r}: {hint}")
    try:
        get_pretrained_cfg(name)
    except RuntimeError as error:
        base, tag = split_model_name_tag(name)
        tags = sorted(published.partition(".")[2] for published in timm.list_pretrained(f"{base}.*"))
        raise ValueError(
            f"{base} has no published weights called {tag!r}: choose among {', '.join(tags) or 'none'}"
        ) from error


def _is_ours(name: str) -> bool:
    return model_entrypoint(split_model_name_tag(name)[0]).__module__.startswith(f"{__package__.partition('.')[0]}.")


def _create_published(config: ModelConfig, num_classes: int) -> nn.Module:
    try:
        return _create(config, num_classes, pretrained=True)
    except OSError as error:
        raise OSError(
            f"the published weights of {config.name} cannot be fetched ({' '.join(str(error).split())[:200]}): check "
            "the connection, or name a file that holds them as checkpoint"
        ) from error
    except RuntimeError as error:
        raise ValueError(f"{config.name} has no published weights ({error}): name a file as checkpoint") from error


def _create(config: ModelConfig, num_classes: int, **weights: Any) -> nn.Module:
    """A model, with those arguments that not all models take only where they are taken."""
    for option in config.options:
        if option in OWN_WORDS:
            raise ValueError(f"{option} stands in model.options: set model.{OWN_WORDS[option]} instead")
    # timm passes over those that are None.
    not_all_take = {"img_size": config.img_size, "drop_path_rate": config.drop_path or None}
    while True:
        arguments = {"num_classes": num_classes, "in_chans": config.in_chans, **not_all_take, **config.options}
        try:
            return timm.create_model(config.name, **arguments, **weights)
        except TypeError as error:
            refused = re.search(r"unexpected keyword argument '(\w+)'", str(error))
            if refused is None or refused[1] not in arguments:
                raise
            if refused[1] not in not_all_take:
                raise ValueError(_unknown_option(config, refused[1])) from error
            if refused[1] == "img_size":
                _check_any_size(config)
            del not_all_take[refused[1]]


def _unknown_option(config: ModelConfig, option: str) -> str:
    arguments = inspect.signature(type(timm.create_model(config.name))).parameters
    known = [name for name in arguments if name not in OWN_WORDS]
    alike = difflib.get_close_matches(option, known, n=1)
    hint = f"did you mean {alike[0]}?" if alike else f"there are {', '.join(known)}"
    return f"{config.name} has no option {option!r}, which stands in model.options: {hint}"


def _check_any_size(config: ModelConfig) -> None:
    """Refuse another size than its own to a model that has one, and no argument for it."""
    made_for = get_pretrained_cfg(config.name)
    if made_for is not None and made_for.fixed_input_size and made_for.input_size[-1] != config.img_size:
        raise ValueError(
            f"{config.name} takes images of {made_for.input_size[-1]} pixels only, not {config.img_size}: leave out "
            "img_size, or choose another model"
        )


def classes_of_weights(name: str, weights: dict[str, Tensor]) -> int | None:
    """For how many classes weights have a head; None if they have none under the name that the model gives it."""
    made_for = get_pretrained_cfg(name)
    head = made_for.classifier if made_for is not None else None
    weight = weights.get(f"{head if isinstance(head, str) else head[0]}.weight") if head else None
    return None if weight is None else weight.shape[0]


def channels_of_weights(name: str, weights: dict[str, Tensor]) -> int | None:
    """For how many channels weights have a first convolution; None if they have none under the model's name for it."""
    made_for = get_pretrained_cfg(name)
    first = made_for.first_conv if made_for is not None else None
    weight = weights.get(f"{first}.weight") if isinstance(first, str) else None
    return None if weight is None or weight.dim() < 2 else weight.shape[1]


def open_classifier(
    model: str, *, checkpoint: str | None = None, img_size: int | None = None, crop_pct: float | None = None
) -> Classifier:
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
        _check_name_or_run(model)
        config, file = ModelConfig(name=model), checkpoint
    else:
        config, file = run.model, str(run_weights(Path(model), checkpoint))
        classes = _read_classes(Path(model) / RUN_CLASSES)
    config = dataclasses.replace(
        config,
        checkpoint=file,
        pretrained=file is None,
        drop_path=0.0,
        img_size=img_size or config.img_size,
        crop_pct=crop_pct or config.crop_pct,
    )
    made_for = get_pretrained_cfg(config.name)
    num_classes = config.num_classes or (made_for.num_classes if made_for is not None else 0)
    if file is not None:
        weights = read_state_dict(file)
        num_classes = classes_of_weights(config.name, weights) or num_classes
        if channels_of_weights(config.name, weights) == 1:
            config = dataclasses.replace(config, in_chans=1)
        del weights
    if num_classes < 2:
        raise ValueError(f"{model} has no head to tell classes apart: name a checkpoint that has one")
    return Classifier(
        model=build_model(config, num_classes).eval(),
        num_classes=num_classes,
        classes=_complete(classes, num_classes) if classes else imagenet_classes(num_classes),
        spec=input_spec(config),
        name=config.name,
    )


def _check_name_or_run(model: str) -> None:
    if Path(model).is_dir() and not is_model(model):
        raise ValueError(f"{model} holds no {RUN_CONFIG}: name the folder of a training run, or a model")
    check_model_name(model)


def run_config(model: str) -> ClassificationConfig | None:
    """The configuration of a training run, if this is the folder of one."""
    file = Path(model) / RUN_CONFIG
    return load_config(file) if file.is_file() else None


def load_config(path: str | Path) -> ClassificationConfig:
    """The configuration that a training run has left."""
    try:
        return from_dict(ClassificationConfig, yaml.safe_load(Path(path).read_text()))
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, TypeError) as error:
        problem = " ".join(str(error).split())
        raise ValueError(f"{path} is no configuration of a classification run ({problem}): mend it") from error


def from_dict(kind: type[Config], values: Any) -> Config:
    """A dataclass out of plain dictionaries and lists, as they come out of a file.

    Args:
        kind: The dataclass; its fields may be dataclasses themselves, and tuples.
        values: Its fields by name; those that are missing keep their defaults.
    """
    if not isinstance(values, dict):
        raise ValueError(f"expected the fields of {kind.__name__}, but found {values!r:.100}")
    hints = typing.get_type_hints(kind)
    unknown = [name for name in values if name not in hints]
    if unknown:
        raise ValueError(f"{kind.__name__} has no {', '.join(map(str, unknown))}")
    return kind(**{name: _convert(hints[name], value) for name, value in values.items()})


def _convert(hint: Any, value: Any) -> Any:
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return from_dict(hint, value)
    alternatives = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    is_tuple = any(typing.get_origin(alternative) is tuple for alternative in alternatives)
    return tuple(value) if is_tuple and isinstance(value, list) else value


def run_weights(run: Path, checkpoint: str | None) -> Path:
    """The file with the weights of a training run.

    Args:
        run: Its folder.
        checkpoint: "best", the folder of a checkpoint, or a file; None = the final weights or, if the run has not
            reached its end, those of the newest good checkpoint.
    """
    folder = CheckpointFolder(run / RUN_CHECKPOINTS)
    if checkpoint is None:
        if (run / RUN_WEIGHTS).is_file():
            return run / RUN_WEIGHTS
        newest = folder.newest_good()
        if newest is None:
            raise FileNotFoundError(f"{run} holds neither {RUN_WEIGHTS} nor a good checkpoint: train on, or anew")
        warnings.warn(f"the run in {run} is not finished: using its checkpoint {newest.name}", stacklevel=2)
        return _weights_in(newest)
    if checkpoint != BEST:
        return _weights_in(Path(checkpoint)) if Path(checkpoint).is_dir() else Path(checkpoint)
    problem = damage(folder.best)
    if problem is not None:
        raise ValueError(f"{folder.best} cannot be used ({problem}): choose another checkpoint")
    return _weights_in(folder.best)


def _weights_in(checkpoint: Path) -> Path:
    for name in CHECKPOINT_WEIGHTS:
        if (checkpoint / name).is_file():
            return checkpoint / name
    raise FileNotFoundError(f"{checkpoint} holds no {' or '.join(CHECKPOINT_WEIGHTS)}: name a checkpoint or a file")


def _read_classes(file: Path) -> list[str] | None:
    """The names of a run's classes, if it knew them."""
    if not file.is_file():
        return None
    try:
        classes = json.loads(file.read_text())
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


def in_words(classes: Sequence[str]) -> list[str]:
    """Words for WordNet ids, as they are the names of ImageNet's folders; other names as they are."""
    if not all(WORDNET_ID.fullmatch(name) for name in classes):
        return list(classes)
    info = ImageNetInfo()
    try:
        return [info.label_name_to_description(name) for name in classes]
    except KeyError:
        return list(classes)
