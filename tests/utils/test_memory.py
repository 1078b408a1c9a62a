"""How much memory there is, and what is refused because it does not fit."""

from pathlib import Path

import pytest
import torch
from torch import nn

from inlinevit.utils import memory
from inlinevit.utils.memory import (
    available_memory,
    require_memory,
    require_memory_for_images,
    require_memory_for_model,
)


@pytest.fixture
def container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a container says what it may take."""
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    return tmp_path


def test_a_container_has_less_than_its_machine(container: Path) -> None:
    machine = available_memory()
    assert machine > 10**6
    for limit, used, expected in (("3000", "1000", 2000), ("1000", "3000", 0)):
        (container / "memory.max").write_text(f"{limit}\n")
        (container / "memory.current").write_text(f"{used}\n")
        assert available_memory() == expected
    (container / "memory.max").write_text("max\n")
    assert available_memory() > 10**6


def test_what_does_not_fit_is_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 2 * 10**9)
    require_memory(2e9, "it", "do without")
    with pytest.raises(
        ValueError, match=r"^it would take at least 3\.0 GB of memory, but 2\.0 GB are free: do without$"
    ):
        require_memory(3e9, "it", "do without")
    require_memory_for_images(1, 3, 10_000, 16_000, "choose less")
    with pytest.raises(ValueError, match=r"a batch of 2 images of 10000 × 16000 pixels would take at least 3\.8 GB"):
        require_memory_for_images(2, 3, 10_000, 16_000, "choose less")


def test_weights_are_counted_without_being_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 10**9)
    state = torch.get_rng_state()
    require_memory_for_model(lambda: nn.Linear(1000, 1000), "small", "choose less")
    with pytest.raises(ValueError, match=r"the weights of large would take at least 4000\.\d GB"):
        require_memory_for_model(lambda: nn.Linear(10**6, 10**6), "large", "choose less")
    assert torch.equal(state, torch.get_rng_state())
