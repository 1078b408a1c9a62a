"""InLine-CSWin: InLine attention over the whole map in the fine stages, softmax in cross-shaped windows in the coarse
ones; and the softmax CSWin that it is compared with."""

from collections.abc import Sequence
from typing import Any

from timm.models import generate_default_cfgs, register_model
from torch import nn

from ..layers import BaseAttention, ConvEmbed, CrossStripes, SoftmaxAttention, WholeMap
from ._arguments import checked
from ._inline_vit import InLineViT, check_stages, grid_of, grid_options
from ._registry import create, default_cfg

__all__ = ["InLineCSWin"]


class InLineCSWin(InLineViT):
    """CSWin transformer with InLine attention, softmax attention, or a mix by stage.

    Args:
        img_size: Size of the images that the softmax stripes are made for; other sizes work, too.
        embed_dim: Channels of the first stage; they double from stage to stage.
        depths: Blocks of each stage.
        num_heads: Heads of each stage.
        mlp_ratio: Hidden width of the MLPs, as a multiple of the channels.
        window_size: Width of the stripes of attention other than softmax; None = the whole map.
        split_sizes: Width of the softmax stripes of each stage; by default 1, 2, and the last stage's map at img_size
            (at least 7) twice. The last stage attends to its whole map.
        **kwargs: What all families have: see InLineViT.
    """

    published_names = (
        (r"^stage1_conv_embed\.0\.", "stages.0.patch_embed.proj."),
        (r"^stage1_conv_embed\.2\.", "stages.0.patch_embed.norm."),
        *((rf"^merge{i}\.conv\.", f"stages.{i}.downsample.proj.") for i in range(1, 4)),
        *((rf"^merge{i}\.norm\.", f"stages.{i}.downsample.norm.") for i in range(1, 4)),
        *((rf"^stage{i + 1}\.(\d+)\.", rf"stages.{i}.blocks.\1.") for i in range(4)),
        (r"^(stages\.\d+\.blocks\.\d+)\.(qkv|proj)\.", r"\1.attn.\2."),
        # The reference has one module for each half of the heads, we have one for all heads.
        (r"\.attns\.(\d)\.get_v\.(\w+)$", r".attn.lepe.\2#\1"),
        (r"\.attns\.(\d)\.residual\.0\.(\w+)$", r".attn.local_residual.fc1.\2#\1"),
        (r"\.attns\.(\d)\.residual\.2\.(\w+)$", r".attn.local_residual.fc2.\2#\1"),
    )

    kernels_before_norm = True

    @checked
    def __init__(
        self,
        *,
        img_size: int | tuple[int, int] = 224,
        embed_dim: int = 64,
        depths: Sequence[int] = (2, 4, 18, 1),
        num_heads: Sequence[int] = (2, 4, 8, 16),
        mlp_ratio: float = 4.0,
        window_size: int | None = None,
        split_sizes: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> None:
        check_stages(depths, num_heads=num_heads, split_sizes=split_sizes)
        coarse = max(7, min(grid_of(img_size, 32)))
        stripes = (1, 2, coarse, coarse) if split_sizes is None else split_sizes
        if len(stripes) < len(depths):
            raise ValueError(f"split_sizes have no default for {len(depths)} stages: pass one entry per stage")
        dims = [embed_dim * 2**i for i in range(len(depths))]
        reductions = [4 * 2**i for i in range(len(depths))]

        def make_embed(stage: int, in_dim: int, factory: dict[str, Any]) -> nn.Module:
            if stage == 0:
                return ConvEmbed(in_dim, dims[0], kernel=7, stride=4, padding=2, **factory)
            return ConvEmbed(in_dim, dims[stage], kernel=3, stride=2, padding=1, **factory)

        def make_attention(kind: type[BaseAttention], stage: int, block: int, options: dict[str, Any]) -> BaseAttention:
            width = window_size
            if issubclass(kind, SoftmaxAttention):
                width = stripes[stage] if stage < len(depths) - 1 else None
            layout = WholeMap() if width is None else CrossStripes(width)
            options |= grid_options(kind, layout, grid_of(img_size, reductions[stage]))
            options.setdefault("lepe", kind.surroundings.lepe or 3)
            return kind(dims[stage], num_heads[stage], layout=layout, **options)

        super().__init__(dims, depths, [mlp_ratio] * len(depths), reductions, make_embed, make_attention, **kwargs)


default_cfgs = generate_default_cfgs(
    {
        "inline_cswin_tiny.in1k": default_cfg("inline_cswin_tiny", "49fa2ecc543647c4b970"),
        "inline_cswin_small.in1k": default_cfg("inline_cswin_small", "59f4e65f776f4052b93c"),
        "inline_cswin_base.in1k": default_cfg("inline_cswin_base", "91e17121df284ae38521"),
        "inline_cswin_base_384.untrained": default_cfg(size=384),
        "cswin_tiny.untrained": default_cfg(paper_ids="arXiv:2107.00652"),
        "cswin_small.untrained": default_cfg(paper_ids="arXiv:2107.00652"),
        "cswin_base.untrained": default_cfg(paper_ids="arXiv:2107.00652"),
    }
)


INLINE = {"attention": ("inline", "inline", "softmax", "softmax")}
BASE = {"embed_dim": 96, "num_heads": (4, 8, 16, 32)}


@register_model
def inline_cswin_tiny(pretrained: bool = False, **kwargs: Any) -> InLineCSWin:
    """InLine-CSWin-T, 20.6 M parameters."""
    return create(InLineCSWin, "inline_cswin_tiny", pretrained, {"depths": (2, 4, 18, 1), **INLINE}, kwargs)


@register_model
def inline_cswin_small(pretrained: bool = False, **kwargs: Any) -> InLineCSWin:
    """InLine-CSWin-S, 33.0 M parameters."""
    return create(InLineCSWin, "inline_cswin_small", pretrained, {"depths": (3, 6, 29, 2), **INLINE}, kwargs)


@register_model
def inline_cswin_base(pretrained: bool = False, **kwargs: Any) -> InLineCSWin:
    """InLine-CSWin-B, 73.4 M parameters."""
    return create(InLineCSWin, "inline_cswin_base", pretrained, {"depths": (3, 6, 29, 2), **BASE, **INLINE}, kwargs)


@register_model
def inline_cswin_base_384(pretrained: bool = False, **kwargs: Any) -> InLineCSWin:
    """InLine-CSWin-B at 384², 73.4 M parameters."""
    model_args = {"img_size": 384, "depths": (3, 6, 29, 2), **BASE, **INLINE}
    return create(InLineCSWin, "inline_cswin_base_384", pretrained, model_args, kwargs)


@register_model
def cswin_tiny(pretrained: bool = False, **kwargs: Any) -> InLineCSWin:
    """Softmax CSWin-T, 23 M parameters."""
    return create(InLineCSWin, "cswin_tiny", pretrained, {"depths": (1, 2, 21, 1), "attention": "softmax"}, kwargs)


@register_model
def cswin_small(pretrained: bool = False, **kwargs: Any) -> InLineCSWin:
    """Softmax CSWin-S, 35 M parameters."""
    return create(InLineCSWin, "cswin_small", pretrained, {"depths": (2, 4, 32, 2), "attention": "softmax"}, kwargs)


@register_model
def cswin_base(pretrained: bool = False, **kwargs: Any) -> InLineCSWin:
    """Softmax CSWin-B, 78 M parameters."""
    return create(
        InLineCSWin, "cswin_base", pretrained, {"depths": (2, 4, 32, 2), **BASE, "attention": "softmax"}, kwargs
    )
