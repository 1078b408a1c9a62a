"""Windows of a map of tokens: partition, reverse, masks, means.

All windows are rectangles, so one pair of functions partitions and reverses for all layouts (layers/layouts.py). Maps
that are not a multiple of the windows are padded at the bottom and on the right; `window_mask` marks real tokens.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ._common import holds, is_symbolic


class Windows(NamedTuple):
    """How one map is split for one of the equally large head groups (most layouts have a single head group)."""

    map_height: int
    map_width: int
    window_height: int
    window_width: int
    # How far the map is rolled before it is partitioned.
    shift_up: int = 0
    shift_left: int = 0
    head_group: int = 0
    num_head_groups: int = 1


def covers_map(windows: Windows) -> bool:
    """Return whether there is just one window, so that nothing needs to be partitioned."""
    return holds(windows.window_height >= windows.map_height) and holds(windows.window_width >= windows.map_width)


def is_padded(windows: Windows) -> bool:
    """Return whether the windows hold padding; with symbolic sizes, whether they may."""
    height, width = padded_size(windows)
    return not (holds(height == windows.map_height) and holds(width == windows.map_width))


def is_shifted(windows: Windows) -> bool:
    """Return whether the map is rolled before it is partitioned; with symbolic sizes, whether it may be."""
    return not (holds(windows.shift_up == 0) and holds(windows.shift_left == 0))


def padded_size(windows: Windows) -> tuple[int, int]:
    """Return the size of the map, rounded up to whole windows."""
    return (
        round_up(windows.map_height, windows.window_height),
        round_up(windows.map_width, windows.window_width),
    )


def round_up(length: int, window: int) -> int:
    """Return a length, rounded up to whole windows."""
    return window if holds(length <= window) else (length + window - 1) // window * window


def count_windows(windows: Windows) -> int:
    """Return the number of windows of a map."""
    height, width = padded_size(windows)
    return (height // windows.window_height) * (width // windows.window_width)


def window_partition(x: Tensor, windows: Windows) -> Tensor:
    """Split tokens (batch, H·W, channels) into windows (batch · windows, tokens of a window, channels)."""
    if covers_map(windows):
        return x
    batch, _, channels = x.shape
    height, width = padded_size(windows)
    x = x.reshape(batch, windows.map_height, windows.map_width, channels)
    if is_padded(windows):
        x = F.pad(x, (0, 0, 0, width - windows.map_width, 0, height - windows.map_height))
    if is_shifted(windows):
        x = roll(x, -windows.shift_up, -windows.shift_left)
    down, across = height // windows.window_height, width // windows.window_width
    x = x.reshape(batch, down, windows.window_height, across, windows.window_width, channels)
    return x.transpose(2, 3).reshape(batch * down * across, windows.window_height * windows.window_width, channels)


def window_reverse(x: Tensor, windows: Windows) -> Tensor:
    """Invert window_partition; padding is dropped."""
    if covers_map(windows):
        return x
    channels = x.shape[2]
    height, width = padded_size(windows)
    down, across = height // windows.window_height, width // windows.window_width
    batch = x.shape[0] // (down * across)
    x = x.reshape(batch, down, across, windows.window_height, windows.window_width, channels)
    x = x.transpose(2, 3).reshape(batch, height, width, channels)
    if is_shifted(windows):
        x = roll(x, windows.shift_up, windows.shift_left)
    x = x[:, : windows.map_height, : windows.map_width]
    return x.reshape(batch, windows.map_height * windows.map_width, channels)


def roll(x: Tensor, down: int, right: int) -> Tensor:
    """Roll maps (batch, H, W, channels) down and to the right."""
    if not is_symbolic(down, right):
        return torch.roll(x, shifts=(down, right), dims=(1, 2))
    # Runtimes have no operator that rolls by a computed distance, and torch exports no remainder by a computed length.
    for dim, shift in ((1, down), (2, right)):
        length = x.shape[dim]
        source = torch.arange(length, device=x.device) - shift
        source = torch.where(source < 0, source + length, source)
        x = x.index_select(dim, torch.where(source >= length, source - length, source))
    return x


def partition_heads(qkv: Tensor, windows: Windows, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Split the projected tokens of one head group into queries, keys and values of its windows.

    Args:
        qkv: (batch, prefix + H·W, 3 · channels of all heads). With prefix tokens, the window must cover the map.
        windows: The head group and its windows.
        num_heads: Number of all heads.

    Returns:
        q, k and v (batch · windows, heads of the group, tokens of a window, head_dim). Padding is zero.
    """
    batch, tokens, channels = qkv.shape
    heads, head_dim = num_heads // windows.num_head_groups, channels // (3 * num_heads)
    qkv = qkv.view(batch, tokens, 3, num_heads, head_dim)
    group = qkv[:, :, :, windows.head_group * heads : (windows.head_group + 1) * heads]
    group = window_partition(group.flatten(2), windows)
    q, k, v = group.view(group.shape[0], group.shape[1], 3, heads, head_dim).permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v


