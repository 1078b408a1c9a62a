"""Reproducible randomness: every step and every sample has its own seed.

A run that is stopped and resumed then has the same random numbers as one that never stopped, and only the number of
the step needs to be saved.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

# The largest seed of numpy, plus one.
SEEDS = 2**32


def derive_seed(*parts: int) -> int:
    """Return a seed for these numbers: the run's seed, then what distinguishes this use from others."""
    # With the number of parts, because numpy does not distinguish (1,) from (1, 0).
    return int(np.random.SeedSequence((len(parts), *parts)).generate_state(1)[0])


def set_seed(seed: int) -> None:
    """Seed Python's, numpy's and torch's generators, those of all devices."""
    set_cpu_seed(seed)
    torch.manual_seed(seed)


def set_cpu_seed(seed: int) -> None:
    """Seed Python's, numpy's and torch's generators on the CPU, which augmentation uses."""
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)


@contextmanager
def preserve_rng_state() -> Iterator[None]:
    """Restore the generators on the CPU at the end of this context.

    Saving them takes longer than seeding them, so put it around a batch rather than around each of its samples.
    """
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
