"""Baselines: DeiT-T with other attentions and three heads, as in DeiT."""

from typing import Any

from timm.models import generate_default_cfgs, register_model

from ._registry import create, default_cfg
from .inline_deit import InLineDeiT

__all__: list[str] = []

default_cfgs = generate_default_cfgs(
    {
        "softmax_deit_tiny.untrained": default_cfg(pool_size=None),
        "linear_deit_tiny.untrained": default_cfg(pool_size=None),
        "hydra_deit_tiny.untrained": default_cfg(pool_size=None),
        "efficient_deit_tiny.untrained": default_cfg(pool_size=None),
        "angular_deit_tiny.untrained": default_cfg(pool_size=None),
        "enhanced_deit_tiny.untrained": default_cfg(pool_size=None),
        "focused_deit_tiny.untrained": default_cfg(pool_size=None),
    }
)


def create_baseline(attention: str, pretrained: bool, given: dict[str, Any]) -> InLineDeiT:
    """Build DeiT-T with this attention."""
    model_args = {"embed_dim": 192, "num_heads": 3, "attention": attention}
    return create(InLineDeiT, f"{attention}_deit_tiny", pretrained, model_args, given)


@register_model
def softmax_deit_tiny(pretrained: bool = False, **kwargs: Any) -> InLineDeiT:
    """DeiT-T with softmax attention, DeiT-T itself, 5.7 M parameters."""
    return create_baseline("softmax", pretrained, kwargs)


@register_model
def linear_deit_tiny(pretrained: bool = False, **kwargs: Any) -> InLineDeiT:
    """DeiT-T with plain linear attention, 5.7 M parameters."""
    return create_baseline("linear", pretrained, kwargs)


@register_model
def hydra_deit_tiny(pretrained: bool = False, **kwargs: Any) -> InLineDeiT:
    """DeiT-T with hydra attention, 5.7 M parameters."""
    return create_baseline("hydra", pretrained, kwargs)


@register_model
def efficient_deit_tiny(pretrained: bool = False, **kwargs: Any) -> InLineDeiT:
    """DeiT-T with efficient attention, 5.7 M parameters."""
    return create_baseline("efficient", pretrained, kwargs)


@register_model
def angular_deit_tiny(pretrained: bool = False, **kwargs: Any) -> InLineDeiT:
    """DeiT-T with angular attention, 5.7 M parameters."""
    return create_baseline("angular", pretrained, kwargs)


@register_model
def enhanced_deit_tiny(pretrained: bool = False, **kwargs: Any) -> InLineDeiT:
    """DeiT-T with linear attention and convolutions in its MLPs, 5.8 M parameters."""
    return create_baseline("enhanced", pretrained, kwargs)


@register_model
def focused_deit_tiny(pretrained: bool = False, **kwargs: Any) -> InLineDeiT:
    """DeiT-T with focused linear attention, 6.2 M parameters."""
    return create_baseline("focused", pretrained, kwargs)
