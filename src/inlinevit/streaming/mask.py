"""Which tokens of each stage belong to the image, and which to its background."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def stage_masks(mask: Tensor, size: tuple[int, int], grids: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Return which tokens of each stage are real: (H, W), True = real.

    A token is real if any pixel of its cell is. The cells of a stage divide the image evenly.

    Args:
        mask: Of the pixels, or of the tokens of the first stage, True = real.
        size: (height, width) of the image.
        grids: (H, W) of each stage.
    """
    if mask.dtype != torch.bool or mask.dim() != 2:
        raise ValueError(
            f"mask must be boolean and (height, width), but it is {mask.dtype} of shape {tuple(mask.shape)}"
        )
    if tuple(mask.shape) not in (size, grids[0]):
        raise ValueError(
            f"mask has {mask.shape[0]} × {mask.shape[1]} entries: it should have those of the image, "
            f"{size[0]} × {size[1]}, or of its tokens, {grids[0][0]} × {grids[0][1]}"
        )
    if not bool(mask.any()):
        raise ValueError("mask excludes the whole image: it should be True where the image is")
    masks = []
    for grid in grids:
        mask = mask if tuple(mask.shape) == grid else any_of_cells(mask, grid)
        masks.append(mask)
    return masks


def any_of_cells(mask: Tensor, grid: tuple[int, int]) -> Tensor:
    """Return whether any entry of each cell is True, for cells of equal size, the last of which may be cut."""
    side = round(mask.shape[0] / grid[0]) if grid[0] > 1 else -(-mask.shape[0] // grid[0])
    side = max(side, *(-(-length // count) for length, count in zip(mask.shape, grid, strict=True)))
    rows = []
    for top in range(0, mask.shape[0], side):
        # Row of cells by row of cells: a mask of pixels may be large.
        row = mask[top : top + side].any(dim=0)
        rows.append(F.pad(row, (0, -len(row) % side)).view(-1, side).any(dim=1))
    return torch.stack(rows)
