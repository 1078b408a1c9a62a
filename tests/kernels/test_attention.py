"""The attention kernel against the layers' own functions in float64: outputs, gradients, all layouts, odd sizes."""

import threading

import pytest
import torch
from torch import Tensor

from inlinevit import kernels, ops
from inlinevit.layers.layouts import CrossStripes, SquareWindows, WholeMap
from inlinevit.ops.local import add_convolution
from inlinevit.ops.windows import Windows, merge_heads, padding_mask, partition_heads, window_reverse
from tests import pairs_of

# Relative to the norm of the output.
TOLERANCE = {torch.float32: 5e-6, torch.float64: 1e-13}

# Windows of the first or second head group, prefix tokens, heads, width.
CASES = {
    "deit": (WholeMap()((14, 14))[0], 1, 6, 32),
    "one token": (WholeMap()((1, 1))[0], 0, 1, 32),
    "prefix tokens alone": (WholeMap()((1, 2))[0], 3, 2, 8),
    "one row": (WholeMap()((1, 7))[0], 0, 2, 24),
    "one column": (WholeMap()((9, 1))[0], 2, 2, 16),
    "wide heads": (WholeMap()((11, 9))[0], 0, 2, 64),
    "odd width": (WholeMap()((5, 6))[0], 1, 3, 5),
    "wider than a vector": (WholeMap()((7, 4))[0], 0, 1, 37),
    "several parts": (WholeMap()((31, 33))[0], 2, 2, 24),
    "wider than a tile": (WholeMap()((2, 301))[0], 0, 1, 16),
    "windows": (SquareWindows(7, shifted=False)((28, 28))[0], 0, 3, 32),
    "shifted windows": (SquareWindows(7, shifted=True)((14, 21))[0], 0, 2, 32),
    "padded windows": (SquareWindows(5, shifted=False)((12, 7))[0], 0, 2, 12),
    "padded shifted windows": (SquareWindows(6, shifted=True)((13, 8))[0], 0, 2, 20),
    "large padded windows": (SquareWindows(25, shifted=True)((30, 41))[0], 0, 1, 8),
    "vertical stripes": (CrossStripes(3)((9, 8))[0], 0, 4, 16),
    "horizontal stripes": (CrossStripes(2)((7, 11))[1], 0, 4, 24),
}


