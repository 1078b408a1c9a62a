"""The linear attentions keep their digits in half precision, where plain sums do not."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from inlinevit import ops
from inlinevit.ops.mhla import initial_mixing
from inlinevit.ops.weights import WEIGHT_FUNCTIONS
from tests import slow_except

BOUNDS = {torch.bfloat16: 3e-3, torch.float16: 5e-4}
# Some of angular's queries meet a large mean key at a right angle. What is left is small, and gets unit length.
FLOAT32_BOUNDS = {"angular": 5e-5}
# For two heads of 32; no digit is lost in half precision.
SPREAD = torch.arange(32, 96).view(2, 32) / 32
AGENTS = torch.randn(1, 2, 49, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
MIXING = initial_mixing().bfloat16()
WEIGHTS = (0.2 * torch.randn(2, 2, 32, 32, generator=torch.Generator().manual_seed(1))).bfloat16()
# What a kind needs besides q, k and v.
OPTIONS: dict[str, dict[str, Any]] = {
    "focused": {"spread": SPREAD},
    "polaformer": {"spread": SPREAD, "power": 1 + 2 * SPREAD / 3},
    "agent": {"agents": AGENTS},
    "mhla": {"mixing": MIXING},
    "vit3": {"weight1": WEIGHTS[0], "weight2": WEIGHTS[1]},
}
# (H, W) of so many tokens.
MAPS = {197: (1, 197), 4097: (17, 241)}

# Softmax attention is torch's own; see test_softmax.py.
kinds = pytest.mark.parametrize("kind", [*(kind for kind in WEIGHT_FUNCTIONS if kind != "softmax"), "vit3"])
halves = pytest.mark.parametrize("dtype", BOUNDS)
ratios = pytest.mark.parametrize("ratio", slow_except([0, 1, 10, 100], 0, 100))
lengths = pytest.mark.parametrize("tokens", [197, 4097])


@pytest.fixture(scope="module")
def attend(fast_ops) -> Callable[..., Tensor]:
    def call(kind: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        options = dict(OPTIONS.get(kind, {}))
        if kind in ("mhla", "circulant"):
            options["feat_size"] = MAPS[q.shape[2]]
        return {**fast_ops, "vit3": ops.vit3_attention}[kind](q, k, v, **options)

    return call


@pytest.fixture(scope="module")
def relative_error(attend) -> Callable[..., float]:
    def measure(kind: str, out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> float:
        """Against float64 on the same rounded inputs."""
        reference = attend(kind, q.double(), k.double(), v.double())
        return float((out.double() - reference).norm() / reference.norm())

    return measure


def draw(kind: str, ratio: float, tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Correlated keys and values of spread about 1 whose means are about `ratio`; linear's keys are not negative."""
    generator = torch.Generator().manual_seed(int(ratio) + tokens)
    q, k, noise = torch.randn(3, 1, 2, tokens, 32, generator=generator, dtype=torch.float64)
    v = 0.8 * k + 0.6 * noise
    means = ratio * (0.75 + 0.5 * torch.rand(2, 1, 2, 1, 32, generator=generator, dtype=torch.float64))
    signs = torch.randint(0, 2, means.shape, generator=generator).mul(2).sub(1)
    v = v + means[1] * signs[1]
    if kind == "hydra":
        # It does not divide by the number of tokens: the answer itself would leave the range of float16.
        v = v / tokens**0.5
    k = (k + means[0]).clamp(min=0) if kind == "linear" else k + means[0] * signs[0]
    return q.to(dtype), k.to(dtype), v.to(dtype)


@kinds
@ratios
@halves
@pytest.mark.parametrize(("tokens", "autocast"), [(197, True), (4097, False), (4097, True)])
def test_half_precision(attend, relative_error, kind, dtype, tokens, ratio, autocast):
    q, k, v = draw(kind, ratio, tokens, dtype)
    with torch.autocast("cpu", dtype=dtype) if autocast else contextlib.nullcontext():
        out = attend(kind, q, k, v)
    assert out.dtype == dtype
    assert relative_error(kind, out, q, k, v) <= BOUNDS[dtype]


@kinds
@ratios
@lengths
@halves
def test_float32_stays_float32_under_autocast(attend, relative_error, kind, dtype, tokens, ratio):
    q, k, v = draw(kind, ratio, tokens, torch.float32)
    with torch.autocast("cpu", dtype=dtype):
        out = attend(kind, q, k, v)
    assert out.dtype == torch.float32
    assert relative_error(kind, out, q, k, v) <= FLOAT32_BOUNDS.get(kind, 2e-6)


@halves
@lengths
@pytest.mark.parametrize("ratio", [10, 100])
def test_inlines_plain_sums_do_not_keep_the_bound(relative_error, dtype, tokens, ratio):
    """v̄ + s·q·(Σ k vᵀ − N k̄ v̄ᵀ)/N in half precision: why the library centres before it multiplies."""
    q, k, v = draw("inline", ratio, tokens, dtype)
    k_mean, v_mean = k.mean(dim=-2, keepdim=True), v.mean(dim=-2, keepdim=True)
    sums = k.transpose(-2, -1) @ v - tokens * (k_mean.transpose(-2, -1) @ v_mean)
    error = relative_error("inline", v_mean + 32**-0.5 * (q @ (sums / tokens)), q, k, v)
    assert not error <= 2 * BOUNDS[dtype]


@lengths
def test_linears_plain_sums_overflow(relative_error, tokens):
    """φ(q)·Σ k vᵀ / φ(q)·Σ k in float16: why the library takes means, in float32."""
    q, k, v = draw("linear", 100, tokens, torch.float16)
    q = q.relu()
    out = q @ (k.transpose(-2, -1) @ v) / (q @ k.sum(dim=-2, keepdim=True).transpose(-2, -1))
    assert not relative_error("linear", out, q, k, v) <= 2 * BOUNDS[torch.float16]


@kinds
def test_gradients_in_half_precision(attend, kind):
    """They come back in the dtype of their leaves, and close to those of float64."""
    half = [x.requires_grad_() for x in draw(kind, 10, 197, torch.bfloat16)]
    double = [x.detach().double().requires_grad_() for x in half]
    for leaves in (half, double):
        out = attend(kind, *leaves)
        # Not the plain square, of which angular attention knows the mean.
        (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).mean().backward()
    for x, y in zip(half, double, strict=True):
        assert x.grad.dtype == torch.bfloat16
        assert (x.grad.double() - y.grad).norm() <= 2e-2 * y.grad.norm()
