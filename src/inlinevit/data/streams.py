"""Data that are read in a row, such as the shards of WebDataset: their order, and a reader for their batches."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, runtime_checkable

from ..utils.seeding import derive_seed, set_cpu_seed
from .samplers import Place, shuffle_indices

Collate = Callable[[list[Any]], Any]


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


def load_samples(samples: Samples, places: list[Place]) -> list[Any]:
    """The samples at some places, each drawn with its seed."""
    drawn = []
    for index, seed in places:
        set_cpu_seed(seed)
        drawn.append(samples[index])
    return drawn


# A batch of a stream: which epoch's, which one.
StreamRequest = tuple[int, int]


@dataclass(frozen=True)
class Window:
    """Samples of a stream that are held in memory together: from where to where in an epoch's row."""

    epoch: int
    first: int
    end: int


class StreamSampler:
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
        return shuffle_indices(len(self.lengths), 1, derive_seed(self.seed, epoch))[0].tolist()

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
        order, seeds = shuffle_indices(count, self.repeats, derive_seed(self.seed, window.epoch, window.first))
        return list(zip(order.tolist(), seeds.tolist(), strict=True))


class StreamReader:
    """Makes the batches of a stream. It reads on where it is, if it can, and opens the stream anew if it cannot.

    Args:
        stream: The stream.
        order: Which samples, in which order.
        collate: From samples to a batch.
    """

    def __init__(self, stream: Stream, order: StreamSampler, collate: Collate) -> None:
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
        return load_samples(self.samples, self.places[inside * size : (inside + 1) * size][start:stop])

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


class ReshardedStreamSampler:
    """The order of a stream, drawn for some processes and dealt out to others.

    Args:
        orders: The order of each process that it was drawn for.
        batch_size: Samples in a batch of one process.
        process: This process.
        processes: How many there are.
    """

    def __init__(self, orders: Sequence[StreamSampler], batch_size: int, *, process: int, processes: int) -> None:
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


class ReshardedStreamReader:
    """Makes the batches of a stream whose order was drawn for other processes.

    Args:
        stream: The stream.
        order: Which samples, in which order.
        collate: From samples to a batch.
    """

    def __init__(self, stream: Stream, order: ReshardedStreamSampler, collate: Collate) -> None:
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
