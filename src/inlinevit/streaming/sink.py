"""Where the maps of a streamed model go."""

from typing import Protocol

import torch
from torch import Tensor


class MapSink(Protocol):
    """Receives one map, row by row, while it is computed.

    `begin` is called once, then `write_rows` from top to bottom without gaps, then `close`. If streaming fails,
    `close` is not called: a sink that writes a file should write it aside, rename it in `close`, and remove what is
    left in `abort`.
    """

    def begin(self, shape: tuple[int, int, int], stride: int) -> None:
        """Prepare for a map of `shape`, (height, width, channels), with one token per `stride` × `stride` pixels."""
        ...

    def write_rows(self, top: int, rows: Tensor) -> None:
        """Take rows (rows, width, channels), float32, the first of which is row `top`. They are reused afterwards."""
        ...

    def close(self) -> None:
        """Finish: all rows have been written."""
        ...

    def abort(self) -> None:
        """Remove what has been written: streaming failed. May be called before `begin`, or after `close`."""
        ...


class TensorSink:
    """Keeps a map in memory, as `map`: (height, width, channels)."""

    def __init__(self) -> None:
        self.map = torch.empty(0, 0, 0)
        self.stride = 0

    def begin(self, shape: tuple[int, int, int], stride: int) -> None:
        """See MapSink.begin."""
        self.map, self.stride = torch.empty(shape), stride

    def write_rows(self, top: int, rows: Tensor) -> None:
        """See MapSink.write_rows."""
        self.map[top : top + len(rows)] = rows

    def close(self) -> None:
        """See MapSink.close."""

    def abort(self) -> None:
        """See MapSink.abort."""
        self.map = torch.empty(0, 0, 0)


class HeadSink:
    """Applies a linear layer to each token of a map, and passes the result on: a dense map of class scores.

    Args:
        weight: (classes, channels).
        bias: (classes,), or None.
        sink: Receives the map (height, width, classes).
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, sink: MapSink) -> None:
        self.weight, self.bias, self.sink = weight, bias, sink

    def begin(self, shape: tuple[int, int, int], stride: int) -> None:
        """See MapSink.begin."""
        if self.weight.dim() != 2 or self.weight.shape[1] != shape[2]:
            raise ValueError(
                f"the head has weights of shape {tuple(self.weight.shape)}, but the tokens have {shape[2]} channels: "
                f"use a head of shape (classes, {shape[2]})"
            )
        self.sink.begin((*shape[:2], self.weight.shape[0]), stride)

    def write_rows(self, top: int, rows: Tensor) -> None:
        """See MapSink.write_rows."""
        self.sink.write_rows(top, torch.nn.functional.linear(rows, self.weight, self.bias))

    def close(self) -> None:
        """See MapSink.close."""
        self.sink.close()

    def abort(self) -> None:
        """See MapSink.abort."""
        self.sink.abort()
