"""A stage of a model over a map of a given size: its passes, what memory they take and how much work they are."""

import math
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..layers import SoftmaxAttention
from ..layers._inference_block import InferenceBlock
from ..layers.block import Block
from ..models._inline_vit import Stage
from ..parallel.collectives import SequenceGroup
from ..parallel.rows import RowSharding
from ..utils.memory import FLOAT_BYTES
from .attention_pass import AttentionPass
from .blocks import make_passes
from .embed import EmbedGeometry, PositionRows
from .passes import Pass
from .plan import StageSize
from .shards import halo_rows, missing_rows, shard_rows, shifted_rows


class StreamedStage:
    """A stage over a map of a given size.

    Args:
        stage: The stage.
        size: (height, width) of its input.
        name: Its name in the model.
    """

    def __init__(self, stage: Stage, size: tuple[int, int], name: str) -> None:
        self.stage, self.name = stage, name
        embed = stage.patch_embed if stage.patch_embed is not None else stage.downsample
        assert embed is not None
        self.geometry = EmbedGeometry(embed, size)
        self.feat_size = self.geometry.out_size
        self.channels = block_list(stage)[0].norm1.normalized_shape[0]
        self.passes: list[Pass] = []
        # The names of blocks by the number of passes after which they are complete.
        self.block_names: dict[int, str] = {}
        for index, block in enumerate(block_list(stage)):
            if type(block) not in (Block, InferenceBlock):
                raise ValueError(
                    f"{type(block).__name__} cannot be streamed: use a model of inlinevit as it was created"
                )
            self.passes += make_passes(block, self.feat_size, stage.num_prefix_tokens)
            self.block_names[len(self.passes)] = f"{name}.blocks.{index}"
        self.mask: Tensor | None = None
        # The rows that this process computes: all, unless the image is shared.
        self.rows: RowSharding | None = None
        self.start, self.end = 0, self.feat_size[0]
        self.borrowed: dict[int, list[Tensor]] = {}
        self.embed_borrowed: list[Tensor] = []
        self.embed_row_floats = 0

    def shard(self, group: SequenceGroup, previous: "StreamedStage | None") -> None:
        """Share the rows between processes, so that windows are whole.

        Args:
            group: The processes.
            previous: The stage before, which is shared already.
        """
        self.rows = shard_rows(self.feat_size[0], self.row_multiple, group)
        self.start, self.end = self.rows.start, self.rows.end
        # For the passes that need rows of other processes, the rows that each process needs.
        self.borrowed = {
            number: halo_rows(self.rows, one.halo) if one.shift == 0 else shifted_rows(self.rows, one.shift)
            for number, one in enumerate(self.passes)
            if one.halo + one.shift > 0
        }
        if previous is not None:
            assert previous.rows is not None
            needed = [
                self.geometry.input_rows(*own) if own[0] < own[1] else (0, 0) for own in pairwise(self.rows.bounds)
            ]
            # Rows of the stage before, for the embedding.
            self.embed_borrowed = missing_rows(previous.rows, needed)
            self.embed_row_floats = previous.feat_size[1] * previous.channels

    @property
    def share(self) -> float:
        """The part of the rows that this process computes."""
        return (self.end - self.start) / self.feat_size[0]

    def borrowed_bytes(self) -> int:
        """Return the most memory that rows of other processes take: those received, those sent, and a copy."""
        if self.rows is None:
            return 0
        floats = self.feat_size[1] * self.channels
        sizes = [floats * len(one) for ranks in self.borrowed.values() for one in ranks]
        sizes += [self.embed_row_floats * len(one) for one in self.embed_borrowed]
        return 3 * FLOAT_BYTES * max(sizes, default=0)

    @property
    def row_multiple(self) -> int:
        """Chunks have a multiple of this many rows."""
        return math.lcm(*(each for one in self.passes for each in (one.row_height, one.summary_height)))

    def size_for_plan(self) -> StageSize:
        """Return what the memory of the stage depends on."""
        # The input of a patch, which is read, padded and rearranged; the new tokens with their norm and positions.
        embedding = 4 * self.geometry.stride**2 * input_channels(self.geometry.module) + 4 * self.channels
        states = [state_bytes(one) for one in self.passes]
        height = self.feat_size[0]
        if self.rows is not None:
            # Those of a process, of all of them, and what they make.
            states = [2 * size for size in states]
            height = max(end - start for start, end in pairwise(self.rows.bounds))
        return StageSize(
            height,
            self.feat_size[1],
            self.channels,
            self.row_multiple,
            max(one.halo for one in self.passes),
            max(embedding, *(one.token_floats for one in self.passes)),
            # Those of a pass and of the next one.
            max(first + second for first, second in zip(states, [*states[1:], 0], strict=True)) + self.borrowed_bytes(),
        )

    def positions(self) -> PositionRows | None:
        """Return the learned positions of the map, if there are any."""
        resample, pos_embed = self.stage.resample_pos_embed, self.stage.pos_embed
        if resample is None or pos_embed is None:
            return None
        return PositionRows(resample, pos_embed.detach(), self.feat_size)

    def first_prefix(self, positions: PositionRows | None) -> Tensor:
        """Return the prefix tokens before the first block, (prefix, channels)."""
        if self.stage.cls_token is None:
            return torch.empty(0, self.channels)
        prefix = self.stage.cls_token.detach()[0].expand(self.stage.num_prefix_tokens, -1)
        return prefix if positions is None else prefix + positions.prefix


