"""MHLA: what holds of it alone. Parity with the explicit form is in test_weights.py."""

import pytest
import torch
from torch import Tensor

from inlinevit import ops
from inlinevit.ops.mhla import block_grid, block_places, initial_mixing, join_blocks, split_blocks

# Divided evenly, padded along one axis, along both, with empty blocks, a single row, a single token.
SIZES = [(8, 8), (4, 6), (5, 7), (2, 9), (1, 5), (1, 1), (9, 14)]
shared = pytest.mark.parametrize("shared", [False, True], ids=["paper", "code"])


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def problem(size: tuple[int, int], batch: int = 2) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and M, of both signs but for M."""
    count = size[0] * size[1]
    mixing = torch.rand(16, 16, dtype=torch.float64) + 0.05
    return draw(batch, 2, count, 4) + 0.5, draw(batch, 2, count, 4) + 0.5, draw(batch, 2, count, 3), mixing


def places(size: tuple[int, int]) -> list[tuple[int, int]]:
    """Block and place in the block of each token, straight from the definition."""
    high, wide = -(-size[0] // 4), -(-size[1] // 4)
    tokens = [(row, column) for row in range(size[0]) for column in range(size[1])]
    return [(y // high * 4 + x // wide, y % high * wide + x % wide) for y, x in tokens]


def reference(
    q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, size: tuple[int, int], mask: Tensor | None, shared: bool
) -> Tensor:
    """Token by token."""
    out, where = torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype), places(size)
    q, k = q.clamp(min=0) + 1e-6, k.clamp(min=0) + 1e-6
    for image in range(len(q)):
        real = [j for j in range(len(where)) if mask is None or mask[image, j]]
        at = {where[j]: j for j in real}
        for head in range(q.shape[1]):
            for i in real:
                total, divisor = torch.zeros_like(v[0, 0, 0]), 1e-6
                for j in real:
                    m = mixing[where[i][0], where[j][0]]
                    weight = m * (q[image, head, i] @ k[image, head, j])
                    total = total + weight * v[image, head, j]
                    other = at.get((where[j][0], where[i][1])) if shared else i
                    if other is not None:
                        divisor = divisor + m * (q[image, head, other] @ k[image, head, j])
                out[image, head, i] = total / divisor
    return out


@shared
@pytest.mark.parametrize("size", SIZES[:-1])
@pytest.mark.parametrize("masked", [False, True])
def test_it_is_the_formula(size, masked, shared):
    q, k, v, mixing = problem(size)
    mask = torch.rand(2, size[0] * size[1]) < 0.6 if masked else None
    out = ops.mhla_attention(q, k, v, mixing, size, mask, shared)
    expected = reference(q, k, v, mixing, size, mask, shared)
    if mask is not None:
        out = out.masked_fill(~mask[:, None, :, None], 0)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)


@shared
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("masked", [False, True])
def test_it_equals_the_explicit_form(size, masked, shared):
    """Outputs and gradients, those of M too; the weights also for some of the queries."""
    leaves = [leaf.requires_grad_() for leaf in problem(size)]
    q, k, v, mixing = leaves
    count = size[0] * size[1]
    mask = torch.rand(2, count) < 0.6 if masked else None
    out = ops.mhla_attention(q, k, v, mixing, size, mask, shared)
    options = {"mixing": mixing, "feat_size": size, "mask": mask, "shared_queries": q if shared else None}
    rows = ops.mhla_weights(q, k, **options)
    explicit = rows @ v
    cotangent = torch.randn_like(out)
    if mask is not None:
        # Queries of padding: the code's divisor has none.
        cotangent = cotangent.masked_fill(~mask[:, None, :, None], 0)
        hidden = ~mask[:, None, :, None]
        torch.testing.assert_close(out.masked_fill(hidden, 0), explicit.masked_fill(hidden, 0), rtol=1e-9, atol=1e-9)
    else:
        torch.testing.assert_close(out, explicit, rtol=1e-10, atol=1e-10)
    found, expected = (torch.autograd.grad(answer, leaves, cotangent) for answer in (out, explicit))
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9)
    first, last = count // 3, count // 3 + max(1, count // 2)
    part = ops.mhla_weights(q[:, :, first:last], k, **options, first=first)
    torch.testing.assert_close(part, rows[:, :, first:last], rtol=0, atol=1e-12)


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -float("inf"), 1e300])
@shared
def test_padding_does_not_matter(garbage, shared):
    q, k, v, mixing = problem((5, 6))
    mask = torch.rand(2, 30) < 0.7
    hidden = ~mask[:, None, :, None]
    expected = ops.mhla_attention(q, k, v, mixing, (5, 6), mask, shared)
    padded = [x.masked_fill(hidden, garbage).requires_grad_() for x in (q, k, v)]
    if not shared:
        # The row of a query at padding is nobody's.
        padded[0] = q.clone().requires_grad_()
    out = ops.mhla_attention(*padded, mixing, (5, 6), mask, shared)
    torch.testing.assert_close(out.masked_fill(hidden, 0), expected.masked_fill(hidden, 0), rtol=0, atol=1e-12)
    for gradient in torch.autograd.grad(out.masked_fill(hidden, 0).sum(), padded):
        assert gradient.isfinite().all()
        assert torch.all(gradient.masked_select(hidden) == 0)


def test_padding_to_whole_blocks_is_a_mask():
    """A map of 5×6 among 8×8 places, of which the others are masked."""
    q, k, v, mixing = problem((8, 8))
    mask = torch.zeros(8, 8, dtype=torch.bool)
    mask[:5, :6] = True
    large = ops.mhla_attention(q, k, v, mixing, (8, 8), mask.flatten().expand(2, -1))
    own = (x.unflatten(2, (8, 8))[:, :, :5, :6].flatten(2, 3) for x in (q, k, v))
    small = ops.mhla_attention(*own, mixing, (5, 6))
    torch.testing.assert_close(large.unflatten(2, (8, 8))[:, :, :5, :6].flatten(2, 3), small, rtol=0, atol=1e-12)


def test_rows_sum_to_one_in_the_paper_alone():
    q, k, _, mixing = problem((6, 8))
    # A query without a positive channel is 1e-6 in each, which ε of the divisor outweighs.
    q = q.abs()
    rows = ops.mhla_weights(q, k, mixing=mixing, feat_size=(6, 8))
    assert torch.all(rows >= 0)
    torch.testing.assert_close(rows.sum(dim=-1), torch.ones(2, 2, 48, dtype=torch.float64), rtol=0, atol=1e-5)
    others = ops.mhla_weights(q, k, mixing=mixing, feat_size=(6, 8), shared_queries=q)
    assert (others.sum(dim=-1) - 1).abs().max() > 0.1


def test_a_row_is_as_if_unseen_tokens_were_masked():
    q, k, v, mixing = problem((3, 5), batch=1)
    attn_mask = torch.rand(1, 1, 15, 15) < 0.5
    out = ops.mhla_weights(q, k, mixing=mixing, feat_size=(3, 5), attn_mask=attn_mask) @ v
    for i in range(15):
        alone = ops.mhla_attention(q, k, v, mixing, (3, 5), attn_mask[0, :, i])
        torch.testing.assert_close(out[:, :, i], alone[:, :, i], rtol=0, atol=1e-10)


@pytest.mark.parametrize("size", SIZES)
def test_blocks_are_cut_and_joined(size):
    grid, x = block_grid(size), draw(2, 3, size[0] * size[1], 4)
    blocks = split_blocks(x, grid)
    for token, (block, place) in enumerate(places(size)):
        assert torch.equal(blocks[:, :, block, place], x[:, :, token])
    assert torch.equal(join_blocks(blocks, grid), x)
    assert block_places(size, x.device).tolist() == [list(pair) for pair in places(size)]


def test_initial_mixing():
    mixing = initial_mixing(dtype=torch.float64)
    torch.testing.assert_close(mixing.sum(dim=1), torch.ones(16, dtype=torch.float64))
    # The corner sees the opposite corner not at all; block 5 is at (1, 1), and farthest from (3, 3).
    assert mixing[0, 15] == 0
    torch.testing.assert_close(mixing[0, 3] / mixing[0, 0], torch.tensor(1 - 1 / 2**0.5, dtype=torch.float64))
    torch.testing.assert_close(mixing[5, 6] / mixing[5, 5], torch.tensor(1 - 1 / 8**0.5, dtype=torch.float64))
    assert torch.all(mixing >= 0)
    assert not torch.allclose(mixing, mixing.T)


def test_wrong_shapes_are_refused():
    q, k, v, mixing = problem((2, 3))
    with pytest.raises(ValueError, match="6 tokens do not make a map of 2×4"):
        ops.mhla_attention(q, k, v, mixing, (2, 4))
    with pytest.raises(ValueError, match=r"mixing must be \(16, 16\)"):
        ops.mhla_attention(q, k, v, mixing[:4], (2, 3))
    with pytest.raises(ValueError, match="there are 12 of them for 6 tokens"):
        ops.mhla_attention(torch.cat([q, q], dim=2), k, v, mixing, (2, 3))
    with pytest.raises(ValueError, match="there are 4 of them for 6 tokens"):
        ops.mhla_attention(q[:, :, :4], k, v, mixing, (2, 3), shared_divisor=True)
