"""Backbones of detectors and segmenters, and how a model is built on one."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

from timm.data import IMAGENET_DEFAULT_MEAN, resolve_data_config
from timm.layers import Format, nhwc_to
from timm.models import get_pretrained_cfg
from torch import Tensor, nn

from ..engine.config import PixelConfig
from ..engine.runs import Run
from ..models import load_checkpoint
from ..models._weight_files import read_state_dict, require_finite
from ..models.factory import (
    check_input_size,
    check_model_name,
    classes_of_weights,
    create_from_weights,
    create_model,
    create_published,
    is_ours,
    load_weights,
)
from ..utils.validation import require
from .backbone_config import BackboneConfig
from .pixels import MeanStd, mean_std_of

Model = TypeVar("Model", bound=nn.Module)

# Arguments of backbones that are fields of BackboneConfig, or that the task decides.
CONFIG_FIELDS = {
    "drop_path_rate": "drop_path_rate",
    "in_chans": "in_chans",
    "pretrained": "pretrained",
    "checkpoint_path": "checkpoint",
    "num_classes": "num_classes",
    "features_only": "backbone",
    "out_indices": "backbone",
}
STRIDES = (4, 8, 16, 32)
# The mean colour of images, in bytes: after normalisation it is 0, as is the padding of models.
MEAN_COLOR = [round(255 * mean) for mean in IMAGENET_DEFAULT_MEAN]
# Height and width that the strides divide, and windows may not.
PROBE_SIZE = (96, 160)


def build_on_backbone(
    config: BackboneConfig, assemble: Callable[[nn.Module], Model], *, prefix: str, by_class: Sequence[str]
) -> Model:
    """Build a model on a backbone, with the initial weights of its config.

    Args:
        config: The backbone, and a file of weights: of the backbone, or of a whole model.
        assemble: From the backbone to the model.
        prefix: What the names of the backbone's weights begin with in a whole model.
        by_class: Layers whose width is the number of classes; see load_weights().

    Raises:
        FileNotFoundError: There is no checkpoint.
        PretrainedWeightsError: The published weights cannot be downloaded.
        ValueError: There is no such backbone or option, it has other strides, or the checkpoint is of another model.
    """
    check_model_name(config.backbone)
    weights = None if config.checkpoint is None else read_state_dict(config.checkpoint)
    is_whole = weights is not None and any(name.startswith(prefix) for name in weights)
    model = assemble(build_backbone(config, None if is_whole else weights))
    if weights is not None and config.checkpoint is not None and is_whole:
        load_weights(model, weights, config.checkpoint, by_class=by_class)
    return model


def load_trained(run: Run[Any], checkpoint: str | None, build: Callable[[Any], Model]) -> Model:
    """Build the model of a run with its trained weights, in evaluation mode.

    Args:
        run: The run; its config has a BackboneConfig as `model`.
        checkpoint: See run_weights().
        build: From that config to the model.
    """
    file = run.weights(checkpoint)
    weights = read_state_dict(file)
    require_finite(weights, file)
    # Everything is in the file: nothing is downloaded.
    model = build(replace(run.config.model, pretrained=False, checkpoint=None, drop_path_rate=0.0))
    load_weights(model, weights, file)
    return model.eval()


def build_backbone(config: BackboneConfig, weights: dict[str, Tensor] | None = None) -> nn.Module:
    """Build a backbone, as timm's features_only does; errors as for build_on_backbone().

    Args:
        config: The backbone.
        weights: A classifier's weights to start from, out of the file that the configuration names.
    """

    def create(**more: Any) -> Any:
        return create_model(
            config.backbone,
            {"features_only": True, "in_chans": config.in_chans, **more},
            # By default, timm's Swin takes images of one size only.
            optional={"drop_path_rate": config.drop_path_rate or None, "strict_img_size": False},
            options=config.kwargs,
            config_fields=CONFIG_FIELDS,
        )

    if config.pretrained and config.checkpoint is None:
        option = "--model.checkpoint FILE, or checkpoint=FILE in Python"
        body = create_published(config.backbone, lambda: create(pretrained=True), option)
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
        # Some of timm's want sizes that their windows divide.
        problem, remedy = "does not take images of any size", "choose another backbone, such as inline_pvt_tiny"
        check_input_size(body, (config.in_chans, *PROBE_SIZE), f"{config.backbone} {problem}", remedy)
    return body


class PyramidFeatures:
    """The maps of a backbone at the strides of a feature pyramid.

    Args:
        body: A model made by timm with features_only=True; see build_backbone().

    Attributes:
        channels: The channels of each map.
    """

    def __init__(self, body: nn.Module) -> None:
        info = cast(Any, body).feature_info
        self.levels = [list(info.reduction()).index(stride) for stride in STRIDES]
        self.channels = [info.channels()[level] for level in self.levels]
        self.is_channels_last = Format(getattr(body, "output_fmt", Format.NCHW)) == Format.NHWC

    def select(self, maps: Sequence[Tensor]) -> list[Tensor]:
        """Return those of the body's maps, as (batch, channels, height / stride, width / stride)."""
        chosen = [maps[level] for level in self.levels]
        return [nhwc_to(one, Format.NCHW) for one in chosen] if self.is_channels_last else chosen


def set_backbone_grad_checkpointing(body: nn.Module, enable: bool) -> None:
    """Turn gradient checkpointing of a backbone on or off."""
    # Some of timm's wrappers have no such method; the model inside has.
    able: Any = body if hasattr(body, "set_grad_checkpointing") else body.model
    able.set_grad_checkpointing(enable)


def backbone_no_weight_decay(body: nn.Module) -> set[str]:
    """Return the names of a backbone's parameters without weight decay."""
    for prefix, module in (("", body), ("model.", getattr(body, "model", None))):
        if hasattr(module, "no_weight_decay"):
            model: Any = module
            return {prefix + name for name in model.no_weight_decay()}
    return set()


def mean_and_std(config: BackboneConfig, data: PixelConfig | None = None) -> MeanStd:
    """Return the mean and the standard deviation that a backbone's images are normalised by, per channel.

    Args:
        config: The backbone.
        data: The data config of the run, which may have others than the backbone was made for.
    """

    def made_for() -> MeanStd:
        published = get_pretrained_cfg(config.backbone)
        spec = resolve_data_config(pretrained_cfg=published.to_dict() if published else {})
        return tuple(spec["mean"]), tuple(spec["std"])

    return mean_std_of(data, config.in_chans, made_for)


def padding_color(config: BackboneConfig, data: PixelConfig) -> list[int]:
    """Return the colour of padding, in bytes: the mean, which is 0 after normalisation."""
    if config.in_chans == 3 and data.mean is None:
        return MEAN_COLOR
    return [round(255 * mean) for mean in mean_and_std(config, data)[0]]
