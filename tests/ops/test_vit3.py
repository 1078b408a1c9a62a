"""ViT³: its closed form is one step of gradient descent, computed by automatic differentiation here."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from inlinevit import ops
from inlinevit.ops.vit3 import clip

SIZES = [(4, 4), (3, 5), (1, 6), (7, 1), (1, 1)]


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def inner_model(t: Tensor, weight1: Tensor, weight2: Tensor) -> Tensor:
    return (t @ weight1) * F.silu(t @ weight2)


def train_head(q: Tensor, k: Tensor, v: Tensor, weight1: Tensor, weight2: Tensor) -> Tensor:
    """One step for one head of one image, (tokens, width), whose gradient autograd computes, differentiably."""
    loss = -(inner_model(k, weight1, weight2) * v).sum() / (3 * len(k))
    gradients = torch.autograd.grad(loss, (weight1, weight2), create_graph=True)
    trained = [
        weight - gradient / (1 + gradient.norm(dim=0, keepdim=True))
        for weight, gradient in zip((weight1, weight2), gradients, strict=True)
    ]
    return inner_model(q, *trained)


def train_maps(q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
    """One step for the kernels of one image, maps (channels, H, W)."""
    loss = -(F.conv2d(k[None], weight, padding=1, groups=len(k))[0] * v).sum() / (3 * k[0].numel())
    (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
    trained = weight - gradient / (1 + gradient.flatten(1).norm(dim=1)[:, None, None, None])
    return F.conv2d(q[None], trained, padding=1, groups=len(k))[0]


@pytest.mark.parametrize(("queries", "tokens"), [(7, 7), (1, 1), (3, 10), (9, 2), (49, 49)])
@pytest.mark.parametrize("scale", [1.0, 5.0])
def test_the_closed_form_is_a_step_of_gradient_descent(queries, tokens, scale):
    """Outputs and gradients."""
    leaves = [draw(2, 3, queries, 4), scale * draw(2, 3, tokens, 4), scale * draw(2, 3, tokens, 4)]
    leaves = [leaf.requires_grad_() for leaf in (*leaves, draw(3, 4, 4), draw(3, 4, 4))]
    out = ops.vit3_attention(*leaves)
    q, k, v, weight1, weight2 = leaves
    heads = [
        train_head(*(x[image, head] for x in (q, k, v)), weight1[head], weight2[head])
        for image in range(2)
        for head in range(3)
    ]
    expected = torch.stack(heads).view_as(out)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    cotangent = torch.randn_like(out)
    found, wanted = (torch.autograd.grad(answer, leaves, cotangent) for answer in (out, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("masked", [False, True])
def test_the_convolution_is_a_step_of_gradient_descent(size, masked):
    count = size[0] * size[1]
    leaves = [leaf.requires_grad_() for leaf in (*(2 * draw(2, count, 3) for _ in range(3)), draw(3, 1, 3, 3))]
    *maps, weight = leaves
    mask = torch.rand(2, count) < 0.7 if masked else None
    if mask is not None:
        mask[:, 0] = True
    out = ops.vit3_convolution(*leaves, size, mask)
    expected = []
    for image in range(2):
        real = torch.ones(count, dtype=torch.float64) if mask is None else mask[image].double()
        one = [(x[image] * real[:, None]).T.reshape(3, *size) for x in maps]
        # The mean is over real tokens.
        one[2] = one[2] * (count / real.sum())
        expected.append(train_maps(*one, weight).flatten(1).T)
    wanted = torch.stack(expected)
    torch.testing.assert_close(out, wanted, rtol=1e-10, atol=1e-10)
    cotangent = torch.randn_like(out)
    found, theirs = (torch.autograd.grad(answer, leaves, cotangent) for answer in (out, wanted))
    torch.testing.assert_close(found, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e300])
def test_padding_does_not_matter(garbage):
    """Outputs and gradients are those of the real tokens alone."""
    q, k, v = draw(1, 2, 7, 4), draw(1, 2, 7, 4), draw(1, 2, 7, 4)
    weights = [draw(2, 4, 4).requires_grad_() for _ in range(2)]
    mask = torch.tensor([[True, False, True, True, False, True, True]])
    hidden = ~mask[:, None, :, None]
    padded = [q.requires_grad_(), *(x.masked_fill(hidden, garbage).requires_grad_() for x in (k, v))]
    out = ops.vit3_attention(*padded, *weights, mask)
    expected = ops.vit3_attention(q, k[:, :, mask[0]], v[:, :, mask[0]], *weights)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    cotangent = torch.randn_like(out)
    for gradient in torch.autograd.grad(out, [*padded[1:], *weights], cotangent):
        assert gradient.isfinite().all()
    maps = [draw(1, 6, 4).masked_fill(~mask[:, :6, None], garbage).requires_grad_() for _ in range(3)]
    convolved = ops.vit3_convolution(*maps, draw(4, 1, 3, 3), (2, 3), mask[:, :6])
    assert convolved.isfinite().all()
    for gradient in torch.autograd.grad(convolved.sum(), maps):
        assert gradient.isfinite().all()
        assert torch.all(gradient[~mask[:, :6]] == 0)


def test_an_image_of_nothing_but_padding_uses_the_learned_weights():
    """Its gradients are zero; the derivative of their norm is 0, not NaN, with the compiler too."""
    q = draw(1, 2, 3, 4)
    leaves = [draw(2, 4, 4).requires_grad_() for _ in range(2)]
    mask = torch.zeros(1, 3, dtype=torch.bool)
    torch.compiler.reset()
    for attend in (ops.vit3_attention, torch.compile(ops.vit3_attention, fullgraph=True, backend="aot_eager")):
        out = attend(q, q, q, *leaves, mask)
        torch.testing.assert_close(out, inner_model(q, *leaves), rtol=1e-12, atol=1e-12)
        for gradient in torch.autograd.grad(out.sum(), leaves):
            assert gradient.isfinite().all()


def test_the_norm_of_nothing_has_no_gradient():
    zero = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(clip(zero, [-1]).sum(), zero)
    assert torch.equal(gradient, torch.ones_like(zero))


def test_gradients_are_those_of_finite_differences():
    mask = torch.tensor([[True, True, False]])
    leaves = tuple(x.requires_grad_() for x in (*(draw(1, 1, 3, 2) for _ in range(3)), draw(1, 2, 2), draw(1, 2, 2)))
    assert torch.autograd.gradcheck(lambda *given: ops.vit3_attention(*given, mask), leaves)
    maps = tuple(x.requires_grad_() for x in (*(draw(1, 6, 2) for _ in range(3)), draw(2, 1, 3, 3)))
    assert torch.autograd.gradcheck(lambda *given: ops.vit3_convolution(*given, (2, 3)), maps)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_many_tokens_in_half_precision(dtype):
    """Values over 3N are subnormal in float16."""
    q, k, v = (draw(1, 1, 40000, 8).mul(0.1).to(dtype) for _ in range(3))
    weights = [draw(1, 8, 8).to(dtype) for _ in range(2)]
    out = ops.vit3_attention(q, k, v, *weights)
    exact = ops.vit3_attention(*(x.double() for x in (q, k, v, *weights)))
    assert out.dtype == dtype
    assert (out.double() - exact).norm() <= torch.finfo(dtype).eps * exact.norm()
    maps = [x[:, 0] for x in (q, k, v)]
    kernels = draw(8, 1, 3, 3).to(dtype)
    out = ops.vit3_convolution(*maps, kernels, (200, 200))
    exact = ops.vit3_convolution(*(x.double() for x in (*maps, kernels)), (200, 200))
    assert out.dtype == dtype
    assert (out.double() - exact).norm() <= torch.finfo(dtype).eps * exact.norm()


@pytest.mark.integration
def test_compiles_in_one_graph():
    torch.compiler.reset()
    leaves = [x.requires_grad_() for x in (*(draw(2, 2, 6, 3) for _ in range(3)), draw(2, 3, 3), draw(2, 3, 3))]
    maps = [x.requires_grad_() for x in (*(draw(2, 6, 3) for _ in range(3)), draw(3, 1, 3, 3))]
    for call, given in (
        (ops.vit3_attention, leaves),
        (lambda *maps: ops.vit3_convolution(*maps, (2, 3)), maps),
    ):
        out, expected = torch.compile(call, fullgraph=True, backend="aot_eager")(*given), call(*given)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
        found, wanted = (torch.autograd.grad(answer.sum(), given) for answer in (out, expected))
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)


def test_wrong_shapes_are_refused():
    q, weight, maps = torch.zeros(1, 2, 6, 4), torch.zeros(2, 4, 4), torch.zeros(1, 6, 4)
    with pytest.raises(ValueError, match=r"weight2 must be \(heads, head_dim, head_dim\), \(2, 4, 4\)"):
        ops.vit3_attention(q, q, q, weight, weight[:1])
    with pytest.raises(ValueError, match="as wide as k"):
        ops.vit3_attention(q, q, q[..., :3], weight, weight)
    with pytest.raises(ValueError, match="6 tokens do not make a map of 2×2"):
        ops.vit3_convolution(maps, maps, maps, torch.zeros(4, 1, 3, 3), (2, 2))
    with pytest.raises(ValueError, match=r"weight must be \(channels, 1, 3, 3\)"):
        ops.vit3_convolution(maps, maps, maps, torch.zeros(4, 3, 3), (2, 3))
