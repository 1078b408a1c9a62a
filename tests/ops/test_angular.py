"""Angular attention: what holds of it alone. Parity with the explicit form is in test_weights.py."""

import math

import pytest
import torch

from inlinevit import ops

MASK = torch.tensor([[True, True, False, True, False], [False, True, True, True, True]])


@pytest.mark.parametrize("mask", [None, MASK], ids=["whole", "masked"])
def test_it_is_the_formula(make_problem, mask):
    """u = ½v_i + (1/π)·q̂_i(K̂ᵀV), of unit length."""
    problem = make_problem("angular", queries=5, tokens=5, mask=mask)
    out = problem.fast()
    for image, head, query in torch.cartesian_prod(torch.arange(2), torch.arange(2), torch.arange(5)).tolist():
        q, k, v = problem.q[image, head, query], problem.k[image, head], problem.v[image, head]
        real = [token for token in range(5) if mask is None or mask[image, token]]
        u = sum((q @ k[token] / (q.norm() * k[token].norm())) * v[token] for token in real) / math.pi
        if query in real:
            u = u + v[query] / 2
        torch.testing.assert_close(out[image, head, query], u / u.norm(), rtol=0, atol=1e-12)


def test_answers_have_unit_length(make_problem):
    problem = make_problem("angular", queries=5, tokens=9, width=7)
    torch.testing.assert_close(problem.fast().norm(dim=-1), torch.ones(2, 2, 5, dtype=torch.float64))
    assert torch.all(problem.explicit().norm(dim=-1).sub(1).abs() < 1e-12)


def test_rows_without_values_are_not_divided(make_problem):
    problem = make_problem("angular", queries=5)
    u = ops.attention_weights(problem.q, problem.k, kind="angular") @ problem.v
    torch.testing.assert_close(u / u.norm(dim=-1, keepdim=True), problem.fast(), rtol=0, atol=1e-12)
    assert torch.all((u.norm(dim=-1) - 1).abs() > 1e-6)


def test_some_of_the_queries_know_their_places(make_problem):
    problem = make_problem("angular")
    whole = problem.weights()
    q, k, v = problem.q, problem.k, problem.v
    for first, last in ((0, 3), (3, 5), (5, 7), (6, 7)):
        rows = ops.attention_weights(q[:, :, first:last], k, kind="angular", v=v, first=first)
        torch.testing.assert_close(rows, whole[:, :, first:last], rtol=0, atol=1e-12)


def test_the_length_of_queries_keys_and_answers_is_lost(make_problem):
    problem = make_problem("angular")
    factors = torch.rand(2, 2, 7, 1, dtype=torch.float64) + 0.5
    scaled = ops.angular_attention(factors * problem.q, factors.flip(2) * problem.k, 7 * problem.v)
    torch.testing.assert_close(scaled, problem.fast())


def test_more_queries_than_values_are_refused():
    q = torch.zeros(1, 1, 3, 4)
    with pytest.raises(ValueError, match="each query adds its own value, but there are 3 queries and 2 values"):
        ops.angular_attention(q, q[:, :, :2], q[:, :, :2])
