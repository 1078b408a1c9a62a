"""Samplers: which samples a batch has, as a function of the seed, the epoch and the batch plan alone."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..utils.seeding import SEEDS, derive_seed
from .batch_plan import BatchPlan

# The index of a sample, and the seed that it is augmented with.
SeededIndex = tuple[int, int]


def shuffle_indices(count: int, repeats: int, seed: int) -> tuple[Tensor, Tensor]:
    """Shuffle the indices of samples.

    Args:
        count: Number of samples, and of indices to return.
        repeats: How often each index comes in succession; only the first count / repeats of the shuffled ones come.
        seed: Determines the indices and the seeds of the samples.

    Returns:
        The indices of samples, (count,), and a seed for each, (count,).
    """
    generator = torch.Generator().manual_seed(seed)
    shuffled = torch.randperm(count, generator=generator)[: -(-count // repeats)]
    indices = shuffled.repeat_interleave(min(repeats, count))[:count]
    return indices, torch.randint(SEEDS, (count,), generator=generator)


class ShardedSampler:
    """Splits the shuffled samples of an epoch over the processes, with a seed for each sample.

    All processes shuffle alike and take their part of each global batch (one batch of every process), so the samples of
    a step depend on their number alone, not on how they are split over processes. The last samples of an epoch that do
    not fill a global batch are left out.

    Args:
        length: Samples of the data set.
        plan: Batches and processes.
        seed: The run's seed.
        repeats: How often a sample comes in succession, each time with another seed; an epoch has as many samples as
            without.
    """

    def __init__(self, length: int, plan: BatchPlan, *, seed: int, repeats: int = 1) -> None:
        self.length, self.plan, self.seed, self.repeats = length, plan, seed, repeats
        self.batch_size, self.global_batch = plan.batch_size, plan.batch_size * plan.processes

    def __len__(self) -> int:
        return self.length // self.global_batch * self.global_batch // (self.batch_size * self.plan.processes)

    def shuffle(self, epoch: int) -> tuple[Tensor, Tensor]:
        """Return the indices of all processes for an epoch, one global batch after another, and their seeds."""
        return shuffle_indices(self.length, self.repeats, derive_seed(self.seed, epoch))

    def requests(self, epoch: int, start: int) -> Iterator[list[SeededIndex]]:
        """Yield the indices and seeds of each batch of an epoch, without the first `start` batches."""
        indices, seeds = self.shuffle(epoch)
        for batch in range(start, len(self)):
            first = (batch * self.plan.processes + self.plan.process) * self.batch_size
            chosen = slice(first, first + self.batch_size)
            yield list(zip(indices[chosen].tolist(), seeds[chosen].tolist(), strict=True))


class GroupedSampler(ShardedSampler):
    """A ShardedSampler whose global batches have samples of one group each, such as landscape or portrait images.

    What remains of the groups, less than a global batch of each, makes mixed batches, so there are as many batches as
    without groups. Pure and mixed batches are shuffled.

    Args:
        groups: The group of each sample, by its index; further arguments as for ShardedSampler.
    """

    def __init__(self, groups: Sequence[int], plan: BatchPlan, *, seed: int) -> None:
        super().__init__(len(groups), plan, seed=seed)
        self.groups = torch.tensor(groups)
        # Of the processes that the run was started with, so that each step keeps its samples when it is resumed.
        self.global_batch = plan.initial_batch_size * plan.initial_processes

    def shuffle(self, epoch: int) -> tuple[Tensor, Tensor]:
        """See ShardedSampler.shuffle."""
        indices, seeds = super().shuffle(epoch)
        total = self.global_batch
        groups = self.groups[indices]
        pure, remaining = [], []
        for group in self.groups.unique():
            members = (groups == group).nonzero().flatten()
            filled = len(members) // total * total
            pure.append(members[:filled])
            remaining.append(members[filled:])
        # Sorted, the remaining ones are as shuffled, so the last of them, which fill no batch, are of any group.
        batches = torch.cat([*pure, torch.cat(remaining).sort().values])[: self.length // total * total].view(-1, total)
        batch_order, _ = shuffle_indices(len(batches), 1, derive_seed(self.seed, epoch, 1))
        positions = batches[batch_order].flatten()
        return indices[positions], seeds[positions]
