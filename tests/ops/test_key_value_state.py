"""States of InLine attention: summaries of tokens that merge exactly."""

from dataclasses import fields, replace
from functools import reduce
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inlinevit import ops
from inlinevit.ops import KeyValueState

HEADS, HEAD_DIM, VALUE_DIM, CHANNELS = 2, 3, 4, 5


def draw_tokens(number, seed=0, batch=2, dtype=torch.float64, offset=0.0):
    """Return keys, values and tokens with these means and different images."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return (torch.randn(*shape, generator=generator, dtype=torch.float64) + offset).to(dtype)

    return (
        normal(batch, HEADS, number, HEAD_DIM),
        normal(batch, HEADS, number, VALUE_DIM),
        normal(batch, number, CHANNELS),
    )


def split_state(k, v, tokens, bounds, mask=None):
    """Return the states of consecutive chunks of tokens that end at `bounds`."""
    edges = [0, *bounds, k.shape[2]]
    return [
        KeyValueState.from_tokens(
            k[:, :, start:end],
            v[:, :, start:end],
            tokens[:, start:end],
            None if mask is None else mask[:, start:end],
        )
        for start, end in pairwise(edges)
    ]


def assert_equal_states(actual, expected, rtol, size=1.0):
    """Compare states; `size` is the largest absolute key or value, which rounding errors are relative to."""
    assert torch.equal(actual.count, expected.count)
    for name in ("k_mean", "v_mean", "token_mean"):
        torch.testing.assert_close(getattr(actual, name), getattr(expected, name), rtol=0, atol=rtol * size)
    # A mean is off by eps·size, so the sum of n centred products is off by n·eps·size times their spread.
    limit = rtol * size * max(1.0, float(expected.count.max()))
    torch.testing.assert_close(actual.covariance, expected.covariance, rtol=0, atol=limit)


def assert_identical(actual, expected):
    for field in fields(KeyValueState):
        assert torch.equal(getattr(actual, field.name), getattr(expected, field.name)), field.name


@st.composite
def chunked_tokens(draw):
    number = draw(st.integers(0, 40))
    bounds = sorted(draw(st.lists(st.integers(0, number), max_size=5)))
    offset = draw(st.sampled_from([0.0, 1.0, -300.0, 1e6]))
    seed = draw(st.integers(0, 2**16))
    k, v, tokens = draw_tokens(number, seed, offset=offset)
    mask = None
    if draw(st.booleans()):
        mask = torch.rand(2, number, generator=torch.Generator().manual_seed(seed + 1)) < draw(
            st.sampled_from([0.1, 0.7])
        )
    return k, v, tokens, bounds, mask, abs(offset) + 10.0


@settings(max_examples=60, deadline=None)
@given(problem=chunked_tokens(), random=st.randoms(use_true_random=False))
def test_merging_is_associative_and_order_free(problem, random):
    k, v, tokens, bounds, mask, size = problem
    whole = KeyValueState.from_tokens(k, v, tokens, mask)
    states = split_state(k, v, tokens, bounds, mask)
    from_the_left = reduce(KeyValueState.merge, states)
    from_the_right = reduce(lambda state, before: before.merge(state), reversed(states))
    random.shuffle(states)
    while len(states) > 1:
        first, second = states.pop(random.randrange(len(states))), states.pop(random.randrange(len(states)))
        states.append(first.merge(second))
    for merged in (from_the_left, from_the_right, states[0]):
        assert_equal_states(merged, whole, rtol=1e-14, size=size)


def test_covariances_of_two_tokens_by_hand():
    k = torch.tensor([1.0, 3.0]).view(1, 1, 2, 1)
    v = torch.tensor([10.0, 30.0]).view(1, 1, 2, 1)
    one, two = (KeyValueState.from_tokens(k[:, :, i : i + 1], v[:, :, i : i + 1]) for i in range(2))
    assert one.covariance.item() == 0.0
    merged = one.merge(two)
    assert (merged.count.item(), merged.k_mean.item(), merged.v_mean.item()) == (2, 2.0, 20.0)
    assert merged.covariance.item() == 20.0
    assert merged.token_mean is None


def test_empty_states_change_nothing():
    k, v, tokens = draw_tokens(5, offset=1e6)
    state = KeyValueState.from_tokens(k, v, tokens)
    empty = KeyValueState.empty(2, HEADS, HEAD_DIM, VALUE_DIM, CHANNELS, dtype=torch.float64)
    none = KeyValueState.from_tokens(k[:, :, :0], v[:, :, :0], tokens[:, :0])
    masked = KeyValueState.from_tokens(k, v, tokens, torch.zeros(2, 5, dtype=torch.bool))
    for other in (empty, none, masked):
        assert_identical(other, empty)
        for merged in (state.merge(other), other.merge(state)):
            assert_identical(merged, state)
        assert not other.merge(empty).attend(k).any()


def test_padding_may_have_any_value():
    k, v, tokens = draw_tokens(6)
    mask = torch.tensor([[True] * 4 + [False] * 2] * 2)
    expected = KeyValueState.from_tokens(k[:, :, :4], v[:, :, :4], tokens[:, :4])
    k[:, :, 4:], v[:, :, 4:], tokens[:, 4:] = float("nan"), float("inf"), float("nan")
    assert_equal_states(KeyValueState.from_tokens(k, v, tokens, mask), expected, rtol=1e-14)


@pytest.mark.parametrize("feature_map", ops.FEATURE_MAPS)
@pytest.mark.parametrize("number", [1, 2, 23])
def test_attend_equals_inline_attention(feature_map, number):
    k, v, _ = draw_tokens(number)
    q = torch.randn(2, HEADS, 7, HEAD_DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    options = dict(feature_map=feature_map)
    if feature_map == "relu_affine":
        options["affine"] = torch.eye(HEAD_DIM, dtype=torch.float64) * 2, torch.ones(HEAD_DIM, dtype=torch.float64)
    mask = torch.arange(number) < torch.tensor([[number], [max(1, number - 3)]])
    for real in (None, mask):
        middle = number // 2
        states = [
            KeyValueState.from_tokens(
                k[:, :, part], v[:, :, part], mask=None if real is None else real[:, part], **options
            )
            for part in (slice(0, middle), slice(middle, None))
        ]
        for scale in (None, 0.3):
            out = states[1].merge(states[0]).attend(q, scale, **options)
            torch.testing.assert_close(out, ops.inline_attention(q, k, v, scale, mask=real, **options))


def test_gradients_pass_through_merged_states():
    k, v, tokens = draw_tokens(9)
    q = k[:, :, :4]
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = torch.autograd.grad(ops.inline_attention(*leaves).square().sum(), leaves)
    states = split_state(leaves[1], leaves[2], tokens, [2, 3])
    out = reduce(KeyValueState.merge, states).attend(leaves[0])
    torch.testing.assert_close(torch.autograd.grad(out.square().sum(), leaves), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_states_are_float32_at_least(dtype):
    # The mean of 3000 tokens near 60000 overflows in float16; in bfloat16 a sum would stop growing.
    k, v, tokens = draw_tokens(3000, dtype=dtype, offset=300.0)
    state = KeyValueState.from_tokens(k, v, tokens)
    assert {x.dtype for x in (state.k_mean, state.v_mean, state.covariance, state.token_mean)} == {torch.float32}
    exact = KeyValueState.from_tokens(k.double(), v.double(), tokens.double())
    torch.testing.assert_close(state.k_mean.double(), exact.k_mean, rtol=1e-6, atol=0)
    torch.testing.assert_close(state.covariance.double(), exact.covariance, rtol=0, atol=0.2)
    assert state.attend(k[:, :, :2]).dtype == dtype


def test_more_tokens_than_float32_can_count():
    k, v, _ = draw_tokens(1)
    one = KeyValueState.from_tokens(k, v)
    many = replace(one, count=torch.full_like(one.count, 2**24))
    assert many.merge(one).count.flatten().tolist() == [2**24 + 1] * 2


def test_states_that_do_not_fit_are_refused():
    k, v, tokens = draw_tokens(3)
    state = KeyValueState.from_tokens(k, v)
    with pytest.raises(ValueError, match="same shape and dtype"):
        state.merge(KeyValueState.from_tokens(k.float(), v.float()))
    with pytest.raises(ValueError, match="token mean"):
        state.merge(KeyValueState.from_tokens(k, v, tokens))
    with pytest.raises(ValueError, match="same batch, heads and tokens"):
        KeyValueState.from_tokens(k, v[:, :, 1:])
    with pytest.raises(ValueError, match="mask must be boolean"):
        KeyValueState.from_tokens(k, v, mask=torch.ones(2, 3))
    with pytest.raises(ValueError, match="tokens must be"):
        KeyValueState.from_tokens(k, v, tokens[:, 1:])
