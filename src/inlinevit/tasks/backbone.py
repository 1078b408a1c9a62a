"""The backbone of a detector or segmenter, with the weights that it starts from."""

from typing import Any, cast

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, resolve_data_config
from timm.models import get_pretrained_cfg
from torch import Tensor, nn

from ..models import load_checkpoint
from ..models.factory import (
    classes_of_weights,
    create_from_weights,
    create_model,
    create_published,
    is_ours,
)
from ..utils.validation import require
from .backbone_config import BackboneConfig

# Arguments of backbones that BackboneConfig has its own words for, or that the task decides.
OWN_WORDS = {
    "drop_path_rate": "drop_path_rate",
    "pretrained": "pretrained",
    "checkpoint_path": "checkpoint",
    "num_classes": "num_classes",
    "features_only": "backbone",
    "out_indices": "backbone",
}
STRIDES = (4, 8, 16, 32)
# The mean colour of images, in bytes: after normalisation it is 0, as is the padding that models give.
MEAN_COLOUR = [round(255 * mean) for mean in IMAGENET_DEFAULT_MEAN]
# Height and width that the strides divide, and windows may not.
PROBE_SIZE = (96, 160)


def build_backbone(config: BackboneConfig, weights: dict[str, Tensor] | None = None) -> nn.Module:
    """A backbone as timm's features_only gives it.

    Args:
        config: The backbone.
        weights: A classifier's weights to start from, out of the file that the configuration names.

    Raises:
        OSError: The published weights cannot be fetched.
        ValueError: There is no such backbone or option, it gives other strides, or the weights are of another model.
    """

    def create(**more: Any) -> Any:
        return create_model(
            config.backbone,
            {"features_only": True, **more},
            # timm's Swin takes images of one size only, unless it is told otherwise.
            optional={"drop_path_rate": config.drop_path_rate or None, "strict_img_size": False},
            options=config.kwargs,
            own_words=OWN_WORDS,
        )

    if config.pretrained:
        body = create_published(config.backbone, lambda: create(pretrained=True))
    elif weights is None or config.checkpoint is None:
        body = create()
    elif is_ours(config.backbone):
        body = create()
        load_checkpoint(body, config.checkpoint)
    else:
        classes = classes_of_weights(config.backbone, weights, config.checkpoint)
        body = create_from_weights(config.checkpoint, config.backbone, weights, classes, create)
    strides = list(cast(Any, body).feature_info.reduction())
    require(
        set(STRIDES) <= set(strides),
        f"{config.backbone} gives features at strides {', '.join(map(str, strides))}, but a feature pyramid needs "
        f"{', '.join(map(str, STRIDES))}: choose a hierarchical backbone, such as inline_pvt_tiny",
    )
    if not is_ours(config.backbone):
        require_any_size(body, config.backbone)
    return body


@torch.no_grad()
def require_any_size(body: nn.Module, name: str) -> None:
    """Refuse a backbone that takes images of some sizes only; some of timm's want sizes that their windows divide."""
    image = torch.zeros(1, 3, *PROBE_SIZE, device=next(body.parameters()).device)
    was_training = body.training
    try:
        body.eval()(image)
    except (AssertionError, RuntimeError) as error:
        raise ValueError(
            f"{name} does not take images of any size ({' '.join(str(error).split())[:200]}): choose another backbone, "
            "such as inline_pvt_tiny"
        ) from error
    finally:
        body.train(was_training)


def checkpoint_backbone(body: nn.Module, enable: bool) -> None:
    """Have a backbone compute activations twice instead of keeping them, or no more."""
    # Some of timm's wrappers have no such method; the model inside has.
    able: Any = body if hasattr(body, "set_grad_checkpointing") else body.model
    able.set_grad_checkpointing(enable)


def undecayed_weights(body: nn.Module) -> set[str]:
    """Names of a backbone's parameters that should not decay, as it says itself."""
    for prefix, module in (("", body), ("model.", getattr(body, "model", None))):
        if hasattr(module, "no_weight_decay"):
            model: Any = module
            return {prefix + name for name in model.no_weight_decay()}
    return set()


def mean_and_std(backbone: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """What the images of a backbone are normalised by, by channel."""
    made_for = get_pretrained_cfg(backbone)
    spec = resolve_data_config(pretrained_cfg=made_for.to_dict() if made_for else {})
    return tuple(spec["mean"]), tuple(spec["std"])
