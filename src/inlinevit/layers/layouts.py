"""How a map of tokens is cut into windows.

A layout is a rule from the size of the map to the windows that the heads see. All layouts come down to rectangles,
so one pair of functions cuts and merges for all of them:

- WholeMap: one window, the map itself (DeiT, PVT, InLine in general);
- SquareWindows: squares, shifted by half a window in every second block (Swin);
- CrossStripes: the first half of the heads sees upright stripes, the second half lying ones (CSWin).

Maps that the windows do not divide are padded at the bottom and on the right; `window_mask` says which tokens are real.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Windows(NamedTuple):
    """How one map is cut for one of the equal shares of the heads (most layouts give all heads one share)."""

    map_height: int
    map_width: int
    height: int
    width: int
    # How far the map is rolled before it is cut.
    shift_up: int
    shift_left: int
    share: int
    shares: int


class WholeMap(nn.Module):
    """One window: the map."""

    # Into how many equal shares the heads are divided, at the most.
    shares = 1

    def forward(self, size: tuple[int, int]) -> list[Windows]:
        """The windows of each share of the heads, for a map of this size."""
        return [Windows(size[0], size[1], size[0], size[1], 0, 0, 0, 1)]


class SquareWindows(nn.Module):
    """Squares of window_size tokens; along an axis that the window covers, it becomes the map, unshifted."""

    shares = 1

    def __init__(self, window_size: int, *, shifted: bool) -> None:
        super().__init__()
        if window_size < 1:
            raise ValueError(f"window_size must be at least 1, but it is {window_size}")
        self.window_size = window_size
        self.shift = window_size // 2 if shifted else 0

    def forward(self, size: tuple[int, int]) -> list[Windows]:
        """The windows of each share of the heads, for a map of this size."""
        height, width = min(self.window_size, size[0]), min(self.window_size, size[1])
        shift_up = self.shift if height < size[0] else 0
        shift_left = self.shift if width < size[1] else 0
        return [Windows(size[0], size[1], height, width, shift_up, shift_left, 0, 1)]


class CrossStripes(nn.Module):
    """Stripes of the map's full height for the first half of the heads, of its full width for the second."""

    shares = 2

    def __init__(self, stripe_width: int) -> None:
        super().__init__()
        if stripe_width < 1:
            raise ValueError(f"stripe_width must be at least 1, but it is {stripe_width}")
        self.stripe_width = stripe_width

    def forward(self, size: tuple[int, int]) -> list[Windows]:
        """The windows of each share of the heads, for a map of this size."""
        if self.stripe_width >= max(size[0], size[1]):
            # Two halves of the heads that both see the map are all heads that see the map.
            return [Windows(size[0], size[1], size[0], size[1], 0, 0, 0, 1)]
        return [
            Windows(size[0], size[1], size[0], min(self.stripe_width, size[1]), 0, 0, 0, 2),
            Windows(size[0], size[1], min(self.stripe_width, size[0]), size[1], 0, 0, 1, 2),
        ]


def covers_map(windows: Windows) -> bool:
    """Whether there is just one window, so that nothing needs to be cut."""
    return windows.height >= windows.map_height and windows.width >= windows.map_width


def padded_size(windows: Windows) -> tuple[int, int]:
    """The map's size, rounded up to whole windows."""
    rows = (windows.map_height + windows.height - 1) // windows.height
    columns = (windows.map_width + windows.width - 1) // windows.width
    return rows * windows.height, columns * windows.width


def window_partition(x: Tensor, windows: Windows) -> Tensor:
    """Tokens (batch, H·W, channels) to windows (batch · windows, tokens of a window, channels)."""
    if covers_map(windows):
        return x
    channels = x.shape[2]
    height, width = padded_size(windows)
    x = x.reshape(-1, windows.map_height, windows.map_width, channels)
    if height > windows.map_height or width > windows.map_width:
        x = F.pad(x, (0, 0, 0, width - windows.map_width, 0, height - windows.map_height))
    if windows.shift_up > 0 or windows.shift_left > 0:
        x = torch.roll(x, shifts=(-windows.shift_up, -windows.shift_left), dims=(1, 2))
    x = x.reshape(-1, height // windows.height, windows.height, width // windows.width, windows.width, channels)
    return x.transpose(2, 3).reshape(-1, windows.height * windows.width, channels)


def window_reverse(x: Tensor, windows: Windows) -> Tensor:
    """The inverse of window_partition; padding is dropped."""
    if covers_map(windows):
        return x
    channels = x.shape[2]
    height, width = padded_size(windows)
    x = x.reshape(-1, height // windows.height, width // windows.width, windows.height, windows.width, channels)
    x = x.transpose(2, 3).reshape(-1, height, width, channels)
    if windows.shift_up > 0 or windows.shift_left > 0:
        x = torch.roll(x, shifts=(windows.shift_up, windows.shift_left), dims=(1, 2))
    x = x[:, : windows.map_height, : windows.map_width]
    return x.reshape(-1, windows.map_height * windows.map_width, channels)


def window_mask(windows: Windows, device: torch.device) -> Tensor | None:
    """Which tokens of each window are real: (windows, tokens), True = real; None where nothing is padded."""
    height, width = padded_size(windows)
    if height == windows.map_height and width == windows.map_width:
        return None
    real = torch.ones(1, windows.map_height * windows.map_width, 1, device=device)
    return window_partition(real, windows).squeeze(-1) > 0


def shift_mask(windows: Windows, device: torch.device) -> Tensor | None:
    """Which tokens of a window were neighbours before the map was rolled: (windows, tokens, tokens); None if unrolled.

    Rolling brings the map's top rows below its bottom ones. They share a window, but they must not see each other.
    """
    if windows.shift_up == 0 and windows.shift_left == 0:
        return None
    height, width = padded_size(windows)
    # In rolled coordinates the last shift_up rows and the last shift_left columns came from the other side.
    rows = (torch.arange(height, device=device) >= height - windows.shift_up).int()
    columns = (torch.arange(width, device=device) >= width - windows.shift_left).int()
    side = (2 * rows[:, None] + columns[None, :]).reshape(1, height * width, 1)
    side = window_partition(side, Windows(height, width, windows.height, windows.width, 0, 0, 0, 1)).squeeze(-1)
    return side[:, :, None] == side[:, None, :]


def take_share(x: Tensor | None, windows: Windows) -> Tensor:
    """The part of a parameter, along its first dimension, that belongs to the windows' share of the heads."""
    # torch declares biases as optional; ours are all there.
    assert x is not None
    length = x.shape[0] // windows.shares
    return x[windows.share * length : (windows.share + 1) * length]
