"""Hydra attention: what holds of it alone. Parity with the explicit form is in test_weights.py."""

import pytest
import torch

from inlinevit import ops

MASK = torch.tensor([[True, True, False, True, False], [False, True, True, True, True]])


@pytest.mark.parametrize("mask", [None, MASK], ids=["whole", "masked"])
def test_heads_of_one_channel_are_the_formula(make_problem, mask):
    """φ(q) ⊙ Σ_j φ(k_j) ⊙ v_j, with lengths over all channels."""
    problem = make_problem("hydra", queries=3, tokens=5, heads=6, width=1, value_width=1, mask=mask)
    q, k, v = (x[..., 0].transpose(1, 2) for x in (problem.q, problem.k, problem.v))
    expected = torch.zeros(2, 3, 6, dtype=torch.float64)
    for image in range(2):
        total = torch.zeros(6, dtype=torch.float64)
        for token in range(5):
            if mask is None or mask[image, token]:
                total = total + k[image, token] / k[image, token].norm() * v[image, token]
        for query in range(3):
            expected[image, query] = q[image, query] / q[image, query].norm() * total
    out = problem.fast()
    torch.testing.assert_close(out[..., 0].transpose(1, 2), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(problem.explicit(), out, rtol=0, atol=1e-12)
    cotangent = torch.randn_like(out)
    torch.testing.assert_close(
        problem.gradients(out, cotangent), problem.gradients(problem.explicit(), cotangent), rtol=0, atol=1e-10
    )


@pytest.mark.parametrize("width", [1, 4])
def test_the_length_of_queries_and_keys_is_lost(make_problem, width):
    problem = make_problem("hydra", width=width, value_width=width)
    q, k, v = problem.q, problem.k, problem.v
    factors = torch.rand(2, 1, 7, 1, dtype=torch.float64) + 0.5
    torch.testing.assert_close(ops.hydra_attention(factors * q, factors.flip(2) * k, v), problem.fast())
    # But that of one head among the others is not.
    assert not torch.allclose(ops.hydra_attention(torch.tensor([1.0, 3.0])[:, None, None] * q, k, v), problem.fast())


def test_zeros_give_zeros(make_problem):
    """And no NaN, forward or backward."""
    problem = make_problem("hydra")
    for q, k in ((problem.q * 0, problem.k), (problem.q, problem.k * 0)):
        out = ops.hydra_attention(q, k, problem.v)
        assert torch.all(out == 0)
        for gradient in torch.autograd.grad(out.sum(), (problem.q, problem.k, problem.v)):
            assert gradient.isfinite().all()
