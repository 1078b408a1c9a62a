"""What the attentions share: refusing wrong shapes, and padding that does not matter."""

import pytest
import torch

from inlinevit import ops
from inlinevit.ops._common import unit_length
from inlinevit.ops.weights import WEIGHT_FUNCTIONS

MAPPED = ("linear", "inline")
# Image 0 has four real tokens, image 1 two, scattered.
MASK = torch.tensor([[True, False, True, True, True, False], [False, True, False, False, False, True]])

# Circulant attention needs all queries of a map: see test_circulant.py.
KINDS = [kind for kind in WEIGHT_FUNCTIONS if kind != "circulant"]
every_kind = pytest.mark.parametrize("kind", KINDS)
# All but softmax, which multiplies padding by zero.
CASES = [
    (kind, phi) for kind in KINDS for phi in (ops.FEATURE_MAPS if kind in MAPPED else (None,)) if kind != "softmax"
]
strict = pytest.mark.parametrize(("kind", "phi"), CASES)
# MHLA depends on the places of tokens: without padding, the others are elsewhere. See test_mhla.py.
movable = pytest.mark.parametrize(("kind", "phi"), [case for case in CASES if case[0] != "mhla"])
garbage = pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -float("inf"), 1e300])


@movable
@garbage
def test_padding_does_not_matter(make_problem, kind, phi, garbage):
    """Outputs and gradients are those of the real tokens alone; the gradient into padding is zero."""
    problem = make_problem(kind, phi, queries=6, tokens=6, mask=MASK)
    hidden = ~MASK[:, None, :, None]
    problem.k = problem.k.detach().masked_fill(hidden, garbage).requires_grad_()
    problem.v = problem.v.detach().masked_fill(hidden, garbage).requires_grad_()
    out = problem.fast()
    # Queries of padding are nobody's; those of angular attention would want a value of their own.
    cotangent = torch.randn_like(out).masked_fill(hidden, 0.0)
    gradients = problem.gradients(out, cotangent)
    summed = {name: torch.zeros_like(gradients[name]) for name in gradients.keys() - set("qkv")}
    for image in range(2):
        real = MASK[image]
        short = make_problem(kind, phi)
        leaves = {name: leaf[image : image + 1, :, real] for name, leaf in problem.leaves().items() if name in "qkv"}
        shared = {name: leaf for name, leaf in problem.leaves().items() if name in summed}
        short.replace({name: leaf.detach().requires_grad_() for name, leaf in (leaves | shared).items()})
        expected = short.fast()
        torch.testing.assert_close(out[image, :, real], expected[0], rtol=1e-10, atol=1e-10)
        expected_gradients = short.gradients(expected, cotangent[image : image + 1, :, real])
        for name in "qkv":
            assert torch.all(gradients[name][image, :, ~real] == 0), f"gradient of {name} at padding"
            torch.testing.assert_close(
                gradients[name][image, :, real], expected_gradients[name][0], rtol=1e-10, atol=1e-10
            )
        for name, total in summed.items():
            total += expected_gradients[name]
    for name, total in summed.items():
        torch.testing.assert_close(gradients[name], total, rtol=1e-10, atol=1e-10)


@strict
@garbage
def test_padding_does_not_matter_for_the_rows(make_problem, kind, phi, garbage):
    problem = make_problem(kind, phi, queries=5, tokens=6, mask=MASK)
    expected = problem.weights()
    hidden = ~MASK[:, None, :, None]
    problem.k, problem.v = (x.detach().masked_fill(hidden, garbage) for x in (problem.k, problem.v))
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


@every_kind
def test_an_image_of_nothing_but_padding_gives_zeros(make_problem, kind):
    problem = make_problem(kind, queries=3, tokens=3, mask=torch.tensor([[False] * 3, [True] * 3]))
    out = problem.fast()
    assert torch.all(out[0] == 0)
    assert torch.all(out[1] != 0)
    torch.testing.assert_close(out, problem.explicit(), rtol=0, atol=1e-12)
    for name, gradient in problem.gradients(out, torch.ones_like(out)).items():
        assert gradient.isfinite().all(), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@every_kind
