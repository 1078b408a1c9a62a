"""Batches in an order that comes back, from any place in an epoch.

Two kinds of data: those with random access (`ShuffledData`), and streams that are read in a row (`StreamedData`). For
both, an order says what to read for each batch (a request), and a reader makes the batch of a request, whoever asks, in
whatever process. So nothing needs to be remembered to go on in the middle of an epoch.
"""

import atexit
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from multiprocessing.synchronize import Event
from types import FrameType
from typing import Any, Protocol, runtime_checkable

import torch
from accelerate.utils import recursively_apply
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from .batching import BatchPlan
from .seeding import SEEDS, generators_kept, seed_of, set_cpu_seed

# A sample's index, and the seed that it is augmented with.
Place = tuple[int, int]
Collate = Callable[[list[Any]], Any]


class TrainingData(Protocol):
    """What the loop trains on."""

    # Samples in a batch of one process.
    batch_size: int

    def __len__(self) -> int:
        """Batches of an epoch for this process; as many for every other one."""

    def batches(self, epoch: int, start: int) -> Iterator[Any]:
        """The batches of an epoch for this process, without the first `start`; ends what was asked for before."""


class Samples(Protocol):
    """Samples with random access. They may be drawn at random, from Python's, numpy's or torch's generator."""

    def __len__(self) -> int:
        """How many there are."""

    def __getitem__(self, index: int, /) -> Any:
        """One of them."""


@runtime_checkable
class Stream(Protocol):
    """Samples that are read in a row, in parts such as the shards of WebDataset."""

    # Samples of each part.
    lengths: Sequence[int]

    def read(self, part: int) -> Iterator[Any]:
        """What is stored of the samples of a part, in their order: at least as many as its length says."""

    def samples(self, stored: list[Any]) -> Samples:
        """Some samples, from what is stored of them."""


@dataclass
class Failure:
    """A user's mistake that a worker found, on its way to the main process."""

    message: str
    details: str


class BatchReader(Dataset[Any]):
    """Makes the batch of a request, and leaves the random generators as they are."""

    def __init__(self, read: Callable[[Any], Any]) -> None:
        self.read = read

    def __getitem__(self, request: Any) -> Any:
        try:
            with generators_kept():
                batch = self.read(request)
            return batch if get_worker_info() is None else _shared(batch)
        except (ValueError, OSError) as error:
            return Failure(str(error), traceback.format_exc())


def _shared(batch: Any) -> Any:
    """A batch in shared memory, on its way to the main process.

    torch would move it there in a thread of the worker, whose errors nobody hears of: the main process would wait for
    ever.
    """
    try:
        return recursively_apply(Tensor.share_memory_, batch)
    except RuntimeError as error:
        raise OSError(
            f"data workers get no shared memory for a batch ({str(error)[:100]}): make /dev/shm larger, or use fewer "
            "--data.workers, or none"
        ) from error


class Requests(Sampler[Any]):
    """What workers are asked for: whatever `current` gives when an iteration begins."""

    def __init__(self) -> None:
        self.current: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.current


class BatchLoader:
    """Has batches read by worker processes, in the order of their requests.

    Args:
        read: From a request to a batch.
        workers: Processes that read; 0 = this one.
        keep_workers: Whether they wait for the next call of `load`, or end with this one.
    """

    def __init__(self, read: Callable[[Any], Any], *, workers: int, keep_workers: bool) -> None:
        self.requests = Requests()
        self.calls = 0
        self.loader = DataLoader(
            BatchReader(read),
            batch_size=None,
            sampler=self.requests,
            num_workers=workers,
            collate_fn=_as_it_is,
            worker_init_fn=partial(_outlive_signals, _process_is_ending()),
            persistent_workers=keep_workers and workers > 0,
            pin_memory=torch.cuda.is_available(),
            # Seeds workers, which is of no use here; without its own, it would draw from the common generator.
            generator=torch.Generator(),
        )

    def load(self, requests: Iterator[Any]) -> Iterator[Any]:
        """The batches of these requests. Workers begin at once; an earlier call, if unfinished, is at its end."""
        self.requests.current = requests
        self.calls += 1
        return self._deliver(iter(self.loader), self.calls)

    def _deliver(self, batches: Iterator[Any], call: int) -> Iterator[Any]:
        # With kept workers, every call gets the same iterator, so an earlier one must not draw from it.
        while call == self.calls:
            batch = next(batches, None)
            if batch is None:
                return
            if isinstance(batch, Failure):
                raise ValueError(batch.message) from RuntimeError(batch.details)
            yield batch


