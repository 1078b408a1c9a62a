"""Loaders whose batches are a function of seed, epoch and number, so that an epoch can be resumed anywhere.

Two kinds of data: those with random access (`ShuffledLoader`), and streams that are read sequentially (`StreamLoader`).
For both, a sampler decides what to read for each batch (a request), and a reader makes the batch of a request in any
process. So no state needs to be saved to resume in the middle of an epoch.
"""

import atexit
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing.synchronize import Event
from types import FrameType
from typing import Any

import torch
from accelerate.utils import recursively_apply
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from ..utils.seeding import preserve_rng_state
from ..utils.validation import require
from .batch_plan import BatchPlan
from .samplers import SeededIndex, ShardedSampler
from .streams import (
    Collate,
    MapDataset,
    ReshardedStreamReader,
    ReshardedStreamSampler,
    Stream,
    StreamPiece,
    StreamSampler,
    load_samples,
)


@dataclass
class WorkerError:
    """An error in a worker that the user can fix, on its way to the main process."""

    message: str
    details: str


class BatchReader(Dataset[Any]):
    """Makes the batch of a request, and leaves the random generators as they are."""

    def __init__(self, read: Callable[[Any], Any]) -> None:
        self.read = read

    def __getitem__(self, request: Any) -> Any:
        try:
            with preserve_rng_state():
                batch = self.read(request)
            return batch if get_worker_info() is None else _shared(batch)
        except (ValueError, OSError) as error:
            return WorkerError(str(error), traceback.format_exc())


def _shared(batch: Any) -> Any:
    """Move a batch to shared memory, for the main process.

    torch would do so in a thread of the worker, whose errors are lost: the main process would wait forever.
    """
    try:
        return recursively_apply(Tensor.share_memory_, batch)
    except RuntimeError as error:
        raise OSError(
            f"data workers get no shared memory for a batch ({str(error)[:100]}): make /dev/shm larger, or use fewer "
            "--data.workers, or none"
        ) from error


class RequestSampler(Sampler[Any]):
    """Yields the requests that `current` has when an iteration begins."""

    def __init__(self) -> None:
        self.current: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.current


