"""One image over several processes: which rows of its maps each of them holds, and which it needs of the others."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..parallel.collectives import Exchange, SequenceGroup, exchange, plan_exchange, return_items
from ..parallel.rows import RowSharding
from .sink import MapSink
from .token_map import TokenMap


def shard_rows(height: int, unit: int, group: SequenceGroup) -> RowSharding:
    """Split the rows of a map evenly, at multiples of a unit, such as the height of windows.

    If there are fewer units than processes, some have no rows.
    """
    units = -(-height // unit)
    bounds = [min(height, unit * (units * rank // group.size)) for rank in range(group.size)]
    return RowSharding((*bounds, height), group)


def halo_rows(rows: RowSharding, halo: int) -> list[Tensor]:
    """Return the rows above and below those of each process."""
    return [
        torch.cat([torch.arange(max(0, start - halo), start), torch.arange(end, min(rows.height, end + halo))])
        if start < end
        else torch.arange(0)
        for start, end in pairwise(rows.bounds)
    ]


def shifted_rows(rows: RowSharding, shift: int) -> list[Tensor]:
    """Return the rows of others in the windows of each process, of a map that is rolled up by `shift` rows.

    The windows of a process begin `shift` rows below its own rows; those of the last one end with the first rows.
    """
    wanted = []
    for start, end in pairwise(rows.bounds):
        below = torch.arange(end, min(rows.height, end + shift))
        first = torch.arange(min(shift, start)) if end == rows.height else torch.arange(0)
        wanted.append(torch.cat([first, below]) if start < end else torch.arange(0))
    return wanted


def missing_rows(rows: RowSharding, needed: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Return the rows that each process needs, from top to before bottom, without those that it holds."""
    wanted = []
    for (top, bottom), (start, end) in zip(needed, pairwise(rows.bounds), strict=True):
        number = torch.arange(top, bottom)
        wanted.append(number[(number < start) | (number >= end)])
    return wanted


class ShardedTokenMap(TokenMap):
    """The rows of a map that this process holds, and rows of others that it has borrowed.

    Rows are numbered as in the whole map.

    Args:
        own: The rows of this process.
        rows: The rows of all processes.
    """

    def __init__(self, own: TokenMap, rows: RowSharding) -> None:
        super().__init__(rows.height, own.width, own.channels)
        self.own, self.rows = own, rows
        self.forget()

    def forget(self) -> None:
        """Drop borrowed rows."""
        self.numbers: list[int] = []
        self.borrowed = torch.empty(0, self.width, self.channels)
        self.lent = torch.arange(0)
        self.plan: Exchange | None = None

    def borrow(self, wanted: Sequence[Tensor]) -> None:
        """Get rows of other processes, in place of those that were borrowed before.

        Args:
            wanted: The rows that each process wants, sorted.
        """
        group = self.rows.group
        plan = plan_exchange(self.rows.bounds, wanted, group.rank)
        self.numbers, self.lent = wanted[group.rank].tolist(), plan.send
        # Only the rows that are sent are read, in the order in which they are sent.
        self.plan = Exchange(torch.arange(len(plan.send)), plan.sent, plan.received)
        sent = [self.own.read(row, row + 1) for row in plan.send.tolist()]
        items = torch.cat(sent) if sent else self.borrowed[:0]
        self.borrowed = exchange(items.unsqueeze(0), self.plan, group).squeeze(0)

    def give_back(self) -> None:
        """Return borrowed rows, which have been written, to those who hold them. Each has been borrowed once."""
        assert self.plan is not None
        returned = return_items(self.borrowed.unsqueeze(0), self.plan, self.rows.group).squeeze(0)
        for row, values in zip(self.lent.tolist(), returned, strict=True):
            self.own.write(row, values.unsqueeze(0))
        self.forget()

    def parts(self, top: int, bottom: int) -> Iterator[tuple[int, int, bool]]:
        """Yield the parts of rows that are above, among and below those of this process, and whether it holds them."""
        start, end = self.rows.start, self.rows.end
        for first, last, is_own in ((0, start, False), (start, end, True), (end, self.height, False)):
            first, last = max(first, top), min(last, bottom)
            if first < last:
                yield first, last, is_own

    def place(self, top: int, bottom: int) -> slice:
        """Return where borrowed rows are."""
        first = self.numbers.index(top)
        assert self.numbers[first + bottom - top - 1] == bottom - 1
        return slice(first, first + bottom - top)

    def read(self, top: int, bottom: int) -> Tensor:
        """See TokenMap.read."""
        start = self.rows.start
        parts = [
            self.own.read(first - start, last - start) if is_own else self.borrowed[self.place(first, last)]
            for first, last, is_own in self.parts(top, bottom)
        ]
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts) if parts else torch.empty(0, self.width, self.channels)

    def write(self, top: int, rows: Tensor) -> None:
        """See TokenMap.write; borrowed rows are changed where they are held by `give_back` only."""
        for first, last, is_own in self.parts(top, top + len(rows)):
            values = rows[first - top : last - top]
            if is_own:
                self.own.write(first - self.rows.start, values)
            else:
                self.borrowed[self.place(first, last)] = values

    def release(self, top: int, bottom: int) -> None:
        """See TokenMap.release."""
        first, last = (min(max(row, self.rows.start), self.rows.end) - self.rows.start for row in (top, bottom))
        self.own.release(first, last)

    def close(self) -> None:
        """See TokenMap.close."""
        self.own.close()


