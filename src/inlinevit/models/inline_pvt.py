"""InLine-PVT: four stages, learned positions in each; and the softmax PVT (version 1) that it is compared with."""

from collections.abc import Sequence
from typing import Any

from timm.models import generate_default_cfgs, register_model
from torch import nn

from ..layers import BaseAttention, ConvEmbed, ResamplePosEmbed, SoftmaxAttention
from ._arguments import checked
from ._inline_vit import LOCAL_RESIDUAL_NAMES, InLineViT, check_stages, grid_of, grid_options, square_windows
from ._registry import create, default_cfg

__all__ = ["InLinePVT"]

# Default sr_ratios: how many times smaller the map of keys and values is in the softmax stages.
SR_RATIOS = (8, 4, 2, 1)


class InLinePVT(InLineViT):
    """Pyramid vision transformer with InLine attention, softmax attention, or a mix by stage.

    Args:
        img_size: Size of the images for which positions are learned; other sizes work, too.
        embed_dims: Channels of each stage.
        depths: Blocks of each stage.
        num_heads: Heads of each stage.
        mlp_ratios: Hidden width of the MLPs of each stage, as a multiple of the channels.
        window_size: Size of the windows of attention other than softmax; None = the whole map. A stage with a class
            token always attends to its whole map.
        sr_ratios: How much each stage reduces the map of keys and values. By default 8-4-2-1 where attention is
            softmax and 1 elsewhere. The local residual needs the values of all tokens.
        class_token: Whether the last stage has a class token (with a final norm, as in PVT version 1).
        **kwargs: What all families have: see InLineViT.
    """

    published_names = (
        (r"^cls_token$", "stages.3.cls_token"),
        *((rf"^pos_embed{i + 1}$", f"stages.{i}.pos_embed") for i in range(4)),
        (r"^patch_embed1\.", "stages.0.patch_embed."),
        *((rf"^patch_embed{i + 1}\.", f"stages.{i}.downsample.") for i in range(1, 4)),
        *((rf"^block{i + 1}\.", f"stages.{i}.blocks.") for i in range(4)),
        (r"\.attn\.sr\.", ".attn.reduce.proj."),
        (r"\.attn\.norm\.", ".attn.reduce.norm."),
        (r"\.attn\.q\.(\w+)$", r".attn.qkv.\1#0"),
        (r"\.attn\.kv\.(\w+)$", r".attn.qkv.\1#1"),
        *LOCAL_RESIDUAL_NAMES,
    )

    norm_eps = 1e-6

    @checked
    def __init__(
        self,
        *,
        img_size: int | tuple[int, int] = 224,
        embed_dims: Sequence[int] = (64, 128, 320, 512),
        depths: Sequence[int] = (2, 2, 2, 2),
        num_heads: Sequence[int] = (2, 4, 10, 16),
        mlp_ratios: Sequence[float] = (8.0, 8.0, 4.0, 4.0),
        window_size: int | None = None,
        sr_ratios: Sequence[int] | None = None,
        class_token: bool = False,
        **kwargs: Any,
    ) -> None:
        check_stages(depths, embed_dims=embed_dims, num_heads=num_heads, mlp_ratios=mlp_ratios, sr_ratios=sr_ratios)
        if sr_ratios is None and len(depths) > len(SR_RATIOS):
            raise ValueError(f"sr_ratios have no default for {len(depths)} stages: pass one entry per stage")
        reductions = [4 * 2**i for i in range(len(depths))]
        prefixes = [1 if class_token and i == len(depths) - 1 else 0 for i in range(len(depths))]

        def make_embed(stage: int, in_dim: int, factory: dict[str, Any]) -> nn.Module:
            stride = 4 if stage == 0 else 2
            return ConvEmbed(in_dim, embed_dims[stage], kernel=stride, stride=stride, **factory)

        def make_attention(kind: type[BaseAttention], stage: int, block: int, options: dict[str, Any]) -> BaseAttention:
            if issubclass(kind, SoftmaxAttention):
                sr_ratio = SR_RATIOS[stage] if sr_ratios is None else sr_ratios[stage]
                return kind(embed_dims[stage], num_heads[stage], sr_ratio=sr_ratio, **options)
            if sr_ratios is not None and sr_ratios[stage] > 1:
                raise ValueError(
                    f"stage {stage} reduces keys and values {sr_ratios[stage]} times, but {kind.__name__} needs the "
                    "values of all tokens: use an sr_ratio of 1 there, or softmax"
                )
            # A class token is in no window: its stage attends to the whole map.
            layout = square_windows(None if prefixes[stage] else window_size, block)
            options |= grid_options(kind, layout, grid_of(img_size, reductions[stage]))
            return kind(embed_dims[stage], num_heads[stage], layout=layout, **options)

        pos_embeds = [
            ResamplePosEmbed(grid_of(img_size, reduction), num_prefix_tokens=prefix, interpolation="bilinear")
            for reduction, prefix in zip(reductions, prefixes, strict=True)
        ]
        super().__init__(embed_dims, depths, mlp_ratios, reductions, make_embed, make_attention, pos_embeds, **kwargs)
        if not class_token:
            self.norm = nn.Identity()