def _as_it_is(batch: Any) -> Any:
    return batch


@cache
def _process_is_ending() -> Event:
    """Is set when this process comes to its end."""
    event = multiprocessing.Event()
    # Registered after multiprocessing's own: it comes before the workers are told to end, and waited for.
    atexit.register(event.set)
    return event


def _outlive_signals(main_is_ending: Event, worker: int) -> None:
    """Let a worker read on through Ctrl-C and SIGTERM, which reach all processes of a group or a cluster's job.

    The main process decides what is still needed, and tells its workers when to end.
    """

    def end_with_main(number: int, frame: FrameType | None) -> None:
        if main_is_ending.is_set():
            os._exit(0)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, end_with_main)


def draw_order(count: int, repeats: int, seed: int) -> tuple[Tensor, Tensor]:
    """A random order of samples.

    Args:
        count: How many samples there are, and how many are drawn.
        repeats: How often each of those drawn comes in a row.
        seed: Decides the order and the samples' seeds.

    Returns:
        The samples' indices, (count,), and a seed for each, (count,).
    """
    generator = torch.Generator().manual_seed(seed)
    # Of those that are drawn, only the first come: more would be repeated for nothing.
    drawn = torch.randperm(count, generator=generator)[: -(-count // repeats)]
    order = drawn.repeat_interleave(min(repeats, count))[:count]
    return order, torch.randint(SEEDS, (count,), generator=generator)


def require_a_batch(batches: int, samples: int, batch_size: int, processes: int) -> None:
    """Refuse training data that do not fill a single batch.

    Args:
        batches: Batches of an epoch.
        samples: Samples that there are.
        batch_size: Samples in a batch of one process.
        processes: How many there are.
    """
    if batches == 0:
        raise ValueError(
            f"{samples} images for training are fewer than a batch of {batch_size} for each of {processes} "
            "processes: choose a smaller --data.batch_size"
        )


class ShardedOrder:
    """Which samples each process sees, in which order, and the seed of each.

    A total batch is drawn first and then dealt out, so that its samples do not depend on the number of processes. The
    last samples of an epoch that do not fill a batch are left out.

    Args:
        length: Samples of the data set.
        batch_size: Samples in a batch of one process.
        seed: The run's seed.
        process: This process.
        processes: How many there are.
        repeats: How often a sample comes in a row, each time augmented anew; an epoch has as many samples as without.
        drawn_batch: Samples of all processes that are drawn together; None = those of a batch of each process.
    """

    def __init__(
        self,
        length: int,
        batch_size: int,
        *,
        seed: int,
        process: int = 0,
        processes: int = 1,
        repeats: int = 1,
        drawn_batch: int | None = None,
    ) -> None:
        self.length, self.batch_size, self.seed = length, batch_size, seed
        self.process, self.processes, self.repeats = process, processes, repeats
        self.drawn_batch = batch_size * processes if drawn_batch is None else drawn_batch

    def __len__(self) -> int:
        return self.length // self.drawn_batch * self.drawn_batch // (self.batch_size * self.processes)

    def draw(self, epoch: int) -> tuple[Tensor, Tensor]:
        """The samples of all processes in the order of an epoch, total batch after total batch, and their seeds."""
        return draw_order(self.length, self.repeats, seed_of(self.seed, epoch))

    def requests(self, epoch: int, start: int) -> Iterator[list[Place]]:
        """The places of each batch of an epoch, without the first `start` batches."""
        order, seeds = self.draw(epoch)
        for batch in range(start, len(self)):
            first = (batch * self.processes + self.process) * self.batch_size
            chosen = slice(first, first + self.batch_size)
            yield list(zip(order[chosen].tolist(), seeds[chosen].tolist(), strict=True))


class GroupedOrder(ShardedOrder):
    """A sharded order in which the samples of a total batch are of one group, such as images that lie or stand.

    What is left of the groups, less than a total batch of each, makes mixed batches. So there are as many batches as
    without groups. Pure and mixed ones come in any order.

    Args:
        groups: The group of each sample, by its index.
        batch_size: Samples in a batch of one process.
        seed: The run's seed.
        process: This process.
        processes: How many there are.
        repeats: As for ShardedOrder.
        drawn_batch: As for ShardedOrder; the samples that are drawn together are of one group.
    """

    def __init__(
        self,
        groups: Sequence[int],
        batch_size: int,
        *,
        seed: int,
        process: int = 0,
        processes: int = 1,
        repeats: int = 1,
        drawn_batch: int | None = None,
    ) -> None:
        super().__init__(
            len(groups),
            batch_size,
            seed=seed,
            process=process,
            processes=processes,
            repeats=repeats,
            drawn_batch=drawn_batch,
        )
        self.groups = torch.tensor(groups)

    def draw(self, epoch: int) -> tuple[Tensor, Tensor]:
        """See ShardedOrder.draw."""
        order, seeds = super().draw(epoch)
        total = self.drawn_batch
        drawn = self.groups[order]
        pure, left = [], []
        for group in self.groups.unique():
            members = (drawn == group).nonzero().flatten()
            filled = len(members) // total * total
            pure.append(members[:filled])
            left.append(members[filled:])
        # Sorted, what is left comes as it was drawn, so the last of it, which fills no batch, is of any group.
        batches = torch.cat([*pure, torch.cat(left).sort().values])[: self.length // total * total].view(-1, total)
        turns, _ = draw_order(len(batches), 1, seed_of(self.seed, epoch, 1))
        places = batches[turns].flatten()
        return order[places], seeds[places]


@dataclass(frozen=True)
class PlacesReader:
    """Makes a batch of the samples at some places, each drawn with its seed."""

    samples: Samples
    collate: Collate

    def __call__(self, places: list[Place]) -> Any:
        """The batch of these places."""
        return self.collate(draw_samples(self.samples, places))


def draw_samples(samples: Samples, places: list[Place]) -> list[Any]:
    """The samples at some places, each drawn with its seed."""
    drawn = []
    for index, seed in places:
        set_cpu_seed(seed)
        drawn.append(samples[index])
    return drawn


class ShuffledData:
    """Training data with random access.

    Args:
        samples: The data set.
        order: Which samples, in which order.
        workers: Processes that read samples; 0 = this one.
        collate: From samples to a batch.
    """

    def __init__(self, samples: Samples, order: ShardedOrder, *, workers: int, collate: Collate) -> None:
        self.batch_size = order.batch_size
        self.order = order
        self.loader = BatchLoader(PlacesReader(samples, collate), workers=workers, keep_workers=True)

    def __len__(self) -> int:
        return len(self.order)

    def batches(self, epoch: int, start: int) -> Iterator[Any]:
        """See TrainingData.batches."""
        return self.loader.load(self.order.requests(epoch, start))


# A batch of a stream: which epoch's, which one.
StreamRequest = tuple[int, int]


@dataclass(frozen=True)
class Window:
    """Samples of a stream that are held in memory together: from where to where in an epoch's row."""

    epoch: int
    first: int
    end: int


class StreamOrder:
    """Which samples of a stream each process sees, in which order.

    The parts are laid in a row, shuffled by epoch. Each process takes an equal stretch of the row, and each of its
    workers a stretch of that, whether or not parts are cut by this: no sample comes twice, and no process gets more
    batches than another. A stretch is read window by window; in a window, samples are shuffled. The order depends on
    the seed, the epoch and the numbers of processes and workers, and on nothing else.

    Args:
        lengths: Samples of each part.
        batch_size: Samples in a batch of one process.
        seed: The run's seed; None = no shuffling, and the last batch may be smaller: every sample comes once.
        process: This process.
        processes: How many there are.
        workers: Processes that read, for each of them.
        repeats: How often a sample comes in a row, each time augmented anew; an epoch has as many samples as without.
        window: Samples that are shuffled together.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        batch_size: int,
        *,
        seed: int | None,
        process: int = 0,
        processes: int = 1,
        workers: int = 1,
        repeats: int = 1,
        window: int = 2048,
    ) -> None:
        self.lengths, self.batch_size, self.seed, self.repeats = lengths, batch_size, seed, repeats
        self.stretches = max(1, workers)
        self.window_batches = max(1, window // batch_size)
        total = sum(lengths)
        if seed is None:
            self.first, self.end = total * process // processes, total * (process + 1) // processes
        else:
            share = total // (batch_size * processes) * batch_size
            self.first, self.end = share * process, share * (process + 1)

    def __len__(self) -> int:
        return -((self.first - self.end) // self.batch_size)

    def requests(self, epoch: int, start: int) -> Iterator[StreamRequest]:
        """The batches of an epoch, without the first `start`.

        Workers are asked in turn, so each gets the batches of one stretch.
        """
        return ((epoch, batch) for batch in range(start, len(self)))

    def parts(self, epoch: int) -> list[int]:
        """The parts in the order of an epoch's row."""
        if self.seed is None:
            return list(range(len(self.lengths)))
        return draw_order(len(self.lengths), 1, seed_of(self.seed, epoch))[0].tolist()

    def find(self, request: StreamRequest) -> tuple[Window, int]:
        """The window that a batch is in, and the batch's number in it."""
        epoch, batch = request
        turn, stretch = divmod(batch, self.stretches)
        batches = [len(range(number, len(self), self.stretches)) for number in range(stretch + 1)]
        number, inside = divmod(turn, self.window_batches)
        first = self.first + self.batch_size * (sum(batches[:-1]) + number * self.window_batches)
        end = first + self.batch_size * min(self.window_batches, batches[-1] - number * self.window_batches)
        return Window(epoch, first, min(end, self.end)), inside

    def places(self, window: Window) -> list[Place]:
        """The order of the samples in a window."""
        count = window.end - window.first
        if self.seed is None:
            return [(index, 0) for index in range(count)]
        order, seeds = draw_order(count, self.repeats, seed_of(self.seed, window.epoch, window.first))
        return list(zip(order.tolist(), seeds.tolist(), strict=True))


class StreamReader:
    """Makes the batches of a stream. It reads on where it is, if it can, and opens the stream anew if it cannot.

    Args:
        stream: The stream.
        order: Which samples, in which order.
        collate: From samples to a batch.
    """

    def __init__(self, stream: Stream, order: StreamOrder, collate: Collate) -> None:
        self.stream, self.order, self.collate = stream, order, collate
        self.row: Iterator[Any] = iter(())
        # Where the row goes on: epoch and number of the sample.
        self.next_sample: tuple[int, int] | None = None
        self.window: Window | None = None

    def __call__(self, request: StreamRequest) -> Any:
        """The batch of this request."""
        return self.collate(self.draw(request, 0, self.order.batch_size))

    def draw(self, request: StreamRequest, start: int, stop: int) -> list[Any]:
        """Some of the samples of a batch."""
        window, inside = self.order.find(request)
        if window != self.window:
            self.window = None
            self.samples = self.stream.samples(self.read(window))
            self.places = self.order.places(window)
            self.window = window
        size = self.order.batch_size
        return draw_samples(self.samples, self.places[inside * size : (inside + 1) * size][start:stop])

    def read(self, window: Window) -> list[Any]:
        """What is stored of the samples of a window."""
        if self.next_sample != (window.epoch, window.first):
            self.row = self.open_row(window.epoch, window.first)
        # Should reading fail, the next attempt begins anew.
        self.next_sample = None
        stored = list(islice(self.row, window.end - window.first))
        self.next_sample = window.epoch, window.end
        return stored

    def open_row(self, epoch: int, first: int) -> Iterator[Any]:
        """What is stored of the samples of an epoch's row, from `first` on. Parts before it are not opened."""
        for part in self.order.parts(epoch):
            length = self.stream.lengths[part]
            if first < length:
                yield from islice(self.stream.read(part), first, length)
            first = max(0, first - length)


@dataclass(frozen=True)
class StreamPiece:
    """Some samples of a batch of a stream.

    Attributes:
        process: The process for which the order has the batch.
        request: The batch.
        start: Its first sample.
        stop: The end of its samples.
    """

    process: int
    request: StreamRequest
    start: int
    stop: int


class DealtStreamOrder:
    """The order of a stream, drawn for some processes and dealt out to others.

    Args:
        orders: The order of each process that it was drawn for.
        batch_size: Samples in a batch of one process.
        process: This process.
        processes: How many there are.
    """

    def __init__(self, orders: Sequence[StreamOrder], batch_size: int, *, process: int, processes: int) -> None:
        self.orders, self.batch_size, self.process, self.processes = orders, batch_size, process, processes

    def __len__(self) -> int:
        samples = len(self.orders[0]) * self.orders[0].batch_size * len(self.orders)
        return samples // (self.batch_size * self.processes)

    def requests(self, epoch: int, start: int) -> Iterator[list[StreamPiece]]:
        """The pieces of each batch of an epoch, without the first `start` batches."""
        for batch in range(start, len(self)):
            first = (batch * self.processes + self.process) * self.batch_size
            yield list(self.pieces(epoch, first, first + self.batch_size))

    def pieces(self, epoch: int, first: int, end: int) -> Iterator[StreamPiece]:
        """The samples of an epoch from `first` to `end`, counted over all processes, batch after batch."""
        size = self.orders[0].batch_size
        while first < end:
            number, start = divmod(first, size)
            batch, process = divmod(number, len(self.orders))
            stop = min(size, start + end - first)
            yield StreamPiece(process, (epoch, batch), start, stop)
            first += stop - start


class DealtStreamReader:
    """Makes the batches of a stream whose order was drawn for other processes.

    Args:
        stream: The stream.
        order: Which samples, in which order.
        collate: From samples to a batch.
    """

    def __init__(self, stream: Stream, order: DealtStreamOrder, collate: Collate) -> None:
        self.stream, self.order, self.collate = stream, order, collate
        # One for each stretch of the row that this worker reads.
        self.readers: dict[tuple[int, int], StreamReader] = {}

    def __call__(self, pieces: list[StreamPiece]) -> Any:
        """The batch of these pieces."""
        return self.collate([sample for piece in pieces for sample in self.draw(piece)])

    def draw(self, piece: StreamPiece) -> list[Any]:
        """The samples of a piece."""
        order = self.order.orders[piece.process]
        key = piece.process, piece.request[1] % order.stretches
        reader = self.readers.get(key)
        if reader is None:
            reader = self.readers[key] = StreamReader(self.stream, order, self.collate)
        return reader.draw(piece.request, piece.start, piece.stop)


class StreamedData:
    """Training data that are read in a row.

    Args:
        stream: The data.
        plan: Which share of each batch, and what the order is drawn for.
        seed: The run's seed.
        repeats: See StreamOrder.
        collate: From samples to a batch.
        window: See StreamOrder.
    """

    def __init__(
        self, stream: Stream, plan: BatchPlan, *, seed: int, repeats: int, collate: Collate, window: int = 2048
    ) -> None:
        self.batch_size = plan.batch_size
        orders = [
            StreamOrder(
                stream.lengths,
                plan.drawn_batch_size,
                seed=seed,
                process=process,
                processes=plan.drawn_processes,
                workers=plan.drawn_workers,
                repeats=repeats,
                window=window,
            )
            for process in range(plan.drawn_processes)
        ]
        self.order = DealtStreamOrder(orders, plan.batch_size, process=plan.process, processes=plan.processes)
        reader = DealtStreamReader(stream, self.order, collate)
        self.loader = BatchLoader(reader, workers=plan.workers, keep_workers=True)

    def __len__(self) -> int:
        return len(self.order)

    def batches(self, epoch: int, start: int) -> Iterator[Any]:
        """See TrainingData.batches."""
        return self.loader.load(self.order.requests(epoch, start))


class EvaluationData:
    """Every sample once, over all processes; a process may have more batches than another, and a smaller last one.

    Args:
        samples: The data set, or a stream.
        batch_size: Samples in a batch.
        workers: Processes that read samples; 0 = this one.
        collate: From samples to a batch.
        process: This process.
        processes: How many there are.
    """

    def __init__(
        self,
        samples: Samples | Stream,
        batch_size: int,
        *,
        workers: int,
        collate: Collate,
        process: int = 0,
        processes: int = 1,
    ) -> None:
        self.requests: list[Any]
        read: Callable[[Any], Any]
        if isinstance(samples, Stream):
            order = StreamOrder(
                samples.lengths,
                batch_size,
                seed=None,
                process=process,
                processes=processes,
                workers=workers,
                window=batch_size,
            )
            self.requests, read = list(order.requests(0, 0)), StreamReader(samples, order, collate)
        else:
            places = [(index, 0) for index in range(process, len(samples), processes)]
            self.requests = [places[first : first + batch_size] for first in range(0, len(places), batch_size)]
            read = PlacesReader(samples, collate)
        self.loader = BatchLoader(read, workers=workers, keep_workers=False)

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Any]:
        return self.loader.load(iter(self.requests))
