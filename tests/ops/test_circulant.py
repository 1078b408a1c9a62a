"""Circulant attention: one kernel over the shifts of the map for each channel."""

import pytest
import torch
from torch import Tensor

from inlinevit import ops
from inlinevit.ops.circulant import correlate, correlate_by_products, shifts_of_pairs

SIZES = [(4, 4), (3, 5), (5, 2), (1, 6), (7, 1), (1, 1), (6, 7)]


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def reference(q: Tensor, k: Tensor, v: Tensor, size: tuple[int, int], mask: Tensor | None) -> Tensor:
    """Shift by shift, for tokens (tokens,) of one channel of one image."""
    height, width = size
    real = torch.ones(size, dtype=torch.float64) if mask is None else mask.view(size).double()
    q, k, v = (x.view(size) * real for x in (q, k, v))
    shifts = [(-row, -column) for row in range(height) for column in range(width)]
    rolled = [torch.roll(k, shift, (0, 1)) for shift in shifts]
    scores = torch.stack([(q * keys).sum() for keys in rolled]) / max(1, int(real.sum())) ** 0.5
    sigma = scores.softmax(dim=0)
    out = sum(weight * torch.roll(v, shift, (0, 1)) for weight, shift in zip(sigma, shifts, strict=True))
    seen = sum(weight * torch.roll(real, shift, (0, 1)) for weight, shift in zip(sigma, shifts, strict=True))
    return (out / seen).flatten()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("masked", [False, True])
def test_it_is_the_formula(size, masked):
    count = size[0] * size[1]
    q, k, v = draw(2, 2, count, 3), draw(2, 2, count, 3), draw(2, 2, count, 3)
    mask = torch.rand(2, count) < 0.7 if masked else None
    if mask is not None:
        mask[:, 0] = True
    out = ops.circulant_attention(q, k, v, size, mask)
    for image in range(2):
        for head in range(2):
            for channel in range(3):
                one = (x[image, head, :, channel] for x in (q, k, v))
                expected = reference(*one, size, None if mask is None else mask[image])
                torch.testing.assert_close(out[image, head, :, channel], expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("masked", [False, True])
def test_it_equals_the_explicit_form(size, masked):
    """Outputs and gradients; the weights also for some of the queries."""
    count = size[0] * size[1]
    leaves = [draw(2, 3, count, 1).requires_grad_() for _ in range(3)]
    q, k, v = leaves
    mask = torch.rand(2, count) < 0.7 if masked else None
    if mask is not None:
        mask[:, 0] = True
    out = ops.circulant_attention(q, k, v, size, mask)
    rows = ops.attention_weights(q, k, kind="circulant", feat_size=size, mask=mask)
    explicit = rows @ v
    torch.testing.assert_close(out, explicit, rtol=0, atol=1e-10)
    cotangent = torch.randn_like(out)
    found, expected = (torch.autograd.grad(answer, leaves, cotangent, retain_graph=True) for answer in (out, explicit))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    first, last = count // 3, count // 3 + max(1, count // 2)
    part = ops.circulant_weights(q[:, :, first:last], k, feat_size=size, queries=q, mask=mask, first=first)
    torch.testing.assert_close(part, rows[:, :, first:last], rtol=0, atol=1e-12)


def test_gradients_are_those_of_finite_differences():
    mask = torch.tensor([[True, True, False, True, True, True]])
    for real in (None, mask):

        def attend(q: Tensor, k: Tensor, v: Tensor, real: Tensor | None = real) -> Tensor:
            return ops.circulant_attention(q, k, v, (2, 3), real)

        assert torch.autograd.gradcheck(attend, tuple(draw(1, 1, 6, 2).requires_grad_() for _ in range(3)))


def test_the_matrix_is_circulant_and_doubly_stochastic():
    q, k = draw(1, 2, 12, 1), draw(1, 2, 12, 1)
    rows = ops.circulant_weights(q, k, feat_size=(3, 4))
    ones = torch.ones(1, 2, 12, dtype=torch.float64)
    torch.testing.assert_close(rows.sum(dim=-1), ones)
    torch.testing.assert_close(rows.sum(dim=-2), ones)
    assert torch.all(rows >= 0)
    shifts = shifts_of_pairs((3, 4), q.device)
    for shift in range(12):
        of_shift = rows[0, 0][shifts == shift]
        torch.testing.assert_close(of_shift, of_shift[:1].expand(12))


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e300])
def test_padding_does_not_matter(garbage):
    q, k, v = draw(2, 2, 15, 1), draw(2, 2, 15, 1), draw(2, 2, 15, 1)
    mask = torch.rand(2, 15) < 0.7
    hidden = ~mask[:, None, :, None]
    expected = ops.circulant_attention(q, k, v, (3, 5), mask)
    padded = [x.masked_fill(hidden, garbage).requires_grad_() for x in (q, k, v)]
    out = ops.circulant_attention(*padded, (3, 5), mask)
    assert torch.equal(out, expected)
    for gradient in torch.autograd.grad(out.sum(), padded):
        assert gradient.isfinite().all()
        assert torch.all(gradient.masked_select(hidden) == 0)
    rows = ops.circulant_weights(padded[0], padded[1], feat_size=(3, 5), mask=mask)
    assert torch.all(rows.masked_select(~mask[:, None, None, :]) == 0)
    torch.testing.assert_close(rows.sum(dim=-1), torch.ones(2, 2, 15, dtype=torch.float64))


