"""What decoders need of a whole map: statistics of group norms, averages of pyramid pooling. Gathered by rows."""

from typing import Protocol

import torch
from torch import Tensor, nn


class Gather(Protocol):
    """Gathers numbers of a whole map."""

    def add(self, top: int, rows: Tensor, mask: Tensor | None = None) -> None:
        """Add rows (rows, width, channels), the first of which is row `top`. Each row is added once.

        Tokens that are not real, mask (rows, width), are zero and do not count.
        """
        ...

    def finish(self) -> list[Tensor]:
        """Return what was gathered of all rows, in float32."""
        ...


class GroupMoments:
    """The mean and variance of each group of channels, merged in float64, for a group norm.

    Args:
        norm: The group norm.
    """

    def __init__(self, norm: nn.GroupNorm) -> None:
        self.norm = norm
        self.count = 0
        self.mean = torch.zeros(norm.num_groups, dtype=torch.float64)
        # Sum of squared differences from the mean.
        self.squares = torch.zeros(norm.num_groups, dtype=torch.float64)

    def add(self, top: int, rows: Tensor, mask: Tensor | None = None) -> None:
        """See Gather.add."""
        # One row at a time: in float64, all of them would take twice their memory.
        for index, row in enumerate(rows):
            row = row if mask is None else row[mask[index]]
            if len(row) == 0:
                continue
            grouped = row.view(len(row), self.norm.num_groups, -1).double()
            mean = grouped.mean(dim=(0, 2))
            squares = grouped.sub_(mean[:, None]).square_().sum(dim=(0, 2))
            count = grouped.numel() // self.norm.num_groups
            # The mean and squares of two sets, from those of each (Chan et al.).
            total, difference = self.count + count, mean - self.mean
            self.mean += difference * (count / total)
            self.squares += squares + difference.square() * (self.count * count / total)
            self.count = total

    def finish(self) -> list[Tensor]:
        """See Gather.finish: the norm as a scale and a shift of each channel."""
        norm, groups = self.norm, self.norm.num_groups
        scale = (self.squares / self.count + norm.eps).rsqrt().repeat_interleave(norm.num_channels // groups)
        mean = self.mean.repeat_interleave(norm.num_channels // groups)
        if norm.affine:
            scale = scale * norm.weight.double()
        shift = -mean * scale
        if norm.affine:
            shift = shift + norm.bias.double()
        return [scale.float(), shift.float()]


class AdaptiveAverages:
    """The averages of adaptive average pooling, for several sizes.

    Args:
        shape: (height, width, channels) of the map.
        sizes: The side of each square of averages.
    """

    def __init__(self, shape: tuple[int, int, int], sizes: list[int]) -> None:
        self.shape, self.sizes = shape, sizes
        self.sums = [torch.zeros(size, size, shape[2], dtype=torch.float64) for size in sizes]
        self.counts = [torch.zeros(size, size, dtype=torch.int64) for size in sizes]

    def add(self, top: int, rows: Tensor, mask: Tensor | None = None) -> None:
        """See Gather.add."""
        height, width, _ = self.shape
        for size, sums, counts in zip(self.sizes, self.sums, self.counts, strict=True):
            for row, (first, last) in enumerate(pooling_spans(height, size)):
                inside = slice(max(0, first - top), max(0, last - top))
                part = rows[inside]
                for column, (left, right) in enumerate(pooling_spans(width, size) if len(part) > 0 else ()):
                    sums[row, column] += part[:, left:right].sum(dim=(0, 1), dtype=torch.float64)
                    real = len(part) * (right - left) if mask is None else int(mask[inside, left:right].sum())
                    counts[row, column] += real

    def finish(self) -> list[Tensor]:
        """See Gather.finish: (size, size, channels) for each size; zero where no token counts."""
        return [
            (sums / counts.clamp(min=1).unsqueeze(2)).float()
            for sums, counts in zip(self.sums, self.counts, strict=True)
        ]


def pooling_spans(length: int, size: int) -> list[tuple[int, int]]:
    """Return the rows or columns of each average, as in nn.AdaptiveAvgPool2d: they may overlap."""
    return [(index * length // size, -(-(index + 1) * length // size)) for index in range(size)]
