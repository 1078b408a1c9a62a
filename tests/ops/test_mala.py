"""MALA: what holds of it alone. Parity with the explicit form is in test_weights.py."""

import pytest
import torch

from inlinevit import ops
from inlinevit.ops.rope import rope_tables, rotate

MASK = torch.tensor([[True, True, False, True, False, True], [False, True, True, True, True, False]])


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def tables(height: int, width: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = rope_tables((height, width), head_dim, dtype=torch.float64)
    return cos[None, None], sin[None, None]


@pytest.mark.parametrize("mask", [None, MASK], ids=["whole", "masked"])
def test_without_rotation_it_is_linear_plus_inline_attention_minus_the_mean(mask):
    q, k = draw(2, 2, 2, 6, 8)
    phi = {"feature_map": "elu_plus_one", "mask": mask}
    count = 6 if mask is None else mask.sum(dim=1)[:, None, None, None]
    # The ε of linear attention is added to a sum; that of MALA to the scaled mean.
    linear = ops.linear_weights(q, k, epsilon=1e-6 * count, **phi)
    mean = 1 / 6 if mask is None else mask[:, None, None, :].double() / count
    expected = linear + ops.inline_weights(q, k, **phi) - mean
    torch.testing.assert_close(ops.mala_weights(q, k, mask=mask), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("first", [0, 2])
def test_it_is_the_published_formula_with_rotation(first):
    """(1 + 1/(z + 1e-6))·s·q̃·(1/N Σ k̃ vᵀ) − z·v̄: rotation has no part in z."""
    q, k, v = draw(3, 1, 2, 6, 8)
    rope = tables(2, 3, 8)
    phi_q, phi_k = (torch.where(x > 0, x + 1, x.exp()) for x in (q, k))
    turned_q, turned_k = rotate(phi_q, rope), rotate(phi_k, rope)
    z = 8**-0.5 * phi_q @ phi_k.mean(dim=2, keepdim=True).transpose(2, 3)
    key_value = turned_k.transpose(2, 3) @ v / 6
    expected = (1 + 1 / (z + 1e-6)) * 8**-0.5 * turned_q @ key_value - z * v.mean(dim=2, keepdim=True)
    out = ops.mala_attention(q[:, :, first:], k, v, rope=rope, first=first)
    torch.testing.assert_close(out, expected[:, :, first:], rtol=0, atol=1e-12)
    weights = ops.mala_weights(q[:, :, first:], k, rope=rope, first=first)
    torch.testing.assert_close(weights @ v, expected[:, :, first:], rtol=0, atol=1e-12)
    assert (weights.sum(dim=-1) - 1).abs().max() > 1e-2


@pytest.mark.parametrize("size", [(1, 1), (3, 5)])
def test_gradients_with_rotation_are_those_of_the_explicit_form(size):
    count = size[0] * size[1]
    q, k, v = (x.requires_grad_() for x in draw(3, 2, 2, count, 8).unbind(0))
    mask = torch.arange(count).expand(2, -1) < torch.tensor([[count], [max(1, count - 4)]])
    rope, cotangent = tables(*size, 8), draw(2, 2, count, 8)
    fast = ops.mala_attention(q, k, v, rope=rope, mask=mask)
    explicit = ops.mala_weights(q, k, rope=rope, mask=mask) @ v.masked_fill(~mask[:, None, :, None], 0)
    torch.testing.assert_close(fast, explicit, rtol=0, atol=1e-11)
    gradients = [torch.autograd.grad(out, (q, k, v), cotangent) for out in (fast, explicit)]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-10, atol=1e-10)


def test_some_weights_are_negative_and_queries_of_any_length_differ():
    q = draw(1, 1, 1, 8).expand(1, 1, 2, 8) * torch.tensor([1.0, 3.0])[None, None, :, None]
    rows = ops.mala_weights(q, 3 * draw(1, 1, 30, 8))[0, 0]
    assert rows.min() < 0
    assert (rows[0] - rows[1]).abs().max() > 1e-3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("level", [-12.0, -30.0])
def test_very_negative_queries_and_keys_in_half_precision(dtype, level):
    """ELU, then + 1, would give 0 in half precision, and 1/z would leave its range."""
    q, k, v = (draw(1, 2, 7, 8) + level).to(dtype), (draw(1, 2, 7, 8) + level).to(dtype), draw(1, 2, 7, 8).to(dtype)
    assert torch.all(torch.nn.functional.elu(q) + 1 == 0)
    out = ops.mala_attention(q, k, v)
    expected = ops.mala_attention(q.double(), k.double(), v.double())
    assert out.isfinite().all()
    # Results below the smallest numbers of the type are zero.
    error = (out.double() - expected).norm()
    assert error <= 2 * torch.finfo(dtype).eps * expected.norm() + torch.finfo(dtype).tiny
