"""Interleaved timing."""

from types import SimpleNamespace

import pytest
import torch

from inlinevit.benchmark import timing
from inlinevit.benchmark.timing import MIN_ROUNDS, interleave, quartiles


def test_functions_alternate_and_warm_up_does_not_count():
    calls = []
    times = interleave({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=3, warmup=2)
    assert calls == ["a", "b"] * 5
    assert {name: len(seconds) for name, seconds in times.items()} == {"a": 3, "b": 3}
    assert all(second >= 0 for seconds in times.values() for second in seconds)


def test_patience_ends_the_rounds_but_a_few_are_always_made():
    times = interleave({"a": lambda: None, "b": lambda: None}, rounds=50, patience=0.0)
    assert {name: len(seconds) for name, seconds in times.items()} == {"a": MIN_ROUNDS, "b": MIN_ROUNDS}


def test_short_calls_are_rehearsed():
    calls = []
    times = interleave({"a": lambda: calls.append("a")}, rounds=2, warmup=1, rehearse_below=9.0)
    assert calls == ["a"] * 5
    assert len(times["a"]) == 2


def test_on_a_gpu_its_events_are_the_clock(monkeypatch):
    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            calls.append("event")

        def elapsed_time(self, end):
            return 250.0  # milliseconds

    calls = []
    fake = SimpleNamespace(Event=Event, synchronize=lambda: calls.append("wait"))
    monkeypatch.setattr(timing, "torch", SimpleNamespace(cuda=fake))
    device = torch.device("cuda")
    times = interleave({"a": lambda: calls.append("a")}, rounds=1, warmup=0, device=device)
    assert times == {"a": [0.25]}
    assert calls == ["wait", "event", "a", "event", "wait"]


def test_quartiles():
    assert quartiles([5.0, 1.0, 3.0, 2.0, 4.0]) == pytest.approx((2.0, 3.0, 4.0))
