"""Baselines: DeiT-T with other attentions and three heads, as in DeiT."""

from collections.abc import Mapping
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
        "mala_deit_tiny.untrained": default_cfg(pool_size=None, paper_ids="arXiv:2507.00698"),
        "rala_deit_tiny.untrained": default_cfg(pool_size=None, paper_ids="arXiv:2411.07635"),
        "polaformer_deit_tiny.untrained": default_cfg(pool_size=None, paper_ids="arXiv:2501.15061"),
        "agent_deit_tiny.untrained": default_cfg(pool_size=None, paper_ids="arXiv:2312.08874"),
        "vit3_deit_tiny.untrained": default_cfg(pool_size=None, paper_ids="arXiv:2512.01643"),
        "mhla_deit_tiny.untrained": default_cfg(size=256, pool_size=None, paper_ids="arXiv:2601.07832"),
        "circulant_deit_tiny.untrained": default_cfg(pool_size=None, paper_ids="arXiv:2512.21542"),
    }
)


def create_baseline(
    attention: str, pretrained: bool, given: dict[str, Any], surroundings: dict[str, bool] | None = None
) -> InLineDeiT:
    """Build DeiT-T with this attention.

    Args:
        attention: Its name.
        pretrained: See create.
        given: Arguments of the user.
        surroundings: Defaults of attn_kwargs beyond those of the attention; what the user gives takes precedence.
    """
    model_args: dict[str, Any] = {"embed_dim": 192, "num_heads": 3, "attention": attention}
    own = given.get("attn_kwargs")
    # Anything else is refused by name later.
    if surroundings and (own is None or isinstance(own, Mapping)):
        given = {**given, "attn_kwargs": {**surroundings, **(own or {})}}
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


# Of the published backbones of MALA and RALA, around attention with a gate, LePE and rotary positions.
CONVOLUTIONS = {"cpe": True, "mlp_conv": True}


@register_model
def mala_deit_tiny(pretrained: bool = False, **kwargs: Any) -> InLineDeiT:
    """DeiT-T with magnitude-aware linear attention and its surroundings, 6.3 M parameters."""
    return create_baseline("mala", pretrained, kwargs, CONVOLUTIONS)


@register_model
def rala_deit_tiny(pretrained: bool = False, **kwargs: Any) -> InLineDeiT:
    """DeiT-T with rank-augmented linear attention and its surroundings, 6.3 M parameters."""
    return create_baseline("rala", pretrained, kwargs, CONVOLUTIONS)


@register_model
def polaformer_deit_tiny(pretrained: bool = False, **kwargs: Any) -> InLineDeiT:
    """DeiT-T with PolaFormer's attention, 6.6 M parameters."""
    return create_baseline("polaformer", pretrained, kwargs)


# Of the models without a class token: positions come from the convolution at the beginning of each block.
NO_POSITIONS = {"class_token": False, "global_pool": "avg", "pos_embed": "none"}


@register_model
def agent_deit_tiny(pretrained: bool = False, **kwargs: Any) -> InLineDeiT:
    """DeiT-T with agent attention, 6.0 M parameters."""
    return create_baseline("agent", pretrained, kwargs)


@register_model
def vit3_deit_tiny(pretrained: bool = False, **kwargs: Any) -> InLineDeiT:
    """DeiT-T with the attention of ViT³, six heads, without class token and positions, 6.1 M parameters."""
    model_args = {"embed_dim": 192, "num_heads": 6, "attention": "vit3", **NO_POSITIONS}
    return create(InLineDeiT, "vit3_deit_tiny", pretrained, model_args, kwargs)


@register_model
def mhla_deit_tiny(pretrained: bool = False, **kwargs: Any) -> InLineDeiT:
    """DeiT-T with MHLA, without class token, the norm after the pooling, 256², 5.8 M parameters.

    The published code pads images of 224² with zeros to 256², for 16 × 16 tokens.
    """
    model_args: dict[str, Any] = {"img_size": 256, "embed_dim": 192, "num_heads": 3, "attention": "mhla"}
    model_args |= {"class_token": False, "global_pool": "avg", "fc_norm": True, "qkv_bias": False}
    return create(InLineDeiT, "mhla_deit_tiny", pretrained, model_args, kwargs)


@register_model
def circulant_deit_tiny(pretrained: bool = False, **kwargs: Any) -> InLineDeiT:
    """DeiT-T with circulant attention, without class token and positions, 6.1 M parameters."""
    model_args = {"embed_dim": 192, "num_heads": 3, "attention": "circulant", "qkv_bias": False, **NO_POSITIONS}
    return create(InLineDeiT, "circulant_deit_tiny", pretrained, model_args, kwargs)
