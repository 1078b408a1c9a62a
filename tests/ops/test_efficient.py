"""Efficient attention: what holds of it alone. Parity with the explicit form is in test_weights.py."""

import torch

from inlinevit import ops

MASK = torch.tensor([[True, True, False, True, False], [False, True, True, True, True]])


def test_it_is_the_formula(make_problem):
    """ρ(q)·(ρ(K)ᵀV): q over its channels, k over the tokens."""
    problem = make_problem("efficient", queries=3, tokens=5)
    expected = torch.zeros(2, 2, 3, 3, dtype=torch.float64)
    for image, head, query in torch.cartesian_prod(torch.arange(2), torch.arange(2), torch.arange(3)).tolist():
        k, v = problem.k[image, head].exp(), problem.v[image, head]
        q = problem.q[image, head, query].exp()
        for channel in range(4):
            context = sum(k[token, channel] * v[token] for token in range(5)) / k[:, channel].sum()
            expected[image, head, query] += q[channel] / q.sum() * context
    torch.testing.assert_close(problem.fast(), expected, rtol=0, atol=1e-12)


def test_rows_are_shares(make_problem):
    rows = make_problem("efficient").weights()
    assert torch.all(rows > 0)
    torch.testing.assert_close(rows.sum(dim=-1), torch.ones(2, 2, 7, dtype=torch.float64))


def test_a_constant_of_a_key_channel_or_a_query_does_not_matter(make_problem):
    problem = make_problem("efficient")
    q, k, v = problem.q, problem.k, problem.v
    shifted = ops.efficient_attention(q + 5, k + torch.randn(2, 2, 1, 4, dtype=torch.float64), v)
    torch.testing.assert_close(shifted, problem.fast())


def test_large_keys_do_not_overflow_and_small_ones_beside_padding_do_not_vanish():
    q, v = torch.zeros(1, 1, 2, 4), torch.tensor([[1.0], [3.0], [100.0]])[None, None]
    mask = torch.tensor([[True, True, False]])
    for level in (1e4, -1e4):
        k = torch.full((1, 1, 3, 4), level).masked_fill(~mask[:, None, :, None], 0.0)
        assert ops.efficient_attention(q, k, v, mask).flatten().tolist() == [2.0, 2.0]
        assert ops.efficient_weights(q, k, mask=mask).flatten().tolist() == [0.5, 0.5, 0.0] * 2
