"""The block kernel against layers.Block in float64, and its int8 form; the linear layer."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from inlinevit import kernels
from inlinevit.layers import Block, InLineAttention
from inlinevit.layers.layouts import CrossStripes, SquareWindows, WholeMap

# Map, prefix tokens, channels, heads, arguments of the attention, arguments of the block.
CASES: dict[str, tuple[tuple[int, int], int, int, int, dict[str, Any], dict[str, Any]]] = {
    "deit": ((14, 14), 1, 192, 6, {}, {"norm_eps": 1e-6}),
    "pvt": ((13, 9), 0, 64, 2, {"qkv_bias": False}, {"mlp_ratio": 8.0}),
    "wide": ((7, 7), 0, 640, 20, {}, {}),
    "swin": ((16, 16), 0, 96, 3, {"layout": SquareWindows(7, shifted=True)}, {}),
    "swin, padded": ((10, 15), 0, 64, 2, {"layout": SquareWindows(6, shifted=False)}, {}),
    "cswin": ((8, 9), 0, 96, 4, {"layout": CrossStripes(2), "lepe": True}, {"kernels_before_norm": True}),
    "cswin, whole map": ((12, 11), 0, 96, 4, {"layout": CrossStripes(12), "lepe": True}, {"kernels_before_norm": True}),
    "no local residual": ((6, 5), 2, 48, 2, {"local_residual": False}, {}),
    "lepe alone": ((6, 5), 2, 48, 2, {"local_residual": False, "lepe": True}, {}),
    "one token": ((1, 1), 0, 32, 1, {}, {}),
    "odd sizes": ((5, 3), 1, 30, 6, {}, {"mlp_ratio": 2.5}),
    "large odd sizes": ((17, 19), 3, 39, 3, {"layout": WholeMap(), "lepe": True}, {"mlp_ratio": 15.0}),
}


def make_block(name: str) -> Block:
    """A block with weights that matter everywhere."""
    torch.manual_seed(0)
    _, _, dim, heads, attention, block = CASES[name]
    made = Block(InLineAttention(dim, heads, **attention), dim, **block).eval().requires_grad_(False)
    for parameter in made.parameters():
        parameter.copy_(torch.randn_like(parameter) * (0.5 if parameter.dim() < 2 else parameter[0].numel() ** -0.5))
    return made


def pack(block: Block, *, int8: bool = False) -> kernels.PackedBlock:
    attn = block.attn
    assert isinstance(attn, InLineAttention)
    residual = attn.local_residual
    return kernels.pack_block(
        norm1=block.norm1,
        qkv=attn.qkv,
        proj=attn.proj,
        norm2=block.norm2,
        fc1=block.mlp.fc1,
        fc2=block.mlp.fc2,
        num_heads=attn.num_heads,
        local_residual=None if residual is None else (residual.fc1, residual.fc2),
        lepe=attn.lepe,
        context_before_norm=block.kernels_before_norm,
        int8=int8,
    )


def make_tokens(name: str, batch: int) -> Tensor:
    feat_size, prefix, dim = CASES[name][:3]
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, prefix + feat_size[0] * feat_size[1], dim, generator=generator) + 0.5


def error(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_float32(name: str, batch: int) -> None:
    block, x, feat_size = make_block(name), make_tokens(name, batch), CASES[name][0]
    packed = pack(block)
    before = x.clone()
    out = packed(x, block.attn.layout(feat_size))
    assert torch.equal(x, before)
    assert error(out - x, block.double()(x.double(), feat_size) - x.double()) < 5e-6


@pytest.mark.parametrize("name", CASES)
def test_int8(name: str) -> None:
    block, x, feat_size = make_block(name), make_tokens(name, 2), CASES[name][0]
    out = pack(block, int8=True)(x, block.attn.layout(feat_size)) - x
    expected = block(x, feat_size) - x
    assert torch.cosine_similarity(out.flatten(), expected.flatten(), dim=0) > 0.999


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("name", ["deit", "no local residual", "odd sizes", "large odd sizes"])
def test_prefix_only(name: str, int8: bool) -> None:
    block, x, (feat_size, prefix) = make_block(name), make_tokens(name, 5), CASES[name][:2]
    packed = pack(block, int8=int8)
    windows = block.attn.layout(feat_size)
    assert error(packed(x, windows, prefix_only=True), packed(x, windows)[:, :prefix].double()) < 1e-6


def test_many_images_are_processed_in_rounds() -> None:
    block, feat_size = make_block("pvt"), CASES["pvt"][0]
    x = make_tokens("pvt", 190)
    windows = block.attn.layout(feat_size)
    packed = pack(block)
    assert error(packed(x, windows)[-2:], packed(x[-2:], windows).double()) < 1e-6


def test_results_do_not_depend_on_later_changes_of_the_weights() -> None:
    block, x, feat_size = make_block("odd sizes"), make_tokens("odd sizes", 1), CASES["odd sizes"][0]
    packed = pack(block)
    windows = block.attn.layout(feat_size)
    out = packed(x, windows)
    for parameter in block.parameters():
        parameter.zero_()
    assert torch.equal(packed(x, windows), out)


def test_copies_and_pickles() -> None:
    packed, x = pack(make_block("odd sizes")), make_tokens("odd sizes", 1)
    windows = WholeMap()((5, 3))
    out = packed(x, windows)
    assert torch.equal(copy.deepcopy(packed)(x, windows), out)
    assert torch.equal(pickle.loads(pickle.dumps(packed))(x, windows), out)


@pytest.mark.parametrize("int8", [False, True])
def test_operator_contract(int8: bool) -> None:
    block, x, feat_size = make_block("swin, padded"), make_tokens("swin, padded", 2), CASES["swin, padded"][0]
    packed = pack(block, int8=int8)
    numbers = [number for group in block.attn.layout(feat_size) for number in group]
    arguments = (x, list(packed.tensors), numbers, 256, 2, False, 1e-5, 1e-5, False)
    torch.library.opcheck(torch.ops.inlinevit.block.default, arguments)


def test_refuses() -> None:
    packed, x = pack(make_block("odd sizes")), make_tokens("odd sizes", 1)
    whole = WholeMap()((5, 3))
    with pytest.raises(ValueError, match="float32"):
        packed(x.double(), whole)
    with pytest.raises(ValueError, match="30"):
        packed(x[:, :, :24], whole)
    with pytest.raises(ValueError, match="16 tokens"):
        packed(x, WholeMap()((5, 4)))
    with pytest.raises(ValueError, match="head group"):
        packed(x, [whole[0]._replace(num_head_groups=2)])
    with pytest.raises(ValueError, match="prefix_only"):
        packed(x[:, 1:], whole, prefix_only=True)
    with pytest.raises(ValueError, match="there are 129"):
        packed(torch.zeros(1, 129 + 15, 30), whole, prefix_only=True)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 1, 1), (7, 5, 3), (197, 192, 576), (65, 1537, 130)])
def test_linear(rows: int, inputs: int, outputs: int, int8: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(inputs, outputs).requires_grad_(False)
    x = torch.randn(rows, inputs)
    packed = kernels.pack_linear(layer.weight, layer.bias, int8=int8)
    for gelu in (False, True):
        out = kernels.linear(x, packed, outputs, gelu=gelu)
        expected = torch.nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double())
        expected = torch.nn.functional.gelu(expected) if gelu else expected
        assert error(out, expected) < (0.02 if int8 else 5e-6)
    torch.library.opcheck(torch.ops.inlinevit.linear.default, (x, *packed, outputs, True))


def test_int8_sums_are_exact() -> None:
    """Inputs and weights that are integers times a scale are represented exactly."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-127, 128, (33, 700), generator=generator).float()
    weight = torch.randint(-127, 128, (50, 700), generator=generator).float()
    # The largest values set the scales.
    x[:, [0, 600]] = 127.0
    weight[:, 3] = -127.0
    packed = kernels.pack_linear(weight, None, int8=True)
    assert torch.equal(kernels.linear(x, packed, 50), x @ weight.t())


def test_int8_keeps_nan() -> None:
    x = torch.ones(3, 40)
    x[1, 7], x[2, 8] = torch.nan, torch.inf
    out = kernels.linear(x, kernels.pack_linear(torch.ones(5, 40), None, int8=True), 5)
    assert torch.equal(out.isnan().all(dim=1), torch.tensor([False, True, True]))
    assert torch.allclose(out[0], torch.tensor(40.0))
