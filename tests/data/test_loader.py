import gc
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from inlinevit.data.batch_plan import BatchPlan
from inlinevit.data.loader import EvalLoader, ShuffledLoader, StreamLoader, TrainLoader
from inlinevit.data.samplers import GroupedSampler, ShardedSampler, shuffle_indices
from inlinevit.data.streams import MapDataset, ReshardedStreamReader, ReshardedStreamSampler, StreamSampler
from inlinevit.engine.checkpoints import Progress
from tests import pairs_of

WORKERS = [0, 1, 2, 3]
# torch's word on machines with fewer than three cores.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Numbers:
    """Sample i is i and three random numbers, one of each generator."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> tuple[float, ...]:
        number = self.numbers[index]
        if number < 0:
            raise ValueError(f"{number} is below zero: choose another")
        return float(number), random.random(), float(np.random.rand()), float(torch.rand(()))


class Parts:
    """A stream of numbers in parts of different lengths, which notes what is opened."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self.opened: list[int] = []

    def read(self, part: int) -> Iterator[int]:
        self.opened.append(part)
        first = sum(self.lengths[:part])
        # More than promised: only the length counts.
        return iter([*range(first, first + self.lengths[part]), 10_000])

    def samples(self, stored: list[int]) -> MapDataset:
        return Numbers(stored)


def collate(samples: list[tuple[float, ...]]) -> Tensor:
    return torch.tensor(samples, dtype=torch.float64)


def shuffled(length: int = 50, batch_size: int = 4, workers: int = 0, **options: int) -> ShuffledLoader:
    repeats = options.pop("repeats", 1)
    order = ShardedSampler(length, BatchPlan.initial(batch_size, workers=workers, **options), seed=5, repeats=repeats)
    return ShuffledLoader(Numbers(list(range(length))), order, collate=collate)


def streamed(
    lengths: list[int] | None = None, batch_size: int = 4, workers: int = 0, window: int = 12, **options: int
) -> StreamLoader:
    stream = Parts([7, 13, 1, 20, 0, 9] if lengths is None else lengths)
    repeats = options.pop("repeats", 1)
    plan = BatchPlan.initial(batch_size, workers=workers, **options)
    return StreamLoader(stream, plan, seed=5, repeats=repeats, collate=collate, window=window)


def every(data: TrainLoader, epoch: int = 0, start: int = 0) -> list[Tensor]:
    return list(data.batches(epoch, start))


def numbers(batches: list[Tensor]) -> list[int]:
    return [int(number) for batch in batches for number in batch[:, 0]]


@pytest.mark.parametrize("make", [shuffled, streamed])
@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_is_a_shuffled_pass_that_comes_back(make: type[TrainLoader], workers: int) -> None:
    data = make(workers=workers)
    first, second = every(data, 0), every(data, 1)
    assert len(data) == len(first) == len(second) == 12
    for batches in (first, second):
        assert all(batch.shape == (4, 4) for batch in batches)
        initial = numbers(batches)
        assert len(set(initial)) == len(initial) == 48
        assert initial != sorted(initial)
        assert set(initial) <= set(range(50))
    assert numbers(first) != numbers(second)
    # Random numbers of a sample are its own, in every epoch.
    assert len({row[1].item() for batch in first + second for row in batch}) == 96
    torch.testing.assert_close(every(make(workers=workers), 1), second, rtol=0, atol=0)


@pytest.mark.parametrize("make", [shuffled, streamed])
@pytest.mark.parametrize(("workers", "start"), [(0, 12), (1, 5), (2, 12), (3, 5)])
def test_the_middle_of_an_epoch_is_bit_equal(make: type[TrainLoader], workers: int, start: int) -> None:
    whole = every(make(workers=workers), 3)
    rest = every(make(workers=workers), 3, start)
    assert len(rest) == 12 - start
    torch.testing.assert_close(rest, whole[start:], rtol=0, atol=0)