def block_list(stage: Stage) -> list[Block]:
    """Return the blocks of a stage."""
    return cast(list[Block], list(stage.blocks))


def input_channels(module: nn.Module) -> int:
    """Return the channels of the input of a patch embedding or downsampling."""
    weight = next(parameter for parameter in module.parameters() if parameter.dim() > 1)
    return weight.shape[1] if weight.dim() == 4 else weight.shape[1] // 4


def is_reduced(step: Pass) -> bool:
    """Return whether the keys of a pass are those of a smaller map."""
    return isinstance(step, AttentionPass) and any(group.is_reduced for group in step.groups)


def state_bytes(step: Pass) -> int:
    """Return the size of the summary of a pass."""
    if not isinstance(step, AttentionPass):
        return 0
    total = 0
    for group in step.groups:
        if group.is_tall and isinstance(group.attn, SoftmaxAttention):
            count = 1 if group.is_reduced else -(-group.windows.map_width // group.windows.window_width)
            total += 2 * FLOAT_BYTES * group.num_keys * count * group.channels
        elif group.is_tall:
            count = -(-group.windows.map_width // group.windows.window_width)
            # In float64, merged from two.
            total += 3 * 2 * FLOAT_BYTES * count * group.channels * (group.attn.head_dim + 4)
    return total + 8 * FLOAT_BYTES * step.attn.dim**2


def embed_work(stage: StreamedStage, rows: int) -> float:
    """Return the work of embedding rows, in multiplications."""
    return float(rows * stage.feat_size[1] * stage.channels * stage.geometry.kernel**2 * 3)


def stage_work(stage: StreamedStage) -> list[float]:
    """Return the work of the embedding and of each pass of a stage, about, in multiplications."""
    tokens = float(math.prod(stage.feat_size))
    blocks = [12 * tokens * stage.channels**2 for _ in stage.passes]
    for index, step in enumerate(stage.passes):
        if isinstance(step, AttentionPass) and isinstance(step.attn, SoftmaxAttention):
            blocks[index] += sum(2 * tokens * keys_of(group) * group.channels for group in step.groups)
    return [embed_work(stage, stage.feat_size[0]), *blocks]


def keys_of(group: Any) -> int:
    """Return the number of keys that a query of a head group attends to."""
    return group.num_keys if group.is_tall else group.windows.window_height * group.windows.window_width
