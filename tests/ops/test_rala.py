"""RALA: what holds of it alone. Parity with the explicit form is in test_weights.py."""

import pytest
import torch

from inlinevit import ops
from inlinevit.ops.rope import rope_tables, rotate


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def phi(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 0, x + 1, x.exp())


def tables(height: int, width: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = rope_tables((height, width), head_dim, dtype=torch.float64)
    return cos[None, None], sin[None, None]


@pytest.mark.parametrize("rotated", [False, True])
def test_it_is_the_published_formula(rotated):
    """q̃·Σ α k̃ vᵀ / (φ(q)·Σ α φ(k) + 1e-6), α = softmax(s·mean φ(q)·φ(k)): rotation has no part in α and divisor."""
    q, k, v = draw(3, 2, 2, 6, 8)
    rope = tables(2, 3, 8) if rotated else None
    alpha = (8**-0.5 * phi(q).mean(dim=2, keepdim=True) @ phi(k).transpose(2, 3)).softmax(dim=-1)
    key_value = (rotate(phi(k), rope) * alpha.transpose(2, 3)).transpose(2, 3) @ v
    expected = rotate(phi(q), rope) @ key_value / (phi(q) @ (alpha @ phi(k)).transpose(2, 3) + 1e-6)
    torch.testing.assert_close(ops.rala_attention(q, k, v, rope=rope), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(ops.rala_attention(q, k, v, q, rope=rope), expected, rtol=0, atol=1e-12)


def test_weights_without_rotation_are_those_of_a_mean_and_lose_the_length_of_a_query():
    q, k = draw(2, 1, 2, 6, 8)
    rows = ops.rala_weights(q, k)
    assert rows.min() >= 0
    torch.testing.assert_close(rows.sum(dim=-1), torch.ones(1, 2, 6, dtype=torch.float64), rtol=0, atol=1e-6)
    # φ of the logarithms of lengths below 1 is linear in them.
    short = -draw(1, 2, 6, 8).abs() - 2
    first, second = (ops.rala_weights(short + shift, k, queries=q) for shift in (0.0, 1.5))
    torch.testing.assert_close(first, second, rtol=0, atol=1e-5)


@pytest.mark.parametrize("size", [(1, 1), (3, 5)])
def test_gradients_with_rotation_and_padding_are_those_of_the_explicit_form(size):
    count = size[0] * size[1]
    q, k, v = (x.requires_grad_() for x in draw(3, 2, 2, count, 8).unbind(0))
    mask = torch.arange(count).expand(2, -1) < torch.tensor([[count], [max(1, count - 4)]])
    options = {"queries": q, "rope": tables(*size, 8), "mask": mask}
    fast = ops.rala_attention(q, k, v, **options)
    explicit = ops.rala_weights(q, k, **options) @ v.masked_fill(~mask[:, None, :, None], 0)
    torch.testing.assert_close(fast, explicit, rtol=0, atol=1e-11)
    gradients = [torch.autograd.grad(out, (q, k, v), draw(2, 2, count, 8)) for out in (fast, explicit)]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-10, atol=1e-10)


def test_queries_of_padding_have_no_part_in_the_mean():
    q, k, v = draw(3, 1, 2, 6, 8)
    mask = torch.tensor([[True, True, False, True, True, False]])
    real = mask[0]
    out = ops.rala_attention(q, k, v, q.masked_fill(~mask[:, None, :, None], torch.nan), mask=mask)
    alone = ops.rala_attention(q[:, :, real], k[:, :, real], v[:, :, real])
    torch.testing.assert_close(out[:, :, real], alone)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_one_token_with_all_the_weight_among_many_in_half_precision(dtype):
    """N·α would be 70,000, beyond float16."""
    k = torch.zeros(1, 1, 70_000, 4)
    k[0, 0, 5] = 60.0
    q, v = torch.full((1, 1, 1, 4), 3.0), torch.randn(1, 1, 70_000, 4)
    out = ops.rala_attention(q.to(dtype), k.to(dtype), v.to(dtype))
    torch.testing.assert_close(out[0, 0, 0], v[0, 0, 5].to(dtype), rtol=1e-2, atol=1e-2)


def test_queries_of_another_shape_are_refused():
    q = draw(1, 2, 6, 8)
    with pytest.raises(ValueError, match=r"queries must have the shape of k, \(1, 2, 6, 8\), but they are"):
        ops.rala_attention(q, q, q, q[:, :, :3])
