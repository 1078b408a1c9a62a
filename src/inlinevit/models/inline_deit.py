"""InLine-DeiT: a plain vision transformer with a class token, all tokens in one window."""

from typing import Any

from timm.models import generate_default_cfgs, register_model
from torch import Tensor, nn

from ..layers import BaseAttention, ConvEmbed, ResamplePosEmbed, SoftmaxAttention
from ._arguments import checked
from ._inline_vit import (
    LOCAL_RESIDUAL_NAMES,
    InLineViT,
    StageAttention,
    grid_of,
    grid_options,
    square_windows,
    tokens_to_map,
)
from ._registry import create, default_cfg

__all__ = ["InLineDeiT"]


class InLineDeiT(InLineViT):
    """DeiT with InLine attention.

    Args:
        img_size: Size of the images for which positions are learned; other sizes work, too.
        patch_size: Side of a patch.
        global_pool: "token", "avg" or "".
        embed_dim: Channels.
        depth: Blocks.
        num_heads: Heads.
        mlp_ratio: Hidden width of the MLPs, as a multiple of the channels.
        attention: One name for all blocks, or names for the first blocks, the last of which is repeated.
        window_size: Size of the windows of attention other than softmax; None = the whole map.
        class_token: Whether there is a class token; windows need a model without one.
        pos_embed: "learn" for learned positions of the tokens, or "none"; a class token needs them.
        **kwargs: What all families have: see InLineViT.
    """

    published_names = (
        (r"^cls_token$", "stages.0.cls_token"),
        (r"^pos_embed$", "stages.0.pos_embed"),
        (r"^patch_embed\.", "stages.0.patch_embed."),
        (r"^blocks\.", "stages.0.blocks."),
        *LOCAL_RESIDUAL_NAMES,
    )

    default_out_indices = 3

    norm_eps = 1e-6

    @checked
    def __init__(
        self,
        *,
        img_size: int | tuple[int, int] = 224,
        patch_size: int = 16,
        global_pool: str = "token",
        embed_dim: int = 192,
        depth: int = 12,
        num_heads: int = 6,
        mlp_ratio: float = 4.0,
        attention: StageAttention = "inline",
        window_size: int | None = None,
        class_token: bool = True,
        pos_embed: str = "learn",
        **kwargs: Any,
    ) -> None:
        grid = grid_of(img_size, patch_size)
        if window_size is not None and class_token:
            raise ValueError("a class token is in no window: use class_token=False and global_pool='avg'")
        if pos_embed not in ("learn", "none"):
            raise ValueError(f"unknown pos_embed {pos_embed!r}: choose learn or none")
        if pos_embed == "none" and class_token:
            raise ValueError("a class token has a learned position: use pos_embed='learn', or class_token=False")

        def make_embed(stage: int, in_dim: int, factory: dict[str, Any]) -> nn.Module:
            return ConvEmbed(in_dim, embed_dim, kernel=patch_size, stride=patch_size, norm=False, **factory)

        def make_attention(kind: type[BaseAttention], stage: int, block: int, options: dict[str, Any]) -> BaseAttention:
            layout = square_windows(None if issubclass(kind, SoftmaxAttention) else window_size, block)
            return kind(embed_dim, num_heads, layout=layout, **grid_options(kind, layout, grid), **options)

        positions = ResamplePosEmbed(grid, num_prefix_tokens=1 if class_token else 0)
        super().__init__(
            [embed_dim],
            [depth],
            [mlp_ratio],
            [patch_size],
            make_embed,
            make_attention,
            [positions] if pos_embed == "learn" else None,
            global_pool=global_pool,
            attention=[attention],
            **kwargs,
        )
        # All maps of a plain transformer have the same size; levels are blocks.
        self.feature_info = [
            {"num_chs": embed_dim, "reduction": patch_size, "module": f"stages.0.blocks.{i}"} for i in range(depth)
        ]

    def forward_levels(self, x: Tensor, take: list[int], last: int | None, norm: bool) -> tuple[Tensor, list[Tensor]]:
        """See InLineViT.forward_levels; the levels are blocks."""
        x, feat_size, taken = self.stage_list()[0].forward_tokens(x, take, last)
        taken = [self.norm(level) for level in taken] if norm else taken
        maps = [tokens_to_map(level, feat_size, self.num_prefix_tokens) for level in taken]
        return self.normalize(x if self.num_prefix_tokens > 0 else tokens_to_map(x, feat_size, 0)), maps

    def keep_levels(self, count: int) -> None:
        """See InLineViT.keep_levels; the levels are blocks."""
        stage = self.stage_list()[0]
        stage.blocks = stage.blocks[:count]


default_cfgs = generate_default_cfgs(
    {
        "inline_deit_tiny.in1k": default_cfg("inline_deit_tiny", "1d6b8191ad6d4114b291", pool_size=None),
        "inline_deit_small.in1k": default_cfg("inline_deit_small", "2f3898b07e9247f3beb3", 288, pool_size=None),
        "inline_deit_base.in1k": default_cfg("inline_deit_base", "10bdd726d4b0435eb34e", 448, pool_size=None),
    }
)


@register_model
def inline_deit_tiny(pretrained: bool = False, **kwargs: Any) -> InLineDeiT:
    """InLine-DeiT-T, 224², 6.5 M parameters."""
    return create(InLineDeiT, "inline_deit_tiny", pretrained, {"embed_dim": 192, "num_heads": 6}, kwargs)


@register_model
def inline_deit_small(pretrained: bool = False, **kwargs: Any) -> InLineDeiT:
    """InLine-DeiT-S, 288², 16.7 M parameters."""
    model_args = {"img_size": 288, "embed_dim": 320, "num_heads": 10}
    return create(InLineDeiT, "inline_deit_small", pretrained, model_args, kwargs)


@register_model
def inline_deit_base(pretrained: bool = False, **kwargs: Any) -> InLineDeiT:
    """InLine-DeiT-B, 448², 23.8 M parameters."""
    model_args = {"img_size": 448, "embed_dim": 384, "num_heads": 12}
    return create(InLineDeiT, "inline_deit_base", pretrained, model_args, kwargs)
