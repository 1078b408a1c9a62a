"""Data that are read sequentially, such as the shards of WebDataset: samplers, and readers for batches."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, Protocol, runtime_checkable

from ..utils.seeding import derive_seed, set_cpu_seed
from .batch_plan import BatchPlan
from .samplers import SeededIndex, shuffle_indices

Collate = Callable[[list[Any]], Any]


class MapDataset(Protocol):
    """A data set with random access. Augmentation may use Python's, numpy's and torch's generators."""

    def __len__(self) -> int:
        """Number of samples."""

    def __getitem__(self, index: int, /) -> Any:
        """Return a sample."""


@runtime_checkable
class Stream(Protocol):
    """A data set that is read sequentially, in parts such as the shards of WebDataset."""

    # Number of samples of each part.
    lengths: Sequence[int]

    def read(self, part: int) -> Iterator[Any]:
        """Yield the stored form of the samples of a part: at least as many as its length."""

    def samples(self, stored: list[Any]) -> MapDataset:
        """Return the samples of these stored forms."""


def load_samples(dataset: MapDataset, indices: list[SeededIndex]) -> list[Any]:
    """Return the samples with these indices, each augmented with its seed."""
    samples = []
    for index, seed in indices:
        set_cpu_seed(seed)
        samples.append(dataset[index])
    return samples


# A batch of a stream: its epoch and its number.
StreamRequest = tuple[int, int]


@dataclass(frozen=True)
class Window:
    """Samples of a stream that are held in memory together: a range of an epoch's sequence."""

    epoch: int
    first: int
    end: int


