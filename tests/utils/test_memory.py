"""How much memory there is, and what is refused because it does not fit."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from inlinevit.utils import memory
from inlinevit.utils.memory import (
    MALLOC_VARIABLES,
    available_memory,
    keep_freed_memory,
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


# Trains a small model, and prints how many pages were mapped in the second half of the steps.
STEPS = """
import resource
import torch
from torch import nn
from inlinevit.utils.memory import keep_freed_memory

kept = {kept} and keep_freed_memory()
torch.set_num_threads(1)
mlps = [nn.Sequential(nn.Linear(48, 192), nn.GELU(), nn.Linear(192, 48)) for _ in range(2)]
model, tokens = nn.Sequential(mlps[0], nn.LayerNorm(48), mlps[1]), torch.randn(4096, 48)
for count in range(20):
    if count == 10:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    model.zero_grad()
    model(tokens).square().mean().backward()
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def train_in_process(kept: bool, **variables: str) -> tuple[str, int]:
    """Run STEPS in a process of its own; returns what keep_freed_memory returned, and the page faults of 10 steps."""
    environment = {name: text for name, text in os.environ.items() if name not in MALLOC_VARIABLES} | variables
    command = [sys.executable, "-c", STEPS.format(kept=kept)]
    output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    word, count = output.split()
    return word, int(count)


@pytest.mark.integration
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_the_memory_of_a_training_step_is_used_again_without_page_faults() -> None:
    # Three runs had 6,400 to 16,500 faults, and 0 to 189 with memory that is kept.
    assert train_in_process(kept=False)[1] > 3000
    word, count = train_in_process(kept=True)
    assert word == "True"
    assert count < 1000


@pytest.mark.integration
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_what_the_environment_says_about_freed_memory_stays() -> None:
    word, count = train_in_process(kept=True, MALLOC_TRIM_THRESHOLD_="1000000")
    assert word == "False"
    assert count > 3000


def test_other_systems_keep_their_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not keep_freed_memory()
