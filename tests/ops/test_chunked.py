"""Chunked InLine attention: values and gradients of the unchunked one."""

import pytest
import torch

from inlinevit import ops


def draw_problem(tokens=11, queries=7, dtype=torch.float64, affine=False, offset=0.0):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    shapes = [(2, 2, queries, 3), (2, 2, tokens, 3), (2, 2, tokens, 4), *([(2, 3, 3), (2, 3)] if affine else [])]
    return [(normal(*shape) + offset).to(dtype).requires_grad_() for shape in shapes]


def options_of(leaves, feature_map, mask):
    return dict(feature_map=feature_map, affine=tuple(leaves[3:]) or None, mask=mask)


@pytest.mark.parametrize("feature_map", ops.FEATURE_MAPS)
@pytest.mark.parametrize("masked", [False, True])
def test_values_and_gradients_equal_the_unchunked(feature_map, masked):
    leaves = draw_problem(affine=feature_map == "relu_affine")
    mask = torch.arange(11) < torch.tensor([[9], [4]]) if masked else None
    options = options_of(leaves, feature_map, mask)
    expected = ops.inline_attention(*leaves[:3], 0.7, path="covariance", **options)
    expected_grads = torch.autograd.grad(expected.sin().sum(), leaves)
    # One token, a divisor of no length, all tokens, more than all.
    for chunk in (1, 4, 11, 100):
        out = ops.chunked_inline_attention(*leaves[:3], 0.7, **options, chunk=chunk)
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(torch.autograd.grad(out.sin().sum(), leaves), expected_grads, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("feature_map", ["identity", "relu_affine"])
def test_gradcheck(feature_map):
    leaves = draw_problem(tokens=5, queries=3, affine=feature_map == "relu_affine")
    mask = torch.tensor([[True] * 5, [True, False, True, True, False]])

    def attention(q, k, v, *affine):
        return ops.chunked_inline_attention(q, k, v, feature_map=feature_map, affine=affine or None, mask=mask, chunk=2)

    assert torch.autograd.gradcheck(attention, leaves)


def test_padding_may_have_any_value():
    leaves = draw_problem()
    mask = torch.arange(11) < torch.tensor([[9], [4]])
    q, k, v = (leaf.detach() for leaf in leaves)
    padded = [q, k.masked_fill(~mask[:, None, :, None], float("nan")), v.masked_fill(~mask[:, None, :, None], 1e300)]
    padded = [leaf.requires_grad_() for leaf in padded]
    out = ops.chunked_inline_attention(*padded, mask=mask, feature_map="exp", chunk=3)
    expected = ops.inline_attention(*leaves, mask=mask, feature_map="exp")
    torch.testing.assert_close(out, expected)
    grads = torch.autograd.grad(out.sum(), padded)
    torch.testing.assert_close(grads, torch.autograd.grad(expected.sum(), leaves))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_with_large_means(dtype):
    leaves = draw_problem(tokens=300, dtype=dtype, offset=200.0)
    out = ops.chunked_inline_attention(*leaves, chunk=64)
    assert out.dtype == dtype
    exact = ops.inline_attention(*(leaf.double() for leaf in leaves))
    torch.testing.assert_close(out.double(), exact, rtol=1e-2, atol=0)
    assert all(grad.dtype == dtype for grad in torch.autograd.grad(out.float().sum(), leaves))


def test_only_inputs_and_the_state_are_kept_for_the_backward_pass():
    leaves = draw_problem(tokens=500, queries=500, affine=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        ops.chunked_inline_attention(*leaves[:3], feature_map="relu_affine", affine=tuple(leaves[3:]), chunk=10)
    ours = {leaf.data_ptr() for leaf in leaves}
    assert max(x.numel() for x in kept if x.data_ptr() not in ours) <= 2 * 2 * 3 * 4


def test_a_chunk_without_tokens_is_refused():
    with pytest.raises(ValueError, match="chunk is 0"):
        ops.chunked_inline_attention(*draw_problem(), chunk=0)
