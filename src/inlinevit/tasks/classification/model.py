"""Models with the weights that they start from."""

import warnings
from dataclasses import replace
from functools import partial
from typing import Any, cast

from timm.models import get_pretrained_cfg
from torch import Tensor, nn

from ...models import load_checkpoint
from ...models._weight_files import read_state_dict, require_finite
from ...models.factory import (
    check_input_size,
    check_model_name,
    classes_of_weights,
    create_from_weights,
    create_model,
    create_published,
    is_ours,
)
from ...utils.validation import require
from .config import ModelConfig

# Arguments of models that are fields of ModelConfig.
CONFIG_FIELDS = {
    **{name: name for name in ("num_classes", "in_chans", "img_size", "drop_path_rate", "pretrained")},
    "checkpoint_path": "checkpoint",
}


def build_model(
    config: ModelConfig, num_classes: int, *, new_head: bool = True, option: str = "--model.checkpoint FILE"
) -> nn.Module:
    """Build the model of a configuration, with its initial weights.

    drop_path_rate and img_size are passed only to models that have these arguments.

    Args:
        config: The model.
        num_classes: Width of its head.
        new_head: Whether the head may be a new one, to be trained, if the checkpoint is for another number of classes:
            that is warned of; False = such a checkpoint is refused.
        option: What names a checkpoint, for messages.

    Raises:
        FileNotFoundError: There is no checkpoint.
        PretrainedWeightsError: The published weights cannot be fetched.
        ValueError: There is no such model or option, or the checkpoint is of another model.
    """
    check_model_name(config.name)
    if config.pretrained and config.checkpoint is None:
        model = create_published(config.name, lambda: _create(config, num_classes, pretrained=True), option)
    elif config.checkpoint is None:
        model = _create(config, num_classes)
    elif is_ours(config.name):
        model = _create(config, num_classes)
        load_checkpoint(model, config.checkpoint, new_head=new_head)
    else:
        model = _create_from_file(config, config.checkpoint, num_classes, new_head)
    if (size := config.img_size) is not None and not is_ours(config.name):
        problem = f"{config.name} does not support images of {size} pixels"
        check_input_size(model, (config.in_chans, size, size), problem, "choose another img_size")
    return model


def build_trained(config: ModelConfig, file: str, num_classes: int) -> nn.Module:
    """Build a model with the weights of a file, for this number of classes, in evaluation mode."""
    require_finite(read_state_dict(file), file)
    trained = replace(config, checkpoint=file, pretrained=False, drop_path_rate=0.0)
    return build_model(trained, num_classes, new_head=False).eval()


def _create_from_file(config: ModelConfig, file: str, num_classes: int, new_head: bool) -> nn.Module:
    """Create a model of timm's with the weights of a file; see build_model."""
    weights = read_state_dict(file)
    classes = classes_of_weights(config.name, weights, file) or num_classes
    require(
        new_head or classes == num_classes,
        f"{file} has a head for {classes} classes, but {num_classes} are needed: choose weights for these classes, or "
        "train the model on them first",
    )
    model = create_from_weights(file, config.name, weights, classes, partial(_create, config, classes))
    if classes != num_classes:
        # Only now, because timm takes any file at all if it must leave out the head.
        cast(Any, model).reset_classifier(num_classes)
        warnings.warn(
            f"{file} is for {classes} classes and the model has {num_classes}: the head is not loaded, so it starts "
            "from random weights",
            stacklevel=3,
        )
    return model


def _create(config: ModelConfig, num_classes: int, **weights: Any) -> nn.Module:
    """Create a model with img_size and drop_path_rate, if it has these arguments."""

    def check_fixed_size(argument: str) -> None:
        made_for = get_pretrained_cfg(config.name)
        if argument == "img_size" and made_for is not None and made_for.fixed_input_size:
            size = made_for.input_size[-1]
            require(
                size == config.img_size,
                f"{config.name} takes images of {size} pixels only, not {config.img_size}: leave out img_size, or "
                "choose another model",
            )

    return create_model(
        config.name,
        {"num_classes": num_classes, "in_chans": config.in_chans, **weights},
        optional={"img_size": config.img_size, "drop_path_rate": config.drop_path_rate or None},
        options=config.kwargs,
        config_fields=CONFIG_FIELDS,
        when_refused=check_fixed_size,
    )


def classes_of_model(config: ModelConfig) -> int:
    """Return the number of classes of a model with its initial weights."""
    made_for = get_pretrained_cfg(config.name)
    published = made_for.num_classes if made_for is not None else 0
    if config.checkpoint is None:
        return published
    return classes_of_weights(config.name, read_state_dict(config.checkpoint), config.checkpoint) or published


def channels_of_weights(name: str, weights: dict[str, Tensor]) -> int | None:
    """Return the input channels of the first convolution among weights; None if it is not under the model's name."""
    made_for = get_pretrained_cfg(name)
    first = made_for.first_conv if made_for is not None else None
    weight = weights.get(f"{first}.weight") if isinstance(first, str) else None
    return None if weight is None or weight.dim() < 2 else weight.shape[1]
