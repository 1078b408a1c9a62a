"""Two-dimensional rotary positions: the formula, what they leave alone, and products that know distances only."""

import math

import pytest
import torch

from inlinevit.layers import CrossStripes, SquareWindows
from inlinevit.ops.rope import rope_tables, rotate, rotate_qkv, window_rope_tables
from inlinevit.ops.windows import partition_heads


def turn(pair: torch.Tensor, angle: float) -> list[float]:
    a, b = pair.tolist()
    return [a * math.cos(angle) - b * math.sin(angle), b * math.cos(angle) + a * math.sin(angle)]


@pytest.mark.parametrize(("head_dim", "prefix", "first_row"), [(4, 0, 0), (8, 1, 0), (16, 2, 5)])
def test_it_is_the_formula(head_dim, prefix, first_row):
    """Channels of the first half turn by row·θ, of the second by column·θ, in adjacent pairs."""
    size, pairs = (3, 5), head_dim // 4
    x = torch.randn(1, 2, prefix + 15, head_dim, dtype=torch.float64)
    tables = rope_tables(size, head_dim, num_prefix_tokens=prefix, first_row=first_row, dtype=torch.float64)
    out = rotate(x, tuple(table[None, None] for table in tables))
    assert torch.equal(out[:, :, :prefix], x[:, :, :prefix])
    for head, token in torch.cartesian_prod(torch.arange(2), torch.arange(15)).tolist():
        place = (first_row + token // 5, token % 5)
        for half in range(2):
            for m in range(pairs):
                theta = 10000 ** (-m / (pairs - 1)) if pairs > 1 else 1.0
                channels = slice(half * 2 * pairs + 2 * m, half * 2 * pairs + 2 * m + 2)
                expected = turn(x[0, head, prefix + token, channels], place[half] * theta)
                assert out[0, head, prefix + token, channels].tolist() == pytest.approx(expected, abs=1e-12)


def test_lengths_stay_and_products_depend_on_distances():
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64).expand(2, 1, 1, 48, 8)
    tables = tuple(table[None, None] for table in rope_tables((6, 8), 8, dtype=torch.float64))
    turned_q, turned_k = rotate(q, tables), rotate(k, tables)
    torch.testing.assert_close(turned_q.norm(dim=-1), q.norm(dim=-1))
    products = (turned_q @ turned_k.transpose(-2, -1))[0, 0].view(6, 8, 6, 8)
    torch.testing.assert_close(products[1, 2, 4, 3], products[0, 5, 3, 6])
    assert (products[1, 2, 4, 3] - products[1, 2, 4, 4]).abs() > 1e-3


@pytest.mark.parametrize("layout", [SquareWindows(4, shifted=True), SquareWindows(3, shifted=False), CrossStripes(2)])
def test_windows_have_the_places_of_the_map(layout):
    """Rotated in windows, or before the map is split: the same."""
    qkv = torch.randn(2, 35, 3 * 16, dtype=torch.float64)
    for windows in layout((5, 7)):
        q, k, v = partition_heads(qkv, windows, 4)
        expected = partition_heads(rotate_qkv(qkv, (5, 7), 4), windows, 4)
        tables = window_rope_tables(k, windows)
        for found, other in zip((rotate(q, tables), rotate(k, tables), v), expected, strict=True):
            torch.testing.assert_close(found, other, rtol=0, atol=1e-12)


def test_some_tokens_alone():
    (windows,) = SquareWindows(4, shifted=True)((5, 7))
    x = torch.randn(2 * 4, 2, 16, 8, dtype=torch.float64)
    tables = window_rope_tables(x, windows)
    torch.testing.assert_close(rotate(x[:, :, 3:9], tables, 3), rotate(x, tables)[:, :, 3:9])


def test_rows_of_a_map_are_those_of_the_whole():
    qkv = torch.randn(1, 1 + 35, 3 * 16, dtype=torch.float64)
    whole = rotate_qkv(qkv, (5, 7), 2)
    part = rotate_qkv(torch.cat([qkv[:, :1], qkv[:, 1 + 14 :]], dim=1), (3, 7), 2, first_row=2)
    torch.testing.assert_close(part[:, 1:], whole[:, 1 + 14 :])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_once(dtype):
    x = torch.randn(1, 1, 64 * 64, 16).to(dtype)
    tables = tuple(table[None, None] for table in rope_tables((64, 64), 16))
    exact = tuple(table[None, None] for table in rope_tables((64, 64), 16, dtype=torch.float64))
    out = rotate(x, tables)
    assert out.dtype == dtype
    error = (out.double() - rotate(x.double(), exact)).norm() / x.double().norm()
    assert error < torch.finfo(dtype).eps


def test_without_tables_nothing_happens():
    x = torch.randn(1, 1, 3, 4)
    assert rotate(x, None) is x


@pytest.mark.parametrize("head_dim", [2, 6, 0])
def test_heads_without_whole_pairs_are_refused(head_dim):
    with pytest.raises(ValueError, match=f"a multiple of 4 channels, but they have {head_dim}: use another num_heads"):
        rope_tables((2, 2), head_dim)
