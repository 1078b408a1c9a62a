"""How a map of tokens is split into windows.

A layout is a rule from the size of the map to the windows that each group of heads attends within; ops/windows.py
partitions and reverses them:

- WholeMap: one window, the map itself (DeiT, PVT, InLine in general);
- SquareWindows: squares, shifted by half a window in every second block (Swin);
- CrossStripes: vertical stripes for the first half of the heads, horizontal ones for the second (CSWin).
"""

from torch import nn

from ..ops._common import holds
from ..ops.windows import Windows


def window_length(window: int, length: int) -> int:
    """Return the length of windows along an axis of a map: at most that of the map.

    Where the map has a symbolic length, the window keeps its own: it is then padded and masked if the map is shorter.
    """
    return length if holds(length <= window) else window


def shift_length(shift: int, window: int, length: int) -> int:
    """Return how far a map is rolled along an axis: not at all if the window covers it."""
    if holds(length <= window):
        return 0
    # For symbolic lengths: the divisor is 1 if the map is longer than the window, else larger than the shift.
    return shift if holds(length > window) else shift // (1 + shift * (window // length))


class WholeMap(nn.Module):
    """One window: the map."""

    # Maximum number of head groups.
    num_head_groups = 1

    def forward(self, feat_size: tuple[int, int]) -> list[Windows]:
        """Return the windows of each head group, for a map of size (H, W)."""
        return [Windows(*feat_size, *feat_size)]


class SquareWindows(nn.Module):
    """Squares of window_size tokens; along an axis that the window covers, it becomes the map, unshifted."""

    num_head_groups = 1

    def __init__(self, window_size: int, *, shifted: bool) -> None:
        super().__init__()
        if window_size < 1:
            raise ValueError(f"window_size must be at least 1, but it is {window_size}")
        self.window_size = window_size
        self.shift = window_size // 2 if shifted else 0

    def forward(self, feat_size: tuple[int, int]) -> list[Windows]:
        """Return the windows of each head group, for a map of size (H, W)."""
        height, width = (window_length(self.window_size, length) for length in feat_size)
        shift_up, shift_left = (shift_length(self.shift, self.window_size, length) for length in feat_size)
        return [Windows(*feat_size, height, width, shift_up=shift_up, shift_left=shift_left)]


class CrossStripes(nn.Module):
    """Stripes of the map's full height for the first half of the heads, of its full width for the second."""

    num_head_groups = 2

    def __init__(self, stripe_width: int) -> None:
        super().__init__()
        if stripe_width < 1:
            raise ValueError(f"stripe_width must be at least 1, but it is {stripe_width}")
        self.stripe_width = stripe_width

    def forward(self, feat_size: tuple[int, int]) -> list[Windows]:
        """Return the windows of each head group, for a map of size (H, W)."""
        height, width = feat_size
        if holds(self.stripe_width >= height) and holds(self.stripe_width >= width):
            # Both halves of the heads attend to the whole map: a single head group.
            return [Windows(*feat_size, *feat_size)]
        return [
            Windows(*feat_size, height, window_length(self.stripe_width, width), head_group=0, num_head_groups=2),
            Windows(*feat_size, window_length(self.stripe_width, height), width, head_group=1, num_head_groups=2),
        ]
