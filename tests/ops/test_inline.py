"""InLine attention: what holds of it alone."""

import torch

from inlinevit import ops


def test_a_zero_query_gets_the_mean_value(make_problem):
    problem = make_problem("inline", tokens=197)
    out = ops.inline_attention(torch.zeros_like(problem.q), problem.k, problem.v)
    torch.testing.assert_close(out, problem.v.mean(dim=-2, keepdim=True).expand_as(out))


def test_default_scale_and_map(make_problem):
    problem = make_problem("inline", width=32)
    q, k, v = problem.q, problem.k, problem.v
    assert torch.equal(ops.inline_attention(q, k, v), ops.inline_attention(q, k, v, 32**-0.5, "identity"))