def test_dtype_is_kept(make_problem, kind, dtype):
    problem = make_problem(kind)
    problem.replace({name: leaf.to(dtype) for name, leaf in problem.leaves().items()})
    assert problem.fast().dtype == dtype
    assert problem.weights().dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", MAPPED)
def test_affine_map_in_half_precision(make_problem, kind, dtype):
    """The parameters of a model in half precision are in half precision too."""
    problem = make_problem(kind, "relu_affine")
    half = {name: leaf.abs().to(dtype) for name, leaf in problem.leaves().items()}
    problem.replace(half)
    out = problem.fast()
    problem.replace({name: leaf.double() for name, leaf in half.items()})
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), problem.fast(), rtol=2 * torch.finfo(dtype).eps, atol=0)


def test_unit_length():
    x = torch.randn(2, 3, 5, 4, dtype=torch.float64)
    x[0, :, 0] = 0
    unit = unit_length(x, [1, 3])
    assert torch.all(unit[0, :, 0] == 0)
    length = unit.square().sum(dim=(1, 3)).sqrt()
    torch.testing.assert_close(length[1], torch.ones(5, dtype=torch.float64))
    torch.testing.assert_close(unit * x.square().sum(dim=(1, 3), keepdim=True).sqrt(), x)
    # Half of the shortest length is not made a whole one.
    torch.testing.assert_close(unit_length(torch.tensor([[0.5, 0.0]]), [1], 1.0), torch.tensor([[0.5, 0.0]]))


# Errors

Q = torch.zeros(2, 1, 3, 4)
BAD = [
    ((Q[0], Q, Q, None), "four dimensions"),
    ((Q, Q[0], Q, None), "four dimensions"),
    ((Q, Q, Q[0], None), r"four dimensions: \(batch, heads, tokens, head_dim\)"),
    ((Q, Q[..., :3], Q, None), "the same head_dim, but have 4 and 3"),
    ((Q, Q, Q[:, :, :2], None), "the same number of tokens, but have 3 and 2"),
    ((Q, Q, Q, torch.ones(2, 3)), "must be boolean.*float32"),
    ((Q, Q, Q, torch.ones(2, 2, dtype=torch.bool)), r"\(batch, 3 tokens\)"),
    ((Q, Q, Q, torch.ones(2, 1, 3, dtype=torch.bool)), r"\(batch, 3 tokens\)"),
]


# What a kind needs besides q, k, v and mask.
NEEDED = {
    "focused": {"spread": torch.ones(1, 4)},
    "polaformer": {"spread": torch.ones(1, 4), "power": torch.full((1, 4), 3.0)},
    "agent": {"agents": torch.ones(1, 1, 2, 4)},
    "mhla": {"mixing": torch.ones(16, 16), "feat_size": (1, 3)},
}


@every_kind
@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_wrong_shapes_are_refused(fast_ops, kind, arguments, message):
    q, k, v, mask = arguments
    with pytest.raises(ValueError, match=message):
        fast_ops[kind](q, k, v, mask=mask, **NEEDED.get(kind, {}))


@every_kind
def test_a_mask_for_another_batch_is_refused(fast_ops, kind):
    with pytest.raises(ValueError, match=r"\(batch, 3 tokens\)"):
        fast_ops[kind](Q[:1], Q[:1], Q[:1], mask=torch.ones(3, 3, dtype=torch.bool), **NEEDED.get(kind, {}))


@every_kind
def test_wrong_shapes_are_refused_by_the_explicit_forms(kind):
    needed = NEEDED.get(kind, {})
    with pytest.raises(ValueError, match="four dimensions"):
        ops.attention_weights(Q[0], Q, kind=kind, **needed)
    with pytest.raises(ValueError, match="the same head_dim"):
        ops.attention_weights(Q, Q[..., :3], kind=kind, **needed)
    with pytest.raises(ValueError, match="boolean"):
        ops.attention_weights(Q, Q, kind=kind, mask=torch.ones(2, 3), **needed)
