"""The kernels of the local residual: r = W₂·GELU(W₁·x̄), head by head."""

import math

import torch

from inlinevit.layers import CrossStripes, LocalResidual, WholeMap


def test_parameters_are_two_grouped_convolutions_with_bias():
    shapes = {name: tuple(p.shape) for name, p in LocalResidual(8, 2).named_parameters()}
    assert shapes == {"fc1.weight": (8, 4, 1), "fc1.bias": (8,), "fc2.weight": (72, 4, 1), "fc2.bias": (72,)}


def test_kernels_by_hand():
    """One channel a head, so each head has one number in W₁ and nine in W₂; a map of one token shows the middle tap."""
    residual = LocalResidual(2, 2).double().requires_grad_(False)
    mean = torch.tensor([[0.3, -0.7]], dtype=torch.float64)
    v = torch.tensor([2.0, 5.0], dtype=torch.float64).view(1, 2, 1, 1)
    (windows,) = WholeMap()((1, 1))
    out = residual(v, mean, windows).flatten()
    for head in range(2):
        x = float(residual.fc1.weight[head, 0, 0] * mean[0, head] + residual.fc1.bias[head])
        hidden = 0.5 * x * (1 + math.erf(x / 2**0.5))
        tap = float(residual.fc2.weight[9 * head + 4, 0, 0]) * hidden + float(residual.fc2.bias[9 * head + 4])
        assert math.isclose(float(out[head]), tap * float(v[0, head, 0, 0]), abs_tol=1e-12)


def test_a_share_takes_its_heads_alone():
    """The second half of the heads, as CSWin's lying stripes see them, equals the whole cut in half."""
    residual = LocalResidual(8, 4)
    v, mean = torch.randn(3, 4, 12, 2), torch.randn(3, 8)
    (whole,) = WholeMap()((2, 6))
    expected = residual(v, mean, whole)
    _, lying = CrossStripes(2)((4, 6))
    torch.testing.assert_close(residual(v[:, 2:], mean[:, 4:], lying), expected[:, 2:])


def test_each_window_has_its_own_kernel():
    residual = LocalResidual(4, 2)
    v, mean = torch.randn(1, 2, 6, 2).expand(2, -1, -1, -1), torch.randn(2, 4)
    (windows,) = WholeMap()((2, 3))
    out = residual(v, mean, windows)
    assert not torch.allclose(out[0], out[1])
    torch.testing.assert_close(residual(v, mean.flip(0), windows), out.flip(0))
