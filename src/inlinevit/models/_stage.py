"""Stages: an embedding, then blocks, whose attention is named by words."""

import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from timm.layers import calculate_drop_path_rates, to_2tuple, trunc_normal_
from timm.models import checkpoint
from torch import Tensor, nn

from ..layers import ATTENTIONS, Block, PositionEmbedding, SquareWindows, TokenMixer, WholeMap
from ..utils.validation import check_value
from ._arguments import MOST_CHANNELS

# A stage's attention: a word for all its blocks, or words for its first blocks, of which the last word goes on.
StageAttention = str | Sequence[str]


def attention_by_stage(attention: str | Sequence[StageAttention], depths: Sequence[int]) -> list[list[str]]:
    """Spell out the attention of every block.

    Args:
        attention: One word for the whole model, or an entry a stage: a word, or a tuple of words for the stage's
            first blocks, the last of which goes on to the end: ("inline", "inline", ("inline", "softmax"), "softmax").
        depths: Blocks of each stage.

    Returns:
        A list of words for each stage, a word for each block.
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
    """An embedding of the map before, and blocks that keep its size.

    Args:
        embed: (batch, channels, H', W') to (batch, H, W, dim).
        blocks: The blocks.
        positions: Learned positions, if the stage has any.
        class_token: Whether a learned token goes before the map.
    """

    def __init__(
        self,
        embed: nn.Module,
        blocks: Sequence[nn.Module],
        *,
        dim: int,
        positions: PositionEmbedding | None = None,
        class_token: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_prefix_tokens = 1 if class_token else 0
        self.grad_checkpointing = False
        self.embed = embed
        self.class_token = nn.Parameter(torch.empty(1, 1, dim, device=device, dtype=dtype)) if class_token else None
        self.positions = positions
        self.blocks = nn.ModuleList(blocks)
        self.reset_parameters()

    @torch.jit.ignore
    def reset_parameters(self) -> None:
        """Draw the class token anew; the modules within have a reset of their own."""
        if self.class_token is not None:
            trunc_normal_(self.class_token, std=0.02)

    def embed_tokens(self, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """The tokens before the first block, (batch, prefix + H·W, dim), and (H, W)."""
        x = self.embed(x)
        batch, height, width, dim = x.shape
        x = x.reshape(batch, height * width, dim)
        if self.class_token is not None:
            x = torch.cat([self.class_token.expand(batch, -1, -1), x], dim=1)
        if self.positions is not None:
            x = self.positions(x, (height, width))
        return x, (height, width)

    def forward_tokens(
        self, x: Tensor, take: list[int], last: int | None = None, prefix_only: bool = False
    ) -> tuple[Tensor, tuple[int, int], list[Tensor]]:
        """Run the blocks.

        Args:
            x: The map before, (batch, channels, H', W').
            take: Blocks whose tokens are wanted.
            last: The last block to run; all of them by default.
            prefix_only: Whether the last block of the stage need but tell the prefix tokens.

        Returns:
            Tokens (batch, prefix + H·W, dim), (H, W), and the tokens after each block to take.
        """
        x, size = self.embed_tokens(x)
        taken: list[Tensor] = []
        for i, block in enumerate(self.blocks):
            # No break: TorchScript unrolls this loop.
            if last is None or i <= last:
                block_prefix_only = prefix_only and i == len(self.blocks) - 1
                if self.grad_checkpointing and not torch.jit.is_scripting():
                    x = checkpoint(block, x, size, block_prefix_only)
                else:
                    x = block(x, size, block_prefix_only)
                if i in take:
                    taken.append(x)
        return x, size, taken

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, H', W') to (batch, dim, H, W), or with a class token to (batch, 1 + H·W, dim)."""
        x, size, _ = self.forward_tokens(x, [])
        return x if self.num_prefix_tokens > 0 else tokens_to_map(x, size, 0)


