"""InLine attention: the covariance form keeps its digits in half precision."""

import contextlib

import pytest
import torch
from torch import Tensor

from inlinevit import ops

BOUNDS = {torch.bfloat16: 3e-3, torch.float16: 5e-4}

halves = pytest.mark.parametrize("dtype", BOUNDS)
ratios = pytest.mark.parametrize("ratio", [0, 1, 10, 100])
lengths = pytest.mark.parametrize("tokens", [197, 4097])


def draw(ratio: float, tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Correlated keys and values of spread 1 whose means are about `ratio`, with either sign."""
    generator = torch.Generator().manual_seed(int(ratio) + tokens)
    q, k, noise = torch.randn(3, 1, 2, tokens, 32, generator=generator, dtype=torch.float64)
    v = 0.8 * k + 0.6 * noise
    means = ratio * (0.75 + 0.5 * torch.rand(2, 1, 2, 1, 32, generator=generator, dtype=torch.float64))
    means = means * torch.randint(0, 2, means.shape, generator=generator).mul(2).sub(1)
    return q.to(dtype), (k + means[0]).to(dtype), (v + means[1]).to(dtype)


def relative_error(out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> float:
    """Against float64 on the same rounded inputs."""
    reference = ops.inline_attention(q.double(), k.double(), v.double())
    return float((out.double() - reference).norm() / reference.norm())


@ratios
@lengths
@halves
@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision(dtype, tokens, ratio, autocast):
    q, k, v = draw(ratio, tokens, dtype)
    with torch.autocast("cpu", dtype=dtype) if autocast else contextlib.nullcontext():
        out = ops.inline_attention(q, k, v)
    assert out.dtype == dtype
    assert relative_error(out, q, k, v) <= BOUNDS[dtype]


@ratios
@lengths
@halves
def test_float32_stays_float32_under_autocast(dtype, tokens, ratio):
    q, k, v = draw(ratio, tokens, torch.float32)
    with torch.autocast("cpu", dtype=dtype):
        out = ops.inline_attention(q, k, v)
    assert out.dtype == torch.float32
    assert relative_error(out, q, k, v) <= 2e-6


@halves
@lengths
@pytest.mark.parametrize("ratio", [10, 100])
def test_the_plain_sums_do_not_keep_the_bound(dtype, tokens, ratio):
    """v̄ + s·q·(Σ k vᵀ − N k̄ v̄ᵀ)/N in half precision: why the library centres before it multiplies."""
    q, k, v = draw(ratio, tokens, dtype)
    k_mean, v_mean = k.mean(dim=-2, keepdim=True), v.mean(dim=-2, keepdim=True)
    sums = k.transpose(-2, -1) @ v - tokens * (k_mean.transpose(-2, -1) @ v_mean)
    error = relative_error(v_mean + 32**-0.5 * (q @ (sums / tokens)), q, k, v)
    assert not error <= 2 * BOUNDS[dtype]


def test_gradients_in_half_precision():
    """They come back in the dtype of their leaves, and close to those of float64."""
    half = [x.requires_grad_() for x in draw(10, 197, torch.bfloat16)]
    double = [x.detach().double().requires_grad_() for x in half]
    for leaves in (half, double):
        ops.inline_attention(*leaves).square().mean().backward()
    for x, y in zip(half, double, strict=True):
        assert x.grad.dtype == torch.bfloat16
        assert (x.grad.double() - y.grad).norm() <= 2e-2 * y.grad.norm()


def test_a_zero_query_gets_the_mean_value():
    q, k, v = draw(1, 197, torch.float64)
    out = ops.inline_attention(torch.zeros_like(q), k, v)
    torch.testing.assert_close(out, v.mean(dim=-2, keepdim=True).expand_as(out))


def test_default_scale_and_map():
    q, k, v = draw(1, 197, torch.float64)
    assert torch.equal(ops.inline_attention(q, k, v), ops.inline_attention(q, k, v, 32**-0.5, "identity"))
