"""InLine-DeiT: a plain vision transformer with a class token, all tokens in one window."""

from functools import partial
from typing import Any

import torch
from timm.layers import calculate_drop_path_rates, to_2tuple
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import Tensor, nn

from ..layers import ConvEmbed, PositionEmbedding, TokenMixer
from ._backbone import (
    Backbone,
    Stage,
    StageAttention,
    attention_by_stage,
    default_cfg,
    grid_of,
    make_blocks,
    square_windows,
    tokens_to_map,
)
from ._checkpoint import adapt_state_dict

__all__ = ["InLineDeiT"]


class InLineDeiT(Backbone):
    """DeiT with InLine attention.

    Args:
        img_size: Size of the images for which positions are learned; others work too.
        patch_size: Side of a patch.
        in_chans: Channels of the images.
        num_classes: Width of the head; 0 = none.
        global_pool: "token", "avg" or "".
        embed_dim: Channels.
        depth: Blocks.
        num_heads: Heads.
        mlp_ratio: Width of the MLPs, in channels.
        qkv_bias: Whether q, k and v have a bias.
        attention: A word for all blocks, or words for the first blocks, of which the last goes on.
        window_size: Side of the windows of attention that is not softmax; None = the whole map.
        class_token: Whether there is a class token; windows need a model without one.
        drop_rate: Dropout before the head.
        proj_drop_rate: Dropout in attention and MLPs.
        drop_path_rate: Stochastic depth of the last block; it grows from 0.
    """

    published_names = (
        (r"^cls_token$", "stages.0.class_token"),
        (r"^pos_embed$", "stages.0.positions.table"),
        (r"^patch_embed\.", "stages.0.embed."),
        (r"^blocks\.", "stages.0.blocks."),
        (r"\.residual\.0\.", ".local_residual.fc1."),
        (r"\.residual\.2\.", ".local_residual.fc2."),
    )

    def __init__(
        self,
        *,
        img_size: int | tuple[int, int] = 224,
        patch_size: int = 16,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "token",
        embed_dim: int = 192,
        depth: int = 12,
        num_heads: int = 6,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        attention: StageAttention = "inline",
        window_size: int | None = None,
        class_token: bool = True,
        drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        prefix = 1 if class_token else 0
        if window_size is not None and class_token:
            raise ValueError("windows leave no place for a class token: use class_token=False and global_pool='avg'")

        make_attention = partial(
            _make_attention,
            window_size=window_size,
            dim=embed_dim,
            num_heads=num_heads,
            qkv_bias=qkv_bias,
            proj_drop=proj_drop_rate,
            num_prefix_tokens=prefix,
            **factory,
        )
        stage = Stage(
            ConvEmbed(in_chans, embed_dim, kernel=patch_size, stride=patch_size, norm=False, **factory),
            make_blocks(
                make_attention,
                attention_by_stage([attention], [depth])[0],
                calculate_drop_path_rates(drop_path_rate, depth),
                embed_dim,
                mlp_ratio=mlp_ratio,
                proj_drop=proj_drop_rate,
                norm_eps=1e-6,
                **factory,
            ),
            dim=embed_dim,
            positions=PositionEmbedding(
                embed_dim, grid_of(to_2tuple(img_size), patch_size), num_prefix_tokens=prefix, **factory
            ),
            class_token=class_token,
            **factory,
        )
        super().__init__(
            [stage],
            nn.LayerNorm(embed_dim, eps=1e-6, **factory),
            dims=[embed_dim],
            reductions=[patch_size],
            num_classes=num_classes,
            in_chans=in_chans,
            global_pool=global_pool,
            drop_rate=drop_rate,
            **factory,
        )
        # All maps of a plain transformer have one size; they are told apart by the block.
        self.feature_info = [
            {"num_chs": embed_dim, "reduction": patch_size, "module": f"stages.0.blocks.{i}"} for i in range(depth)
        ]

    @torch.jit.ignore
    def forward_levels(self, x: Tensor, take: list[int], last: int | None, norm: bool) -> tuple[Tensor, list[Tensor]]:
        """See Backbone.forward_levels; the levels are blocks."""
        x, size, taken = self.stages[0].forward_tokens(x, take, last)
        maps = [tokens_to_map(self.norm(level) if norm else level, size, self.num_prefix_tokens) for level in taken]
        return self.normalize(x if self.num_prefix_tokens > 0 else tokens_to_map(x, size, 0)), maps

    @torch.jit.ignore
    def keep_levels(self, count: int) -> None:
        """See Backbone.keep_levels; the levels are blocks."""
        self.stages[0].blocks = self.stages[0].blocks[:count]


def _make_attention(kind: type[TokenMixer], block: int, *, window_size: int | None, **options: Any) -> TokenMixer:
    """Softmax sees all tokens; so do the others, unless they are given windows."""
    return kind(layout=square_windows(None if kind.quadratic else window_size, block), **options)


default_cfgs = generate_default_cfgs(
    {
        "inline_deit_tiny.in1k": default_cfg("inline_deit_tiny", "1d6b8191ad6d4114b291"),
        "inline_deit_small.in1k": default_cfg("inline_deit_small", "2f3898b07e9247f3beb3", 288),
        "inline_deit_base.in1k": default_cfg("inline_deit_base", "10bdd726d4b0435eb34e", 448),
    }
)


def _create(variant: str, pretrained: bool, **kwargs: Any) -> InLineDeiT:
    return build_model_with_cfg(
        InLineDeiT,
        variant,
        pretrained,
        pretrained_filter_fn=adapt_state_dict,
        feature_cfg={"out_indices": kwargs.pop("out_indices", 3), "feature_cls": "getter"},
        **kwargs,
    )


@register_model
def inline_deit_tiny(pretrained: bool = False, **kwargs: Any) -> InLineDeiT:
    """InLine-DeiT-T, 224², 6.5 M parameters."""
    return _create("inline_deit_tiny", pretrained, **{"embed_dim": 192, "num_heads": 6, **kwargs})


@register_model
def inline_deit_small(pretrained: bool = False, **kwargs: Any) -> InLineDeiT:
    """InLine-DeiT-S, 288², 16.7 M parameters."""
    return _create("inline_deit_small", pretrained, **{"img_size": 288, "embed_dim": 320, "num_heads": 10, **kwargs})


@register_model
def inline_deit_base(pretrained: bool = False, **kwargs: Any) -> InLineDeiT:
    """InLine-DeiT-B, 448², 23.8 M parameters."""
    return _create("inline_deit_base", pretrained, **{"img_size": 448, "embed_dim": 384, "num_heads": 12, **kwargs})
