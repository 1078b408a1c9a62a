"""Tensors that are kept between calls."""

import copy
import pickle

import pytest
import torch

from inlinevit.layers._kept import KeptTensors, may_keep


def test_the_tensors_used_last_are_kept():
    kept = KeptTensors(most=2)
    one, two, three = (torch.full((2,), float(value)) for value in (1, 2, 3))
    kept.keep("one", one)
    kept.keep("two", two)
    assert kept.get("one") is one
    kept.keep("three", three)
    assert [kept.get(key) for key in ("one", "two", "three")] == [one, None, three]
    kept.keep("three", one)
    assert kept.get("three") is one
    assert len(kept) == 2


def test_bytes_are_bounded():
    kept = KeptTensors(most=100, most_bytes=4000)
    for key in range(50):
        kept.keep(key, torch.zeros(300))
        assert kept.nbytes <= 4000
    assert [key for key in range(50) if kept.get(key) is not None] == [47, 48, 49]
    kept.keep("large", torch.zeros(1001))
    assert kept.get("large") is None
    assert len(kept) == 3


@pytest.mark.parametrize("duplicate", [copy.deepcopy, copy.copy, lambda kept: pickle.loads(pickle.dumps(kept))])
def test_copies_are_empty(duplicate):
    kept = KeptTensors(most=3, most_bytes=500)
    kept.keep("one", torch.ones(5))
    other = duplicate(kept)
    assert (len(other), other.most, other.most_bytes) == (0, 3, 500)
    assert len(kept) == 1


def test_nothing_is_kept_where_tensors_hold_no_numbers():
    cpu = torch.device("cpu")
    assert may_keep(cpu)
    assert not may_keep(torch.device("meta"))
    with torch._subclasses.FakeTensorMode():
        assert not may_keep(cpu)
    seen = []

    @torch.compile(backend="eager", fullgraph=True)
    def compiled(x):
        seen.append(may_keep(cpu))
        return x + 1

    compiled(torch.ones(1))
    assert seen == [False]
