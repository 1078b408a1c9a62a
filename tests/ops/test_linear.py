"""Linear attention: what holds of it alone."""

import pytest
import torch

from inlinevit import ops


def test_a_query_whose_map_is_zero_gets_zeros(make_problem):
    """And no NaN, forward or backward."""
    problem = make_problem("linear")
    q, k, v = (x.detach().requires_grad_() for x in (problem.q, problem.k, problem.v))
    out = ops.linear_attention(-q.abs(), k, v)
    assert torch.all(out == 0)
    assert torch.all(ops.attention_weights(-q.abs(), k, kind="linear") == 0)
    for gradient in torch.autograd.grad(out.sum(), (q, k, v)):
        assert gradient.isfinite().all()


def test_scale_cancels(make_problem):
    problem = make_problem("linear", tokens=197)
    q, k, v = problem.q, problem.k, problem.v
    torch.testing.assert_close(
        ops.linear_attention(q, k, v, scale=5.0), ops.linear_attention(q, k, v), rtol=1e-12, atol=0
    )


def test_a_divisor_near_zero_still_runs():
    """Signed maps break training, which is the experiment: no error, no clamp."""
    q = torch.tensor([1.0, 1.0], dtype=torch.float64)[None, None, None]
    k = torch.tensor([[1.0, 0.0], [0.0, -1 + 1e-6]], dtype=torch.float64)[None, None]
    v = torch.tensor([[1.0], [0.0]], dtype=torch.float64)[None, None]
    assert float(ops.linear_attention(q, k, v, feature_map="identity")) == pytest.approx(1e6, rel=1e-4)
