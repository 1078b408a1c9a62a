"""InLine-Swin: InLine attention over the whole map in fine stages, softmax in shifted windows in coarse ones."""

from collections.abc import Sequence
from typing import Any

from timm.models import generate_default_cfgs, register_model
from torch import nn

from ..layers import BaseAttention, ConvEmbed, PatchMerging, SoftmaxAttention
from ._arguments import checked
from ._inline_vit import LOCAL_RESIDUAL_NAMES, InLineViT, check_stages, grid_of, grid_options, square_windows
from ._registry import create, default_cfg

__all__ = ["InLineSwin"]


class InLineSwin(InLineViT):
    """Swin transformer with InLine attention, softmax attention, or a mix by stage.

    Args:
        img_size: Size of the images that the softmax windows are made for; other sizes work, too.
        embed_dim: Channels of the first stage; they double from stage to stage.
        depths: Blocks of each stage.
        num_heads: Heads of each stage.
        mlp_ratio: Hidden width of the MLPs, as a multiple of the channels.
        window_size: Size of the windows of attention other than softmax; None = the whole map.
        softmax_window_size: Side of the softmax windows. By default max(7, W // 8), W being window_size or, where
            that is the whole map, the first stage's map at img_size.
        **kwargs: What all families have: see InLineViT.
    """

    published_names = (
        (r"^patch_embed\.", "stages.0.patch_embed."),
        # The reference downsamples at the end of a stage, we do it at the beginning of the next.
        *((rf"^layers\.{i}\.downsample\.", f"stages.{i + 1}.downsample.") for i in range(3)),
        (r"^layers\.", "stages."),
        *LOCAL_RESIDUAL_NAMES,
    )

    @checked
    def __init__(
        self,
        *,
        img_size: int | tuple[int, int] = 224,
        embed_dim: int = 96,
        depths: Sequence[int] = (2, 2, 6, 2),
        num_heads: Sequence[int] = (3, 6, 12, 24),
        mlp_ratio: float = 4.0,
        window_size: int | None = None,
        softmax_window_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        check_stages(depths, num_heads=num_heads)
        softmax_window = softmax_window_size or max(7, (window_size or min(grid_of(img_size, 4))) // 8)
        dims = [embed_dim * 2**i for i in range(len(depths))]
        reductions = [4 * 2**i for i in range(len(depths))]

        def make_embed(stage: int, in_dim: int, factory: dict[str, Any]) -> nn.Module:
            if stage == 0:
                return ConvEmbed(in_dim, dims[0], kernel=4, stride=4, **factory)
            return PatchMerging(in_dim, dims[stage], **factory)

        def make_attention(kind: type[BaseAttention], stage: int, block: int, options: dict[str, Any]) -> BaseAttention:
            if issubclass(kind, SoftmaxAttention):
                options = {**options, "relative_window": softmax_window}
                layout = square_windows(softmax_window, block)
            else:
                layout = square_windows(window_size, block)
                options |= grid_options(kind, layout, grid_of(img_size, reductions[stage]))
            return kind(dims[stage], num_heads[stage], layout=layout, **options)

        super().__init__(dims, depths, [mlp_ratio] * len(depths), reductions, make_embed, make_attention, **kwargs)


default_cfgs = generate_default_cfgs(
    {
        "inline_swin_tiny.in1k": default_cfg("inline_swin_tiny", "32810869fcc34410966b"),
        "inline_swin_small.in1k": default_cfg("inline_swin_small", "e9657fd247c04c7cb1a1"),
        "inline_swin_base.in1k": default_cfg("inline_swin_base", "bf23564bb64c420aafe1"),
        "inline_swin_base_384.untrained": default_cfg(size=384),
    }
)


@register_model
def inline_swin_tiny(pretrained: bool = False, **kwargs: Any) -> InLineSwin:
    """InLine-Swin-T, 29.2 M parameters."""
    model_args = {"attention": ("inline", "inline", "inline", "softmax")}
    return create(InLineSwin, "inline_swin_tiny", pretrained, model_args, kwargs)


@register_model
def inline_swin_small(pretrained: bool = False, **kwargs: Any) -> InLineSwin:
    """InLine-Swin-S, 49.8 M parameters."""
    model_args = {"depths": (2, 2, 18, 2), "attention": ("inline", "inline", "softmax", "softmax")}
    return create(InLineSwin, "inline_swin_small", pretrained, model_args, kwargs)


# The third stage begins with two InLine blocks.
BASE = {
    "embed_dim": 128,
    "depths": (2, 2, 18, 2),
    "num_heads": (4, 8, 16, 32),
    "attention": ("inline", "inline", ("inline", "inline", "softmax"), "softmax"),
}


@register_model
def inline_swin_base(pretrained: bool = False, **kwargs: Any) -> InLineSwin:
    """InLine-Swin-B, 88.4 M parameters."""
    return create(InLineSwin, "inline_swin_base", pretrained, {**BASE}, kwargs)


@register_model
def inline_swin_base_384(pretrained: bool = False, **kwargs: Any) -> InLineSwin:
    """InLine-Swin-B at 384², 88.5 M parameters."""
    return create(InLineSwin, "inline_swin_base_384", pretrained, {**BASE, "img_size": 384}, kwargs)
