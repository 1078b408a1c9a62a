"""Taking turns."""

from inlinevit.benchmark.timing import quartiles, take_turns


def test_rivals_take_turns_and_warm_up_does_not_count():
    calls = []
    times = take_turns({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=3, warmup=2)
    assert calls == ["a", "b"] * 5
    assert {name: len(seconds) for name, seconds in times.items()} == {"a": 3, "b": 3}
    assert all(second >= 0 for seconds in times.values() for second in seconds)


def test_quartiles():
    assert quartiles([5.0, 1.0, 3.0, 2.0, 4.0]) == (2.0, 3.0, 4.0)
