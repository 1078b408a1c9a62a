"""All tests of this folder need the compiled library; INLINEVIT_KERNELS forces a variant of it."""

from collections.abc import Iterator

import pytest
import torch

from inlinevit import kernels


@pytest.fixture(autouse=True)
def _library() -> None:
    if not kernels.available():
        pytest.skip(f"native kernels: {kernels.status().reason}")


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    """Two threads, however many the test run has: with one, the kernels do not divide their work."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
