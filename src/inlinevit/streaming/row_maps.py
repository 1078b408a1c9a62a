"""Maps that are computed by rows, from the rows of other maps: the layers of decoders.

A map is read from top to bottom by each of its readers. It computes every row once, and keeps those that a reader will
need again: rows above the next ones of a convolution or of an interpolation, and rows that another reader has yet to
read. So a whole graph of layers is computed in one pass, in the memory of a few rows of each map.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..utils.memory import FLOAT_BYTES
from .run_pass import hide_background
from .token_map import TokenMap

# Memory in relation to that of all tensors that exist at once: there are gaps between them that no tensor fits into.
GAPS = 1.5
# (first row, row after the last one).
Span = tuple[int, int]


class Reader:
    """Reads a map from top to bottom.

    Args:
        rows: The map.
    """

    def __init__(self, rows: "RowMap") -> None:
        self.rows = rows
        # Rows above this one are not read again.
        self.first_needed = 0

    def read(self, span: Span, needed_from: int) -> Tensor:
        """Return rows (rows, width, channels); those above `needed_from` will not be read again."""
        return self.rows.read(self, span, needed_from)


class RowMap(ABC):
    """A map (height, width, channels) that is computed by rows.

    Args:
        shape: (height, width, channels).
        inputs: The maps that it is computed from.
    """

    def __init__(self, shape: tuple[int, int, int], inputs: Sequence["RowMap"] = ()) -> None:
        self.height, self.width, self.channels = shape
        self.inputs = [Reader(one) for one in inputs]
        self.readers: list[Reader] = []
        for reader in self.inputs:
            reader.rows.readers.append(reader)
        # Which tokens are real, (height, width): others are zero; None = all.
        self.mask: Tensor | None = None
        # Rows that have been computed and are needed again, from row `top` on; `end` is the row after the last one.
        self.kept, self.top, self.end = torch.empty(0, self.width, self.channels), 0, 0

    @property
    def shape(self) -> tuple[int, int, int]:
        """(height, width, channels)."""
        return self.height, self.width, self.channels

    def open(self) -> Reader:
        """Return a reader of all rows."""
        self.readers.append(Reader(self))
        return self.readers[-1]

    def needed(self, index: int, span: Span) -> Span:
        """Return the rows of an input that rows of this map are computed from."""
        return span

    @abstractmethod
    def compute(self, span: Span, parts: list[Tensor]) -> Tensor:
        """Return rows of this map, (rows, width, channels).

        Args:
            span: The rows.
            parts: The rows of each input that they need; they must not be changed.
        """

    def read(self, reader: Reader, span: Span, needed_from: int) -> Tensor:
        """See Reader.read."""
        (top, bottom), end = span, self.end
        if bottom > end:
            new = self.compute_new((end, bottom))
            self.kept = torch.cat([self.kept, new]) if len(self.kept) > 0 else new
            self.end = bottom
        rows = self.kept[top - self.top : bottom - self.top]
        reader.first_needed = needed_from
        first = min(self.end, *(one.first_needed for one in self.readers))
        if first > self.top:
            # A copy, so that the memory of rows above is freed.
            self.kept, self.top = self.kept[first - self.top :].clone(), first
        return rows

    def compute_new(self, span: Span) -> Tensor:
        """Read what rows need, and compute them."""
        parts = []
        for index, reader in enumerate(self.inputs):
            below = (span[1], min(span[1] + 1, self.height))
            needed_from = self.needed(index, below)[0] if below[0] < below[1] else reader.rows.height
            parts.append(reader.read(self.needed(index, span), needed_from))
        if self.mask is None:
            return self.compute(span, parts)
        mask = self.mask[slice(*span)]
        if not bool(mask.any()):
            return torch.zeros(len(mask), self.width, self.channels)
        return hide_background(self.compute(span, parts), mask)

    def set_masks(self, masks: Mapping[tuple[int, int], Tensor]) -> None:
        """Set the masks of this map and of those that it is computed from.

        Args:
            masks: By (height, width). Small maps in memory, and what is made of them alone, have none.
        """
        for one in self.walk():
            if any(isinstance(origin, StoredRows) for origin in one.walk()):
                one.mask = masks.get((one.height, one.width))

    def work(self) -> float:
        """Return the multiplications that all rows take, about, without those of the inputs."""
        return 0.0

    def work_floats(self, rows: int) -> int:
        """Return how many numbers exist at once while rows are computed, without those of the inputs."""
        return rows * self.width * self.channels

    def row_floats(self) -> int:
        """Return the numbers of a row."""
        return self.width * self.channels

    def walk(self) -> Iterator["RowMap"]:
        """Yield this map and all that it is computed from, each of them once."""
        seen: set[int] = set()
        waiting: list[RowMap] = [self]
        while waiting:
            one = waiting.pop()
            if id(one) not in seen:
                seen.add(id(one))
                yield one
                waiting += [reader.rows for reader in one.inputs]

    def peak_bytes(self, rows: int) -> int:
        """Return the memory that computing with so many rows at a time takes, of this map and its inputs."""
        kept: dict[int, int] = {}
        peak = self._peak_floats(rows, kept)
        return math.ceil(GAPS * FLOAT_BYTES * (peak + sum(kept.values())))

    def _peak_floats(self, rows: int, kept: dict[int, int]) -> int:
        """Return the numbers that exist at once, without those that maps keep, which are added to `kept` by map."""
        rows = min(rows, self.height)
        if not self.inputs and isinstance(self, StoredRows):
            return rows * self.row_floats()
        peak, held = 0, 0
        # Rows in the middle of the map, where none are cut off.
        top = max(0, (self.height - rows) // 2)
        for index, reader in enumerate(self.inputs):
            first, last = self.needed(index, (top, top + rows))
            count = min(last - first + 1, reader.rows.height)
            # Rows that are read again, and those that wait for another reader.
            again = max(0, last - self.needed(index, (min(top + rows, self.height - 1), self.height))[0])
            waiting = count if len(reader.rows.readers) > 1 else again
            if not isinstance(reader.rows, StoredRows):
                kept[id(reader.rows)] = max(kept.get(id(reader.rows), 0), waiting * reader.rows.row_floats())
            peak = max(peak, held + reader.rows._peak_floats(count, kept))
            held += count * reader.rows.row_floats()
        # With the rows that are kept, the new ones are copied once.
        return max(peak, held + self.work_floats(rows) + rows * self.row_floats())


class StoredRows(RowMap):
    """A map that has been computed; its rows are read in any order.

    Args:
        shape: (height, width, channels).
        tokens: The map; None = to be computed, for plans.
    """

    def __init__(self, shape: tuple[int, int, int], tokens: TokenMap | None = None) -> None:
        super().__init__(shape)
        self.tokens = tokens

    def read(self, reader: Reader, span: Span, needed_from: int) -> Tensor:
        """See RowMap.read."""
        assert self.tokens is not None
        return self.tokens.read(*span)

    def compute(self, span: Span, parts: list[Tensor]) -> Tensor:
        """See RowMap.compute: nothing is computed."""
        raise NotImplementedError


class TensorRows(RowMap):
    """A small map in memory.

    Args:
        rows: (height, width, channels).
    """

    def __init__(self, rows: Tensor) -> None:
        super().__init__(cast(tuple[int, int, int], tuple(rows.shape)))
        self.rows = rows

    def read(self, reader: Reader, span: Span, needed_from: int) -> Tensor:
        """See RowMap.read."""
        return self.rows[slice(*span)]

    def compute(self, span: Span, parts: list[Tensor]) -> Tensor:
        """See RowMap.compute: nothing is computed."""
        raise NotImplementedError


class PointwiseRows(RowMap):
    """Layers that treat each token alone.

    Args:
        source: The map.
        layers: From a map (1, channels, rows, width) to another one.
        channels: Channels of the result; None = as many.
        work: Multiplications per token.
    """

    def __init__(
        self, source: RowMap, layers: Sequence[nn.Module], channels: int | None = None, work: float = 0.0
    ) -> None:
        super().__init__((source.height, source.width, channels or source.channels), [source])
        self.layers, self.token_work = layers, work

    def compute(self, span: Span, parts: list[Tensor]) -> Tensor:
        """See RowMap.compute."""
        x = to_image(parts[0])
        for layer in self.layers:
            # Layers in place would change the rows of the input.
            x = layer(x.clone() if x.data_ptr() == parts[0].data_ptr() and getattr(layer, "inplace", False) else x)
        return to_rows(x)

    def work(self) -> float:
        """See RowMap.work."""
        return self.token_work * self.height * self.width

    def work_floats(self, rows: int) -> int:
        """See RowMap.work_floats."""
        return 2 * rows * self.row_floats()


class ConvRows(RowMap):
    """A convolution of stride 1 that keeps the size, and layers after it that treat each token alone.

    Args:
        source: The map.
        conv: The convolution; see decoders.check_conv.
        layers: What follows.
    """

    def __init__(self, source: RowMap, conv: nn.Conv2d, layers: Sequence[nn.Module] = ()) -> None:
        super().__init__((source.height, source.width, conv.out_channels), [source])
        self.conv, self.layers = conv, layers
        self.halo = conv.kernel_size[0] // 2

    def needed(self, index: int, span: Span) -> Span:
        """See RowMap.needed."""
        return max(0, span[0] - self.halo), min(self.height, span[1] + self.halo)

    def compute(self, span: Span, parts: list[Tensor]) -> Tensor:
        """See RowMap.compute."""
        rows = parts[0]
        above, below = max(0, self.halo - span[0]), max(0, span[1] + self.halo - self.height)
        if above + below > 0:
            rows = F.pad(rows, (0, 0, 0, 0, above, below))
        x = F.conv2d(to_image(rows), self.conv.weight, self.conv.bias, padding=(0, self.conv.kernel_size[1] // 2))
        for layer in self.layers:
            x = layer(x)
        return to_rows(x)

    def work(self) -> float:
        """See RowMap.work."""
        return float(self.height * self.width * self.conv.weight.numel())

    def work_floats(self, rows: int) -> int:
        """See RowMap.work_floats: libraries rearrange the input and the output."""
        padded = (rows + 2 * self.halo) * self.width * self.conv.in_channels
        return padded + 2 * rows * self.row_floats()


class NormRows(RowMap):
    """A group norm whose statistics are known, and ReLU.

    Args:
        source: The map.
        scale: (channels,); see moments.GroupMoments.
        shift: (channels,).
    """

    def __init__(self, source: RowMap, scale: Tensor, shift: Tensor) -> None:
        super().__init__(source.shape, [source])
        self.scale, self.shift = scale, shift

    def compute(self, span: Span, parts: list[Tensor]) -> Tensor:
        """See RowMap.compute."""
        return torch.addcmul(self.shift, parts[0], self.scale).relu_()


class SumRows(RowMap):
    """The sum of maps of one size."""

    def __init__(self, sources: Sequence[RowMap]) -> None:
        super().__init__(sources[0].shape, sources)
        assert all(one.shape == self.shape for one in sources)

    def compute(self, span: Span, parts: list[Tensor]) -> Tensor:
        """See RowMap.compute."""
        total = parts[0] + parts[1]
        for part in parts[2:]:
            total += part
        return total


class ConcatRows(RowMap):
    """The channels of several maps, one after the other."""

    def __init__(self, sources: Sequence[RowMap]) -> None:
        first = sources[0]
        super().__init__((first.height, first.width, sum(one.channels for one in sources)), sources)
        assert all((one.height, one.width) == (self.height, self.width) for one in sources)

    def compute(self, span: Span, parts: list[Tensor]) -> Tensor:
        """See RowMap.compute."""
        return torch.cat(parts, dim=2)


class NearestRows(RowMap):
    """Each token repeated `factor` times along both axes."""

    def __init__(self, source: RowMap, factor: int) -> None:
        super().__init__((factor * source.height, factor * source.width, source.channels), [source])
        self.factor = factor

    def needed(self, index: int, span: Span) -> Span:
        """See RowMap.needed."""
        return span[0] // self.factor, (span[1] - 1) // self.factor + 1

    def compute(self, span: Span, parts: list[Tensor]) -> Tensor:
        """See RowMap.compute."""
        rows = torch.arange(*span) // self.factor - span[0] // self.factor
        return parts[0][rows].repeat_interleave(self.factor, dim=1)

    def work_floats(self, rows: int) -> int:
        """See RowMap.work_floats."""
        return 2 * rows * self.row_floats()


class BilinearRows(RowMap):
    """Bilinear interpolation to another size, with the weights of F.interpolate.

    Args:
        source: The map.
        size: (height, width) of the result.
        align_corners: As in F.interpolate.
    """

    def __init__(self, source: RowMap, size: tuple[int, int], align_corners: bool) -> None:
        super().__init__((*size, source.channels), [source])
        self.align_corners, self.source_height = align_corners, source.height
        self.above, self.nearness = interpolation_weights(source.height, size[0], align_corners)

    def needed(self, index: int, span: Span) -> Span:
        """See RowMap.needed."""
        return int(self.above[span[0]]), min(int(self.above[span[1] - 1]) + 2, self.source_height)

    def compute(self, span: Span, parts: list[Tensor]) -> Tensor:
        """See RowMap.compute."""
        rows = parts[0]
        if self.width != rows.shape[1]:
            # Rows stay as they are: only columns are interpolated.
            size = (len(rows), self.width)
            rows = to_rows(F.interpolate(to_image(rows), size, mode="bilinear", align_corners=self.align_corners))
        above = self.above[slice(*span)] - int(self.above[span[0]])
        below = (above + 1).clamp(max=len(rows) - 1)
        return torch.lerp(rows[above], rows[below], self.nearness[slice(*span)].view(-1, 1, 1))

    def work(self) -> float:
        """See RowMap.work."""
        # Cheap for each number, but memory is slow.
        return 8.0 * self.height * self.row_floats()

    def work_floats(self, rows: int) -> int:
        """See RowMap.work_floats: the columns, twice the rows, and the result."""
        before = -(-rows * self.source_height // self.height) + 3
        return (before + 3 * rows) * self.row_floats()


def interpolation_weights(old: int, new: int, align_corners: bool) -> tuple[Tensor, Tensor]:
    """Return, for each of `new` rows, the row above it, and how near it is to the row below that one, (new,) each.

    In float32, as in F.interpolate: for thousands of rows, rounding matters.
    """
    places = torch.arange(new, dtype=torch.float32)
    if align_corners:
        scale = torch.tensor(float(old - 1)) / (new - 1) if new > 1 else torch.tensor(0.0)
        places = places * scale
    else:
        places = (torch.tensor(float(old)) / new * (places + 0.5) - 0.5).clamp(min=0)
    above = places.long().clamp(max=old - 1)
    return above, (places - above).clamp(0, 1)


def bilinear(source: RowMap, size: tuple[int, int], *, align_corners: bool) -> RowMap:
    """Return a map interpolated to a size; the map itself if it has that size."""
    return source if (source.height, source.width) == size else BilinearRows(source, size, align_corners)


def to_image(rows: Tensor) -> Tensor:
    """View rows (rows, width, channels) as an image (1, channels, rows, width), channels last."""
    # The batch first: its stride has to be the largest, or layers would not know that channels are last, and copy.
    return rows.unsqueeze(0).permute(0, 3, 1, 2)


def to_rows(image: Tensor) -> Tensor:
    """View an image (1, channels, rows, width) as rows (rows, width, channels), in the order of their memory."""
    return image.squeeze(0).permute(1, 2, 0).contiguous()
