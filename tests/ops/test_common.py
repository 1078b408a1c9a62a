"""What the attentions share: refusing wrong shapes, and padding that does not matter."""

import pytest
import torch

from inlinevit import ops

FAST = [ops.softmax_attention, ops.linear_attention, ops.inline_attention]
# Image 0 has four real tokens, image 1 two, scattered.
MASK = torch.tensor([[True, False, True, True, True, False], [False, True, False, False, False, True]])

mapped = pytest.mark.parametrize(("kind", "phi"), [(k, p) for k in ("linear", "inline") for p in ops.FEATURE_MAPS])
garbage = pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -float("inf"), 1e300])


@mapped
@garbage
def test_padding_does_not_matter(make_problem, kind, phi, garbage):
    """Outputs and gradients are those of the real tokens alone; the gradient into padding is zero."""
    problem = make_problem(kind, phi, queries=5, tokens=6, mask=MASK)
    hidden = ~MASK[:, None, :, None]
    problem.k = problem.k.detach().masked_fill(hidden, garbage).requires_grad_()
    problem.v = problem.v.detach().masked_fill(hidden, garbage).requires_grad_()
    out = problem.fast()
    cotangent = torch.randn_like(out)
    gradients = problem.gradients(out, cotangent)
    summed = {name: torch.zeros_like(gradients[name]) for name in gradients.keys() & {"A", "b"}}
    for image in range(2):
        real = MASK[image]
        short = make_problem(kind, phi)
        short.q = problem.q[image : image + 1].detach().requires_grad_()
        short.k = problem.k[image : image + 1, :, real].detach().requires_grad_()
        short.v = problem.v[image : image + 1, :, real].detach().requires_grad_()
        if summed:
            short.options["affine"] = problem.options["affine"]
        expected = short.fast()
        torch.testing.assert_close(out[image], expected[0], rtol=1e-10, atol=1e-10)
        expected_gradients = short.gradients(expected, cotangent[image : image + 1])
        torch.testing.assert_close(gradients["q"][image], expected_gradients["q"][0], rtol=1e-10, atol=1e-10)
        for name in "kv":
            assert torch.all(gradients[name][image, :, ~real] == 0), f"gradient of {name} at padding"
            torch.testing.assert_close(
                gradients[name][image, :, real], expected_gradients[name][0], rtol=1e-10, atol=1e-10
            )
        for name, total in summed.items():
            total += expected_gradients[name]
    for name, total in summed.items():
        torch.testing.assert_close(gradients[name], total, rtol=1e-10, atol=1e-10)


@mapped
@garbage
def test_padding_does_not_matter_for_the_rows(make_problem, kind, phi, garbage):
    problem = make_problem(kind, phi, queries=5, tokens=6, mask=MASK)
    expected = problem.weights()
    problem.k = problem.k.detach().masked_fill(~MASK[:, None, :, None], garbage)
    assert torch.equal(problem.weights(), expected)


def test_padding_does_not_matter_for_softmax(make_problem):
    """Any finite padding, that is: softmax multiplies it by zero."""
    problem = make_problem("softmax", queries=5, tokens=6, mask=MASK)
    expected = problem.fast()
    hidden = ~MASK[:, None, :, None]
    problem.k, problem.v = (x.detach().masked_fill(hidden, 1e6).requires_grad_() for x in (problem.k, problem.v))
    out = problem.fast()
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    gradients = problem.gradients(out, torch.ones_like(out))
    for name in "kv":
        assert torch.all(gradients[name].masked_select(hidden) == 0)


@pytest.mark.parametrize("kind", ["softmax", "linear", "inline"])
def test_an_image_of_nothing_but_padding_gives_zeros(make_problem, kind):
    problem = make_problem(kind, tokens=3, mask=torch.tensor([[False] * 3, [True] * 3]))
    out = problem.fast()
    assert torch.all(out[0] == 0)
    assert torch.all(out[1] != 0)
    torch.testing.assert_close(out, problem.explicit(), rtol=0, atol=1e-12)
    for name, gradient in problem.gradients(out, torch.ones_like(out)).items():
        assert gradient.isfinite().all(), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("op", FAST)
def test_dtype_is_kept(op, dtype):
    q, k, v = torch.rand(3, 1, 2, 5, 4).to(dtype)
    assert op(q, k, v).dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("op", FAST[1:])
def test_affine_map_in_half_precision(op, dtype):
    """The parameters of a model in half precision are in half precision too."""
    q, k, v = torch.rand(3, 1, 2, 5, 4).to(dtype)
    affine = (torch.rand(2, 4, 4).to(dtype), torch.rand(2, 4).to(dtype))
    out = op(q, k, v, feature_map="relu_affine", affine=affine)
    double = (affine[0].double(), affine[1].double())
    expected = op(q.double(), k.double(), v.double(), feature_map="relu_affine", affine=double)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=0)


# Errors

Q = torch.zeros(2, 1, 3, 4)
BAD = [
    ((Q[0], Q, Q, None), "four dimensions"),
    ((Q, Q[0], Q, None), "four dimensions"),
    ((Q, Q, Q[0], None), r"four dimensions: \(batch, heads, tokens, width\)"),
    ((Q, Q[..., :3], Q, None), "one width, but they have 4 and 3"),
    ((Q, Q, Q[:, :, :2], None), "as many tokens, but they have 3 and 2"),
    ((Q, Q, Q, torch.ones(2, 3)), "must be boolean.*float32"),
    ((Q, Q, Q, torch.ones(2, 2, dtype=torch.bool)), r"\(batch, 3 tokens\)"),
    ((Q, Q, Q, torch.ones(2, 1, 3, dtype=torch.bool)), r"\(batch, 3 tokens\)"),
]


@pytest.mark.parametrize("op", FAST)
@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_wrong_shapes_are_refused(op, arguments, message):
    q, k, v, mask = arguments
    with pytest.raises(ValueError, match=message):
        op(q, k, v, mask=mask)


@pytest.mark.parametrize("op", FAST)
def test_a_mask_for_another_batch_is_refused(op):
    with pytest.raises((ValueError, RuntimeError)):
        op(Q[:1], Q[:1], Q[:1], mask=torch.ones(3, 3, dtype=torch.bool))


@pytest.mark.parametrize("kind", ["softmax", "linear", "inline"])
def test_wrong_shapes_are_refused_by_the_explicit_forms(kind):
    with pytest.raises(ValueError, match="one width"):
        ops.attention_weights(Q, Q[..., :3], kind=kind)
    with pytest.raises(ValueError, match="boolean"):
        ops.attention_weights(Q, Q, kind=kind, mask=torch.ones(2, 3))
