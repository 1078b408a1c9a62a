"""Stages of a model: patch embedding or downsampling, then blocks."""

import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from timm.layers import calculate_drop_path_rates, to_2tuple, trunc_normal_
from timm.models import checkpoint
from torch import Tensor, nn

from ..layers import ATTENTIONS, BaseAttention, Block, FocusedAttention, ResamplePosEmbed, SquareWindows, WholeMap
from ..utils.validation import check_value
from ._arguments import MOST_CHANNELS

# The attention of a stage: one name for all blocks, or names for the first blocks, the last of which is repeated.
StageAttention = str | Sequence[str]


def attention_by_stage(attention: str | Sequence[StageAttention], depths: Sequence[int]) -> list[list[str]]:
    """Return the name of the attention of every block.

    Args:
        attention: One name for the whole model, or one entry per stage: a name, or a tuple of names for the first
            blocks of the stage, the last of which is repeated: ("inline", "inline", ("inline", "softmax"), "softmax").
        depths: Blocks of each stage.

    Returns:
        A list of names per stage, one for each block.
    """
    stages = [attention] * len(depths) if isinstance(attention, str) else list(attention)
    if len(stages) != len(depths):
        raise ValueError(f"attention names {len(stages)} stages, but the model has {len(depths)}: {attention!r}")
    spelled = []
    for words, depth in zip(stages, depths, strict=True):
        first = [words] if isinstance(words, str) else list(words)
        for word in first:
            if word not in ATTENTIONS:
                raise ValueError(f"unknown attention {word!r}: choose one of {', '.join(sorted(ATTENTIONS))}")
        if depth < 1:
            raise ValueError(f"every stage needs at least one block, but the depths are {tuple(depths)}")
        if not 1 <= len(first) <= depth:
            raise ValueError(f"a stage of {depth} blocks takes 1 to {depth} attention words, not {len(first)}")
        spelled.append(first + first[-1:] * (depth - len(first)))
    return spelled


