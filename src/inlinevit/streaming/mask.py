"""Which tokens of each stage belong to the image, and which to its background."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def stage_masks(
    mask: Tensor, size: tuple[int, int], grids: Sequence[tuple[int, int]], strides: Sequence[int]
) -> list[Tensor]:
    """Return which tokens of each stage are real: (H, W), True = real.

    A token is real if any pixel of its cell is. The cells of a stage divide the image evenly.

    Args:
        mask: Of the pixels, or of the tokens of the first stage, True = real.
        size: (height, width) of the image.
        grids: (H, W) of each stage.
        strides: Pixels per token of each stage.
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
    stride = 1 if tuple(mask.shape) == size else strides[0]
    for next_stride in strides:
        mask, stride = any_of_cells(mask, next_stride // stride), next_stride
        masks.append(mask)
    return masks


def any_of_cells(mask: Tensor, side: int) -> Tensor:
    """Return whether any entry of each cell of side × side entries is True; the last cells may be cut."""
    if side == 1:
        return mask
    # Row of cells by row of cells: a mask of pixels may be large.
    rows = [part.any(dim=0) for part in mask.split(side)]
    return torch.stack([F.pad(row, (0, -len(row) % side)).view(-1, side).any(dim=1) for row in rows])
