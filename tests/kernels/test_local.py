"""The kernels of the local residual by compiled code, against LocalResidual in float64: outputs and gradients."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from inlinevit import kernels
from inlinevit.layers import LocalResidual
from inlinevit.layers.layouts import WholeMap
from inlinevit.ops.windows import Windows, window_means
from tests import pairs_of
from tests.kernels.test_attention import CASES, TOLERANCE, error


@contextmanager
def threads_of_torch(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def make_inputs(name: str, batch: int, lepe: bool) -> list[Tensor]:
    """x, the weights and biases of the head group and, with LePE, what is added; in float64."""
    windows, prefix, heads, width = CASES[name]
    generator = torch.Generator().manual_seed(0)
    channels = heads * width // windows.num_head_groups
    tokens = prefix + windows.map_height * windows.map_width
    shapes = [(batch, tokens, heads * width), (channels, width, 1), (channels,), (9 * channels, width, 1)]
    shapes += [(9 * channels,), *([(channels, 9)] if lepe else [])]
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    tensors[0] += 1.0
    return tensors


def compute(name: str, tensors: list[Tensor]) -> Tensor:
    windows, _, heads, _ = CASES[name]
    names = ("weight1", "bias1", "weight2", "bias2", "added")
    return kernels.local_kernels(tensors[0], windows, heads, **dict(zip(names, tensors[1:], strict=False)))


def reference(name: str, tensors: list[Tensor]) -> Tensor:
    """The same by 1×1 convolutions with one group per head."""
    windows, _, heads, _ = CASES[name]
    x, weight1, bias1, weight2, bias2, *added = tensors
    groups, first = windows.num_head_groups, windows.head_group
    mean = window_means(x.unflatten(2, (groups, -1))[:, :, first], windows).unsqueeze(2)
    hidden = torch.nn.functional.gelu(torch.conv1d(mean, weight1, bias1, groups=heads // groups))
    out = torch.conv1d(hidden, weight2, bias2, groups=heads // groups).view(len(mean), -1, 9)
    return out + added[0] if added else out


@pytest.mark.parametrize(("name", "dtype", "threads"), pairs_of(list(CASES), list(TOLERANCE), [1, 3]))
def test_outputs_and_gradients(name: str, dtype: torch.dtype, threads: int) -> None:
    with threads_of_torch(threads):
        for batch, lepe in [(1, False), (2, True), (7, False)]:
            theirs = [tensor.requires_grad_() for tensor in make_inputs(name, batch, lepe)]
            ours = [tensor.detach().to(dtype).requires_grad_() for tensor in theirs]
            out, expected = compute(name, ours), reference(name, theirs)
            assert out.shape == expected.shape
            assert out.dtype == dtype
            assert error(out, expected) < TOLERANCE[dtype]
            with torch.no_grad():
                assert torch.equal(compute(name, ours), out)
            cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
            found = torch.autograd.grad(out, ours, cotangent.to(dtype))
            wanted = torch.autograd.grad(expected, theirs, cotangent)
            for gradient, exact in zip(found, wanted, strict=True):
                assert gradient.shape == exact.shape
                assert error(gradient, exact) < TOLERANCE[dtype]


@pytest.mark.parametrize("name", ["prefix tokens alone", "odd width", "padded shifted windows", "horizontal stripes"])
def test_gradcheck(name: str) -> None:
    inputs = [tensor.requires_grad_() for tensor in make_inputs(name, 1, True)]
    assert torch.autograd.gradcheck(lambda *tensors: compute(name, list(tensors)), inputs, fast_mode=True)


@pytest.mark.parametrize("name", ["odd width", "padded shifted windows", "horizontal stripes"])
def test_second_derivatives(name: str) -> None:
    def second(function) -> tuple[Tensor, ...]:
        tensors = [tensor.requires_grad_() for tensor in make_inputs(name, 2, True)]
        gradients = torch.autograd.grad(function(name, tensors).pow(2).sum(), tensors, create_graph=True)
        total = sum(gradient.pow(2).sum() for gradient in gradients)
        return torch.autograd.grad(total, tensors)

    torch.testing.assert_close(second(compute), second(reference), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["deit", "windows", "vertical stripes"])
def test_gradients_do_not_depend_on_the_number_of_threads(name: str) -> None:
    def gradients(threads: int) -> tuple[Tensor, ...]:
        # So many images that no window is divided into parts, whose number depends on the threads.
        tensors = [tensor.float().requires_grad_() for tensor in make_inputs(name, 16, False)]
        with threads_of_torch(threads):
            out = compute(name, tensors)
            cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
            return torch.autograd.grad(out, tensors, cotangent)

    assert all(map(torch.equal, gradients(3), gradients(1)))


def test_frozen_tensors_need_no_gradient() -> None:
    tensors = [tensor.float() for tensor in make_inputs("deit", 2, False)]
    tensors[3].requires_grad_()
    expected = [tensor.double().detach() for tensor in tensors]
    expected[3].requires_grad_()
    (found,) = torch.autograd.grad(compute("deit", tensors).pow(2).sum(), tensors[3])
    (wanted,) = torch.autograd.grad(reference("deit", expected).pow(2).sum(), expected[3])
    assert error(found, wanted) < TOLERANCE[torch.float32]


def test_large_values_have_the_slopes_of_the_identity_and_of_zero() -> None:
    tensors = [tensor.float().requires_grad_() for tensor in make_inputs("odd width", 2, False)]
    with torch.no_grad():
        tensors[2].copy_(torch.tensor([1e4, -1e4, 6.0, -6.0, 0.0] * 3))
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    found = torch.autograd.grad(compute("odd width", tensors).sum(), tensors)
    wanted = torch.autograd.grad(reference("odd width", exact).sum(), exact)
    for gradient, other in zip(found, wanted, strict=True):
        assert torch.isfinite(gradient).all()
        assert error(gradient, other) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("windows", [WholeMap()((3, 2))[0], Windows(3, 2, 2, 2)])
def test_no_images(windows: Windows) -> None:
    module, x = LocalResidual(8, 2), torch.zeros(0, 6, 8, requires_grad=True)
    out = module.native(x, windows)
    assert out.shape == (0, 8, 9)
    gradients = torch.autograd.grad(out.sum(), [x, *module.parameters()])
    assert gradients[0].shape == x.shape
    assert not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight1": torch.zeros(8, 8, 1)}, r"weight1 must be torch.float32 of shape \(8, 4, 1\)"),
        ({"bias2": torch.zeros(71)}, r"bias2 must be torch.float32 of shape \(72,\)"),
        ({"weight2": torch.zeros(72, 4, 1, dtype=torch.float64)}, "weight2 must be torch.float32"),
        ({"added": torch.zeros(9, 8)}, r"added must be torch.float32 of shape \(8, 9\)"),
        ({"x": torch.zeros(6, 8)}, "x must be"),
        ({"x": torch.zeros(1, 5, 8)}, "5 tokens do not match"),
        ({"x": torch.zeros(1, 6, 8, dtype=torch.float16)}, "float32 and float64"),
    ],
)
def test_refuses_what_does_not_fit(change: dict[str, Tensor], message: str) -> None:
    arguments = {"x": torch.zeros(1, 6, 8), "weight1": torch.zeros(8, 4, 1), "bias1": torch.zeros(8)}
    arguments |= {"weight2": torch.zeros(72, 4, 1), "bias2": torch.zeros(72)}
    with pytest.raises(ValueError, match=message):
        kernels.local_kernels(windows=WholeMap()((3, 2))[0], num_heads=2, **{**arguments, **change})
