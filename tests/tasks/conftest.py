"""What tests of all tasks use."""

from collections.abc import Iterator

import pytest
import torch
from accelerate.state import AcceleratorState


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As many threads as other processes have: sums may depend on it. And no precision of an earlier test."""
    AcceleratorState._reset_state()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