class BatchLoader:
    """Reads batches in worker processes, in the order of their requests.

    Args:
        read: From a request to a batch.
        workers: Data workers; 0 = read in this process.
        keep_workers: Whether they wait for the next call of `load`, or end with this one.
    """

    def __init__(self, read: Callable[[Any], Any], *, workers: int, keep_workers: bool) -> None:
        self.requests = RequestSampler()
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
            # Seeds workers, which is not needed here; without its own, it would use the common generator.
            generator=torch.Generator(),
        )

    def load(self, requests: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches of these requests. Workers begin at once; an earlier iteration ends."""
        self.requests.current = requests
        self.calls += 1
        return self._deliver(iter(self.loader), self.calls)

    def _deliver(self, batches: Iterator[Any], call: int) -> Iterator[Any]:
        # With kept workers, every call gets the same iterator, so an earlier one must not use it.
        while call == self.calls:
            batch = next(batches, None)
            if batch is None:
                return
            if isinstance(batch, WorkerError):
                raise ValueError(batch.message) from RuntimeError(batch.details)
            yield batch


def _as_it_is(batch: Any) -> Any:
    return batch


@cache
def _process_is_ending() -> Event:
    """An event that is set when this process ends."""
    event = multiprocessing.Event()
    # Registered after multiprocessing's own, so it runs before the workers are ended and waited for.
    atexit.register(event.set)
    return event


def _outlive_signals(main_is_ending: Event, worker: int) -> None:
    """Let a worker continue on Ctrl-C and SIGTERM, which reach all processes of a group or a cluster's job.

    The main process decides what is still needed, and ends its workers.
    """

    def end_with_main(number: int, frame: FrameType | None) -> None:
        if main_is_ending.is_set():
            os._exit(0)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, end_with_main)


class TrainLoader:
    """Training data of one process, as the training loop reads them.

    Args:
        sampler: Decides what each batch has; ValueError if it has no batch.
        read: From a request of the sampler to a batch.
    """

    def __init__(self, sampler: ShardedSampler | ReshardedStreamSampler, read: Callable[[Any], Any]) -> None:
        plan = sampler.plan
        require(
            len(sampler) > 0,
            f"{sampler.length} images for training are fewer than a batch of {plan.batch_size} for each of "
            f"{plan.processes} processes: choose a smaller --data.batch_size",
        )
        self.sampler, self.batch_size = sampler, plan.batch_size
        self.loader = BatchLoader(read, workers=plan.workers, keep_workers=True)

    def __len__(self) -> int:
        return len(self.sampler)

    def batches(self, epoch: int, start: int) -> Iterator[Any]:
        """Yield the batches of an epoch, without the first `start`; ends earlier iterations."""
        return self.loader.load(self.sampler.requests(epoch, start))


class ShuffledLoader(TrainLoader):
    """Training data with random access; `collate` makes a batch of samples."""

    def __init__(self, dataset: MapDataset, sampler: ShardedSampler, *, collate: Collate) -> None:
        super().__init__(sampler, partial(_load_batch, dataset, collate))


def _load_batch(dataset: MapDataset, collate: Collate, indices: list[SeededIndex]) -> Any:
    return collate(load_samples(dataset, indices))


class StreamLoader(TrainLoader):
    """Training data that are read sequentially.

    Args:
        stream: The data.
        plan: How the samples of a step are split over processes.
        collate: From samples to a batch.
        options: See StreamSampler: seed, repeats, window.
    """

    def __init__(self, stream: Stream, plan: BatchPlan, *, collate: Collate, **options: int) -> None:
        samplers = [StreamSampler(stream.lengths, initial, **options) for initial in plan.initial_plans()]
        sampler = ReshardedStreamSampler(samplers, plan)
        super().__init__(sampler, ReshardedStreamReader(stream, sampler, collate))


class EvalLoader:
    """Reads every sample once, over all processes; their numbers of batches may differ, and last batches be smaller.

    With `numbered`, batches come with the indices of their samples in the data: (indices, batch).
    """

    def __init__(
        self,
        dataset: MapDataset | Stream,
        batch_size: int,
        *,
        workers: int,
        collate: Collate,
        process: int = 0,
        processes: int = 1,
        numbered: bool = False,
    ) -> None:
        self.requests: list[Any]
        read: Callable[[Any], Any]
        self.numbered = numbered
        if isinstance(dataset, Stream):
            plan = BatchPlan.initial(batch_size, process=process, processes=processes, workers=workers)
            part = StreamSampler(dataset.lengths, plan, seed=None, window=batch_size)
            sampler = ReshardedStreamSampler([part], BatchPlan.initial(batch_size))
            self.requests, read = list(sampler.requests(0, 0)), ReshardedStreamReader(dataset, sampler, collate)
            self.indices: Callable[[Any], list[int]] = partial(_stream_indices, part)
        else:
            indices = [(index, 0) for index in range(process, len(dataset), processes)]
            self.requests = [indices[first : first + batch_size] for first in range(0, len(indices), batch_size)]
            read = partial(_load_batch, dataset, collate)
            self.indices = _batch_indices
        self.loader = BatchLoader(read, workers=workers, keep_workers=False)

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Any]:
        batches = self.loader.load(iter(self.requests))
        return zip(map(self.indices, self.requests), batches, strict=True) if self.numbered else batches


def _batch_indices(request: list[SeededIndex]) -> list[int]:
    return [index for index, _ in request]


def _stream_indices(sampler: StreamSampler, pieces: list[StreamPiece]) -> list[int]:
    """Return the indices in the data of the samples of a batch of a stream that is not shuffled."""
    indices: list[int] = []
    for piece in pieces:
        window, inside = sampler.find(piece.request)
        first = window.first + inside * sampler.batch_size
        indices += range(first + piece.start, min(first + piece.stop, window.end))
    return indices
