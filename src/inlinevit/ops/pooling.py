"""Adaptive average pooling of maps as a matrix product for each axis: for masked maps, and for exported graphs."""

import torch
from torch import Tensor


def bin_matrix(length: int, count: int, like: Tensor) -> Tensor:
    """Return the weights (count, length) of the means of adaptive pooling along an axis, in the dtype of `like`."""
    places, bins = torch.arange(length, device=like.device), torch.arange(count, device=like.device)[:, None]
    first, end = bins * length // count, ((bins + 1) * length + count - 1) // count
    inside = (places >= first) & (places < end)
    return inside.to(like.dtype) / (end - first).to(like.dtype)


def pool_maps(maps: Tensor, output_size: tuple[int, int]) -> Tensor:
    """Pool maps (batch, H, W, channels) to the means of (rows, columns) cells, (batch, rows, columns, channels)."""
    _, height, width, channels = maps.shape
    rows, columns = bin_matrix(height, output_size[0], maps), bin_matrix(width, output_size[1], maps)
    # (batch, H, W · channels) -> (batch, rows, W · channels) -> (batch, rows, W, channels)
    pooled = (rows @ maps.flatten(2)).unflatten(2, (width, channels))
    return columns @ pooled
