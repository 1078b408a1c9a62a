"""Models with the weights that they start from."""

import warnings
from dataclasses import replace
from typing import Any, cast

import torch
from timm.models import get_pretrained_cfg
from torch import Tensor, nn

from ...models import load_checkpoint
from ...models._weight_files import read_state_dict, require_finite
from ...models.factory import (
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
    "num_classes": "num_classes",
    "in_chans": "in_chans",
    "img_size": "img_size",
    "drop_path_rate": "drop_path_rate",
    "pretrained": "pretrained",
    "checkpoint_path": "checkpoint",
}


def build_model(config: ModelConfig, num_classes: int, *, new_head: bool = True) -> nn.Module:
    """Build the model of a configuration, with its initial weights.

    drop_path_rate and img_size are passed only to models that have these arguments.

    Args:
        config: The model.
        num_classes: Width of its head.
        new_head: Whether the head may be a new one, to be trained, if the checkpoint is for another number of classes:
            that is warned of; False = such a checkpoint is refused.

    Raises:
        FileNotFoundError: There is no checkpoint.
        OSError: The published weights cannot be fetched.
        ValueError: There is no such model or option, or the checkpoint is of another model.
    """
    model = _build_with_weights(config, num_classes, new_head)
    if config.img_size is not None and not is_ours(config.name):
        require_size(model, config)
    return model


def build_trained(config: ModelConfig, file: str, num_classes: int) -> nn.Module:
    """Build a model with the weights of a file, for this number of classes, in evaluation mode."""
    require_finite(read_state_dict(file), file)
    trained = replace(config, checkpoint=file, pretrained=False, drop_path_rate=0.0)
    return build_model(trained, num_classes, new_head=False).eval()


def _build_with_weights(config: ModelConfig, num_classes: int, new_head: bool) -> nn.Module:
    """See build_model."""
    check_model_name(config.name)
    if config.checkpoint is None:
        if not config.pretrained:
            return _create(config, num_classes)
        return create_published(config.name, lambda: _create(config, num_classes, pretrained=True))
    if is_ours(config.name):
        model = _create(config, num_classes)
        load_checkpoint(model, config.checkpoint, new_head=new_head)
        return model
    weights = read_state_dict(config.checkpoint)
    classes = classes_of_weights(config.name, weights, config.checkpoint) or num_classes
    require(
        new_head or classes == num_classes,
        f"{config.checkpoint} has a head for {classes} classes, but {num_classes} are needed: choose weights for these "
        "classes, or train the model on them first",
    )

    def create(**given: Any) -> nn.Module:
        return _create(config, classes, **given)

    model = create_from_weights(config.checkpoint, config.name, weights, classes, create)
    if classes != num_classes:
        # Only now, because timm takes any file at all if it must leave out the head.
        cast(Any, model).reset_classifier(num_classes)
        warnings.warn(
            f"{config.checkpoint} is for {classes} classes and the model has {num_classes}: the head is not loaded, so "
            "it starts from random weights",
            stacklevel=3,
        )
    return model


def _create(config: ModelConfig, num_classes: int, **weights: Any) -> nn.Module:
    """Create a model with img_size and drop_path_rate, if it has these arguments."""

    def when_refused(argument: str) -> None:
        if argument == "img_size":
            _check_any_size(config)

    return create_model(
        config.name,
        {"num_classes": num_classes, "in_chans": config.in_chans, **weights},
        optional={"img_size": config.img_size, "drop_path_rate": config.drop_path_rate or None},
        options=config.kwargs,
        config_fields=CONFIG_FIELDS,
        when_refused=when_refused,
    )


@torch.no_grad()
def require_size(model: nn.Module, config: ModelConfig) -> None:
    """Refuse an image size that a timm model does not support: some only fail in their first forward pass."""
    device = next(model.parameters()).device
    image = torch.zeros(1, config.in_chans, config.img_size or 1, config.img_size or 1, device=device)
    was_training = model.training
    try:
        model.eval()(image)
    except (AssertionError, RuntimeError, ValueError, IndexError, ZeroDivisionError) as error:
        raise ValueError(
            f"{config.name} does not support images of {config.img_size} pixels "
            f"({' '.join(str(error).split())[:200]}): choose another img_size"
        ) from error
    finally:
        model.train(was_training)


def _check_any_size(config: ModelConfig) -> None:
    """Refuse an img_size for a model with a fixed input size."""
    made_for = get_pretrained_cfg(config.name)
    if made_for is not None and made_for.fixed_input_size and made_for.input_size[-1] != config.img_size:
        raise ValueError(
            f"{config.name} takes images of {made_for.input_size[-1]} pixels only, not {config.img_size}: leave out "
            "img_size, or choose another model"
        )


def classes_of_model(config: ModelConfig) -> int:
    """Return the number of classes of a model with its initial weights."""
    made_for = get_pretrained_cfg(config.name)
    published = made_for.num_classes if made_for is not None else 0
    if config.checkpoint is None:
        return published
    return classes_of_weights(config.name, read_state_dict(config.checkpoint), config.checkpoint) or published


def channels_of_weights(name: str, weights: dict[str, Tensor]) -> int | None:
    """For how many channels weights have a first convolution; None if they have none under the model's name for it."""
    made_for = get_pretrained_cfg(name)
    first = made_for.first_conv if made_for is not None else None
    weight = weights.get(f"{first}.weight") if isinstance(first, str) else None
    return None if weight is None or weight.dim() < 2 else weight.shape[1]