class StreamSampler:
    """Splits the samples of a stream over processes and their workers.

    The parts are shuffled for each epoch and concatenated to a sequence. Each process reads an equal range of it, and
    each of its workers a range of that, across the borders of parts: no sample comes twice, and no process gets more
    batches than another. A range is read window by window; in a window, samples are shuffled. All this is a function
    of the seed, the epoch and the numbers of processes and workers alone.

    Args:
        lengths: Number of samples of each part.
        plan: Batches, processes and workers.
        seed: The run's seed; None = no shuffling, and the last batch may be smaller: every sample comes once.
        repeats: As for ShardedSampler.
        window: Samples that are shuffled together.
    """

    def __init__(
        self, lengths: Sequence[int], plan: BatchPlan, *, seed: int | None, repeats: int = 1, window: int = 2048
    ) -> None:
        self.lengths, self.batch_size, self.seed, self.repeats = lengths, plan.batch_size, seed, repeats
        # Workers are asked one after another, so each gets the batches of one range.
        self.ranges = max(1, plan.workers)
        self.window_batches = max(1, window // plan.batch_size)
        total = sum(lengths)
        if seed is None:
            self.first, self.end = (total * number // plan.processes for number in (plan.process, plan.process + 1))
        else:
            per_process = total // (plan.batch_size * plan.processes) * plan.batch_size
            self.first, self.end = per_process * plan.process, per_process * (plan.process + 1)

    def __len__(self) -> int:
        return -((self.first - self.end) // self.batch_size)

    def parts(self, epoch: int) -> list[int]:
        """Return the parts in the order of an epoch."""
        if self.seed is None:
            return list(range(len(self.lengths)))
        return shuffle_indices(len(self.lengths), 1, derive_seed(self.seed, epoch))[0].tolist()

    def find(self, request: StreamRequest) -> tuple[Window, int]:
        """Return the window that contains a batch, and the number of the batch in it."""
        epoch, batch = request
        position, worker = divmod(batch, self.ranges)
        batches = [len(range(number, len(self), self.ranges)) for number in range(worker + 1)]
        number, inside = divmod(position, self.window_batches)
        first = self.first + self.batch_size * (sum(batches[:-1]) + number * self.window_batches)
        end = first + self.batch_size * min(self.window_batches, batches[-1] - number * self.window_batches)
        return Window(epoch, first, min(end, self.end)), inside

    def indices(self, window: Window) -> list[SeededIndex]:
        """Return the shuffled indices of the samples in a window, with their seeds."""
        count = window.end - window.first
        if self.seed is None:
            return [(index, 0) for index in range(count)]
        indices, seeds = shuffle_indices(count, self.repeats, derive_seed(self.seed, window.epoch, window.first))
        return list(zip(indices.tolist(), seeds.tolist(), strict=True))


class StreamReader:
    """Reads the samples of a range. It continues where it is, if it can, and opens the stream again if it cannot."""

    def __init__(self, stream: Stream, sampler: StreamSampler) -> None:
        self.stream, self.sampler = stream, sampler
        self.sequence: Iterator[Any] = iter(())
        # The next sample of the sequence: its epoch and number.
        self.next_sample: tuple[int, int] | None = None
        self.window: Window | None = None

    def load(self, request: StreamRequest, start: int, stop: int) -> list[Any]:
        """Return the samples of a batch from `start` to `stop`."""
        window, inside = self.sampler.find(request)
        if window != self.window:
            self.window = None
            self.dataset = self.stream.samples(self.read(window))
            self.indices = self.sampler.indices(window)
            self.window = window
        size = self.sampler.batch_size
        return load_samples(self.dataset, self.indices[inside * size : (inside + 1) * size][start:stop])

    def read(self, window: Window) -> list[Any]:
        """Return the stored form of the samples of a window."""
        if self.next_sample != (window.epoch, window.first):
            self.sequence = self.open_sequence(window.epoch, window.first)
        # If reading fails, the next attempt opens the stream again.
        self.next_sample = None
        stored = list(islice(self.sequence, window.end - window.first))
        self.next_sample = window.epoch, window.end
        return stored

    def open_sequence(self, epoch: int, first: int) -> Iterator[Any]:
        """Yield the stored form of the samples of an epoch, from `first` on. Parts before it are not opened."""
        for part in self.sampler.parts(epoch):
            length = self.stream.lengths[part]
            if first < length:
                yield from islice(self.stream.read(part), first, length)
            first = max(0, first - length)


class StreamPiece(NamedTuple):
    """The samples from `start` to `stop` of a batch of a stream."""

    # That had the batch when the run was started.
    process: int
    request: StreamRequest
    start: int
    stop: int


class ReshardedStreamSampler:
    """Splits the batches of a stream that were sampled for some processes over others, or over the same ones.

    Args:
        samplers: The sampler of each process that the run was started with.
        plan: Batches and processes.
    """

    def __init__(self, samplers: Sequence[StreamSampler], plan: BatchPlan) -> None:
        self.samplers, self.plan, self.batch_size = samplers, plan, plan.batch_size
        self.length = sum(samplers[0].lengths)

    def __len__(self) -> int:
        samples = len(self.samplers[0]) * self.samplers[0].batch_size * len(self.samplers)
        return samples // (self.batch_size * self.plan.processes)

    def requests(self, epoch: int, start: int) -> Iterator[list[StreamPiece]]:
        """Yield the pieces of each batch of an epoch, without the first `start` batches."""
        for batch in range(start, len(self)):
            first = (batch * self.plan.processes + self.plan.process) * self.batch_size
            yield list(self.pieces(epoch, first, first + self.batch_size))

    def pieces(self, epoch: int, first: int, end: int) -> Iterator[StreamPiece]:
        """Yield the samples of an epoch from `first` to `end`, counted over all processes, batch after batch."""
        size = self.samplers[0].batch_size
        while first < end:
            number, start = divmod(first, size)
            batch, process = divmod(number, len(self.samplers))
            stop = min(size, start + end - first)
            yield StreamPiece(process, (epoch, batch), start, stop)
            first += stop - start


class ReshardedStreamReader:
    """Reads the batches of a ReshardedStreamSampler; `collate` makes a batch of samples."""

    def __init__(self, stream: Stream, sampler: ReshardedStreamSampler, collate: Collate) -> None:
        self.stream, self.sampler, self.collate = stream, sampler, collate
        # One for each range of the sequence that this worker reads.
        self.readers: dict[tuple[int, int], StreamReader] = {}

    def __call__(self, pieces: list[StreamPiece]) -> Any:
        """Return the batch of these pieces."""
        samples = []
        for process, request, start, stop in pieces:
            sampler = self.sampler.samplers[process]
            key = process, request[1] % sampler.ranges
            if key not in self.readers:
                self.readers[key] = StreamReader(self.stream, sampler)
            samples += self.readers[key].load(request, start, stop)
        return self.collate(samples)
