"""Models whose images are shared by several processes: each one computes rows of every map."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..layers import BaseAttention, Block, ConvEmbed, InLineAttention, PatchMerging, ResamplePosEmbed
from ..layers.block import DWConvMlp
from ..layers.embed import pad_to_multiple, patch_rows
from ..layers.registry import attention_name
from ..layers.surroundings import ResidualConv
from ..models import InLineViT
from ..models._inline_vit import Stage, as_image, tokens_to_map
from ..utils.validation import require
from .attention import PARALLEL_ATTENTIONS
from .collectives import SequenceGroup, all_reduce
from .rows import LocalSize, RowSharding, add_halo, split_rows

Model = TypeVar("Model", bound=nn.Module)


def parallelize_sequence(model: Model, group: dist.ProcessGroup | DeviceMesh | None = None) -> Model:
    """Share the rows of every image between the processes of a group, in place.

    All processes call the model with the same images, and each computes its rows: `model(images)` returns the same
    logits in all of them as the model did before. Parameters and their names stay the same. The gradient of a loss is
    the mean of the gradients of the processes, as DistributedDataParallel and fully_shard compute it; wrap or shard the
    model after this call, over the processes of `data` and `sequence` together.

    Args:
        model: A model of this library. Random numbers, such as those of stochastic depth, must be the same in all
            processes of the group: seed them alike.
        group: The processes that share an image: a process group, or a one-dimensional DeviceMesh such as
            `mesh["sequence"]`; None = all processes.

    Returns:
        The model.

    Raises:
        ValueError: The model has a part that cannot be split.
    """
    require(
        isinstance(model, InLineViT),
        f"{type(model).__name__} cannot be split over processes: choose a model of this library, such as "
        "inline_deit_tiny",
    )
    check_parts(cast(InLineViT, model))
    sequence = SequenceGroup(group.get_group() if isinstance(group, DeviceMesh) else group)
    for module in list(model.modules()):
        kind = type(module)
        if isinstance(module, BaseAttention):
            module.__class__ = PARALLEL_ATTENTIONS[type(module)]
        elif kind in PARALLEL_MODULES:
            module.__class__ = PARALLEL_MODULES[kind]
    name = f"SequenceParallel{type(model).__name__}"
    model.__class__ = type(name, (SequenceParallelViT, type(model)), {})
    parallel = cast(SequenceParallelViT, model)
    parallel.sequence_group, parallel.splits_images = sequence, True
    return model


def check_parts(model: InLineViT) -> None:
    """Raise ValueError for a part that cannot be split."""
    require(
        model.global_pool != "",
        "a model without pooling returns a map, of which each process has rows: use global_pool='avg' or 'token'",
    )
    for name, module in model.named_modules():
        if isinstance(module, BaseAttention):
            known = ", ".join(attention_name(kind) for kind in PARALLEL_ATTENTIONS)
            require(
                type(module) in PARALLEL_ATTENTIONS,
                f"{attention_name(type(module))} attention cannot be split over processes: use one of {known}",
            )
        if isinstance(module, InLineAttention):
            require(
                module.path in (None, "covariance"),
                f"path {module.path} of {name} cannot be split over processes: leave it out",
            )
        if isinstance(module, (*PARALLEL_MODULES, PatchMerging)):
            require(
                type(module) in (*PARALLEL_MODULES, PatchMerging),
                f"{name} is {type(module).__name__}, which cannot be split over processes: parallelize the model first",
            )
        require(
            not isinstance(module, nn.Dropout) or module is model.head_drop or module.p == 0,
            "dropout in blocks would draw other numbers in each process: use proj_drop_rate=0",
        )


@contextmanager
def whole_images(model: nn.Module) -> Iterator[None]:
    """A context in which a parallelized model computes whole images in each process, without the others.

    Other models stay as they are. An evaluation distributes images instead of rows.
    """
    parallel = [module for module in model.modules() if isinstance(module, SequenceParallelViT)]
    for module in parallel:
        module.splits_images = False
    try:
        yield
    finally:
        for module in parallel:
            module.splits_images = True


class SequenceParallelViT(InLineViT):
    """A model whose images are split; parallelize_sequence makes models of it.

    Attributes:
        sequence_group: The processes that share an image.
        splits_images: Whether images are split now; see whole_images.
    """

    sequence_group: SequenceGroup
    splits_images: bool

    def forward_features(self, x: Tensor) -> Tensor:
        """See InLineViT.forward_features: the features of the rows of this process, and the prefix tokens."""
        if not self.splits_images:
            return super().forward_features(x)
        x = as_image(x, self.in_chans)
        rows = split_rows(x.shape[2], self.reductions, self.sequence_group)
        return self.forward_rows(x[:, :, rows.start : rows.end], rows)

    def forward_rows(self, x: Tensor, rows: RowSharding) -> Tensor:
        """Map the rows of this process to features.

        Args:
            x: The rows of the images, (batch, in_chans, rows, W).
            rows: Of split_rows.
        """
        for stage in self.stage_list():
            assert isinstance(stage, SequenceParallelStage)
            x, rows = stage.forward_rows(x, rows)
        return self.normalize(x)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """See InLineViT.forward_head: the same in all processes."""
        if not self.splits_images or self.global_pool == "token":
            return super().forward_head(x, pre_logits)
        require(self.global_pool == "avg", "a model without pooling cannot be split: use global_pool='avg'")
        tokens = x[:, self.num_prefix_tokens :] if self.num_prefix_tokens > 0 else x.flatten(2).transpose(1, 2)
        number = tokens.new_tensor([tokens.shape[1]], dtype=torch.float64)
        sums = torch.cat([tokens.sum(dim=1, dtype=torch.float64).flatten(), number])
        *_, total = (summed := all_reduce(sums, self.sequence_group)).unbind()
        pooled = (summed[:-1] / total).view(len(tokens), -1).to(tokens.dtype)
        pooled = self.head_drop(self.fc_norm(pooled))
        return pooled if pre_logits else self.head(pooled)

    def forward_levels(self, x: Tensor, take: list[int], last: int | None, norm: bool) -> tuple[Tensor, list[Tensor]]:
        """See InLineViT.forward_levels; only of whole images."""
        require(
            not self.splits_images,
            "the maps of a split model are in several processes: call it in `with whole_images(model)`",
        )
        return super().forward_levels(x, take, last, norm)


class SequenceParallelStage(Stage):
    """A stage of which a process computes rows."""

    def forward_rows(self, x: Tensor, rows: RowSharding) -> tuple[Tensor, RowSharding]:
        """Compute the rows of this process.

        Args:
            x: The rows of the images, or of the map of the stage before, (batch, channels, rows, W).
            rows: The rows of that map.

        Returns:
            (batch, dim, rows, W), or with a class token (batch, 1 + rows · W, dim), and the rows of this map.
        """
        for embed in (self.patch_embed, self.downsample):
            if isinstance(embed, SequenceParallelConvEmbed):
                x, rows = embed.forward_rows(x, rows)
            elif embed is not None:
                # Patch merging has no overlap.
                x, rows = embed(x), rows.strided(2)
        batch, _, width, _ = x.shape
        x = x.flatten(1, 2)
        if self.cls_token is not None:
            x = torch.cat([self.cls_token.expand(batch, -1, -1), x], dim=1)
        if self.resample_pos_embed is not None and self.pos_embed is not None:
            x = x + positions_of_rows(self.pos_embed, self.resample_pos_embed, rows, width)
        size = LocalSize(width, rows)
        x, _ = self.forward_blocks(x, size)
        return (x if self.num_prefix_tokens > 0 else tokens_to_map(x, size, 0)), rows


def positions_of_rows(pos_embed: Tensor, resample: ResamplePosEmbed, rows: RowSharding, width: int) -> Tensor:
    """Return the resized positions of prefix tokens and of the rows of this process, (1, prefix + rows · W, dim).

    Both interpolations are separable: along the width they are those of `resample`, along the height their weights.
    """
    prefix, old_height = resample.num_prefix_tokens, resample.grid[0]
    if (rows.height, width) == resample.grid:
        first, last = prefix + rows.start * width, prefix + rows.end * width
        return torch.cat([pos_embed[:, :prefix], pos_embed[:, first:last]], dim=1)
    table = resample(pos_embed, (old_height, width))
    identity = torch.eye(old_height, device=pos_embed.device).view(1, 1, old_height, old_height)
    weights = F.interpolate(
        identity,
        size=(rows.height, old_height),
        mode=resample.interpolation,
        antialias=resample.interpolation == "bicubic",
        align_corners=False,
    )[0, 0, rows.start : rows.end]
    # (rows, old rows) × (old rows, width · dim)
    resized = weights @ table[0, prefix:].float().view(old_height, -1)
    resized = resized.view(1, -1, pos_embed.shape[2]).to(pos_embed.dtype)
    return torch.cat([table[:, :prefix], resized], dim=1)


class SequenceParallelConvEmbed(ConvEmbed):
    """ConvEmbed of rows; patches that overlap get the rows of other processes."""

    def forward_rows(self, x: Tensor, rows: RowSharding) -> tuple[Tensor, RowSharding]:
        """Map rows (batch, in_chans, rows, W) to (batch, rows / stride, W / stride, dim), and return their rows."""
        x, rows = pad_to_multiple(x, self.stride), rows.padded(self.stride)
        if self.patches_as_rows:
            tokens = F.linear(patch_rows(x, self.stride), self.proj.weight.flatten(1), self.proj.bias)
            return self.norm(tokens), rows.strided(self.stride)
        kernel, padding = self.proj.kernel_size[0], cast(int, self.proj.padding[0])
        bottom = max(0, kernel - self.stride - padding)
        x = add_halo(x.permute(0, 2, 3, 1), rows, padding, bottom).permute(0, 3, 1, 2)
        x = F.conv2d(x, self.proj.weight, self.proj.bias, self.stride, (0, padding))
        return self.norm(x.permute(0, 2, 3, 1)), rows.strided(self.stride)


class SequenceParallelBlock(Block):
    """A block of rows."""

    def forward(self, x: Tensor, feat_size: tuple[int, int]) -> Tensor:
        """See Block.forward. Nothing is chunked by the size of the rows, since that differs between processes."""
        if not isinstance(feat_size, LocalSize):
            return super().forward(x, feat_size)
        x = self.encode_positions(x, feat_size)
        x = x + self.attention_branch(x, feat_size)
        return x + self.mlp_branch(x, feat_size)


class SequenceParallelDWConvMlp(DWConvMlp):
    """An MLP with a convolution, of rows."""

    def forward(self, x: Tensor, feat_size: tuple[int, int]) -> Tensor:
        """See DWConvMlp.forward."""
        if not isinstance(feat_size, LocalSize):
            return super().forward(x, feat_size)
        x = self.fc1(x)
        prefix = x.shape[1] - feat_size[0] * feat_size[1]
        maps = add_halo(x[:, prefix:].unflatten(1, feat_size), feat_size.rows).permute(0, 3, 1, 2)
        maps = F.conv2d(maps, self.conv.weight, self.conv.bias, padding=(0, 1), groups=self.conv.groups)
        x = torch.cat([x[:, :prefix], maps.permute(0, 2, 3, 1).flatten(1, 2)], dim=1)
        return self.drop(self.fc2(self.drop(F.gelu(x))))


class SequenceParallelResidualConv(ResidualConv):
    """A convolution that is added to its input, of rows."""

    def forward(self, x: Tensor, feat_size: tuple[int, int]) -> Tensor:  # type: ignore[override]
        """See ResidualConv.forward."""
        if not isinstance(feat_size, LocalSize):
            return super().forward(x, feat_size)
        prefix = x.shape[1] - feat_size[0] * feat_size[1]
        maps = add_halo(x[:, prefix:].unflatten(1, feat_size), feat_size.rows).permute(0, 3, 1, 2)
        maps = F.conv2d(maps, self.weight, self.bias, padding=(0, 1), groups=self.groups)
        return torch.cat([x[:, :prefix], x[:, prefix:] + maps.permute(0, 2, 3, 1).flatten(1, 2)], dim=1)


# By the class of the module that is split.
PARALLEL_MODULES: dict[type[Any], type[Any]] = {
    Stage: SequenceParallelStage,
    Block: SequenceParallelBlock,
    ConvEmbed: SequenceParallelConvEmbed,
    DWConvMlp: SequenceParallelDWConvMlp,
    ResidualConv: SequenceParallelResidualConv,
}