def test_large_means_of_queries_and_keys_leave_their_digits():
    """The same is added to the scores of all shifts, which softmax does not see."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 35, 6) for _ in range(3))
    expected = ops.circulant_attention(q.double(), k.double(), v.double(), (5, 7))
    found = ops.circulant_attention(q + 128, k - 128, v, (5, 7)).double()
    exact = ops.circulant_attention((q + 128).double(), (k - 128).double(), v.double(), (5, 7))
    torch.testing.assert_close(exact, expected, rtol=0, atol=2e-4)
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-6)


def test_a_single_token_sees_itself():
    """However small its product with itself is beside that of padding, 0."""
    q = torch.full((1, 1, 6, 1), 30.0)
    mask = torch.tensor([[False, False, True, False, False, False]])
    v = torch.randn(1, 1, 6, 1)
    out = ops.circulant_attention(q, -q, v, (2, 3), mask)
    torch.testing.assert_close(out[:, :, 2], v[:, :, 2])
    rows = ops.circulant_weights(q, -q, feat_size=(2, 3), mask=mask)
    assert rows[0, 0, 2].tolist() == [0, 0, 1, 0, 0, 0]


def test_an_image_of_nothing_but_padding_gives_zeros():
    q = draw(2, 2, 6, 1).requires_grad_()
    mask = torch.tensor([[False] * 6, [True] * 6])
    out = ops.circulant_attention(q, q, q, (2, 3), mask)
    assert torch.all(out[0] == 0)
    torch.testing.assert_close(out[1:], ops.circulant_attention(q[1:], q[1:], q[1:], (2, 3)), rtol=0, atol=1e-12)
    (gradient,) = torch.autograd.grad(out.sum(), q)
    assert gradient.isfinite().all()


def test_a_row_is_as_if_unseen_tokens_were_masked():
    q, k, v = draw(2, 2, 15, 1), draw(2, 2, 15, 1), draw(2, 2, 15, 1)
    attn_mask = torch.rand(2, 1, 15, 15) < 0.6
    attn_mask[:, :, 2] = False
    rows = ops.circulant_weights(q, k, feat_size=(3, 5), attn_mask=attn_mask)
    out = rows @ v
    for i in range(15):
        alone = ops.circulant_attention(q, k, v, (3, 5), attn_mask[:, 0, i])
        torch.testing.assert_close(out[:, :, i], alone[:, :, i], rtol=0, atol=1e-10)
    assert torch.all(rows[:, :, 2] == 0)
    # By head.
    by_head = torch.rand(2, 2, 15, 15) < 0.6
    rows = ops.circulant_weights(q, k, feat_size=(3, 5), attn_mask=by_head)
    for head in range(2):
        alone = ops.circulant_weights(q, k, feat_size=(3, 5), attn_mask=by_head[:, head : head + 1])
        torch.testing.assert_close(rows[:, head], alone[:, head], rtol=0, atol=1e-12)
    # The same for all queries.
    same = by_head[:, :1, :1]
    expected = ops.circulant_weights(q, k, feat_size=(3, 5), attn_mask=same.expand(2, 1, 15, 15))
    torch.testing.assert_close(ops.circulant_weights(q, k, feat_size=(3, 5), attn_mask=same), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtype_is_kept(dtype):
    q = draw(1, 2, 12, 1).to(dtype)
    assert ops.circulant_attention(q, q, q, (3, 4)).dtype == dtype
    assert ops.circulant_weights(q, q, feat_size=(3, 4)).dtype == dtype


@pytest.mark.integration
@pytest.mark.parametrize("masked", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_compiles_in_one_graph(masked):
    torch.compiler.reset()
    leaves = [draw(2, 2, 6, 1).requires_grad_() for _ in range(3)]
    mask = torch.tensor([[True] * 5 + [False]] * 2) if masked else None
    compiled = torch.compile(ops.circulant_attention, fullgraph=True, backend="aot_eager")
    out, expected = (call(*leaves, (2, 3), mask) for call in (compiled, ops.circulant_attention))
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    cotangent = torch.randn_like(out)
    found, wanted = (torch.autograd.grad(answer, leaves, cotangent) for answer in (out, expected))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)


@pytest.mark.parametrize("size", SIZES)
def test_transforms_by_products(size):
    """As they are exported."""
    x, y = draw(2, 3, *size), draw(2, 1, *size)
    torch.testing.assert_close(correlate_by_products(x, y), correlate(x, y), rtol=0, atol=1e-10)


def test_wrong_shapes_are_refused():
    q = torch.zeros(1, 2, 6, 1)
    with pytest.raises(ValueError, match="6 tokens do not make a map of 2×4"):
        ops.circulant_attention(q, q, q, (2, 4))
    with pytest.raises(ValueError, match="the same shape"):
        ops.circulant_attention(q[:, :, :3], q, q, (2, 3))
    with pytest.raises(ValueError, match="heads have 2 channels: make each a head"):
        ops.circulant_weights(q.view(1, 1, 6, 2), q.view(1, 1, 6, 2), feat_size=(2, 3))
    with pytest.raises(ValueError, match="boolean"):
        ops.circulant_attention(q, q, q, (2, 3), torch.ones(1, 6))
