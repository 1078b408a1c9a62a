"""The kernels of the local residual: r = W₂·GELU(W₁·x̄), head by head."""

import math

import torch

from inlinevit.layers import CrossStripes, LocalResidual, WholeMap


def test_parameters_are_two_grouped_convolutions_with_bias():
    shapes = {name: tuple(p.shape) for name, p in LocalResidual(8, 2).named_parameters()}
    assert shapes == {"fc1.weight": (8, 4, 1), "fc1.bias": (8,), "fc2.weight": (72, 4, 1), "fc2.bias": (72,)}


def test_kernels_by_hand():
    """One channel a head, so each head has one number in W₁ and nine in W₂."""
    residual = LocalResidual(2, 2).double().requires_grad_(False)
    mean = torch.tensor([[0.3, -0.7]], dtype=torch.float64)
    (windows,) = WholeMap()((1, 1))
    kernels = residual(mean, windows)
    assert kernels.shape == (1, 2, 9)
    for head in range(2):
        x = float(residual.fc1.weight[head, 0, 0] * mean[0, head] + residual.fc1.bias[head])
        hidden = 0.5 * x * (1 + math.erf(x / 2**0.5))
        for tap in range(9):
            row = 9 * head + tap
            expected = float(residual.fc2.weight[row, 0, 0]) * hidden + float(residual.fc2.bias[row])
            assert math.isclose(float(kernels[0, head, tap]), expected, abs_tol=1e-12)


def test_kernels_are_those_of_two_grouped_convolutions():
    residual = LocalResidual(12, 3).double()
    mean = torch.randn(5, 12, dtype=torch.float64)
    (windows,) = WholeMap()((4, 4))
    expected = residual.fc2(torch.nn.functional.gelu(residual.fc1(mean.unsqueeze(-1))))
    torch.testing.assert_close(residual(mean, windows), expected.view(5, 12, 9), rtol=0, atol=1e-12)


def test_a_share_takes_its_heads_alone():
    """The second half of the heads, as CSWin's lying stripes see them, equals the whole cut in half."""
    residual = LocalResidual(8, 4)
    mean = torch.randn(3, 8)
    (whole,) = WholeMap()((2, 6))
    _, lying = CrossStripes(2)((4, 6))
    torch.testing.assert_close(residual(mean[:, 4:], lying), residual(mean, whole)[:, 4:])


def test_each_window_has_its_own_kernel():
    residual = LocalResidual(4, 2)
    mean = torch.randn(2, 4)
    (windows,) = WholeMap()((2, 3))
    kernels = residual(mean, windows)
    assert not torch.allclose(kernels[0], kernels[1])
    torch.testing.assert_close(residual(mean.flip(0), windows), kernels.flip(0))