def merge_heads(x: Tensor) -> Tensor:
    """Join heads: (batch, heads, tokens, head_dim) to (batch, tokens, heads · head_dim)."""
    return x.transpose(1, 2).flatten(2)


def window_mask(windows: Windows, device: torch.device) -> Tensor | None:
    """Return which tokens of each window are real: (windows, tokens), True = real; None if nothing is padded."""
    if not is_padded(windows):
        return None
    real = torch.ones(1, windows.map_height * windows.map_width, 1, device=device)
    return window_partition(real, windows).squeeze(-1) > 0


def padding_mask(k: Tensor, windows: Windows) -> Tensor | None:
    """Return window_mask for each window of k (batch · windows, heads, tokens, head_dim): (batch · windows, tokens)."""
    mask = window_mask(windows, k.device)
    return None if mask is None else mask.repeat(k.shape[0] // mask.shape[0], 1)


def shift_mask(windows: Windows, device: torch.device) -> Tensor | None:
    """Return which tokens were neighbours before the map was rolled: (windows, tokens, tokens); None if it was not.

    Rolling moves the map's top rows below its bottom ones. They share a window, but must not attend to each other.
    """
    if not is_shifted(windows):
        return None
    height, width = padded_size(windows)
    # In rolled coordinates the last shift_up rows and the last shift_left columns came from the other side.
    rows = (torch.arange(height, device=device) >= height - windows.shift_up).int()
    columns = (torch.arange(width, device=device) >= width - windows.shift_left).int()
    side = (2 * rows[:, None] + columns[None, :]).reshape(1, height * width, 1)
    side = window_partition(side, Windows(height, width, windows.window_height, windows.window_width)).squeeze(-1)
    return side[:, :, None] == side[:, None, :]


def window_means(x: Tensor, windows: Windows) -> Tensor:
    """Return the mean of each window's real tokens: (batch, tokens, channels) to (batch · windows, channels)."""
    if covers_map(windows):
        return x.mean(dim=1)
    # Padding is zero, so the mean over all places is too small by the fraction of real ones. No sum is computed: it
    # might overflow in float16.
    means = window_partition(x, windows).mean(dim=1)
    mask = window_mask(windows, x.device)
    if mask is None:
        return means
    fraction = mask.to(x.dtype).mean(dim=1)
    return (means.view(-1, mask.shape[0], x.shape[2]) / fraction[:, None]).view(-1, x.shape[2])


def take_head_group(x: Tensor | None, windows: Windows) -> Tensor:
    """Return the part of a parameter, along its first dimension, that belongs to the head group of the windows."""
    # torch declares biases as optional; ours always exist.
    assert x is not None
    if windows.num_head_groups == 1:
        return x
    length = x.shape[0] // windows.num_head_groups
    return x[windows.head_group * length : (windows.head_group + 1) * length]