def test_workers_change_nothing_with_random_access() -> None:
    torch.testing.assert_close(every(shuffled(workers=2)), every(shuffled(workers=0)), rtol=0, atol=0)


@pytest.mark.parametrize("repeats", [1, 3])
def test_global_batches_do_not_depend_on_the_number_of_processes(repeats: int) -> None:
    alone = every(shuffled(batch_size=6, repeats=repeats))
    parts = [every(shuffled(batch_size=3, process=p, processes=2, repeats=repeats)) for p in range(2)]
    together = [torch.cat(batches) for batches in zip(*parts, strict=True)]
    torch.testing.assert_close(together, alone, rtol=0, atol=0)


@given(
    groups=st.lists(st.integers(-1, 2), min_size=1, max_size=60),
    shape=st.sampled_from([(1, 1), (2, 1), (3, 2), (1, 4), (2, 3)]),
    seed=st.integers(0, 2**32),
    epoch=st.integers(0, 3),
)
@settings(max_examples=150, deadline=None)
def test_groups_keep_to_themselves(groups: list[int], shape: tuple[int, int], seed: int, epoch: int) -> None:
    batch_size, processes = shape
    total = batch_size * processes
    plan = BatchPlan.initial(total)
    batches = list(GroupedSampler(groups, plan, seed=seed).requests(epoch, 0))
    assert len(batches) == len(ShardedSampler(len(groups), plan, seed=seed)) == len(groups) // total
    initial = [index for batch in batches for index, _ in batch]
    assert len(set(initial)) == len(initial) == len(batches) * total
    assert set(initial) <= set(range(len(groups)))
    # Mixed are only those that no single group can fill; some of them may be of one group by chance.
    mixed = sum(len({groups[index] for index, _ in batch}) > 1 for batch in batches)
    assert mixed <= len(batches) - sum(groups.count(group) // total for group in set(groups))
    # However many processes there are, and from wherever they start: the same.
    plans = [BatchPlan.initial(batch_size, process=process, processes=processes) for process in range(processes)]
    orders = [GroupedSampler(groups, plan, seed=seed) for plan in plans]
    drawn = [list(order.requests(epoch, 0)) for order in orders]
    assert [list(chain.from_iterable(parts)) for parts in zip(*drawn, strict=True)] == batches
    assert [list(order.requests(epoch, 1)) for order in orders] == [requests[1:] for requests in drawn]


def test_groups_are_shuffled_and_come_in_any_order() -> None:
    groups = [0] * 40 + [1] * 20
    order = GroupedSampler(groups, BatchPlan.initial(4), seed=1)
    epochs = [[[index for index, _ in batch] for batch in order.requests(epoch, 0)] for epoch in range(3)]
    for batches in epochs:
        assert sorted(chain.from_iterable(batches)) == list(range(60))
        kinds = [groups[batch[0]] for batch in batches]
        assert all(len({groups[index] for index in batch}) == 1 for batch in batches)
        assert kinds not in (sorted(kinds), sorted(kinds, reverse=True))
    assert epochs[0] != epochs[1] != epochs[2]
    assert {frozenset(batch) for batch in epochs[0]} != {frozenset(batch) for batch in epochs[1]}


def test_what_fills_no_batch_is_not_always_of_the_same_group() -> None:
    # Of each, 3 are left: 4 of these make a mixed batch, 2 are left out.
    order = GroupedSampler([0] * 7 + [1] * 7, BatchPlan.initial(4), seed=1)
    left_out = set()
    for epoch in range(60):
        initial = {index for batch in order.requests(epoch, 0) for index, _ in batch}
        left_out |= set(range(14)) - initial
    assert left_out == set(range(14))


def test_samples_of_groups_have_seeds_of_their_own() -> None:
    order = GroupedSampler([0, 1] * 10, BatchPlan.initial(4), seed=1)
    seeds = [seed for epoch in range(2) for batch in order.requests(epoch, 0) for _, seed in batch]
    assert len(set(seeds)) == len(seeds) == 40


@pytest.mark.parametrize("make", [shuffled, streamed])
def test_repeats_are_augmented_anew(make: type[TrainLoader]) -> None:
    data = make(repeats=3)
    rows = torch.cat(every(data))
    initial = rows[:, 0].tolist()
    assert len(data) == 12
    assert max(initial.count(number) for number in initial) == 3
    assert len(set(initial)) <= 20
    assert len(set(rows[:, 3].tolist())) == len(initial)
    assert initial[0] == initial[1] == initial[2] != initial[3]


@pytest.mark.parametrize("processes", [1, 2, 3, 5])
@pytest.mark.parametrize("workers", WORKERS)
def test_streams_are_split_equally(processes: int, workers: int) -> None:
    # More processes and workers than parts, too: parts are cut.
    drawn = []
    for process in range(processes):
        plan = BatchPlan.initial(2, process=process, processes=processes, workers=workers)
        order = ReshardedStreamSampler([StreamSampler([7, 13, 30], plan, seed=1)], BatchPlan.initial(2))
        reader = ReshardedStreamReader(Parts([7, 13, 30]), order, collate)
        drawn.append(numbers([reader(request) for request in order.requests(2, 0)]))
    assert {len(part) for part in drawn} == {50 // (2 * processes) * 2}
    initial = list(chain.from_iterable(drawn))
    assert len(set(initial)) == len(initial)


def test_a_stream_shuffles_parts_and_windows() -> None:
    orders = {tuple(StreamSampler([1] * 20, BatchPlan.initial(2), seed=1).parts(epoch)) for epoch in range(3)}
    assert len(orders) == 3
    assert all(sorted(order) == list(range(20)) for order in orders)
    one_part = numbers(every(streamed([48], window=12)))
    assert [sorted(one_part[i : i + 12]) for i in range(0, 48, 12)] == [
        list(range(i, i + 12)) for i in range(0, 48, 12)
    ]
    assert one_part[:12] != list(range(12))


class LargeSamples:
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        # Here in the worker, as on a machine with little shared memory.
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        return torch.zeros(1000)


def test_workers_without_shared_memory_say_so() -> None:
    order = ShardedSampler(4, BatchPlan.initial(2, workers=1), seed=1)
    data = ShuffledLoader(LargeSamples(), order, collate=torch.stack)
    with pytest.raises(ValueError, match=r"no shared memory for a batch \(.*\): make /dev/shm larger, or use fewer"):
        every(data)


# (processes, batch size, batches of each process in a step), all for 12 samples in a step.
LAYOUTS = [(1, 12, 1), (1, 4, 3), (2, 6, 1), (2, 3, 2), (3, 4, 1), (4, 3, 1), (6, 1, 2), (12, 1, 1)]


def steps_of(data: list[TrainLoader], batches: int, start: int = 0) -> list[list[tuple[float, ...]]]:
    """The samples of each step of the first epoch, sorted, with what was initial for them.

    Args:
        data: Those of each process.
        batches: Batches of each process in a step.
        start: The first step.
    """
    by_process = [every(one, 0, start * batches) for one in data]
    count = len(by_process[0]) // batches
    return [
        sorted(
            tuple(row.tolist())
            for own in by_process
            for batch in own[step * batches : (step + 1) * batches]
            for row in batch
        )
        for step in range(count)
    ]


def plans_of(
    layout: tuple[int, int, int], initial: tuple[int, int, int], workers: int, initial_workers: int
) -> list[BatchPlan]:
    """The plans of all processes of a layout for an order that was initial for another one."""
    processes, batch_size, batches = layout
    progress = Progress(total_batch=12, processes=initial[0], batch_size=initial[1], workers=initial_workers)
    return [
        BatchPlan.initial(
            batch_size, process=process, processes=processes, grad_accum_steps=batches, workers=workers
        ).resumed(progress, 1)
        for process in range(processes)
    ]


@pytest.mark.parametrize(
    ("layout", "initial", "kind"), pairs_of(LAYOUTS, LAYOUTS[::2], ["shuffled", "grouped", "streamed"])
)
def test_steps_do_not_depend_on_how_they_are_split(
    kind: str, layout: tuple[int, int, int], initial: tuple[int, int, int]
) -> None:
    def data(plan: BatchPlan) -> TrainLoader:
        if kind == "streamed":
            stream = Parts([7, 13, 1, 50, 0, 29])
            return StreamLoader(stream, plan, seed=5, repeats=1, collate=collate, window=24)
        groups = [number % 3 for number in range(100)]
        order = GroupedSampler(groups, plan, seed=5) if kind == "grouped" else ShardedSampler(100, plan, seed=5)
        return ShuffledLoader(Numbers(list(range(100))), order, collate=collate)

    first = [data(plan) for plan in plans_of(initial, initial, 0, 2)]
    second = [data(plan) for plan in plans_of(layout, initial, 0, 2)]
    expected = steps_of(first, initial[2])
    assert len(expected) == 8
    assert len({row[0] for step in expected for row in step}) == 96
    assert steps_of(second, layout[2]) == expected
    assert steps_of(second, layout[2], start=3) == expected[3:]


@pytest.mark.parametrize(("workers", "initial_workers"), [(0, 2), (1, 0), (3, 2)])
def test_steps_of_a_stream_do_not_depend_on_the_workers(workers: int, initial_workers: int) -> None:
    stream = Parts([7, 13, 1, 50, 0, 29])

    def data(workers: int) -> list[TrainLoader]:
        plans = plans_of((2, 6, 1), (2, 6, 1), workers, initial_workers)
        return [StreamLoader(stream, plan, seed=5, repeats=1, collate=collate, window=24) for plan in plans]

    assert steps_of(data(workers), 1, start=2) == steps_of(data(initial_workers), 1, start=2)


def test_batches_that_a_plan_cannot_split() -> None:
    progress = Progress(total_batch=12, processes=2, batch_size=6, workers=0)
    with pytest.raises(
        ValueError, match=r"12 samples in a step, which 5 processes with batches of up to 3 .* divides 12"
    ):
        BatchPlan.initial(3, processes=5).resumed(progress, 1)
    with pytest.raises(ValueError, match=r"batches of up to 4 \(multiples of 2\) cannot split equally"):
        BatchPlan.initial(4, processes=4).resumed(progress, 2)
    with pytest.raises(ValueError, match=r"0 samples in a step, which 1 processes .* cannot split equally"):
        BatchPlan.initial(4).resumed(Progress(total_batch=0), 1)
    with pytest.warns(UserWarning, match="on 3 processes, that is 2 batches of 2 each"):
        plan = BatchPlan.initial(3, processes=3).resumed(progress, 2)
    assert (plan.batch_size, plan.grad_accum_steps, plan.total_batch) == (2, 2, 12)


def test_what_is_skipped_is_not_opened() -> None:
    stream = Parts([12, 12, 12, 12])
    part = StreamSampler(stream.lengths, BatchPlan.initial(4), seed=3, window=8)
    order = ReshardedStreamSampler([part], BatchPlan.initial(4))
    reader = ReshardedStreamReader(stream, order, collate)
    for request in order.requests(0, 8):
        reader(request)
    assert stream.opened == part.parts(0)[2:]


@pytest.mark.parametrize(
    ("processes", "workers", "length"),
    [*((processes, 0, length) for processes in (1, 2, 3) for length in (1, 2, 9, 24, 25)), (2, 2, 25)],
)
@pytest.mark.parametrize("kind", ["samples", "stream"])
def test_evaluation_meets_every_sample_once(processes: int, workers: int, kind: str, length: int) -> None:
    samples = Numbers(list(range(length))) if kind == "samples" else Parts([length // 3, length - length // 3])
    met = []
    for process in range(processes):
        options = {"process": process, "processes": processes}
        data = EvalLoader(samples, 4, workers=workers, collate=collate, **options)
        batches = list(data)
        assert len(batches) == len(data)
        assert numbers(list(data)) == numbers(batches)
        met += numbers(batches)
        # With their indices, which here are the samples themselves.
        for indices, batch in EvalLoader(samples, 4, workers=workers, collate=collate, numbered=True, **options):
            assert numbers([batch]) == indices
    assert sorted(met) == list(range(length))


def test_reading_leaves_the_generators_alone() -> None:
    torch.manual_seed(1)
    random.seed(1)
    expected = torch.rand(()), random.random()
    torch.manual_seed(1)
    random.seed(1)
    every(shuffled())
    assert (torch.rand(()), random.random()) == expected


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", [shuffled, streamed])
def test_batches_may_be_asked_for_again_at_any_time(make: type[TrainLoader], workers: int) -> None:
    data = make(workers=workers)
    expected = every(make(workers=workers), 4, 2)
    former = data.batches(0, 0)
    next(former)
    unused = data.batches(2, 0)
    torch.testing.assert_close(list(data.batches(4, 2)), expected, rtol=0, atol=0)
    assert list(former) == list(unused) == []
    latter = data.batches(4, 2)
    torch.testing.assert_close(next(latter), expected[0], rtol=0, atol=0)


def children() -> set[int]:
    return {child.pid for child in multiprocessing.active_children() if child.pid is not None}


@pytest.mark.parametrize("make", [shuffled, streamed])
def test_no_worker_outlives_its_data(make: type[TrainLoader]) -> None:
    before = children()
    data = make(workers=2)
    every(data, 0)
    workers = children() - before
    assert len(workers) == 2
    every(data, 1)
    assert children() - before == workers, "workers should stay from epoch to epoch"
    batches = data.batches(2, 0)
    next(batches)
    del data, batches
    gc.collect()
    assert children() == before


def test_no_worker_outlives_an_evaluation() -> None:
    before = children()
    data = EvalLoader(Numbers(list(range(20))), 4, workers=2, collate=collate)
    batches = iter(data)
    next(batches)
    assert len(children() - before) == 2
    list(batches)
    del batches
    gc.collect()
    assert children() == before


def test_workers_leave_signals_to_the_main_process() -> None:
    before = children()
    data = shuffled(workers=2)
    batches = data.batches(0, 0)
    # One batch from each, so that both have begun.
    first = [next(batches), next(batches)]
    for worker in children() - before:
        os.kill(worker, signal.SIGINT)
        os.kill(worker, signal.SIGTERM)
    time.sleep(0.1)
    torch.testing.assert_close([*first, *batches], every(shuffled()), rtol=0, atol=0)


@pytest.mark.integration
def test_a_run_that_fails_does_not_wait_for_its_workers() -> None:
    script = """
from inlinevit.data.loader import EvalLoader
batches = iter(EvalLoader([1] * 100, 1, workers=2, collate=sum))
next(batches)
raise KeyError("all of this is still alive")
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert ended.stderr.rstrip().endswith("KeyError: 'all of this is still alive'")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_mistake_found_by_a_worker_is_told_in_its_own_words(workers: int) -> None:
    data = EvalLoader(Numbers([1, 2, -3]), 1, workers=workers, collate=collate)
    batches = iter(data)
    next(batches)
    next(batches)
    with pytest.raises(ValueError, match=r"^-3 is below zero: choose another$"):
        next(batches)


@pytest.mark.parametrize(("count", "repeats"), [(10, 1), (10, 3), (10, 10), (10, 11), (7, 10**12)])
def test_repeated_samples_take_no_more_memory_than_others(count: int, repeats: int) -> None:
    order, seeds = shuffle_indices(count, repeats, seed=3)
    assert len(order) == len(seeds) == count
    initial = torch.randperm(count, generator=torch.Generator().manual_seed(3)).tolist()
    assert order.tolist() == [initial[place // repeats] for place in range(count)]