def reference(
    qkv: Tensor, windows: Windows, num_heads: int, taps: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """Attention and convolution by the layers' functions."""
    q, k, v = partition_heads(qkv, windows, num_heads)
    # The N×N weights, where they are not too many.
    path = "explicit" if k.shape[2] < 300 else "covariance"
    out = merge_heads(ops.inline_attention(q, k, v, mask=padding_mask(k, windows), path=path))
    if taps is not None:
        channels = taps.shape[1]
        static = None if bias is None else (torch.zeros(channels, 1, 3, 3, dtype=qkv.dtype), bias)
        out = add_convolution(out, v, taps, static, windows)
    return window_reverse(out, windows)


def make_inputs(name: str, batch: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """qkv with large means, kernels and bias."""
    windows, prefix, heads, width = CASES[name]
    generator = torch.Generator().manual_seed(0)
    channels = heads * width // windows.num_head_groups
    units = batch * kernels.attention.count_windows(windows)
    tokens = prefix + windows.map_height * windows.map_width
    qkv = torch.randn(batch, tokens, 3 * heads * width, generator=generator, dtype=torch.float64) + 1.0
    taps = torch.randn(units, channels, 9, generator=generator, dtype=torch.float64)
    bias = torch.randn(channels, generator=generator, dtype=torch.float64)
    return qkv.to(dtype), taps.to(dtype), bias.to(dtype)


def error(found: Tensor, expected: Tensor) -> float:
    """The distance, relative to the norm of what was expected."""
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize(("name", "dtype", "threads"), pairs_of(list(CASES), list(TOLERANCE), [1, 3]))
def test_outputs_and_gradients(name: str, dtype: torch.dtype, threads: int) -> None:
    windows, _, heads, _ = CASES[name]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for batch, convolved in [(1, True), (2, True), (13, False)]:
            inputs = make_inputs(name, batch, dtype) if convolved else make_inputs(name, batch, dtype)[:1]
            ours = [tensor.clone().requires_grad_() for tensor in inputs]
            theirs = [tensor.double().requires_grad_() for tensor in inputs]
            names = ("kernels", "bias")
            out = kernels.inline_attention(ours[0], windows, heads, **dict(zip(names, ours[1:], strict=False)))
            expected = reference(theirs[0], windows, heads, *theirs[1:])
            assert error(out, expected) < TOLERANCE[dtype]
            cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
            found = torch.autograd.grad(out, ours, cotangent.to(dtype))
            wanted = torch.autograd.grad(expected, theirs, cotangent)
            for gradient, exact in zip(found, wanted, strict=True):
                assert error(gradient, exact) < TOLERANCE[dtype]
            with torch.no_grad():
                again = kernels.inline_attention(ours[0], windows, heads, **dict(zip(names, ours[1:], strict=False)))
            assert torch.equal(again, out)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["prefix tokens alone", "one row", "padded shifted windows", "horizontal stripes"])
def test_gradcheck(name: str) -> None:
    windows, _, heads, _ = CASES[name]
    inputs = [tensor.requires_grad_() for tensor in make_inputs(name, 1, torch.float64)]

    def attend(qkv: Tensor, taps: Tensor, bias: Tensor) -> Tensor:
        return kernels.inline_attention(qkv, windows, heads, kernels=taps, bias=bias)

    assert torch.autograd.gradcheck(attend, inputs, fast_mode=True)


@pytest.mark.integration
@pytest.mark.parametrize("name", ["deit", "padded shifted windows", "vertical stripes"])
def test_operator_contract(name: str) -> None:
    """Schema, fake implementation and autograd agree with each other."""
    windows, _, heads, width = CASES[name]
    qkv, taps, bias = (tensor.requires_grad_() for tensor in make_inputs(name, 2, torch.float32))
    operator = torch.ops.inlinevit.attention.default
    torch.library.opcheck(operator, (qkv, taps, bias, heads, list(windows), width**-0.5, True))
    torch.library.opcheck(operator, (qkv.detach(), None, None, heads, list(windows), width**-0.5, False))


def test_views_are_accepted() -> None:
    windows, _, heads, _ = CASES["deit"]
    qkv, taps, bias = make_inputs("deit", 2, torch.float32)
    strided = torch.cat([qkv, qkv], dim=2)[:, :, : qkv.shape[2]]
    assert not strided.is_contiguous()
    out = kernels.inline_attention(strided, windows, heads, kernels=taps, bias=bias)
    assert torch.equal(out, kernels.inline_attention(qkv, windows, heads, kernels=taps, bias=bias))


def test_an_empty_batch() -> None:
    windows, _, heads, _ = CASES["deit"]
    qkv, taps, _ = make_inputs("deit", 1, torch.float32)
    qkv = qkv[:0].requires_grad_()
    out = kernels.inline_attention(qkv, windows, heads, kernels=taps[:0])
    assert out.shape == (0, 197, 192)
    assert torch.autograd.grad(out.sum(), qkv)[0].shape == qkv.shape


def test_nan_stays_in_its_window() -> None:
    windows, _, heads, _ = CASES["padded windows"]
    qkv, taps, _ = make_inputs("padded windows", 2, torch.float32)
    clean = kernels.inline_attention(qkv, windows, heads, kernels=taps)
    qkv[0, 0] = torch.nan
    out = kernels.inline_attention(qkv, windows, heads, kernels=taps)
    assert torch.isnan(out[0, 0]).all()
    assert torch.equal(out[1], clean[1])
    assert torch.equal(out[0, -1], clean[0, -1])


WHOLE = WholeMap()((2, 2))[0]


@pytest.mark.parametrize(
    ("qkv", "windows", "options", "message"),
    [
        (torch.zeros(1, 4, 12), WHOLE, {"num_heads": 3}, "3 heads"),
        (torch.zeros(1, 4, 12).half(), WHOLE, {}, "float32"),
        (torch.zeros(1, 3, 12), WHOLE, {}, "3 tokens"),
        (torch.zeros(1, 5, 12), WHOLE._replace(window_height=1), {}, "prefix tokens only"),
        (torch.zeros(1, 4, 12), WHOLE._replace(window_height=3), {}, "do not fit"),
        (torch.zeros(1, 4, 12), WHOLE._replace(shift_up=2), {}, "shifted"),
        (torch.zeros(1, 4, 12), WHOLE._replace(num_head_groups=3), {}, "groups"),
        (torch.zeros(1, 4, 12), WHOLE._replace(head_group=1), {}, "group 1"),
        (torch.zeros(1, 4, 12), WHOLE[:4], {}, "8 numbers"),
        (torch.zeros(1, 4, 12), WHOLE, {"kernels": torch.zeros(2, 4, 9)}, "kernels must be"),
        (torch.zeros(1, 4, 12), WHOLE, {"kernels": torch.zeros(1, 4, 9).double()}, "kernels must be"),
        (torch.zeros(1, 4, 12), WHOLE, {"bias": torch.zeros(4)}, "pass kernels"),
    ],
)
def test_refuses(qkv: Tensor, windows: Windows, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kernels.inline_attention(qkv, windows, **{"num_heads": 2, **options})


def test_calls_from_several_threads() -> None:
    windows, _, heads, _ = CASES["several parts"]
    qkv, taps, bias = make_inputs("several parts", 1, torch.float32)
    expected = kernels.inline_attention(qkv, windows, heads, kernels=taps, bias=bias)
    wrong = []

    def work() -> None:
        for _ in range(20):
            out = kernels.inline_attention(qkv, windows, heads, kernels=taps, bias=bias)
            if not torch.equal(out, expected):
                wrong.append(out)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
