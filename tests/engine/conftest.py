"""What the tests of the loop share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.engine.running import Server
from tests.engine.toy import settings


@pytest.fixture(scope="session")
def reference(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy run that nothing happened to."""
    output = tmp_path_factory.mktemp("reference") / "run"
    server.run(settings(output))
    return output


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """As many threads as the forked processes have: sums may depend on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
