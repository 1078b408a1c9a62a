"""A pass over the map of a stage, chunk by chunk."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .passes import Chunk, Pass
from .stage import StreamedStage
from .token_map import TokenMap


def run_pass(
    stage: StreamedStage, step: Pass, finished: Any, tokens: TokenMap, target: TokenMap, chunk_rows: int
) -> Iterator[tuple[int, Tensor, Tensor | None]]:
    """Replace the rows of a map, in place or in another one; yield the first new row, new rows, and their mask.

    Args:
        stage: The stage of the map.
        step: The pass.
        finished: What it needs of all tokens; see Pass.finish.
        tokens: The map.
        target: Where the new rows go: the map itself, or another one.
        chunk_rows: Rows per chunk.
    """
    if stage.start == stage.end:
        # Of several processes, some have no rows of a small map; they have not borrowed any, either.
        return
    if step.shift > 0:
        yield from run_shifted_pass(stage, step, finished, tokens, target, chunk_rows)
        return
    above = tokens.read(max(0, stage.start - step.halo), stage.start)
    for top in range(stage.start, stage.end, chunk_rows):
        bottom = min(top + chunk_rows, stage.end)
        end = min(bottom + step.halo, stage.feat_size[0])
        rows, below = tokens.read(top, bottom), tokens.read(bottom, end)
        mask = None if stage.mask is None else stage.mask[top - len(above) : end]
        # A copy of what is above the next chunk, because these rows are overwritten.
        last = torch.cat([above, rows[-step.halo :]])[-step.halo :] if step.halo > 0 else above
        new = apply_pass(step, Chunk(rows, above, below, mask), finished)
        above = last
        target.write(top, new)
        yield top, new, None if stage.mask is None else stage.mask[top:bottom]


def run_shifted_pass(
    stage: StreamedStage, step: Pass, finished: Any, tokens: TokenMap, target: TokenMap, chunk_rows: int
) -> Iterator[tuple[int, Tensor, Tensor | None]]:
    """See run_pass, for a map that is rolled up: its last windows have the last and the first rows of the map."""
    height, shift = stage.feat_size[0], step.shift
    padded = -(-height // step.row_height) * step.row_height
    last = padded if stage.end == height else stage.end
    for first in range(stage.start, last, chunk_rows):
        top, bottom = first + shift, min(first + chunk_rows, last) + shift
        # Rows of the map, padding, and rows of the top of the map.
        middle = (min(top, height), min(bottom, height))
        padding = max(0, min(bottom, padded) - max(top, height))
        start = (max(0, top - padded), max(0, bottom - padded))
        rows = tokens.read(*middle)
        mask = None if stage.mask is None else stage.mask[slice(*middle)]
        if padding > 0 or start[1] > start[0]:
            empty = torch.zeros(padding, *rows.shape[1:])
            if mask is None and padding > 0:
                mask = torch.ones(rows.shape[:2], dtype=torch.bool)
            first_rows = tokens.read(*start)
            rows = torch.cat([rows, empty, first_rows])
            if mask is not None:
                first_mask = torch.ones(first_rows.shape[:2], dtype=torch.bool)
                first_mask = first_mask if stage.mask is None else stage.mask[slice(*start)]
                mask = torch.cat([mask, torch.zeros(empty.shape[:2], dtype=torch.bool), first_mask])
        new = apply_pass(step, Chunk(rows, rows[:0], rows[:0], mask, start[1] - start[0]), finished)
        for begin, (start_row, end_row) in ((0, middle), (len(new) - (start[1] - start[0]), start)):
            if end_row > start_row:
                part = new[begin : begin + end_row - start_row]
                target.write(start_row, part)
                yield start_row, part, None if stage.mask is None else stage.mask[start_row:end_row]


def apply_pass(step: Pass, chunk: Chunk, finished: Any) -> Tensor:
    """Return the new rows of a chunk; background is zero."""
    if chunk.mask is None:
        return step.apply(chunk, finished)
    mask = chunk.own_rows(chunk.mask)
    if not bool(mask.any()):
        return torch.zeros_like(chunk.tokens)
    return hide_background(step.apply(chunk, finished), mask)


def hide_background(rows: Tensor, mask: Tensor | None) -> Tensor:
    """Return rows (rows, width, channels) with zeros where mask (rows, width) is False."""
    return rows if mask is None else rows.masked_fill(~mask.unsqueeze(2), 0.0)