default_cfgs = generate_default_cfgs(
    {
        "inline_pvt_tiny.in1k": default_cfg("inline_pvt_tiny", "90ac52b1555b401eb5e6"),
        "inline_pvt_small.in1k": default_cfg("inline_pvt_small", "1ab953b2479d433080a3"),
        "inline_pvt_medium.in1k": default_cfg("inline_pvt_medium", "a72aec31e6084bc0a280"),
        "inline_pvt_large.in1k": default_cfg("inline_pvt_large", "efd91318ba964f01b288"),
        "pvt_tiny.untrained": default_cfg(paper_ids="arXiv:2102.12122"),
        "pvt_small.untrained": default_cfg(paper_ids="arXiv:2102.12122"),
        "pvt_medium.untrained": default_cfg(paper_ids="arXiv:2102.12122"),
        "pvt_large.untrained": default_cfg(paper_ids="arXiv:2102.12122"),
    }
)

DEPTHS = {"tiny": (2, 2, 2, 2), "small": (3, 4, 6, 3), "medium": (3, 4, 18, 3), "large": (3, 8, 27, 3)}
SOFTMAX = {"num_heads": (1, 2, 5, 8), "attention": "softmax", "class_token": True, "global_pool": "token"}


@register_model
def inline_pvt_tiny(pretrained: bool = False, **kwargs: Any) -> InLinePVT:
    """InLine-PVT-T, 12.0 M parameters."""
    return create(InLinePVT, "inline_pvt_tiny", pretrained, {"depths": DEPTHS["tiny"]}, kwargs)


@register_model
def inline_pvt_small(pretrained: bool = False, **kwargs: Any) -> InLinePVT:
    """InLine-PVT-S, 21.6 M parameters."""
    return create(InLinePVT, "inline_pvt_small", pretrained, {"depths": DEPTHS["small"]}, kwargs)


@register_model
def inline_pvt_medium(pretrained: bool = False, **kwargs: Any) -> InLinePVT:
    """InLine-PVT-M, 37.6 M parameters."""
    return create(InLinePVT, "inline_pvt_medium", pretrained, {"depths": DEPTHS["medium"]}, kwargs)


@register_model
def inline_pvt_large(pretrained: bool = False, **kwargs: Any) -> InLinePVT:
    """InLine-PVT-L, 51.2 M parameters."""
    return create(InLinePVT, "inline_pvt_large", pretrained, {"depths": DEPTHS["large"]}, kwargs)


@register_model
def pvt_tiny(pretrained: bool = False, **kwargs: Any) -> InLinePVT:
    """Softmax PVT-Tiny, version 1, 13.2 M parameters."""
    return create(InLinePVT, "pvt_tiny", pretrained, {"depths": DEPTHS["tiny"], **SOFTMAX}, kwargs)


@register_model
def pvt_small(pretrained: bool = False, **kwargs: Any) -> InLinePVT:
    """Softmax PVT-Small, version 1, 24.5 M parameters."""
    return create(InLinePVT, "pvt_small", pretrained, {"depths": DEPTHS["small"], **SOFTMAX}, kwargs)


@register_model
def pvt_medium(pretrained: bool = False, **kwargs: Any) -> InLinePVT:
    """Softmax PVT-Medium, version 1, 44.2 M parameters."""
    return create(InLinePVT, "pvt_medium", pretrained, {"depths": DEPTHS["medium"], **SOFTMAX}, kwargs)


@register_model
def pvt_large(pretrained: bool = False, **kwargs: Any) -> InLinePVT:
    """Softmax PVT-Large, version 1, 61.4 M parameters."""
    return create(InLinePVT, "pvt_large", pretrained, {"depths": DEPTHS["large"], **SOFTMAX}, kwargs)
