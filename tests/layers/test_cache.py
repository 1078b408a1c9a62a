"""The cache of tensors between calls."""

import copy
import pickle

import pytest
import torch

from inlinevit.layers._cache import TensorCache, can_cache


def test_the_tensors_used_last_are_kept():
    cache = TensorCache(max_entries=2)
    one, two, three = (torch.full((2,), float(value)) for value in (1, 2, 3))
    cache.put("one", one)
    cache.put("two", two)
    assert cache.get("one") is one
    cache.put("three", three)
    assert [cache.get(key) for key in ("one", "two", "three")] == [one, None, three]
    cache.put("three", one)
    assert cache.get("three") is one
    assert len(cache) == 2


def test_bytes_are_bounded():
    cache = TensorCache(max_entries=100, max_bytes=4000)
    for key in range(50):
        cache.put(key, torch.zeros(300))
        assert cache.nbytes <= 4000
    assert [key for key in range(50) if cache.get(key) is not None] == [47, 48, 49]
    cache.put("large", torch.zeros(1001))
    assert cache.get("large") is None
    assert len(cache) == 3


@pytest.mark.parametrize("duplicate", [copy.deepcopy, copy.copy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_copies_are_empty(duplicate):
    cache = TensorCache(max_entries=3, max_bytes=500)
    cache.put("one", torch.ones(5))
    other = duplicate(cache)
    assert (len(other), other.max_entries, other.max_bytes) == (0, 3, 500)
    assert len(cache) == 1


def test_nothing_is_kept_where_tensors_hold_no_numbers():
    cpu = torch.device("cpu")
    assert can_cache(cpu)
    assert not can_cache(torch.device("meta"))
    with torch._subclasses.FakeTensorMode():
        assert not can_cache(cpu)
    seen = []

    @torch.compile(backend="eager", fullgraph=True)
    def compiled(x):
        seen.append(can_cache(cpu))
        return x + 1

    compiled(torch.ones(1))
    assert seen == [False]
