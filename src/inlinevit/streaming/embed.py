"""Patch embedding, downsampling and positions by rows."""

from collections.abc import Callable, Iterator
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..layers import ConvEmbed, PatchMerging, ResamplePosEmbed
from ..layers._inference_embed import InferenceConvEmbed, InferencePatchMerging

# Gives rows (channels, rows, width) of an image or a map: top to before bottom.
ReadRows = Callable[[int, int], Tensor]


class EmbedGeometry:
    """Which rows of the input a patch embedding or downsampling needs for rows of its output.

    Args:
        module: ConvEmbed or PatchMerging, or its form for inference.
        size: (height, width) of the input.
    """

    def __init__(self, module: nn.Module, size: tuple[int, int]) -> None:
        if type(module) in (ConvEmbed, InferenceConvEmbed):
            module = cast(ConvEmbed, module)
            conv = module.proj
            self.kernel, self.stride = conv.kernel_size[0], module.stride
            self.padding = cast(int, conv.padding[0])
        elif type(module) in (PatchMerging, InferencePatchMerging):
            self.kernel, self.stride, self.padding = 2, 2, 0
        else:
            raise ValueError(f"{type(module).__name__} cannot be streamed: use a model of inlinevit as it was created")
        self.module, self.size = module, size
        # The input is padded to whole strides.
        self.padded = tuple(-(-length // self.stride) * self.stride for length in size)
        self.out_size = cast(tuple[int, int], tuple(map(self.out_length, self.padded)))

    def out_length(self, length: int) -> int:
        """Return the number of patches along an axis."""
        return (length + 2 * self.padding - self.kernel) // self.stride + 1

    def embed(self, rows: Tensor, top: int, first: int, last: int) -> Tensor:
        """Return rows of the output, (rows, width, dim).

        Args:
            rows: Rows of the input from `top` on, (channels, rows, width).
            top: The first of them; the rows that the output needs outside of them are padding.
            first: The first row of the output.
            last: The row of the output after the last one.
        """
        if self.padding == 0 and self.kernel == self.stride:
            # A row of patches at a time: what is made of it stays in the cache. The module pads the last rows and
            # columns itself.
            parts = [self.module(part.unsqueeze(0)).squeeze(0) for part in rows.split(self.stride, dim=1)]
            return torch.cat(parts) if len(parts) > 1 else parts[0]
        above = top - (first * self.stride - self.padding)
        below = (last - 1) * self.stride - self.padding + self.kernel - (top + rows.shape[1])
        left, right = self.padding, self.padding + self.padded[1] - self.size[1]
        module = cast(ConvEmbed, self.module)
        # Rows that no patch reaches are cut off.
        padded = F.pad(rows, (left, right, above, below)).unsqueeze(0)
        out = F.conv2d(padded, module.proj.weight, module.proj.bias, self.stride)
        return module.norm(out.permute(0, 2, 3, 1)).squeeze(0)

    def input_rows(self, first: int, last: int) -> tuple[int, int]:
        """Return the rows of the input that rows `first` to before `last` of the output need; all below the last."""
        top, bottom = first * self.stride - self.padding, (last - 1) * self.stride - self.padding + self.kernel
        return max(0, top), self.size[0] if last == self.out_size[0] else min(self.size[0], bottom)


def embed_rows(
    geometry: EmbedGeometry, read: ReadRows, step: int, start: int = 0, end: int | None = None
) -> Iterator[tuple[int, Tensor]]:
    """Yield the first row and the rows (rows, width, dim) of each chunk of the output.

    Args:
        geometry: The patch embedding or downsampling.
        read: Gives rows of the input. It is called for each row once, from top to bottom.
        step: Rows of the output per chunk.
        start: The first row of the output.
        end: The row after the last one; None = all rows.
    """
    end = geometry.out_size[0] if end is None else end
    # Rows that were read and are needed again, from row `top` on.
    kept, top = torch.empty(0), geometry.input_rows(start, end)[0]
    done = top
    for first in range(start, end, step):
        last = min(first + step, end)
        needed, bottom = geometry.input_rows(first, last)
        if bottom > done:
            rows = read(done, bottom)
            rows = rows if kept.numel() == 0 else torch.cat([kept, rows], dim=1)
        else:
            rows = kept
        if needed > top:
            rows, top = rows[:, needed - top :], needed
        done = max(done, bottom)
        yield first, geometry.embed(rows, top, first, last)
        if last < end:
            next_top = min(geometry.input_rows(last, last + 1)[0], done)
            # A copy: the rows themselves may be large, or be overwritten.
            kept = rows[:, next_top - top :].clone()
            top = next_top


class PositionRows:
    """Learned positions, resized to a map of any size, by rows.

    Resizing is linear along each axis, so the weights of both axes are computed once, by resizing unit vectors.

    Args:
        resample: Resizes positions.
        pos_embed: The learned positions, (1, prefix + H'·W', dim).
        feat_size: (H, W) of the map.
    """

    def __init__(self, resample: ResamplePosEmbed, pos_embed: Tensor, feat_size: tuple[int, int]) -> None:
        prefix = resample.num_prefix_tokens
        self.prefix = pos_embed[0, :prefix]
        # (H', W', dim)
        self.table = pos_embed[0, prefix:].float().unflatten(0, resample.grid)
        self.is_resized = feat_size != resample.grid
        if self.is_resized:
            mode, antialias = resample.interpolation, resample.interpolation == "bicubic"
            self.rows_of, self.columns_of = (
                axis_weights(old, new, mode, antialias) for old, new in zip(resample.grid, feat_size, strict=True)
            )

    def rows(self, top: int, bottom: int) -> Tensor:
        """Return the positions of rows, (rows, width, dim)."""
        if not self.is_resized:
            return self.table[top:bottom]
        rows = torch.tensordot(self.rows_of[top:bottom], self.table, dims=1)
        # (width, W') @ (rows, W', dim)
        return self.columns_of @ rows


def axis_weights(old: int, new: int, mode: str, antialias: bool) -> Tensor:
    """Return the weight of each of `old` positions for each of `new` ones along an axis, (new, old)."""
    # Along the other axis, nothing changes: entry (j, i) is the weight of unit vector i at position j.
    return F.interpolate(torch.eye(old)[None, None], size=(new, old), mode=mode, antialias=antialias)[0, 0]
