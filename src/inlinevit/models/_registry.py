"""Default configs of models for timm's registry, and how it builds them."""

from typing import Any, TypeVar

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, resolve_pretrained_cfg

from ._checkpoint import adapt_state_dict
from ._inline_vit import InLineViT
from ._pretrained import downloading

ModelT = TypeVar("ModelT", bound=InLineViT)


def default_cfg(name: str = "", file_id: str = "", size: int = 224, **overrides: Any) -> dict[str, Any]:
    """Return what timm needs to know about the weights and data of a model.

    Args:
        name: Name of the model, and of the downloaded file.
        file_id: Identifier of the published weights; "" if there are none.
        size: Input size of the model.
        **overrides: Entries with other values.
    """
    return {
        "url": (f"https://cloud.tsinghua.edu.cn/f/{file_id}/?dl=1", f"{name}.pth") if file_id else None,
        # Our own loader, which refuses files that could run code.
        "custom_load": True,
        "num_classes": 1000,
        "input_size": (3, size, size),
        "pool_size": (size // 32, size // 32),
        # At 384 images are resized to the input size; at other sizes the centre of a larger image is cropped.
        "crop_pct": 1.0 if size == 384 else 224 / 256,
        "crop_mode": "squash" if size == 384 else "center",
        "interpolation": "bicubic",
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "first_conv": "stages.0.patch_embed.proj",
        "classifier": "head",
        "license": "apache-2.0",
        "paper_ids": "arXiv:2412.06590",
        **overrides,
    }


def create(
    model_class: type[ModelT], variant: str, pretrained: bool, defaults: dict[str, Any], given: dict[str, Any]
) -> ModelT:
    """Build a variant for timm's registry, with published weights on request.

    Args:
        model_class: The family.
        variant: The model's name.
        pretrained: Whether to load the published weights.
        defaults: Arguments that define the variant.
        given: Arguments of the user, which take precedence.

    Raises:
        PretrainedWeightsError: The weights cannot be downloaded.
    """
    overlay, cache_dir = given.get("pretrained_cfg_overlay"), given.get("cache_dir")
    cfg = resolve_pretrained_cfg(variant, given.get("pretrained_cfg"), dict(overlay or {})) if pretrained else None
    with downloading(variant, cfg, "load a local file with inlinevit.load_checkpoint(model, FILE)", cache_dir):
        return build_model_with_cfg(
            model_class,
            variant,
            pretrained,
            pretrained_filter_fn=adapt_state_dict,
            feature_cfg={"feature_cls": "getter", "out_indices": model_class.default_out_indices},
            **{**defaults, **given},
        )
