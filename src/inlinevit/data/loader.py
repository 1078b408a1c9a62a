"""Batches in an order that comes back, from any place in an epoch.

Two kinds of data: those with random access (`ShuffledLoader`), and streams that are read in a row (`StreamLoader`). For
both, an order says what to read for each batch (a request), and a reader makes the batch of a request, whoever asks, in
whatever process. So nothing needs to be remembered to go on in the middle of an epoch.
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
from typing import Any, Protocol

import torch
from accelerate.utils import recursively_apply
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from ..utils.seeding import preserve_rng_state
from .batch_plan import BatchPlan
from .samplers import Place, ShardedSampler
from .streams import (
    Collate,
    ReshardedStreamReader,
    ReshardedStreamSampler,
    Samples,
    Stream,
    StreamReader,
    StreamSampler,
    load_samples,
)


class TrainLoader(Protocol):
    """What the loop trains on."""

    # Samples in a batch of one process.
    batch_size: int

    def __len__(self) -> int:
        """Batches of an epoch for this process; as many for every other one."""

    def batches(self, epoch: int, start: int) -> Iterator[Any]:
        """The batches of an epoch for this process, without the first `start`; ends what was asked for before."""


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
            with preserve_rng_state():
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


@dataclass(frozen=True)
class IndexReader:
    """Makes a batch of the samples at some places, each drawn with its seed."""

    samples: Samples
    collate: Collate

    def __call__(self, places: list[Place]) -> Any:
        """The batch of these places."""
        return self.collate(load_samples(self.samples, places))


class ShuffledLoader:
    """Training data with random access.

    Args:
        samples: The data set.
        order: Which samples, in which order.
        workers: Processes that read samples; 0 = this one.
        collate: From samples to a batch.
    """

    def __init__(self, samples: Samples, order: ShardedSampler, *, workers: int, collate: Collate) -> None:
        self.batch_size = order.batch_size
        self.order = order
        self.loader = BatchLoader(IndexReader(samples, collate), workers=workers, keep_workers=True)

    def __len__(self) -> int:
        return len(self.order)

    def batches(self, epoch: int, start: int) -> Iterator[Any]:
        """See TrainLoader.batches."""
        return self.loader.load(self.order.requests(epoch, start))


class StreamLoader:
    """Training data that are read in a row.

    Args:
        stream: The data.
        plan: Which share of each batch, and what the order is drawn for.
        seed: The run's seed.
        repeats: See StreamSampler.
        collate: From samples to a batch.
        window: See StreamSampler.
    """

    def __init__(
        self, stream: Stream, plan: BatchPlan, *, seed: int, repeats: int, collate: Collate, window: int = 2048
    ) -> None:
        self.batch_size = plan.batch_size
        orders = [
            StreamSampler(
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
        self.order = ReshardedStreamSampler(orders, plan.batch_size, process=plan.process, processes=plan.processes)
        reader = ReshardedStreamReader(stream, self.order, collate)
        self.loader = BatchLoader(reader, workers=plan.workers, keep_workers=True)

    def __len__(self) -> int:
        return len(self.order)

    def batches(self, epoch: int, start: int) -> Iterator[Any]:
        """See TrainLoader.batches."""
        return self.loader.load(self.order.requests(epoch, start))


class EvalLoader:
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
            order = StreamSampler(
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
            read = IndexReader(samples, collate)
        self.loader = BatchLoader(read, workers=workers, keep_workers=False)

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Any]:
        return self.loader.load(iter(self.requests))
