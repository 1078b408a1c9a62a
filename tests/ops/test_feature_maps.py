"""The maps φ, number by number."""

import math

import pytest
import torch

from inlinevit import ops

X = torch.tensor([[-2.0, 0.0, 3.0]], dtype=torch.float64)[None, None]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("identity", [-2.0, 0.0, 3.0]),
        ("relu", [0.0, 0.0, 3.0]),
        ("leaky_relu", [-0.02, 0.0, 3.0]),
        ("exp", [math.exp(-0.4), 1.0, math.exp(0.6)]),
        ("elu_plus_one", [math.exp(-2), 1.0, 4.0]),
    ],
)
def test_values(name, expected):
    assert ops.apply_feature_map(X, name)[0, 0, 0].tolist() == pytest.approx(expected, abs=1e-15)


def test_relu_affine_is_relu_of_a_x_plus_b_for_each_head():
    generator = torch.Generator().manual_seed(0)
    x, matrix, bias = (torch.randn(*s, generator=generator) for s in [(2, 3, 5, 4), (3, 4, 4), (3, 4)])
    out = ops.apply_feature_map(x, "relu_affine", (matrix, bias))
    expected = torch.einsum("hij,bhnj->bhni", matrix, x) + bias[None, :, None, :]
    torch.testing.assert_close(out, expected.clamp(min=0))
    assert (out == 0).any()
    assert (out > 0).any()


def test_every_listed_map_is_known():
    affine = (torch.eye(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64))
    assert {ops.apply_feature_map(X, name, affine).shape for name in ops.FEATURE_MAPS} == {X.shape}


@pytest.mark.parametrize("op", [ops.inline_attention, ops.linear_attention])
def test_unknown_map_is_refused_with_the_list(op):
    with pytest.raises(ValueError, match="'elu'.*" + ", ".join(ops.FEATURE_MAPS)):
        op(X, X, X, feature_map="elu")


@pytest.mark.parametrize("op", [ops.inline_attention, ops.linear_attention])
def test_relu_affine_without_affine_is_refused(op):
    with pytest.raises(ValueError, match=r"'relu_affine' needs affine=\(A, b\)"):
        op(X, X, X, feature_map="relu_affine")
