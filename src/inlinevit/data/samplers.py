"""Which samples a batch has: orders that follow from the seed and the epoch alone."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..utils.seeding import SEEDS, derive_seed

# A sample's index, and the seed that it is augmented with.
Place = tuple[int, int]


def shuffle_indices(count: int, repeats: int, seed: int) -> tuple[Tensor, Tensor]:
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


def check_one_batch(batches: int, samples: int, batch_size: int, processes: int) -> None:
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


class ShardedSampler:
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
        return shuffle_indices(self.length, self.repeats, derive_seed(self.seed, epoch))

    def requests(self, epoch: int, start: int) -> Iterator[list[Place]]:
        """The places of each batch of an epoch, without the first `start` batches."""
        order, seeds = self.draw(epoch)
        for batch in range(start, len(self)):
            first = (batch * self.processes + self.process) * self.batch_size
            chosen = slice(first, first + self.batch_size)
            yield list(zip(order[chosen].tolist(), seeds[chosen].tolist(), strict=True))


class GroupedSampler(ShardedSampler):
    """A sharded order in which the samples of a total batch are of one group, such as images that lie or stand.

    What is left of the groups, less than a total batch of each, makes mixed batches. So there are as many batches as
    without groups. Pure and mixed ones come in any order.

    Args:
        groups: The group of each sample, by its index.
        batch_size: Samples in a batch of one process.
        seed: The run's seed.
        process: This process.
        processes: How many there are.
        repeats: As for ShardedSampler.
        drawn_batch: As for ShardedSampler; the samples that are drawn together are of one group.
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
        """See ShardedSampler.draw."""
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
        turns, _ = shuffle_indices(len(batches), 1, derive_seed(self.seed, epoch, 1))
        places = batches[turns].flatten()
        return order[places], seeds[places]