class FirstProcessSink:
    """Sends the rows of all processes to the first one, in order, and there to a sink.

    Each process writes its own rows only; the first one has to call `close` for the rows of the others to arrive.

    Args:
        sink: Receives the map, in the first process.
        rows: The rows of all processes.
        chunk_rows: Rows of a chunk, but for the last one of each process.
    """

    def __init__(self, sink: MapSink, rows: RowSharding, chunk_rows: int) -> None:
        self.sink, self.rows, self.chunk_rows = sink, rows, chunk_rows

    def begin(self, shape: tuple[int, int, int], stride: int) -> None:
        """See MapSink.begin."""
        self.shape = shape
        if self.rows.group.rank == 0:
            self.sink.begin(shape, stride)

    def write_rows(self, top: int, rows: Tensor) -> None:
        """See MapSink.write_rows."""
        group = self.rows.group
        if group.rank == 0:
            self.sink.write_rows(top, rows)
        else:
            dist.send(rows.contiguous(), group=group.group, group_dst=0)

    def close(self) -> None:
        """See MapSink.close."""
        group = self.rows.group
        if group.rank != 0:
            return
        for rank, (start, end) in enumerate(pairwise(self.rows.bounds)):
            for top in range(start, end, self.chunk_rows) if rank > 0 else ():
                rows = torch.empty(min(self.chunk_rows, end - top), *self.shape[1:])
                dist.recv(rows, group=group.group, group_src=rank)
                self.sink.write_rows(top, rows)
        self.sink.close()

    def abort(self) -> None:
        """See MapSink.abort."""
        self.sink.abort()


def sequence_group(group: dist.ProcessGroup | DeviceMesh) -> SequenceGroup | None:
    """Return the processes that share an image; None if there is but one."""
    processes = SequenceGroup(group.get_group() if isinstance(group, DeviceMesh) else group)
    return processes if processes.size > 1 else None


def agree(group: SequenceGroup, error: Exception | None, facts: dict[str, Any]) -> None:
    """Raise an error in all processes if one of them has one, or if they do not compute the same, before work begins.

    Args:
        group: The processes.
        error: That of this process.
        facts: What has to be the same in all processes, by what it is called.
    """
    told: list[Any] = [None] * group.size
    dist.all_gather_object(told, (None if error is None else str(error), facts), group=group.group)
    if error is not None:
        raise error
    for rank, (problem, others) in enumerate(told):
        if problem is not None:
            raise ValueError(f"process {rank} of those that share the image reports: {problem}")
        for name, value in facts.items():
            if others[name] != value:
                raise ValueError(
                    f"processes {group.rank} and {rank} share an image, but have another {name}: start all of them "
                    "with the same model, image and options"
                )
