"""Peak memory, on functions whose peak is known."""

import torch
from torch import nn

from inlinevit.benchmark.memory import peak_memory

CPU = torch.device("cpu")
MEGABYTE = torch.ones(250_000).nbytes


def test_the_peak_of_a_function_is_the_most_that_it_holds_at_a_time():
    def three_then_one():
        a = torch.ones(250_000)
        b = a.neg()
        c = b.neg()
        del a, b
        return c.neg_()

    assert peak_memory(three_then_one, CPU) == 3 * MEGABYTE


def test_what_was_there_before_does_not_count_even_if_it_is_freed():
    held = [torch.ones(2_000_000)]

    def free_and_take():
        held.clear()
        return torch.ones(250_000)

    assert peak_memory(free_and_take, CPU) == MEGABYTE


def test_the_peak_is_the_same_each_time():
    layer = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    x = torch.randn(100, 64)

    def step():
        layer.zero_grad()
        layer(x).square().sum().backward()

    peaks = {peak_memory(step, CPU) for _ in range(3)}
    assert len(peaks) == 1
    # Gradients, and at least the wide activation.
    assert peaks.pop() > sum(one.nbytes for one in layer.parameters()) + 100 * 256 * 4


def test_nothing_is_written(capfd):
    peak_memory(lambda: torch.ones(3), CPU)
    assert capfd.readouterr() == ("", "")
