"""Classifiers in timm's format for the Hugging Face hub: config.json and model.safetensors, by whomever."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from timm.models import get_pretrained_cfg

from ...models.factory import check_model_name
from ...models.hub import TIMM_CONFIG, WEIGHTS, fetch_source, is_source
from ...utils.files import read_json
from ...utils.validation import Range, check_value, has_type, require, shorten
from .config import ModelConfig

# Entries of timm's pretrained_cfg that say how images are prepared, with their types.
INPUT_FIELDS: dict[str, Any] = {
    "input_size": list[int],
    "mean": list[float],
    "std": list[float],
    "interpolation": str,
    "crop_pct": float,
    "crop_mode": str,
}
# Arguments of a model that are fields of ModelConfig.
FIELD_ARGUMENTS = ("num_classes", "in_chans", "img_size", "drop_path_rate", "pretrained")
COUNT = Range(1, 10**6)


@dataclass(frozen=True)
class PublishedModel:
    """What timm's config.json says.

    Attributes:
        config: The model, with the weights of the folder.
        made_for: Size and normalisation of its images, as entries of timm's pretrained_cfg.
        num_classes: Width of its head.
        label_names: Names of its classes by index; None if they are not known.
    """

    config: ModelConfig
    made_for: dict[str, Any]
    num_classes: int
    label_names: list[str] | None


def is_published(folder: str) -> bool:
    """Whether this is a folder in timm's format."""
    return (Path(folder) / TIMM_CONFIG).is_file() and (Path(folder) / WEIGHTS).is_file()


def read_published(folder: str) -> PublishedModel:
    """Read a folder in timm's format.

    Raises:
        ValueError: A field is missing or makes no sense.
    """
    file = Path(folder) / TIMM_CONFIG
    try:
        return _parse(read_json(file), str(Path(folder) / WEIGHTS))
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{folder} holds no {TIMM_CONFIG}, timm's description of a model: name another"
        ) from None
    except (ValueError, TypeError, KeyError) as error:
        problem = " ".join(str(error).split())[:200]
        raise ValueError(f"{file} cannot be used ({problem}): fetch or write it again") from error


def _parse(content: Any, weights: str) -> PublishedModel:
    require(isinstance(content, dict), "it is not a JSON object")
    # timm's older form has everything in one object.
    cfg = content.get("pretrained_cfg", content)
    require(isinstance(cfg, dict), "pretrained_cfg is not an object")
    name = content.get("architecture")
    require(isinstance(name, str), "architecture is not a name")
    check_model_name(name)
    default = get_pretrained_cfg(name)
    made_for = {} if default is None else default.to_dict()
    for field, kind in INPUT_FIELDS.items():
        if cfg.get(field) is not None:
            value: Any = [float(number) for number in cfg[field]] if kind == list[float] else cfg[field]
            check_value(field, float(value) if kind is float else value, kind)
            made_for[field] = tuple(value) if isinstance(value, list) else value
    size = made_for.get("input_size", (3, 224, 224))
    require(len(size) == 3 and size[1] == size[2] and min(size) > 0, f"input_size is {shorten(size)}, not (C, S, S)")
    num_classes = content.get("num_classes", cfg.get("num_classes", made_for.get("num_classes")))
    check_value("num_classes", num_classes, int, COUNT)
    arguments = content.get("model_args") or {}
    require(has_type(arguments, dict[str, Any]), "model_args is not an object")
    config = ModelConfig(
        name=name,
        num_classes=num_classes if num_classes > 1 else None,
        img_size=size[1] if "img_size" in arguments else None,
        in_chans=arguments.get("in_chans", size[0]),
        drop_path_rate=0.0,
        checkpoint=weights,
        kwargs={key: value for key, value in arguments.items() if key not in FIELD_ARGUMENTS},
    )
    names = _label_names(content.get("label_names", cfg.get("label_names")), num_classes)
    return PublishedModel(config, made_for, num_classes, names)


def _label_names(names: Any, num_classes: int) -> list[str] | None:
    """Class names by index, out of a list or of an object with indices as keys."""
    if isinstance(names, dict):
        names = [names.get(str(index), str(index)) for index in range(num_classes)]
    require(has_type(names, list[str] | None), "label_names is not a list of names")
    require(names is None or len(names) == num_classes, f"label_names does not have {num_classes} names")
    return names


def with_published(config: ModelConfig) -> ModelConfig:
    """Return the model to train; if its name says where a model is published, that model and its weights.

    Settings that the configuration has take precedence over those of the published model.
    """
    if not is_source(config.name):
        return config
    published = read_published(fetch_source(config.name)).config
    return replace(
        config,
        name=published.name,
        checkpoint=config.checkpoint or published.checkpoint,
        img_size=config.img_size or published.img_size,
        kwargs={**published.kwargs, **config.kwargs},
    )
