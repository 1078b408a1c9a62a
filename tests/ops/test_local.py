"""The local residual against a grouped convolution."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from inlinevit import ops
from inlinevit.ops.local import CONVOLUTIONS, choose_convolution

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
    height, width = 3, 4
    v, _ = draw((height, width), batch=1)
    kernels = torch.zeros(1, 54, dtype=torch.float64)
    kernels[0, 9 * channel + tap] = 1
    out = ops.local_residual(v, kernels, (height, width))
    out, v = (x.transpose(1, 2).reshape(height, width, 6) for x in (out, v))
    for row in range(height):
        for column in range(width):
            y, x = row + tap // 3 - 1, column + tap % 3 - 1
            inside = 0 <= y < height and 0 <= x < width
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
    with pytest.raises(
        ValueError, match=r"6 tokens do not make a map of 2×4.*pass \(H, W\) of the token grid as feat_size"
    ):
        ops.local_residual(v, kernels, (2, 4))


@pytest.mark.parametrize("convolution", CONVOLUTIONS)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("batch", [1, 3])
def test_every_convolution_is_the_same(convolution, with_bias, size, batch):
    v, kernels = draw(size, batch)
    bias = torch.randn(6, dtype=torch.float64, requires_grad=True) if with_bias else None
    maps = v.transpose(1, 2).reshape(batch, *size, 6)
    out = CONVOLUTIONS[convolution](maps, kernels.view(batch, 6, 9), bias)
    expected = grouped_convolution(v, kernels, size).transpose(1, 2).reshape(batch, *size, 6)
    expected = expected if bias is None else expected + bias
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    if convolution == "in place":
        return
    leaves = [leaf for leaf in (v, kernels, bias) if leaf is not None]
    cotangent = torch.randn_like(out)
    gradients = torch.autograd.grad(out, leaves, cotangent)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, leaves, cotangent), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("batch", "side", "gradients", "convolution"),
    [
        (1, 7, False, "one by one"),
        (1, 7, True, "one by one"),
        (2, 32, True, "one by one"),
        (2, 31, False, "in place"),
        (2, 31, True, "grouped"),
        (0, 7, True, "padded"),
    ],
)
def test_the_convolution_that_is_chosen_on_a_cpu(batch, side, gradients, convolution):
    maps, kernels = torch.zeros(batch, side, side, 4), torch.zeros(batch, 4, 9, requires_grad=gradients)
    assert choose_convolution(maps, kernels) == convolution
    with torch.no_grad():
        assert choose_convolution(maps.double(), kernels.double()) == "padded"
        assert choose_convolution(maps.to("meta"), kernels.to("meta")) == "padded"


@pytest.mark.parametrize("batch", [1, 3])
def test_float32_agrees_with_float64(batch):
    """Through the forms that float32 alone takes."""
    for size in [(8, 8), (33, 32)]:
        v, kernels = draw(size, batch)
        expected = ops.local_residual(v, kernels, size)
        with torch.no_grad():
            out = ops.local_residual(v.float(), kernels.float(), size)
        torch.testing.assert_close(out.double(), expected.detach(), rtol=0, atol=2e-5)
        with_gradients = ops.local_residual(v.float(), kernels.float(), size)
        torch.testing.assert_close(with_gradients.double(), expected, rtol=0, atol=2e-5)
        single = torch.autograd.grad(with_gradients.square().sum(), (v, kernels))
        double = torch.autograd.grad(expected.square().sum(), (v, kernels))
        torch.testing.assert_close(single, double, rtol=1e-5, atol=1e-3)


def test_autocast_does_not_round():
    v, kernels = (x.detach().float() for x in draw((8, 8), 1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = ops.local_residual(v, kernels, (8, 8))
    assert torch.equal(out, ops.local_residual(v, kernels, (8, 8)))
