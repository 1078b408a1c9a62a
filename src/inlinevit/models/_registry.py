"""What timm's registry wants to know of a model, and how it builds one."""

from typing import Any, TypeVar

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg

from ._backbone import Backbone
from ._checkpoint import adapt_state_dict

BackboneT = TypeVar("BackboneT", bound=Backbone)


def default_cfg(name: str = "", file_id: str = "", size: int = 224, **overrides: Any) -> dict[str, Any]:
    """What timm wants to know of a model's weights and data.

    Args:
        name: The model's name, which the downloaded file gets.
        file_id: Where the published weights lie; "" if there are none.
        size: Side of the images that the model is made for.
        **overrides: Entries that differ.
    """
    return {
        "url": (f"https://cloud.tsinghua.edu.cn/f/{file_id}/?dl=1", f"{name}.pth") if file_id else None,
        # Our own loader, which refuses files that could run code.
        "custom_load": True,
        "num_classes": 1000,
        "input_size": (3, size, size),
        "pool_size": (size // 32, size // 32),
        # At 384 images are resized straight to the input size; elsewhere the middle of a larger one is taken.
        "crop_pct": 1.0 if size == 384 else 224 / 256,
        "crop_mode": "squash" if size == 384 else "center",
        "interpolation": "bicubic",
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "first_conv": "stages.0.embed.proj",
        "classifier": "head",
        "license": "apache-2.0",
        "paper_ids": "arXiv:2412.06590",
        **overrides,
    }


def create(
    model_class: type[BackboneT], variant: str, pretrained: bool, defaults: dict[str, Any], given: dict[str, Any]
) -> BackboneT:
    """What timm's registry calls: build a variant, with weights if they are wanted.

    Args:
        model_class: The family.
        variant: The model's name.
        pretrained: Whether to load the published weights.
        defaults: Arguments that make the variant.
        given: Arguments of the user, which prevail.
    """
    return build_model_with_cfg(
        model_class,
        variant,
        pretrained,
        pretrained_filter_fn=adapt_state_dict,
        feature_cfg={"feature_cls": "getter", "out_indices": model_class.default_out_indices},
        **{**defaults, **given},
    )
