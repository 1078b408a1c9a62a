"""InLine-Swin: InLine attention over the whole map in fine stages, softmax in shifted windows in coarse ones."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from timm.models import generate_default_cfgs, register_model
from torch import nn

from ..layers import BaseAttention, ConvEmbed, PatchMerging, SoftmaxAttention
from ._arguments import checked
from ._backbone import LOCAL_RESIDUAL_NAMES, Backbone
from ._registry import create, default_cfg
from ._stage import StageAttention, check_stages, grid_of, make_stages, square_windows

__all__ = ["InLineSwin"]


class InLineSwin(Backbone):
    """Swin transformer with InLine attention, softmax attention, or a mix by stage.

    Args:
        img_size: Size of the images that the softmax windows are made for; other sizes work, too.
        in_chans: Channels of the images.
        num_classes: Number of classes; 0 = no head.
        global_pool: "avg" or "".
        embed_dim: Channels of the first stage; they double from stage to stage.
        depths: Blocks of each stage.
        num_heads: Heads of each stage.
        mlp_ratio: Hidden width of the MLPs, as a multiple of the channels.
        qkv_bias: Whether q, k and v have a bias.
        attention: One name for all stages, or one entry per stage (see attention_by_stage).
        attn_kwargs: Arguments of the attention, such as {"feature_map": "relu", "local_residual": False}.
        window_size: Size of the windows of attention other than softmax; None = the whole map.
        softmax_window_size: Side of the softmax windows. By default max(7, W // 8), W being window_size or, where
            that is the whole map, the first stage's map at img_size.
        drop_rate: Dropout before the head.
        proj_drop_rate: Dropout in attention and MLPs.
        drop_path_rate: Stochastic depth of the last block; it increases from 0.
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
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        embed_dim: int = 96,
        depths: Sequence[int] = (2, 2, 6, 2),
        num_heads: Sequence[int] = (3, 6, 12, 24),
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        attention: str | Sequence[StageAttention] = "inline",
        attn_kwargs: Mapping[str, Any] | None = None,
        window_size: int | None = None,
        softmax_window_size: int | None = None,
        drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        check_stages(depths, num_heads=num_heads)
        if softmax_window_size is None:
            softmax_window_size = max(7, (window_size or min(grid_of(img_size, 4))) // 8)
        softmax_window = softmax_window_size
        dims = [embed_dim * 2**i for i in range(len(depths))]
        options: dict[str, Any] = {"qkv_bias": qkv_bias, "proj_drop": proj_drop_rate, "num_prefix_tokens": 0, **factory}

        def make_embed(stage: int) -> nn.Module:
            if stage == 0:
                return ConvEmbed(in_chans, embed_dim, kernel=4, stride=4, **factory)
            return PatchMerging(dims[stage - 1], dims[stage], **factory)

        def make_attention(kind: type[BaseAttention], stage: int, block: int, extra: dict[str, Any]) -> BaseAttention:
            if issubclass(kind, SoftmaxAttention):
                layout = square_windows(softmax_window, block)
                return kind(
                    dims[stage],
                    num_heads[stage],
                    layout=layout,
                    relative_window=softmax_window,
                    **options,
                    **extra,
                )
            return kind(dims[stage], num_heads[stage], layout=square_windows(window_size, block), **options, **extra)

        stages = make_stages(
            make_embed,
            make_attention,
            dims=dims,
            depths=depths,
            attention=attention,
            attn_kwargs=attn_kwargs,
            mlp_ratios=[mlp_ratio] * len(depths),
            proj_drop_rate=proj_drop_rate,
            drop_path_rate=drop_path_rate,
            **factory,
        )
        super().__init__(
            stages,
            nn.LayerNorm(dims[-1], **factory),
            dims=dims,
            reductions=[4 * 2**i for i in range(len(depths))],
            num_classes=num_classes,
            in_chans=in_chans,
            global_pool=global_pool,
            drop_rate=drop_rate,
            **factory,
        )


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
