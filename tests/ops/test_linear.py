"""Linear attention: half precision, and the queries that see nothing."""

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
    """Nonnegative keys and signed values, correlated, of spread about 1, whose means are about `ratio`."""
    generator = torch.Generator().manual_seed(int(ratio) + tokens)
    q, k, noise = torch.randn(3, 1, 2, tokens, 32, generator=generator, dtype=torch.float64)
    v = 0.8 * k + 0.6 * noise
    means = ratio * (0.75 + 0.5 * torch.rand(2, 1, 2, 1, 32, generator=generator, dtype=torch.float64))
    means[1] *= torch.randint(0, 2, means[1].shape, generator=generator).mul(2).sub(1)
    return q.to(dtype), (k + means[0]).clamp(min=0).to(dtype), (v + means[1]).to(dtype)


def relative_error(out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> float:
    """Against float64 on the same rounded inputs."""
    reference = ops.linear_attention(q.double(), k.double(), v.double())
    return float((out.double() - reference).norm() / reference.norm())


@ratios
@lengths
@halves
@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision(dtype, tokens, ratio, autocast):
    q, k, v = draw(ratio, tokens, dtype)
    with torch.autocast("cpu", dtype=dtype) if autocast else contextlib.nullcontext():
        out = ops.linear_attention(q, k, v)
    assert out.dtype == dtype
    assert relative_error(out, q, k, v) <= BOUNDS[dtype]


@ratios
@lengths
@halves
def test_float32_stays_float32_under_autocast(dtype, tokens, ratio):
    q, k, v = draw(ratio, tokens, torch.float32)
    with torch.autocast("cpu", dtype=dtype):
        out = ops.linear_attention(q, k, v)
    assert out.dtype == torch.float32
    assert relative_error(out, q, k, v) <= 2e-6


@lengths
def test_the_plain_sums_overflow(tokens):
    """φ(q)·Σ k vᵀ / φ(q)·Σ k in float16: why the library takes means, in float32."""
    q, k, v = draw(100, tokens, torch.float16)
    q = q.relu()
    out = q @ (k.transpose(-2, -1) @ v) / (q @ k.sum(dim=-2, keepdim=True).transpose(-2, -1))
    assert not relative_error(out, q, k, v) <= 2 * BOUNDS[torch.float16]


def test_a_query_whose_map_is_zero_gets_zeros():
    """And no NaN, forward or backward."""
    q, k, v = (x.requires_grad_() for x in draw(1, 7, torch.float64))
    out = ops.linear_attention(-q.abs(), k, v)
    assert torch.all(out == 0)
    assert torch.all(ops.attention_weights(-q.abs(), k, kind="linear") == 0)
    for gradient in torch.autograd.grad(out.sum(), (q, k, v)):
        assert gradient.isfinite().all()


def test_scale_cancels():
    q, k, v = draw(1, 197, torch.float64)
    torch.testing.assert_close(
        ops.linear_attention(q, k, v, scale=5.0), ops.linear_attention(q, k, v), rtol=1e-12, atol=0
    )


def test_a_divisor_near_zero_still_runs():
    """Signed maps break training, which is the experiment: no error, no clamp."""
    q = torch.tensor([1.0, 1.0], dtype=torch.float64)[None, None, None]
    k = torch.tensor([[1.0, 0.0], [0.0, -1 + 1e-6]], dtype=torch.float64)[None, None]
    v = torch.tensor([[1.0], [0.0]], dtype=torch.float64)[None, None]
    assert float(ops.linear_attention(q, k, v, feature_map="identity")) == pytest.approx(1e6, rel=1e-4)
