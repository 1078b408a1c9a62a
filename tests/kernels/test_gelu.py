"""GELU by compiled code against torch's in float64."""

import pytest
import torch
import torch.nn.functional as F

from inlinevit import kernels
from inlinevit.layers.block import GELU


@pytest.mark.parametrize("shape", [(1,), (3, 7), (2, 5, 64), (40000,)])
@pytest.mark.parametrize("threads", [1, 3])
def test_outputs_and_gradients(shape: tuple[int, ...], threads: int) -> None:
    x = (4 * torch.randn(shape, generator=torch.Generator().manual_seed(0))).requires_grad_()
    exact = x.detach().double().requires_grad_()
    cotangent = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        out = kernels.gelu(x)
        (found,) = torch.autograd.grad(out, x, cotangent)
    finally:
        torch.set_num_threads(before)
    expected = F.gelu(exact)
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=2e-6)
    (wanted,) = torch.autograd.grad(expected, exact, cotangent.double())
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=2e-6)


def test_extreme_values() -> None:
    x = torch.tensor([0.0, 5.6, -5.6, 30.0, -30.0, 1e30, -1e30, torch.inf, torch.nan], requires_grad=True)
    out = kernels.gelu(x)
    (slope,) = torch.autograd.grad(out.sum(), x)
    assert out[:7].tolist() == pytest.approx([0, 5.6, 0, 30, 0, 1e30, 0], rel=1e-6, abs=1e-5)
    assert slope[:8].tolist() == pytest.approx([0.5, 1, 0, 1, 0, 1, 0, 1], abs=1e-5)
    assert out[8].isnan()
    assert slope[8].isnan()


def test_views_are_accepted() -> None:
    x = torch.randn(6, 8, requires_grad=True)
    cotangent = torch.randn(8, 6)
    out = kernels.gelu(x.t())
    torch.testing.assert_close(out, F.gelu(x.t()))
    torch.testing.assert_close(torch.autograd.grad(out, x, cotangent), torch.autograd.grad(F.gelu(x.t()), x, cotangent))
    # A gradient without memory of its own.
    out = kernels.gelu(x)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), x), torch.autograd.grad(F.gelu(x).sum(), x))


def test_second_derivatives_and_batches_of_gradients() -> None:
    x = torch.randn(5, 3, requires_grad=True)

    def second(function) -> torch.Tensor:
        (gradient,) = torch.autograd.grad(function(x).pow(2).sum(), x, create_graph=True)
        return torch.autograd.grad(gradient.pow(2).sum(), x)[0]

    torch.testing.assert_close(second(kernels.gelu), second(F.gelu), rtol=1e-5, atol=1e-5)
    cotangents = torch.randn(4, 5, 3)
    (batched,) = torch.autograd.grad(kernels.gelu(x), x, cotangents, is_grads_batched=True)
    single = [torch.autograd.grad(F.gelu(x), x, one)[0] for one in cotangents]
    torch.testing.assert_close(batched, torch.stack(single))


def test_an_empty_tensor() -> None:
    x = torch.zeros(0, 4, requires_grad=True)
    assert torch.autograd.grad(kernels.gelu(x).sum(), x)[0].shape == (0, 4)


def test_where_it_is_taken() -> None:
    layer, x = GELU(), torch.randn(4, requires_grad=True)
    assert type(layer(x).grad_fn).__name__ == "GeluBackward"
    assert type(GELU("tanh")(x).grad_fn).__name__ == "GeluBackward0"
    assert type(layer(x.double()).grad_fn).__name__ == "GeluBackward0"
    assert not kernels.computes_gelu(x.detach())
    with torch.no_grad():
        assert torch.equal(layer(x), F.gelu(x))
    traced = torch.fx.symbolic_trace(torch.nn.Sequential(layer))
    assert torch.equal(traced(x), F.gelu(x))
