"""The MLP that looks at neighbours."""

import pytest
import torch
import torch.nn.functional as F

from inlinevit.layers.block import DWConvMlp


@pytest.mark.parametrize("prefix", [0, 1, 2])
def test_it_is_its_formula(randomise, prefix):
    """linear → depthwise 3×3 over the map → GELU → linear; the prefix passes the convolution by."""
    mlp = randomise(DWConvMlp(4, 12))
    x = torch.randn(2, prefix + 15, 4, dtype=torch.float64)
    hidden = x @ mlp.fc1.weight.T + mlp.fc1.bias
    padded = F.pad(hidden[:, prefix:].view(2, 3, 5, 12), (0, 0, 1, 1, 1, 1))
    maps = mlp.conv.bias + sum(
        padded[:, row : row + 3, column : column + 5] * mlp.conv.weight[:, 0, row, column]
        for row in range(3)
        for column in range(3)
    )
    hidden = torch.cat([hidden[:, :prefix], maps.flatten(1, 2)], dim=1)
    expected = F.gelu(hidden) @ mlp.fc2.weight.T + mlp.fc2.bias
    torch.testing.assert_close(mlp(x, (3, 5)), expected, rtol=0, atol=1e-12)


def test_tokens_without_a_map_are_not_convolved(randomise):
    mlp, x = randomise(DWConvMlp(4, 12)), torch.randn(2, 3, 4, dtype=torch.float64)
    expected = mlp.fc2(F.gelu(mlp.fc1(x)))
    torch.testing.assert_close(mlp(x, (0, 0)), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(mlp(torch.cat([x, x], dim=1), (1, 3))[:, :3], expected, rtol=0, atol=1e-12)


def test_dropout_acts_in_training_alone():
    mlp, x = DWConvMlp(4, 12, drop=0.5), torch.randn(2, 15, 4)
    assert (mlp.train()(x, (3, 5)) == 0).float().mean() > 0.3
    assert torch.all(mlp.eval()(x, (3, 5)) != 0)


def test_built_on_a_device_and_in_a_dtype():
    mlp = DWConvMlp(4, 12, device="meta", dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in mlp.parameters()} == {("meta", torch.bfloat16)}
    assert mlp.conv.weight.shape == (12, 1, 3, 3)