class Stage(nn.Module):
    """Patch embedding (first stage) or downsampling (later stages), and blocks that keep the size of the map.

    Args:
        blocks: The blocks.
        dim: Channels.
        patch_embed: For the first stage: images (batch, channels, H', W') to tokens (batch, H, W, dim).
        downsample: For later stages: the previous map (batch, channels, H', W') to tokens (batch, H, W, dim).
        resample_pos_embed: Resizes the learned positions, if the stage has any.
        class_token: Whether there is a learned token before the map.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        *,
        dim: int,
        patch_embed: nn.Module | None = None,
        downsample: nn.Module | None = None,
        resample_pos_embed: ResamplePosEmbed | None = None,
        class_token: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_prefix_tokens = 1 if class_token else 0
        self.grad_checkpointing = False
        self.patch_embed = patch_embed
        self.downsample = downsample
        self.cls_token = nn.Parameter(torch.empty(1, 1, dim, device=device, dtype=dtype)) if class_token else None
        self.resample_pos_embed = resample_pos_embed
        self.pos_embed: nn.Parameter | None = None
        if resample_pos_embed is not None:
            pos_embed = torch.empty(1, resample_pos_embed.num_tokens, dim, device=device, dtype=dtype)
            self.pos_embed = nn.Parameter(pos_embed)
        self.blocks = nn.ModuleList(blocks)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the class token and the positions; child modules have their own reset_parameters."""
        for parameter in (self.cls_token, self.pos_embed):
            if parameter is not None:
                trunc_normal_(parameter, std=0.02)

    def embed_tokens(self, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """Return the tokens before the first block, (batch, prefix + H·W, dim), and (H, W)."""
        if self.patch_embed is not None:
            x = self.patch_embed(x)
        if self.downsample is not None:
            x = self.downsample(x)
        batch, height, width, dim = x.shape
        x = x.reshape(batch, height * width, dim)
        if self.cls_token is not None:
            x = torch.cat([self.cls_token.expand(batch, -1, -1), x], dim=1)
        if self.resample_pos_embed is not None and self.pos_embed is not None:
            x = x + self.resample_pos_embed(self.pos_embed, (height, width))
        return x, (height, width)

    def forward_tokens(
        self, x: Tensor, take: Sequence[int] = (), last: int | None = None
    ) -> tuple[Tensor, tuple[int, int], list[Tensor]]:
        """Run the blocks.

        Args:
            x: The images, or the map of the stage before, (batch, channels, H', W').
            take: Blocks whose tokens are returned.
            last: The last block to run; all of them by default.

        Returns:
            Tokens (batch, prefix + H·W, dim), (H, W), and the tokens after each block to take.
        """
        x, feat_size = self.embed_tokens(x)
        taken: list[Tensor] = []
        for i, block in enumerate(self.blocks if last is None else self.blocks[: last + 1]):
            x = checkpoint(block, x, feat_size) if self.grad_checkpointing else block(x, feat_size)
            if i in take:
                taken.append(x)
        return x, feat_size, taken

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, channels, H', W') to (batch, dim, H, W), or with a class token to (batch, 1 + H·W, dim)."""
        x, feat_size, _ = self.forward_tokens(x)
        return x if self.num_prefix_tokens > 0 else tokens_to_map(x, feat_size, 0)

    def set_grid(self, grid: tuple[int, int]) -> None:
        """Learn positions for another grid from now on, here and in attention that has learned the same grid."""
        if self.resample_pos_embed is None:
            return
        before = self.resample_pos_embed.grid
        for module in self.modules():
            # Attention may have positions of its own, for the map or for windows.
            if isinstance(module, Stage | FocusedAttention):
                resample, pos_embed = module.resample_pos_embed, module.pos_embed
                if resample is not None and pos_embed is not None and resample.grid == before:
                    module.pos_embed = resample.set_grid(pos_embed, grid)


def tokens_to_map(x: Tensor, feat_size: tuple[int, int], num_prefix_tokens: int) -> Tensor:
    """View tokens (batch, prefix + H·W, dim) as a map (batch, dim, H, W)."""
    return x[:, num_prefix_tokens:].unflatten(1, feat_size).permute(0, 3, 1, 2)


def grid_of(img_size: int | tuple[int, int], reduction: int) -> tuple[int, int]:
    """Return (H, W) of the map with one token per reduction × reduction pixels, rounded up."""
    height, width = to_2tuple(img_size)
    return -(-height // reduction), -(-width // reduction)


def check_attn_kwargs(given: Mapping[str, Any], words: Sequence[Sequence[str]]) -> None:
    """Raise ValueError for arguments that none of the named attentions has, and for values of the wrong type."""
    kinds_named = {ATTENTIONS[word] for stage in words for word in stage}
    known = {name for kind in kinds_named for name in kind.attn_kwargs_names}
    for name, value in given.items():
        for kind in kinds_named:
            if name in kind.attn_kwargs_names:
                check_value(f"{name} in attn_kwargs", value, typing.get_type_hints(kind.__init__)[name])
        if name not in known:
            kinds = " and ".join(sorted({word for stage in words for word in stage}))
            choice = f"choose one of {', '.join(sorted(known))}" if known else "leave it out"
            raise ValueError(f"{kinds} attention has no argument {name!r} in attn_kwargs: {choice}")


def make_stages(
    make_embed: Callable[[int], nn.Module],
    make_attention: Callable[[type[BaseAttention], int, int, dict[str, Any]], BaseAttention],
    *,
    dims: Sequence[int],
    depths: Sequence[int],
    attention: str | Sequence[StageAttention],
    attn_kwargs: Mapping[str, Any] | None,
    mlp_ratios: Sequence[float],
    proj_drop_rate: float,
    drop_path_rate: float,
    norm_eps: float = 1e-5,
    context_before_norm: bool = False,
    resample_pos_embeds: Sequence[ResamplePosEmbed] | None = None,
    class_token: bool = False,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> list[Stage]:
    """Build the stages of a model, from fine to coarse.

    Args:
        make_embed: From the index of a stage to its patch embedding (stage 0) or downsampling.
        make_attention: From the class of attention, the index of the stage, the index of the block in it and the
            matching attn_kwargs to the attention.
        dims: Channels of each stage.
        depths: Blocks of each stage.
        attention: See attention_by_stage.
        attn_kwargs: Arguments of the attentions; each gets those that it has.
        mlp_ratios: Hidden width of the MLPs of each stage, as a multiple of the channels.
        proj_drop_rate: Dropout in MLPs.
        drop_path_rate: Stochastic depth of the last block; it grows from 0 in the first.
        norm_eps: See Block.
        context_before_norm: See Block.
        resample_pos_embeds: For learned positions: one for each stage.
        class_token: Whether the last stage has a class token.
    """
    words = attention_by_stage(attention, depths)
    for stage, dim in enumerate(dims):
        if dim > MOST_CHANNELS:
            raise ValueError(
                f"stage {stage} would have {dim} channels, but the maximum is {MOST_CHANNELS}: choose fewer channels "
                "for the first stage, or fewer stages"
            )
    given = {} if attn_kwargs is None else dict(attn_kwargs)
    check_attn_kwargs(given, words)

    def matching_kwargs(kind: type[BaseAttention]) -> dict[str, Any]:
        return {name: value for name, value in given.items() if name in kind.attn_kwargs_names}

    drop_paths = cast(list[list[float]], calculate_drop_path_rates(drop_path_rate, list(depths), stagewise=True))
    return [
        Stage(
            [
                Block(
                    make_attention(ATTENTIONS[word], stage, block, matching_kwargs(ATTENTIONS[word])),
                    dim,
                    mlp_ratio=mlp_ratios[stage],
                    proj_drop=proj_drop_rate,
                    drop_path=drop_path,
                    norm_eps=norm_eps,
                    context_before_norm=context_before_norm,
                    local_mlp=ATTENTIONS[word].wants_local_mlp,
                    device=device,
                    dtype=dtype,
                )
                for block, (word, drop_path) in enumerate(zip(words[stage], drop_paths[stage], strict=True))
            ],
            dim=dim,
            patch_embed=make_embed(0) if stage == 0 else None,
            downsample=make_embed(stage) if stage > 0 else None,
            resample_pos_embed=resample_pos_embeds[stage] if resample_pos_embeds is not None else None,
            class_token=class_token and stage == len(dims) - 1,
            device=device,
            dtype=dtype,
        )
        for stage, dim in enumerate(dims)
    ]


def check_stages(depths: Sequence[int], **by_stage: Sequence[Any] | None) -> None:
    """Raise ValueError for arguments that do not have one entry per stage."""
    for name, entries in by_stage.items():
        if entries is not None and len(entries) != len(depths):
            raise ValueError(f"{name} must have an entry for each of the {len(depths)} stages, but it is {entries}")


def square_windows(window_size: int | None, block: int) -> WholeMap | SquareWindows:
    """Return windows that are shifted in every second block, or the whole map if no size is given."""
    return WholeMap() if window_size is None else SquareWindows(window_size, shifted=block % 2 == 1)
