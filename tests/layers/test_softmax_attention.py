"""Softmax attention's own: reduced keys and values, the table of relative positions."""

import pytest
import torch
import torch.nn.functional as F

from inlinevit import ops
from inlinevit.layers import CrossStripes, SoftmaxAttention, SquareWindows
from inlinevit.layers.softmax_attention import MASK_CACHE, compute_masked_pairs, masked_pairs


@pytest.mark.parametrize("qkv_bias", [True, False])
@pytest.mark.parametrize(("sr_ratio", "size"), [(2, (4, 6)), (2, (5, 7)), (4, (8, 8)), (8, (3, 5))])
def test_reduction(randomise, sr_ratio, size, qkv_bias):
    """Keys and values come from a strided convolution of the padded map and a LayerNorm."""
    mixer = randomise(SoftmaxAttention(8, 2, sr_ratio=sr_ratio, qkv_bias=qkv_bias))
    x = torch.randn(2, size[0] * size[1], 8, dtype=torch.float64)
    image = x.transpose(1, 2).reshape(2, 8, *size)
    image = F.pad(image, (0, -size[1] % sr_ratio, 0, -size[0] % sr_ratio))
    reduced = F.conv2d(image, mixer.reduce.proj.weight, mixer.reduce.proj.bias, stride=sr_ratio)
    reduced = F.layer_norm(reduced.flatten(2).transpose(1, 2), (8,), mixer.reduce.norm.weight, mixer.reduce.norm.bias)
    assert reduced.shape[1] == -(-size[0] // sr_ratio) * -(-size[1] // sr_ratio)
    q = mixer.qkv(x)[..., :8]
    _, k, v = mixer.qkv(reduced).split(8, dim=-1)
    q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in (q, k, v))
    expected = ops.attention_weights(q, k, kind="softmax") @ v
    expected = mixer.proj(expected.transpose(1, 2).flatten(2))
    torch.testing.assert_close(mixer(x, size), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("unit_queries", [False, True])
@pytest.mark.parametrize("size", [(4, 6), (5, 7)])
def test_weights_and_partition_with_reduction(randomise, size, unit_queries):
    """Queries of all tokens, keys and values of the reduced map; also some queries at a time, and some keys masked."""
    mixer = randomise(SoftmaxAttention(8, 2, sr_ratio=2, unit_queries=unit_queries)).requires_grad_(False)
    count, reduced = size[0] * size[1], -(-size[0] // 2) * -(-size[1] // 2)
    x = torch.randn(2, count, 8, dtype=torch.float64)
    ((q, k, v, windows),) = mixer.partition(x, size)
    assert q.shape == (2, 2, count, 4)
    assert k.shape == v.shape == (2, 2, reduced, 4)
    assert mixer.local_kernels(x, windows) is mixer.static_kernels(windows) is None
    weights = mixer.attention_weights(q, k, v, windows)
    out = (weights @ v).transpose(1, 2).flatten(2)
    torch.testing.assert_close(mixer.proj(out), mixer(x, size), rtol=0, atol=1e-10)
    attn_mask = torch.rand(1, 1, count, reduced) < 0.5
    part = mixer.attention_weights(q[:, :, 3:9], k, v, windows, attn_mask[:, :, 3:9], first=3)
    expected = (weights * attn_mask)[:, :, 3:9]
    expected = expected / expected.sum(dim=-1, keepdim=True)
    torch.testing.assert_close(part, expected.nan_to_num(0.0), rtol=0, atol=1e-10)


def test_unit_queries_lose_the_length_of_queries():
    mixer = SoftmaxAttention(8, 2, unit_queries=True)
    (windows,) = mixer.layout((3, 5))
    q, k, v = torch.randn(3, 2, 2, 15, 4)
    out = mixer.attend(q, k, v, windows)
    torch.testing.assert_close(mixer.attend(3 * q, k, v, windows), out)
    torch.testing.assert_close(mixer.attend(q, k, v, windows), ops.softmax_attention(F.normalize(q, dim=-1), k, v))
    assert not torch.allclose(mixer.attend(-q, k, v, windows), out)
    mixer.unit_queries = False
    assert not torch.allclose(mixer.attend(q, k, v, windows), out)
    assert mixer.attend(q * 0, k, v, windows).isfinite().all()


def test_gradients_reach_the_reduction(randomise):
    mixer = randomise(SoftmaxAttention(8, 2, sr_ratio=2))
    mixer(torch.randn(2, 35, 8, dtype=torch.float64), (5, 7)).square().sum().backward()
    for name, parameter in mixer.named_parameters():
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_reduction_in_half_precision(dtype):
    mixer, x = SoftmaxAttention(8, 2, sr_ratio=2), torch.randn(1, 16, 8)
    with torch.autocast("cpu", dtype=dtype):
        assert mixer(x, (4, 4)).dtype == dtype
    assert mixer.to(dtype)(x.to(dtype), (4, 4)).dtype == dtype


def test_prefix_tokens_with_reduction_are_refused():
    with pytest.raises(ValueError, match=r"prefix tokens.*use sr_ratio=1"):
        SoftmaxAttention(8, 2, sr_ratio=2)(torch.randn(1, 17, 8), (4, 4))


@pytest.mark.parametrize("layout", [SquareWindows(4, shifted=False), CrossStripes(2)])
def test_windows_with_reduction_are_refused(layout):
    with pytest.raises(
        ValueError, match=r"sr_ratio=2 works on the whole map, without windows.*leave them out, or use sr_ratio=1"
    ):
        SoftmaxAttention(8, 2, sr_ratio=2, layout=layout)


@pytest.mark.parametrize("options", [{"lepe": True}, {"relative_window": 4}])
def test_what_reduction_would_ignore_is_refused(options):
    """Parameters that never get a gradient break training on several devices."""
    with pytest.raises(ValueError, match="sr_ratio"):
        SoftmaxAttention(8, 2, sr_ratio=2, **options)


def test_relative_positions_follow_swin():
    """Index (row distance + w − 1)·(2w − 1) + (column distance + w − 1), query minus key."""
    mixer = SoftmaxAttention(8, 2, relative_window=3)
    with torch.no_grad():
        mixer.relative_position_bias_table.copy_(torch.arange(50.0).view(25, 2))
    (windows,) = mixer.layout((3, 3))
    bias = mixer.relative_position_bias(windows)
    assert bias.shape == (1, 2, 9, 9)
    assert bias[0, :, 4, 4].tolist() == [24.0, 25.0]  # itself: row 12
    assert bias[0, 0, 0, 8] == 0  # top left looks at bottom right: row 0
    assert bias[0, 0, 8, 0] == 48  # and back: row 24
    assert bias[0, 0, 0, 1] == 2 * 11  # one column to the right
    assert bias[0, 0, 0, 3] == 2 * 7  # one row down


@pytest.mark.parametrize("size", [(2, 10), (10, 2), (5, 5)])
def test_a_window_larger_than_the_table_is_refused(size):
    """Else the distances of one row would be read as those of another."""
    mixer = SoftmaxAttention(8, 2, relative_window=4)
    with pytest.raises(ValueError, match="relative_window"):
        mixer(torch.randn(1, size[0] * size[1], 8), size)


def test_prefix_tokens_with_relative_positions_are_refused():
    with pytest.raises(ValueError, match="prefix tokens"):
        SoftmaxAttention(8, 2, relative_window=4)(torch.randn(1, 17, 8), (4, 4))


def attend_stripes_with_relative_positions():
    SoftmaxAttention(8, 2, relative_window=6, layout=CrossStripes(2))(torch.randn(1, 36, 8), (6, 6))


def test_relative_positions_in_stripes_are_refused():
    """The table holds all heads, a stripe half of them. CSWin has LePE instead."""
    with pytest.raises(ValueError, match="relative_window"):
        attend_stripes_with_relative_positions()


def test_shifted_windows_hide_the_other_side():
    """A change at one edge of the map reaches nothing at the opposite edge, though they share a window."""
    mixer = SoftmaxAttention(8, 2, layout=SquareWindows(4, shifted=True))
    x = torch.randn(1, 64, 8)
    changed = x.clone()
    changed[:, :8] += 1  # the top row
    moved = (mixer(changed, (8, 8)) - mixer(x, (8, 8))).abs().sum(dim=-1).view(8, 8)
    assert torch.all(moved[2:] == 0)
    assert torch.all(moved[:2] > 0)


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("size", [(8, 8), (5, 7), (3, 9)])
def test_masked_pairs(slots, may_see, size, shifted):
    """Padding and the other side of the seam; but every token, padding too, sees itself, so that no row is empty."""
    (windows,) = SquareWindows(4, shifted=shifted)(size)
    hidden = masked_pairs(windows, torch.device("cpu"))
    expected = torch.tensor(
        [
            [[a is not b and (b.token is None or not may_see(a, b)) for b in window] for a in window]
            for window in slots(windows)
        ]
    )
    assert (hidden is None) == (not expected.any())
    if hidden is not None:
        # An unpadded, unshifted axis needs no mask of its own: (windows or 1, 1, tokens, tokens)
        assert torch.equal(hidden.squeeze(1).expand_as(expected), expected)


def test_masks_are_made_once_and_serve_training_after_inference(monkeypatch):
    made = []

    def counted(*arguments):
        made.append(arguments)
        return compute_masked_pairs(*arguments)

    monkeypatch.setattr("inlinevit.layers.softmax_attention.compute_masked_pairs", counted)
    mixer, x = SoftmaxAttention(8, 2, layout=SquareWindows(3, shifted=True)), torch.randn(2, 49, 8)
    MASK_CACHE.clear()
    with torch.inference_mode():
        expected = mixer(x, (7, 7))
    out = mixer(x, (7, 7))
    out.sum().backward()
    torch.testing.assert_close(out, expected)
    assert len(made) == len(MASK_CACHE) == 1


def test_masks_of_many_sizes_do_not_add_up():
    mixer = SoftmaxAttention(8, 2, layout=SquareWindows(7, shifted=True))
    MASK_CACHE.clear()
    with torch.no_grad():
        for side in range(60, 100):
            mixer(torch.randn(1, side * side, 8), (side, side))
    assert 0 < len(MASK_CACHE) <= 16
    assert 0 < MASK_CACHE.nbytes <= 2**25
