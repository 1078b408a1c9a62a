"""All tests of this folder need the compiled library; INLINEVIT_KERNELS forces a variant of it."""

import pytest

from inlinevit import kernels


@pytest.fixture(autouse=True)
def _library() -> None:
    if not kernels.available():
        pytest.skip(f"native kernels: {kernels.status().reason}")
