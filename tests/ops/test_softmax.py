"""Softmax attention: bias and masks. Parity with the explicit form is in test_weights.py."""

import pytest
import torch

from inlinevit import ops

MASK = torch.tensor([[True, True, False, True, False], [False, True, True, True, True]])


@pytest.mark.parametrize("mask", [None, MASK], ids=["whole", "masked"])
@pytest.mark.parametrize("shape", [(2, 2, 3, 5), (1, 2, 3, 5), (2, 1, 3, 5), (1, 1, 1, 5)])
def test_bias(make_problem, shape, mask):
    """The bias is added to the scores, whichever of its dimensions are broadcast."""
    problem = make_problem("softmax", queries=3, tokens=5, mask=mask, bias=torch.randn(shape, dtype=torch.float64))
    scores = problem.q @ problem.k.transpose(-2, -1) / 2 + problem.options["bias"]
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, None, :], -1e30)
    fast, expected = problem.fast(), scores.softmax(dim=-1) @ problem.v
    torch.testing.assert_close(fast, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(problem.explicit(), expected, rtol=0, atol=1e-12)
    cotangent = torch.randn_like(fast)
    torch.testing.assert_close(
        problem.gradients(fast, cotangent), problem.gradients(expected, cotangent), rtol=1e-10, atol=1e-10
    )


def test_bias_of_a_query_that_does_not_see_all(make_problem):
    """As if scores and biases of the others were not there."""
    problem = make_problem("softmax", queries=3, tokens=5, mask=MASK, bias=torch.randn(2, 2, 3, 5).double())
    attn_mask = torch.rand(2, 2, 3, 5) < 0.6
    rows = problem.weights(attn_mask=attn_mask)
    for image, head, query in torch.cartesian_prod(torch.arange(2), torch.arange(2), torch.arange(3)).tolist():
        visible = attn_mask[image, head, query] & MASK[image]
        scores = problem.k[image, head, visible] @ problem.q[image, head, query] / 2
        scores = scores + problem.options["bias"][image, head, query, visible]
        torch.testing.assert_close(rows[image, head, query, visible], scores.softmax(dim=0), rtol=0, atol=1e-12)
        assert torch.all(rows[image, head, query, ~visible] == 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    q, k, v = torch.randn(3, 1, 2, 197, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = ops.softmax_attention(q.double(), k.double(), v.double())
    error = (ops.softmax_attention(q, k, v).double() - expected).norm() / expected.norm()
    assert error <= 2 * torch.finfo(dtype).eps


def test_large_scores_do_not_overflow():
    q = torch.full((1, 1, 2, 4), 1e4)
    v = torch.tensor([[1.0], [3.0]])[None, None]
    assert ops.softmax_attention(q, q, v).flatten().tolist() == [2.0, 2.0]
    assert ops.attention_weights(q, q, kind="softmax").flatten().tolist() == [0.5] * 4
