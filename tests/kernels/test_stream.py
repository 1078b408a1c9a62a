"""Streamed blocks against layers.Block in float64: chunks, masks, prefix tokens, int8; and their moments."""

import copy
import pickle
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from inlinevit import kernels
from inlinevit.kernels import StreamedBlock, TokenMoments
from inlinevit.kernels.packing import select_outputs, unpack_weight
from inlinevit.layers import Block
from inlinevit.ops.local import add_convolution
from inlinevit.ops.windows import merge_heads

from .test_block import CASES, INLINE, error, make_block, make_tokens, pack

WHOLE_MAP = [name for name in INLINE if not name.startswith(("swin", "cswin"))] + ["cswin, whole map"]


def split_rows(height: int, chunks: int) -> list[tuple[int, int]]:
    """The first and last rows of uneven chunks."""
    return list(
        pairwise(sorted({0, height, *(min(height, chunk * height // chunks + 1) for chunk in range(1, chunks))}))
    )


def stream(
    block: StreamedBlock,
    x: Tensor,
    feat_size: tuple[int, int],
    chunks: Sequence[tuple[int, int]],
    mask: Tensor | None = None,
) -> Tensor:
    """Apply a block to tokens (prefix + H·W, channels) in place, a chunk of rows after the other."""
    (height, width), prefix = feat_size, x.shape[0] - feat_size[0] * feat_size[1]
    out = x.clone()
    tokens = out[prefix:].view(height, width, -1)
    visible = torch.ones(x.shape[0], dtype=torch.bool) if mask is None else mask
    rows_visible = visible[prefix:].view(height, width)

    def hides(rows: Tensor) -> Tensor | None:
        return None if mask is None else rows.flatten()

    moments = block.summarize(out[:prefix], hides(visible[:prefix]))
    for begin, end in chunks:
        moments = moments.merge(block.summarize(tokens[begin:end].flatten(0, 1), hides(rows_visible[begin:end])))
    done = block.apply_prefix(out[:prefix], moments)
    above = None
    for begin, end in chunks:
        rows = tokens[begin:end].view(-1, x.shape[1])
        last = tokens[end - 1].clone()
        block.apply(
            rows,
            moments,
            width,
            above,
            tokens[end] if end < height else None,
            rows,
            mask=hides(rows_visible[begin:end]),
            mask_above=None if above is None else hides(rows_visible[begin - 1]),
            mask_below=None if end == height else hides(rows_visible[end]),
        )
        above = last
    out[:prefix] = done
    return out


def forward_masked(block: Block, x: Tensor, feat_size: tuple[int, int], mask: Tensor) -> Tensor:
    """The block for tokens (prefix + H·W, channels), as if tokens that are False in the mask did not exist."""
    attn, x = block.attn, x[None]
    normed = block.norm1(x)
    ((q, k, v, windows),) = attn.partition(normed, feat_size)
    v = v * mask[:, None]
    weights = attn.attention_weights(q, k, v, windows, mask[None, None, None])
    mean = (x if block.kernels_before_norm else normed)[:, mask].sum(dim=1, keepdim=True) / max(1, int(mask.sum()))
    dynamic = attn.local_kernels(mean.expand_as(x), windows)
    attended = add_convolution(merge_heads(weights @ v), v, dynamic, attn.static_kernels(windows), windows)
    x = x + attn.proj(attended)
    return (x + block.mlp(block.norm2(x)))[0]


@pytest.mark.parametrize("chunks", [1, 2, 5])
@pytest.mark.parametrize("name", WHOLE_MAP)
def test_float32(name: str, chunks: int) -> None:
    block, x, feat_size = make_block(name), make_tokens(name, 1), CASES[name][0]
    streamed = StreamedBlock(pack(block))
    expected = block.double()(x.double(), feat_size)[0] - x[0].double()
    out = stream(streamed, x[0], feat_size, split_rows(feat_size[0], chunks))
    assert error(out - x[0], expected) < 5e-6


@pytest.mark.parametrize("name", WHOLE_MAP)
def test_int8(name: str) -> None:
    block, x, feat_size = make_block(name), make_tokens(name, 1), CASES[name][0]
    streamed = StreamedBlock(pack(block, int8=True))
    out = stream(streamed, x[0], feat_size, split_rows(feat_size[0], 2)) - x[0]
    expected = block(x, feat_size)[0] - x[0]
    assert torch.cosine_similarity(out.flatten(), expected.flatten(), dim=0) > 0.999


@pytest.mark.parametrize("visible", [0.7, 0.1])
@pytest.mark.parametrize("name", WHOLE_MAP)
def test_mask(name: str, visible: float) -> None:
    block, x, feat_size = make_block(name), make_tokens(name, 1)[0], CASES[name][0]
    mask = torch.rand(x.shape[0], generator=torch.Generator().manual_seed(2)) < visible
    # Whatever hidden tokens contain, others do not see it.
    shown = torch.where(mask[:, None], x, torch.nan)
    streamed = StreamedBlock(pack(block))
    out = stream(streamed, x, feat_size, split_rows(feat_size[0], 3), mask)
    found = stream(streamed, shown, feat_size, split_rows(feat_size[0], 3), mask)
    assert torch.equal(found[mask], out[mask])
    if mask.any():
        expected = forward_masked(block.double(), x.double(), feat_size, mask)
        assert error(out - x, expected - x.double()) < 5e-6
    else:
        assert out.isfinite().all()


@pytest.mark.parametrize("feat_size", [(3, 1000), (700, 1), (40, 130), (1, 1)])
def test_maps_of_any_shape(feat_size: tuple[int, int]) -> None:
    block = make_block("odd sizes")
    x = torch.randn(1 + feat_size[0] * feat_size[1], 30, generator=torch.Generator().manual_seed(1))
    expected = block.double()(x[None].double(), feat_size)[0] - x.double()
    streamed = StreamedBlock(pack(block.float()))
    for chunks in (1, 3):
        out = stream(streamed, x, feat_size, split_rows(feat_size[0], chunks))
        assert error(out - x, expected) < 5e-6


def test_many_rounds() -> None:
    """More tokens than values are kept of, so that their places are used again."""
    block, feat_size = make_block("one token"), (150, 521)
    x = torch.randn(150 * 521, 32, generator=torch.Generator().manual_seed(1))
    streamed = StreamedBlock(pack(block))
    expected = streamed.block(x[None], block.attn.layout(feat_size))[0] - x
    for chunks in (1, 2):
        out = stream(streamed, x, feat_size, split_rows(150, chunks))
        assert error(out - x, expected.double()) < 5e-6


@pytest.mark.parametrize("threads", [1, 3])
def test_threads(threads: int) -> None:
    block, feat_size = make_block("odd sizes"), (41, 77)
    x = torch.randn(1 + 41 * 77, 30, generator=torch.Generator().manual_seed(1))
    streamed = StreamedBlock(pack(block))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        out = stream(streamed, x, feat_size, split_rows(41, 2))
    finally:
        torch.set_num_threads(before)
    assert error(out - x, block.double()(x[None].double(), feat_size)[0] - x.double()) < 5e-6


def normed_moments(block: Block, x: Tensor) -> TokenMoments:
    """The moments of tokens, by their definition."""
    normed = block.double().norm1(x.double())
    mean = normed.mean(dim=0)
    kernel_mean = x.double().mean(dim=0) if block.kernels_before_norm else mean
    count = torch.tensor(float(len(x)), dtype=torch.float64)
    return TokenMoments(count, mean, kernel_mean, (normed - mean).t() @ (normed - mean))


def assert_close(found: TokenMoments, expected: TokenMoments, tolerance: float) -> None:
    for name in ("count", "mean", "kernel_mean", "covariance"):
        assert error(getattr(found, name), getattr(expected, name)) < tolerance, name


@pytest.mark.parametrize("tokens", [1, 2, 127, 129, 1025, 5003])
@pytest.mark.parametrize("name", ["large odd sizes", "cswin, whole map"])
def test_moments(name: str, tokens: int) -> None:
    block = make_block(name)
    x = torch.randn(tokens, CASES[name][2], generator=torch.Generator().manual_seed(1))
    found = StreamedBlock(pack(block)).summarize(x)
    expected = normed_moments(block, x)
    if tokens == 1:
        assert torch.equal(found.covariance, torch.zeros_like(found.covariance))
        expected = TokenMoments(expected.count, expected.mean, expected.kernel_mean, found.covariance + 1)
        found = TokenMoments(found.count, found.mean, found.kernel_mean, found.covariance + 1)
    assert torch.equal(found.covariance, found.covariance.t())
    assert_close(found, expected, 1e-6)


def test_moments_of_large_means() -> None:
    """Means are 1,000 times as large as deviations, and differ between parts of the map."""
    block = make_block("large odd sizes")
    generator = torch.Generator().manual_seed(1)
    offsets = torch.randn(39, generator=generator) * torch.linspace(1.0, 1.01, 4000)[:, None]
    x = offsets + 1e-3 * torch.randn(4000, 39, generator=generator)
    found = StreamedBlock(pack(block)).summarize(x)
    # The deviations of x after the norm have 4 digits less than x.
    assert_close(found, normed_moments(block, x), 1e-4)
    assert error(found.mean, normed_moments(block, x).mean) < 1e-7


def test_merging_is_exact_in_any_order() -> None:
    generator = torch.Generator().manual_seed(1)
    block = make_block("cswin, whole map")
    streamed = StreamedBlock(pack(block))
    parts = [
        streamed.summarize(torch.randn(count, 96, generator=generator) + shift)
        for count, shift in ((7, 0.0), (300, 3.0), (0, 0.0), (1, -20.0), (1100, 1.0))
    ]
    merged = streamed.summarize(torch.zeros(0, 96))
    for part in parts:
        merged = merged.merge(part)
    backwards = parts[4].merge(parts[3]).merge(parts[2].merge(parts[1]).merge(parts[0]))
    assert_close(backwards, merged, 1e-14)
    generator.manual_seed(1)
    counts_and_shifts = ((7, 0.0), (300, 3.0), (1, -20.0), (1100, 1.0))
    x = torch.cat([torch.randn(count, 96, generator=generator) + shift for count, shift in counts_and_shifts])
    assert_close(merged, normed_moments(block, x), 1e-6)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(("inputs", "begin", "end"), [(39, 78, 117), (64, 32, 48), (700, 1, 2)])
def test_selected_outputs(inputs: int, begin: int, end: int, int8: bool) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(inputs, 117).requires_grad_(False)
    packed = kernels.pack_linear(layer.weight, layer.bias, int8=int8)
    x = torch.randn(9, inputs)
    selected = select_outputs(packed, begin, end)
    assert torch.equal(kernels.linear(x, selected, end - begin), kernels.linear(x, packed, 117)[:, begin:end])
    assert error(unpack_weight(packed, inputs)[:117], layer.weight.double()) < (0.02 if int8 else 1e-30)


def test_refuses() -> None:
    block = StreamedBlock(pack(make_block("odd sizes")))
    x = torch.zeros(15, 30)
    moments, out = block.summarize(x), torch.empty(15, 30)
    with pytest.raises(ValueError, match="softmax"):
        StreamedBlock(pack(make_block("softmax deit")))
    for wrong in (x.double(), x[:, :24], x[None], x.to("meta")):
        with pytest.raises(ValueError, match="float32 of shape"):
            block.summarize(wrong)
        with pytest.raises(ValueError, match="float32 of shape"):
            block.apply_prefix(wrong, moments)
    for wrong_mask in (torch.ones(15), torch.ones(14, dtype=torch.bool)):
        with pytest.raises(ValueError, match="mask to be boolean"):
            block.summarize(x, wrong_mask)
    with pytest.raises(ValueError, match="whole rows of 4 tokens"):
        block.apply(x, moments, 4, None, None, out)
    with pytest.raises(ValueError, match="out to be float32"):
        block.apply(x, moments, 3, None, None, out[:12])
    with pytest.raises(ValueError, match="above to be float32"):
        block.apply(x, moments, 3, x[:2].clone(), None, out)
    with pytest.raises(ValueError, match="contiguous"):
        block.apply(x, moments, 3, None, None, torch.empty(30, 15).t())
    with pytest.raises(ValueError, match="out must be x"):
        block.apply(x[:12], moments, 3, None, None, x[3:])
    with pytest.raises(ValueError, match="keep a copy"):
        block.apply(x[3:12], moments, 3, x[3:6], None, x[3:12])
    with pytest.raises(ValueError, match="belong together"):
        block.apply(x, moments, 3, x[:3].clone(), None, out, mask=torch.ones(15, dtype=torch.bool))
    with pytest.raises(ValueError, match="needs the tokens"):
        block.apply(x, moments, 3, None, None, out, mask_below=torch.ones(3, dtype=torch.bool))
    with pytest.raises(ValueError, match="moments of 30 channels"):
        block.apply(x, StreamedBlock(pack(make_block("pvt"))).summarize(torch.zeros(1, 64)), 3, None, None, out)


def test_copies_and_pickles() -> None:
    block, x = StreamedBlock(pack(make_block("odd sizes"))), make_tokens("odd sizes", 1)[0]
    out = stream(block, x, (5, 3), [(0, 5)])
    for copied in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        assert torch.equal(stream(copied, x, (5, 3), [(0, 5)]), out)


@pytest.mark.slow
@pytest.mark.parametrize("shift", [0.0, 30.0])
def test_a_million_tokens(shift: float) -> None:
    """The moments of 2²⁰ tokens, and the output of a chunk, against float64."""
    block, width = make_block("deit"), 1024
    generator = torch.Generator().manual_seed(1)
    offset = shift * torch.randn(192, generator=generator)
    # Tokens change over the map.
    trend = torch.randn(192, generator=generator)
    moments, expected = None, None
    reference = copy.deepcopy(block).double()
    streamed = StreamedBlock(pack(block))
    chunks = []
    for index in range(16):
        x = torch.randn(64 * width, 192, generator=generator) + offset + index / 16 * trend
        if index < 2:
            chunks.append(x[: 2 * width] if index else x[-width:])
        found = streamed.summarize(x)
        moments = found if moments is None else moments.merge(found)
        exact = normed_moments(reference, x)
        expected = exact if expected is None else expected.merge(exact)
    assert moments is not None
    assert expected is not None
    assert_close(moments, expected, 2e-6)
    above, (x, below) = chunks[0], chunks[1].view(2, width, 192)
    out = torch.empty_like(x)
    streamed.apply(x, moments, width, above, below, out)
    exact = apply_exactly(reference, torch.stack([above, x, below]), expected)
    # What the block adds, although tokens are up to 13 times as large as that.
    assert error(out.double() - x.double(), exact - x.double()) < 2e-6


def apply_exactly(block: Block, rows: Tensor, moments: TokenMoments) -> Tensor:
    """The output of the middle one of three rows (3, width, channels) of a map with these moments, in float64."""
    attn, x = block.attn, rows.double()
    heads, channels = attn.num_heads, x.shape[2]
    normed = block.norm1(x)
    q, _, v = (part.unflatten(2, (heads, -1)) for part in attn.qkv(normed).chunk(3, dim=2))
    w_k, w_v = (part.view(heads, -1, channels) for part in attn.qkv.weight.chunk(3)[1:])
    covariance = w_k @ (moments.covariance / moments.count) @ w_v.transpose(1, 2)
    v_mean = attn.qkv(moments.mean).chunk(3)[2]
    attended = v_mean + (channels // heads) ** -0.5 * torch.einsum("whk,hkv->whv", q[1], covariance).flatten(1)
    ((*_, windows),) = attn.partition(normed[1:2], (1, rows.shape[1]))
    taps = attn.local_kernels(moments.kernel_mean.expand(1, 1 + rows.shape[1], channels), windows)
    residual = torch.nn.functional.conv2d(
        v.flatten(2).permute(2, 0, 1)[None], taps.view(channels, 1, 3, 3), padding=(0, 1), groups=channels
    )
    x = x[1] + attn.proj(attended + residual[0, :, 0].t())
    return x + block.mlp(block.norm2(x))
