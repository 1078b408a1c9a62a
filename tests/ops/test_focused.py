"""Focused attention: what holds of it alone. Parity with the explicit form is in test_weights.py."""

import pytest
import torch

from inlinevit import ops
from inlinevit.ops.focused import focus

MASK = torch.tensor([[True, True, False, True, False], [False, True, True, True, True]])
SPREAD = torch.tensor([[0.5, 1.0, 2.0, 1.5], [1.0, 3.0, 0.7, 1.1]], dtype=torch.float64)


def draw(*shape: int) -> torch.Tensor:
    """Numbers of both signs."""
    return torch.randn(*shape, dtype=torch.float64)


def test_focus_is_the_formula():
    """t = (ReLU(x) + 1e-6)/spread; t³·‖t‖/‖t³‖, with lengths over the channels of all heads."""
    x = draw(2, 2, 5, 4)
    out = focus(x, SPREAD)
    for image in range(2):
        for token in range(5):
            t = (x[image, :, token].flatten().clamp(min=0) + 1e-6) / SPREAD.flatten()
            expected = t**3 * (t.norm() / (t**3).norm())
            torch.testing.assert_close(out[image, :, token].flatten(), expected, rtol=1e-12, atol=0)


def test_focus_keeps_the_length_and_draws_to_the_nearest_axis():
    x = draw(2, 2, 50, 4)
    t = ((x.relu() + 1e-6) / SPREAD[:, None]).transpose(1, 2).flatten(2)
    out = focus(x, SPREAD).transpose(1, 2).flatten(2)
    torch.testing.assert_close(out.norm(dim=-1), t.norm(dim=-1), rtol=1e-12, atol=0)
    assert torch.equal(out.argmax(dim=-1), t.argmax(dim=-1))
    assert torch.all(out.amax(dim=-1) > t.amax(dim=-1))


@pytest.mark.parametrize("level", [1e-9, 1e-6, 1e15])
def test_focus_stays_in_range(level):
    """The cubes of such numbers would not, in float32."""
    x = (torch.rand(1, 2, 3, 4) + 0.1) * level
    out = focus(x, torch.ones(2, 4), least=0.0)
    torch.testing.assert_close(out.double(), focus(x.double(), torch.ones(2, 4), least=0.0), rtol=1e-5, atol=0)
    assert torch.all(out.norm(dim=(1, 3)) > 0)


def test_tokens_without_a_positive_channel(make_problem):
    """No NaN, forward or backward; they look everywhere alike."""
    problem = make_problem("focused")
    problem.q = (-problem.q.detach().abs()).requires_grad_()
    problem.k = (-problem.k.detach().abs()).requires_grad_()
    out = problem.fast()
    rows = problem.weights()
    torch.testing.assert_close(rows, rows[..., :1].expand_as(rows))
    for gradient in problem.gradients(out, torch.ones_like(out)).values():
        assert gradient.isfinite().all()


@pytest.mark.parametrize("mask", [None, MASK], ids=["whole", "masked"])
def test_it_is_linear_attention_of_what_is_focused(mask):
    """With 1e-6 added to the divisor, on inputs of both signs, where it may count."""
    q, k, v = draw(2, 2, 3, 4), draw(2, 2, 5, 4), draw(2, 2, 5, 3)
    out = ops.focused_attention(q, k, v, SPREAD, mask)
    rows = ops.attention_weights(q, k, kind="focused", spread=SPREAD, mask=mask)
    focused_q, focused_k = focus(q, SPREAD), focus(k, SPREAD)
    for image, head, query in torch.cartesian_prod(torch.arange(2), torch.arange(2), torch.arange(3)).tolist():
        real = [token for token in range(5) if mask is None or mask[image, token]]
        scores = {token: focused_q[image, head, query] @ focused_k[image, head, token] for token in real}
        divisor = sum(scores.values()) + 1e-6
        expected = sum(score / divisor * v[image, head, token] for token, score in scores.items())
        torch.testing.assert_close(out[image, head, query], expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(rows[image, head, query] @ v[image, head], expected, rtol=0, atol=1e-12)


def test_the_epsilon_of_the_divisor_is_used():
    q, k, v = draw(1, 2, 3, 4).abs(), draw(1, 2, 5, 4).abs(), draw(1, 2, 5, 3)
    assert not torch.allclose(
        ops.focused_attention(q, k, v, SPREAD, epsilon=10.0), ops.focused_attention(q, k, v, SPREAD)
    )
