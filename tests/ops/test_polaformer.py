"""PolaFormer: what holds of it alone. Parity with the explicit form is in test_weights.py."""

import pytest
import torch

from inlinevit import ops
from inlinevit.ops.polaformer import polar_features

SPREAD = torch.tensor([[0.5, 1.0, 2.0, 1.5], [1.0, 3.0, 0.7, 1.1]], dtype=torch.float64)
POWER = torch.tensor([[3.0, 1.2, 4.9, 2.0], [3.0, 3.0, 1.5, 2.5]], dtype=torch.float64)
MASK = torch.tensor([[True, True, False, True, False], [False, True, True, True, True]])


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("mask", [None, MASK], ids=["whole", "masked"])
def test_it_is_the_published_formula(mask):
    q, k, v = draw(2, 2, 5, 4), draw(2, 2, 5, 4).flip(2), draw(2, 2, 5, 6)
    out = ops.polaformer_attention(q, k, v, SPREAD, POWER, mask)
    rows = ops.polaformer_weights(q, k, spread=SPREAD, power=POWER, mask=mask)
    assert rows.shape == (2, 4, 5, 5)
    assert rows.min() >= 0
    for image, head, query in torch.cartesian_prod(torch.arange(2), torch.arange(2), torch.arange(5)).tolist():
        real = [token for token in range(5) if mask is None or mask[image, token]]

        def signed(x: torch.Tensor, sign: int, head: int = head) -> torch.Tensor:
            return (sign * x / SPREAD[head]).clamp(min=0) ** POWER[head]

        keys = {token: torch.cat([signed(k[image, head, token], s) for s in (1, -1)]) for token in real}
        for part, sign in enumerate((1, -1)):
            features = torch.cat([signed(q[image, head, query], s * sign) for s in (1, -1)])
            scores = {token: features @ key / len(real) for token, key in keys.items()}
            divisor = sum(scores.values()) + 1e-6
            expected = sum(s / divisor * v[image, head, t, 3 * part : 3 * part + 3] for t, s in scores.items())
            found = out[image, head, query, 3 * part : 3 * part + 3]
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
            row = rows[image, 2 * head + part, query]
            torch.testing.assert_close(row[real], torch.stack(list(scores.values())) / divisor, rtol=0, atol=1e-12)


def test_the_opposite_sign_is_that_of_the_negative_query():
    q, k = draw(1, 2, 5, 4), draw(1, 2, 5, 4).flip(2)
    rows = ops.polaformer_weights(q, k, spread=SPREAD, power=POWER).unflatten(1, (2, 2))
    turned = ops.polaformer_weights(-q, k, spread=SPREAD, power=POWER).unflatten(1, (2, 2))
    torch.testing.assert_close(rows, turned.flip(2))


def test_lengths_of_queries_are_lost():
    """q_c → t^(1/p_c)·q_c scales all features by t."""
    q, k = draw(1, 2, 5, 4), draw(1, 2, 5, 4).flip(2)
    rows = ops.polaformer_weights(q, k, spread=SPREAD, power=POWER)
    longer = ops.polaformer_weights(q * 7 ** (1 / POWER)[:, None], k, spread=SPREAD, power=POWER)
    torch.testing.assert_close(rows, longer, rtol=0, atol=1e-2)


def test_gradients_at_zero_are_zero():
    """The derivative of 0^p by p, and by 0, is 0: not 0·log 0."""
    x = torch.tensor([0.0, 2.0, -3.0, 0.0], dtype=torch.float64).expand(1, 2, 3, 4).clone().requires_grad_()
    spread, power = SPREAD.clone().requires_grad_(), POWER.clone().requires_grad_()
    positive, negative = polar_features(x, spread, power)
    gradients = torch.autograd.grad((positive + negative).sum(), (x, spread, power))
    for gradient in gradients:
        assert gradient.isfinite().all()
        assert torch.all(gradient[..., [0, 3]] == 0)
        assert torch.all(gradient[..., [1, 2]] != 0)


def test_tokens_of_zeros(make_problem):
    """No NaN, forward or backward; they get zeros."""
    problem = make_problem("polaformer")
    problem.q = torch.zeros_like(problem.q).requires_grad_()
    out = problem.fast()
    assert torch.all(out == 0)
    for gradient in problem.gradients(out, torch.ones_like(out)).values():
        assert gradient.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("level", [30.0, 0.02])
def test_powers_beyond_half_precision(dtype, level):
    """30⁵ is beyond float16, and 0.02⁵ below all its numbers."""
    q, k, v = ((level * draw(1, 2, 9, 4).flip(i)).to(dtype) for i in (1, 2, 3))
    power = torch.full((2, 4), 5.0 if level > 1 else 2.0)
    out = ops.polaformer_attention(q, k, v, torch.ones(2, 4), power)
    expected = ops.polaformer_attention(q.double(), k.double(), v.double(), torch.ones(2, 4).double(), power.double())
    assert out.dtype == dtype
    assert (out.double() - expected).norm() <= 2 * torch.finfo(dtype).eps * expected.norm()


def test_values_without_halves_are_refused():
    q = draw(1, 2, 5, 4)
    with pytest.raises(ValueError, match="value_dim is 3: use an even one"):
        ops.polaformer_attention(q, q, q[..., :3], SPREAD, POWER)
