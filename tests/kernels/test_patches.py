"""Patch embedding and downsampling by the kernels, against torch in float64."""

import pytest
import torch
from torch import Tensor, nn

from inlinevit import kernels
from inlinevit.layers import PatchMerging

pytestmark = pytest.mark.skipif(not kernels.available(), reason=f"native kernels: {kernels.status().reason}")

# Channels in and out, kernel, stride, padding, and whether a norm follows.
CONVOLUTIONS = {
    "deit": (3, 192, 16, 16, 0, False),
    "swin": (3, 96, 4, 4, 0, True),
    "five bands": (5, 33, 4, 4, 0, True),
    "pvt": (64, 128, 2, 2, 0, True),
    "cswin, image": (3, 64, 7, 4, 2, True),
    "cswin, map": (32, 64, 3, 2, 1, True),
    "gaps": (4, 7, 2, 3, 0, False),
    "one pixel": (1, 1, 1, 1, 0, False),
    "deep": (640, 40, 3, 1, 1, False),
}


def error(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm()).item()


def make_conv(name: str) -> tuple[nn.Conv2d, nn.LayerNorm | None]:
    torch.manual_seed(0)
    inputs, outputs, kernel, stride, padding, has_norm = CONVOLUTIONS[name]
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding).requires_grad_(False)
    if not has_norm:
        return conv, None
    norm = nn.LayerNorm(outputs).requires_grad_(False)
    norm.weight.copy_(torch.randn(outputs))
    norm.bias.copy_(torch.randn(outputs))
    return conv, norm


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("size", [(1, 32, 32), (3, 37, 50)], ids=str)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name: str, size: tuple[int, int, int], int8: bool) -> None:
    conv, norm = make_conv(name)
    x = torch.randn(size[0], conv.in_channels, *size[1:]) + 0.5
    expected = conv.double()(x.double()).permute(0, 2, 3, 1)
    expected = expected if norm is None else norm.double()(expected)
    packed = kernels.pack_conv(conv.float(), None if norm is None else norm.float(), int8=int8)
    for layout in (torch.contiguous_format, torch.channels_last):
        out = packed(x.contiguous(memory_format=layout))
        assert out.shape == expected.shape
        assert out.is_contiguous()
        assert error(out, expected) < (0.05 if int8 else 5e-6)
    assert torch.equal(packed(x[:0]), expected[:0].float())


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(("dim", "size"), [(96, (2, 14, 28)), (7, (1, 2, 2)), (400, (1, 6, 4))], ids=str)
def test_patch_merging(dim: int, size: tuple[int, int, int], int8: bool) -> None:
    torch.manual_seed(0)
    merging = PatchMerging(dim, 2 * dim).requires_grad_(False)
    merging.norm.weight.copy_(torch.randn(4 * dim))
    merging.norm.bias.copy_(torch.randn(4 * dim))
    x = torch.randn(size[0], dim, *size[1:])
    expected = merging.double()(x.double())
    out = kernels.pack_merging(merging.norm.float(), merging.reduction.float(), int8=int8)(x)
    assert out.shape == expected.shape
    assert error(out, expected) < (0.05 if int8 else 5e-6)


@pytest.mark.integration
@pytest.mark.parametrize("name", ["deit", "cswin, map"])
def test_operator_contract(name: str) -> None:
    conv, norm = make_conv(name)
    packed = kernels.pack_conv(conv, norm, int8=False)
    x = torch.randn(2, conv.in_channels, 33, 48)
    torch.library.opcheck(torch.ops.inlinevit.patches.default, (x, list(packed.tensors), *packed.options))


def test_later_changes_of_the_weights_do_not_count() -> None:
    conv, norm = make_conv("swin")
    packed, x = kernels.pack_conv(conv, norm, int8=False), torch.randn(1, 3, 8, 8)
    before = packed(x)
    assert norm is not None
    for parameter in (conv.weight, conv.bias, norm.weight, norm.bias):
        parameter.zero_()
    assert torch.equal(packed(x), before)


def test_refuses() -> None:
    packed = kernels.pack_conv(*make_conv("deit"), int8=False)
    for wrong in (torch.randn(3, 32, 32), torch.randn(1, 3, 32, 32, dtype=torch.float64)):
        with pytest.raises(ValueError, match="expected float32 maps"):
            packed(wrong)
    with pytest.raises(ValueError, match="no patch of 16×16"):
        packed(torch.randn(1, 3, 15, 32))
    with pytest.raises(ValueError, match="1024 inputs"):
        packed(torch.randn(1, 4, 32, 32))
