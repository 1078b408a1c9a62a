"""Numbers of steps that are read in blocks."""

import math

import pytest
import torch
from accelerate import Accelerator

from inlinevit.engine.monitor import StepMonitor, StepValues


@pytest.fixture
def monitor() -> StepMonitor:
    return StepMonitor(Accelerator(cpu=True))


def add(monitor: StepMonitor, step: int) -> None:
    monitor.add(StepValues(step, 0.1, 1.0), torch.tensor([step, step + 1.0, 0.5]))


def read(monitor: StepMonitor, *, start: bool = False, wait: bool = False) -> list[int]:
    steps, requests = monitor.read((False, False), start=start, wait=wait)
    assert requests == (False, False)
    assert all(step.own == step.mean == [step.step, step.step + 1.0, 0.5] for step in steps)
    return [step.step for step in steps]


def test_a_copy_is_read_one_step_later(monitor: StepMonitor) -> None:
    found = []
    for step in range(1, 8):
        add(monitor, step)
        found.append(read(monitor, start=step % 3 == 0))
    assert found == [[], [], [], [1, 2, 3], [], [], [4, 5, 6]]
    assert read(monitor, start=True) == []
    assert read(monitor) == [7]
    assert read(monitor) == []


def test_waiting_reads_all_steps_in_order(monitor: StepMonitor) -> None:
    for step in (1, 2):
        add(monitor, step)
    read(monitor, start=True)
    add(monitor, 3)
    assert read(monitor, wait=True) == [1, 2, 3]


def test_one_process_is_answered_at_once(monitor: StepMonitor) -> None:
    add(monitor, 1)
    steps, requests = monitor.read((True, False), start=False, wait=False)
    assert requests == (True, False)
    assert [step.step for step in steps] == [1]


@pytest.mark.parametrize(
    ("own", "mean", "expected"),
    [
        ([1.0, 2.0, 0.5], [1.0, 3.0, 0.5], None),
        ([1.0, math.nan, 0.5], [1.0, math.nan, 0.5], ("the loss is nan", 1)),
        ([math.inf, 2.0, math.nan], [math.inf, 2.0, math.nan], ("the loss is inf", 0)),
        ([1.0, 2.0, math.inf], [1.0, 3.0, math.inf], ("the norm of the gradients is inf (loss 2)", 1)),
        ([1.0, 2.0, 0.5], [1.0, math.nan, 0.5], ("the loss of another process is NaN or infinite", None)),
    ],
)
def test_what_is_not_finite(own: list[float], mean: list[float], expected: tuple[str, int | None] | None) -> None:
    values = StepValues(1, 0.1, 1.0, own, mean)
    assert values.find_non_finite() == expected
    if expected is None:
        assert values.loss == 2.0