def tokens_to_map(x: Tensor, size: tuple[int, int], num_prefix_tokens: int) -> Tensor:
    """(batch, prefix + H·W, dim) to (batch, dim, H, W); a view."""
    return x[:, num_prefix_tokens:].unflatten(1, size).permute(0, 3, 1, 2)


def grid_of(img_size: int | tuple[int, int], reduction: int) -> tuple[int, int]:
    """(H, W) of the map on which a token stands for reduction × reduction pixels."""
    height, width = to_2tuple(img_size)
    return -(-height // reduction), -(-width // reduction)


def check_attention_options(given: Mapping[str, Any], words: Sequence[Sequence[str]]) -> None:
    """Refuse options that none of the attentions named by the words has, and values of other types than theirs."""
    kinds_named = {ATTENTIONS[word] for stage in words for word in stage}
    known = {option for kind in kinds_named for option in kind.own_options}
    for name, value in given.items():
        for kind in kinds_named:
            if name in kind.own_options:
                check_value(f"{name} in attn_kwargs", value, typing.get_type_hints(kind.__init__)[name])
        if name not in known:
            kinds = " and ".join(sorted({word for stage in words for word in stage}))
            choice = f"choose one of {', '.join(sorted(known))}" if known else "leave it out"
            raise ValueError(f"{kinds} attention has no option {name!r} in attn_kwargs: {choice}")


def make_stages(
    make_embed: Callable[[int], nn.Module],
    make_attention: Callable[[type[TokenMixer], int, int, dict[str, Any]], TokenMixer],
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
    positions: Sequence[PositionEmbedding] | None = None,
    class_token: bool = False,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> list[Stage]:
    """The stages of a model, from fine to coarse.

    Args:
        make_embed: From a stage's number to its embedding.
        make_attention: From the kind of attention, the stage's number, the block's number in it and the kind's own
            options to the attention.
        dims: Channels of each stage.
        depths: Blocks of each stage.
        attention: See attention_by_stage.
        attn_kwargs: Options of the attentions' own; each gets those that it has.
        mlp_ratios: Width of the MLPs of each stage, in channels.
        proj_drop_rate: Dropout in MLPs.
        drop_path_rate: Stochastic depth of the last block; it grows from 0 in the first.
        norm_eps: See Block.
        context_before_norm: See Block.
        positions: Learned positions of each stage, if there are any.
        class_token: Whether the last stage has a class token.
    """
    words = attention_by_stage(attention, depths)
    for stage, dim in enumerate(dims):
        if dim > MOST_CHANNELS:
            raise ValueError(
                f"stage {stage} would have {dim} channels, but {MOST_CHANNELS} are the most: choose fewer channels for "
                "the first stage, or fewer stages"
            )
    given = {} if attn_kwargs is None else dict(attn_kwargs)
    check_attention_options(given, words)

    def own_options(kind: type[TokenMixer]) -> dict[str, Any]:
        return {name: value for name, value in given.items() if name in kind.own_options}

    drop_paths = cast(list[list[float]], calculate_drop_path_rates(drop_path_rate, list(depths), stagewise=True))
    return [
        Stage(
            make_embed(stage),
            [
                Block(
                    make_attention(ATTENTIONS[word], stage, block, own_options(ATTENTIONS[word])),
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
            positions=positions[stage] if positions is not None else None,
            class_token=class_token and stage == len(dims) - 1,
            device=device,
            dtype=dtype,
        )
        for stage, dim in enumerate(dims)
    ]


def check_stages(depths: Sequence[int], **by_stage: Sequence[Any] | None) -> None:
    """Refuse arguments that do not have an entry for each stage."""
    for name, entries in by_stage.items():
        if entries is not None and len(entries) != len(depths):
            raise ValueError(f"{name} must have an entry for each of the {len(depths)} stages, but it is {entries}")


def square_windows(window_size: int | None, block: int) -> WholeMap | SquareWindows:
    """Windows that shift in every second block, or the whole map if no size is given."""
    return WholeMap() if window_size is None else SquareWindows(window_size, shifted=block % 2 == 1)
