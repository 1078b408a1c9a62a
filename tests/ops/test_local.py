"""The local residual against a grouped convolution."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from inlinevit import ops

SIZES = [(1, 1), (1, 5), (5, 1), (2, 3), (7, 7), (4, 9)]


def draw(size: tuple[int, int], batch: int = 2, heads: int = 2, width: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(size[0] * 100 + size[1])
    v = torch.randn(batch, heads, size[0] * size[1], width, generator=generator, dtype=torch.float64)
    kernels = torch.randn(batch, heads * width * 9, generator=generator, dtype=torch.float64)
    return v.requires_grad_(), kernels.requires_grad_()


def grouped_convolution(v: Tensor, kernels: Tensor, size: tuple[int, int]) -> Tensor:
    """One convolution with groups = batch × channels; r[9c … 9c+8] is the kernel of channel c."""
    batch, heads, tokens, width = v.shape
    maps = v.transpose(2, 3).reshape(1, batch * heads * width, *size)
    out = F.conv2d(maps, kernels.reshape(batch * heads * width, 1, 3, 3), padding=1, groups=batch * heads * width)
    return out.reshape(batch, heads, width, tokens).transpose(2, 3)


@pytest.mark.parametrize("size", SIZES)
def test_equals_a_grouped_convolution(size):
    v, kernels = draw(size)
    out, expected = ops.local_residual(v, kernels, size), grouped_convolution(v, kernels, size)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    cotangent = torch.randn_like(out)
    gradients = torch.autograd.grad(out, (v, kernels), cotangent)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, (v, kernels), cotangent), rtol=0, atol=1e-12)


def test_gradcheck():
    assert torch.autograd.gradcheck(lambda v, r: ops.local_residual(v, r, (2, 3)), draw((2, 3), 1, 1, 2))


@pytest.mark.parametrize("tap", range(9))
@pytest.mark.parametrize("channel", [0, 4])
def test_taps_go_row_by_row_and_correlate(channel, tap):
    """With one tap set, each token gets the neighbour at that row and column of the kernel, not its mirror image."""
    height, breadth = 3, 4
    v, _ = draw((height, breadth), batch=1)
    kernels = torch.zeros(1, 54, dtype=torch.float64)
    kernels[0, 9 * channel + tap] = 1
    out = ops.local_residual(v, kernels, (height, breadth))
    out, v = (x.transpose(1, 2).reshape(height, breadth, 6) for x in (out, v))
    for row in range(height):
        for column in range(breadth):
            y, x = row + tap // 3 - 1, column + tap % 3 - 1
            inside = 0 <= y < height and 0 <= x < breadth
            assert out[row, column, channel] == (v[y, x, channel] if inside else 0)
    assert torch.all(out[..., [c for c in range(6) if c != channel]] == 0)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype, autocast):
    """Only the result is rounded: half a unit in the last place of each number."""
    v, kernels = (x.detach().to(dtype) for x in draw((7, 7)))
    with torch.autocast("cpu", dtype=dtype, enabled=autocast):
        out = ops.local_residual(v, kernels, (7, 7))
    assert out.dtype == dtype
    expected = ops.local_residual(v.double(), kernels.double(), (7, 7))
    torch.testing.assert_close(out.double(), expected, rtol=0.51 * torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize("shape", [(2, 6, 3, 3), (2, 2, 3, 9), (2, 54, 1)])
def test_kernels_of_any_shape(shape):
    v, kernels = draw((2, 3))
    assert torch.equal(ops.local_residual(v, kernels.view(shape), (2, 3)), ops.local_residual(v, kernels, (2, 3)))


def test_tokens_that_make_no_map_are_refused():
    v, kernels = draw((2, 3))
    with pytest.raises(ValueError, match=r"6 tokens do not make a map of 2×4.*pass the size"):
        ops.local_residual(v, kernels, (2, 4))
