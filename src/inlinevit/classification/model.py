"""Models with the weights that they start from."""

import inspect
import re
from typing import Any, cast

import timm
from timm.models import get_pretrained_cfg, is_model, model_entrypoint, split_model_name_tag
from torch import Tensor, nn

from ..models import load_checkpoint
from ..models._weight_files import read_state_dict
from ..training.config import did_you_mean
from .config import ModelConfig

# Arguments of models that ModelConfig has its own words for.
OWN_WORDS = {
    "num_classes": "num_classes",
    "in_chans": "in_chans",
    "img_size": "img_size",
    "drop_path_rate": "drop_path",
    "pretrained": "pretrained",
    "checkpoint_path": "checkpoint",
}


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
        near = did_you_mean(split_model_name_tag(name)[0], timm.list_models())
        hint = near or "`inlinevit models` lists ours, timm.list_models() all"
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
    hint = did_you_mean(option, known) or f"there are {', '.join(known)}"
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


def classes_of_model(config: ModelConfig) -> int:
    """How many classes a model can tell apart with the weights that it starts from."""
    made_for = get_pretrained_cfg(config.name)
    published = made_for.num_classes if made_for is not None else 0
    if config.checkpoint is None:
        return published
    return classes_of_weights(config.name, read_state_dict(config.checkpoint)) or published


def channels_of_weights(name: str, weights: dict[str, Tensor]) -> int | None:
    """For how many channels weights have a first convolution; None if they have none under the model's name for it."""
    made_for = get_pretrained_cfg(name)
    first = made_for.first_conv if made_for is not None else None
    weight = weights.get(f"{first}.weight") if isinstance(first, str) else None
    return None if weight is None or weight.dim() < 2 else weight.shape[1]
