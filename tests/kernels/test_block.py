"""The block kernel against layers.Block in float64, and its int8 form; the linear layer."""

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from inlinevit import kernels
from inlinevit.kernels.packing import has_wide_sums
from inlinevit.layers import Block, InLineAttention, SoftmaxAttention
from inlinevit.layers.layouts import CrossStripes, SquareWindows, WholeMap

Case = tuple[tuple[int, int], int, int, int, dict[str, Any], dict[str, Any]]

# Map, prefix tokens, channels, heads, arguments of the attention, arguments of the block.
INLINE: dict[str, Case] = {
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
SHIFTED, LARGE, SINGLE = (SquareWindows(size, shifted=True) for size in (7, 26, 1))
SOFTMAX: dict[str, Case] = {
    "softmax deit": ((14, 14), 1, 192, 3, {}, {"norm_eps": 1e-6}),
    "softmax pvt": ((9, 13), 0, 64, 1, {"qkv_bias": False}, {"mlp_ratio": 8.0}),
    "softmax swin": ((14, 21), 0, 96, 3, {"layout": SquareWindows(7, shifted=False), "relative_window": 7}, {}),
    "softmax swin, shifted": ((14, 21), 0, 96, 3, {"layout": SHIFTED, "relative_window": 7}, {}),
    "softmax swin, padded": ((16, 10), 0, 64, 2, {"layout": SHIFTED, "relative_window": 7}, {}),
    "softmax swin, small map": ((5, 3), 0, 64, 2, {"layout": SHIFTED, "relative_window": 7}, {}),
    "softmax swin, flat map": ((5, 18), 0, 64, 2, {"layout": SHIFTED, "relative_window": 7}, {}),
    "softmax swin, no bias": ((9, 18), 0, 30, 6, {"layout": SHIFTED}, {}),
    "softmax cswin": ((8, 9), 0, 96, 4, {"layout": CrossStripes(2), "lepe": True}, {}),
    "softmax cswin, padded": ((7, 10), 0, 96, 2, {"layout": CrossStripes(3), "lepe": True}, {}),
    "softmax cswin, whole map": ((12, 11), 0, 96, 4, {"layout": CrossStripes(12), "lepe": True}, {}),
    "softmax, one token windows": ((3, 2), 0, 48, 2, {"layout": SINGLE, "relative_window": 1}, {}),
    "softmax, one token": ((1, 1), 0, 32, 1, {"relative_window": 1}, {}),
    "softmax, many keys": ((25, 61), 3, 39, 3, {"lepe": True}, {}),
    "softmax, large windows": ((50, 27), 0, 30, 2, {"layout": LARGE, "relative_window": 26}, {}),
}
CASES = INLINE | SOFTMAX


def make_block(name: str) -> Block:
    """A block with weights that matter everywhere."""
    torch.manual_seed(0)
    _, _, dim, heads, attention, block = CASES[name]
    kind = InLineAttention if name in INLINE else SoftmaxAttention
    made = Block(kind(dim, heads, **attention), dim, **block).eval().requires_grad_(False)
    for parameter in made.parameters():
        parameter.copy_(torch.randn_like(parameter) * (0.5 if parameter.dim() < 2 else parameter[0].numel() ** -0.5))
    if isinstance(made.attn, SoftmaxAttention):
        # Weights that are far from equal.
        made.attn.qkv.weight.mul_(3.0)
    return made


def pack(block: Block, *, int8: bool = False) -> kernels.PackedBlock:
    attn = block.attn
    softmax = isinstance(attn, SoftmaxAttention)
    residual = None if softmax else attn.local_residual
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
        kernels_before_norm=block.kernels_before_norm,
        softmax=softmax,
        relative_position_bias_table=attn.relative_position_bias_table if softmax else None,
        relative_window=attn.relative_window if softmax else 0,
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


# Fewer tokens than channels: several threads divide the channels, where the heads can be divided.
FEW_TOKENS: dict[str, Case] = {
    "few tokens": ((7, 7), 0, 768, 24, {}, {}),
    "few tokens with LePE": ((3, 4), 2, 256, 4, {"lepe": True}, {"kernels_before_norm": True, "mlp_ratio": 3.5}),
    "few tokens, no local residual": ((5, 2), 1, 192, 12, {"local_residual": False}, {}),
    "several tiles": ((14, 14), 0, 384, 6, {}, {}),
    "one token, many channels": ((1, 1), 0, 96, 6, {}, {}),
}


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("name", [*FEW_TOKENS, "deit", "wide", "odd sizes"])
def test_threads(name: str, int8: bool, set_threads: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    for cases in (CASES, INLINE):
        for other, case in FEW_TOKENS.items():
            monkeypatch.setitem(cases, other, case)
    block, x, feat_size = make_block(name), make_tokens(name, 1), CASES[name][0]
    packed, windows = pack(block, int8=int8), block.attn.layout(feat_size)
    expected = block.double()(x.double(), feat_size) - x.double()
    found = {}
    for threads in (1, 2, 3, 6):
        set_threads(threads)
        found[threads] = packed(x, windows) - x
        if int8:
            assert torch.cosine_similarity(found[threads].flatten().double(), expected.flatten(), dim=0) > 0.999
        else:
            assert error(found[threads], expected) < 5e-6
    # Sums in another order change rows that are quantised by one step here and there.
    assert all(error(out, found[1].double()) < (5e-3 if int8 else 5e-6) for out in found.values())


@pytest.mark.parametrize("int8", [False, True])
def test_consecutive_blocks(int8: bool) -> None:
    names = ["swin", "swin, unshifted", "whole map"]
    layouts = [SquareWindows(7, shifted=True), SquareWindows(7, shifted=False), WholeMap()]
    blocks = []
    for name, layout in zip(names, layouts, strict=True):
        torch.manual_seed(len(name))
        blocks.append(Block(InLineAttention(96, 3, layout=layout), 96).eval().requires_grad_(False))
    x = make_tokens("swin", 2)
    before = x.clone()
    packed, windows = [pack(block, int8=int8) for block in blocks], [layout((16, 16)) for layout in layouts]
    out = kernels.run_blocks(packed, x, windows)
    expected = x
    for one, groups in zip(packed, windows, strict=True):
        expected = one(expected, groups)
    assert torch.equal(out, expected)
    assert torch.equal(x, before)
    strided = x.repeat_interleave(2, dim=2)[:, :, ::2]
    assert torch.equal(kernels.run_blocks(packed, strided, windows), expected)
    assert kernels.run_blocks(packed, x[:0], windows).shape == (0, 256, 96)
    with pytest.raises(ValueError, match="expected float32 tokens"):
        kernels.run_blocks(packed, x.double(), windows)


@pytest.mark.parametrize("name", CASES)
def test_int8(name: str) -> None:
    block, x, feat_size = make_block(name), make_tokens(name, 2), CASES[name][0]
    out = pack(block, int8=True)(x, block.attn.layout(feat_size)) - x
    expected = block(x, feat_size) - x
    # Softmax amplifies errors of large scores.
    assert torch.cosine_similarity(out.flatten(), expected.flatten(), dim=0) > (0.999 if name in INLINE else 0.995)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(
    "name", ["deit", "no local residual", "odd sizes", "large odd sizes", "softmax deit", "softmax, many keys"]
)
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
@pytest.mark.parametrize("name", ["swin, padded", "softmax swin, padded"])
def test_operator_contract(name: str, int8: bool) -> None:
    block, x, feat_size = make_block(name), make_tokens(name, 2), CASES[name][0]
    packed = pack(block, int8=int8)
    numbers = [number for group in block.attn.layout(feat_size) for number in group]
    arguments = (x, list(packed.tensors), numbers, *packed.options, False)
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


def test_softmax_refuses() -> None:
    block = make_block("softmax swin")
    packed, x = pack(block), make_tokens("softmax swin", 1)
    with pytest.raises(ValueError, match="up to 7×7"):
        packed(x, SquareWindows(8, shifted=False)((14, 21)))
    with pytest.raises(ValueError, match="1 prefix tokens"):
        packed(x[:, :26], WholeMap()((5, 5)))
    tensors = list(packed.tensors)
    with pytest.raises(ValueError, match="relative_bias of a packed block"):
        torch.ops.inlinevit.block(x, tensors, WholeMap()((14, 21))[0], *packed.options[:-1], 8, False)
    inline = pack(make_block("swin"))
    with pytest.raises(ValueError, match="does not belong"):
        torch.ops.inlinevit.block(x, list(inline.tensors), WholeMap()((14, 21))[0], *packed.options, False)
    with pytest.raises(ValueError, match="InLine attention has no biases"):
        kernels.pack_block(
            norm1=block.norm1,
            qkv=block.attn.qkv,
            proj=block.attn.proj,
            norm2=block.norm2,
            fc1=block.mlp.fc1,
            fc2=block.mlp.fc2,
            num_heads=3,
            relative_position_bias_table=block.attn.relative_position_bias_table,
        )


def test_softmax_of_large_scores() -> None:
    """Scores far beyond what exp can represent."""
    block, x, feat_size = make_block("softmax swin, padded"), make_tokens("softmax swin, padded", 1), (16, 10)
    block.attn.qkv.weight.mul_(30.0)
    out = pack(block)(x, block.attn.layout(feat_size))
    assert error(out, block.double()(x.double(), feat_size)) < 1e-3


def test_softmax_keeps_nan_in_its_window() -> None:
    block, x, feat_size = make_block("softmax swin"), make_tokens("softmax swin", 1), CASES["softmax swin"][0]
    packed, windows = pack(block), block.attn.layout(feat_size)
    clean = packed(x, windows)
    x[0, 0] = torch.nan
    out = packed(x, windows)
    assert out[0, :7].isnan().all()
    assert torch.equal(out[0, 7:21], clean[0, 7:21])


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
    most = 154 if has_wide_sums() else 103
    x = torch.randint(-100, most + 1, (33, 700), generator=generator).float()
    weight = torch.randint(-39, 40, (50, 700), generator=generator).float()
    # The smallest and largest values set the scales. Weights 2, 3, 6 and 7 are summed up in 16 bits.
    x[:, [0, 600]], x[:, [1, 601]] = -100.0, float(most)
    weight[:, [2, 6, 7]] = weight[:, [2, 6, 7]].abs()
    weight[:, 3] = -127.0
    packed = kernels.pack_linear(weight, None, int8=True)
    assert torch.equal(kernels.linear(x, packed, 50), x @ weight.t())


@pytest.mark.parametrize("inputs", [4, 6, 96, 1031])
def test_int8_sums_cannot_overflow(inputs: int) -> None:
    """The largest inputs meet the largest weights of the same sign."""
    weight = torch.ones(40, inputs) * torch.linspace(-3, 3, 40)[:, None]
    packed = kernels.pack_linear(weight, None, int8=True)
    for sign in (-1.0, 1.0):
        out = kernels.linear(torch.full((1, inputs), sign), packed, 40)
        assert error(out, sign * weight.sum(1).double()) < 1e-6
    largest = packed.weight.int().view(-1, packed.weight.shape[1] // 2, 2, 16, 2, 2).sum(dim=(2, 5)).abs().amax()
    assert packed.weight.abs().amax() == 127 if has_wide_sums() else 204 * largest <= 2**15 - 1


def test_int8_keeps_nan() -> None:
    x = torch.ones(3, 40)
    x[1, 7], x[2, 8] = torch.nan, torch.inf
    out = kernels.linear(x, kernels.pack_linear(torch.ones(5, 40), None, int8=True), 5)
    assert torch.equal(out.isnan().all(dim=1), torch.tensor([False, True, True]))
    assert torch.allclose(out[0], torch.tensor(40.0))
