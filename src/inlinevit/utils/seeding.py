"""Randomness that comes back: every step and every sample has a seed of its own.

A run that is stopped and resumed then draws the same numbers as one that never stopped, and nothing needs to be saved
but the number of the step.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

# numpy takes no larger seeds.
SEEDS = 2**32


def derive_seed(*parts: int) -> int:
    """A seed for these numbers: the run's seed, then what tells this draw from all others."""
    # The number of parts goes in, for numpy does not tell (1,) from (1, 0).
    return int(np.random.SeedSequence((len(parts), *parts)).generate_state(1)[0])


def set_seed(seed: int) -> None:
    """Seed Python's, numpy's and torch's generators, those of all devices."""
    set_cpu_seed(seed)
    torch.manual_seed(seed)


def set_cpu_seed(seed: int) -> None:
    """Seed Python's, numpy's and torch's generators on the CPU: all that augmentation draws from."""
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)


@contextmanager
def preserve_rng_state() -> Iterator[None]:
    """A context after which the generators on the CPU are as they were before.

    Keeping them takes longer than seeding them, so put it around a batch rather than around each of its samples.
    """
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
