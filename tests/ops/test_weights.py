"""The explicit N×N forms: the fast ops agree with them, and they have the properties that the paper claims."""

import json
import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from inlinevit import ops
from inlinevit.ops.weights import WEIGHT_FUNCTIONS
from tests import GOLDEN

MAPPED = ("linear", "inline")
# Circulant attention needs all queries of a map: see test_circulant.py.
KINDS = [kind for kind in WEIGHT_FUNCTIONS if kind != "circulant"]
CASES = [(kind, phi) for kind in KINDS for phi in (ops.FEATURE_MAPS if kind in MAPPED else (None,))]
# Queries of angular attention and MHLA are those of the first tokens.
SIZES = [(1, 1), (2, 2), (7, 7), (49, 49), (197, 197), (1, 9), (5, 8)]
MORE_QUERIES = [(kind, phi) for kind, phi in CASES if kind not in ("angular", "mhla")]
MASK = torch.tensor([[True, False, True, True, False, False, True], [False, True, True, False, True, True, False]])
PROPERTY = settings(deadline=None, max_examples=40, derandomize=True)
FIGURE = json.loads((GOLDEN / "figure1.json").read_text())

cases = pytest.mark.parametrize(("kind", "phi"), CASES)


def assert_parity(problem) -> None:
    fast, explicit = problem.fast(), problem.explicit()
    torch.testing.assert_close(fast, explicit, rtol=1e-10, atol=1e-10)
    cotangent = torch.randn_like(fast)
    fast_gradients, explicit_gradients = problem.gradients(fast, cotangent), problem.gradients(explicit, cotangent)
    torch.testing.assert_close(fast_gradients, explicit_gradients, rtol=1e-10, atol=1e-10)
    assert any(gradient.abs().max() > 1e-6 for gradient in fast_gradients.values())


@cases
@pytest.mark.parametrize(("queries", "tokens"), SIZES)
def test_fast_op_equals_explicit_form(make_problem, kind, phi, queries, tokens):
    assert_parity(make_problem(kind, phi, queries=queries, tokens=tokens, value_width=5))


@pytest.mark.parametrize(("kind", "phi"), MORE_QUERIES)
def test_fast_op_equals_explicit_form_with_more_queries_than_tokens(make_problem, kind, phi):
    assert_parity(make_problem(kind, phi, queries=9, tokens=1, value_width=5))


@cases
def test_fast_op_equals_explicit_form_with_mask(make_problem, kind, phi):
    assert_parity(make_problem(kind, phi, queries=5, mask=MASK))


@pytest.mark.parametrize(("kind", "phi"), [case for case in CASES if case[0] in ("softmax", *MAPPED)])
def test_fast_op_equals_explicit_form_with_mask_and_scale(make_problem, kind, phi):
    assert_parity(make_problem(kind, phi, queries=5, scale=0.37, mask=MASK))


@cases
@pytest.mark.parametrize("mask", [None, MASK[:, :4]], ids=["whole", "masked"])
def test_gradients_are_those_of_finite_differences(make_problem, kind, phi, mask):
    problem = make_problem(kind, phi, queries=3, tokens=4, heads=1, width=2, value_width=2, mask=mask)
    names = list(problem.leaves())

    def attend(*leaves: Tensor) -> Tensor:
        problem.replace(dict(zip(names, leaves, strict=True)))
        return problem.fast()

    assert torch.autograd.gradcheck(attend, tuple(problem.leaves().values()))


@pytest.mark.parametrize("kind", MAPPED)
def test_one_affine_map_for_all_heads(make_problem, kind):
    """A (width, width) and b (width) count for each head."""
    shared, repeated = make_problem(kind, "relu_affine"), make_problem(kind, "relu_affine")
    matrix, bias = (x[0].detach() for x in shared.options["affine"])
    shared.options["affine"] = (matrix, bias)
    repeated.options["affine"] = (matrix.expand(2, -1, -1), bias.expand(2, -1))
    torch.testing.assert_close(shared.fast(), repeated.fast(), rtol=0, atol=1e-12)
    torch.testing.assert_close(shared.weights(), repeated.weights(), rtol=0, atol=1e-12)


@cases
@pytest.mark.parametrize("mask", [None, MASK], ids=["whole", "masked"])
def test_rows_sum_to_one_and_skip_padding(make_problem, kind, phi, mask):
    """But for hydra and angular attention, which have no divisor that would see to it."""
    rows = make_problem(kind, phi, queries=5, mask=mask).weights()
    ones = torch.ones(*rows.shape[:3], dtype=rows.dtype)
    if kind in ("hydra", "angular"):
        assert torch.all((rows.sum(dim=-1) - ones).abs() > 1e-3)
    else:
        # These add 1e-6 to their divisors.
        near = {"focused": 1e-6, "mala": 1e-5, "rala": 1e-5, "polaformer": 1e-2, "mhla": 1e-6}
        torch.testing.assert_close(rows.sum(dim=-1), ones, rtol=0, atol=near.get(kind, 1e-11))
    if mask is not None:
        hidden = ~mask[:, None, None, :].expand_as(rows)
        assert torch.all(rows[hidden] == 0)
        # Queries and keys without a channel of the same sign, or of the opposite one, do not meet in PolaFormer.
        assert kind == "polaformer" or torch.all(rows[~hidden] != 0)


# Queries that do not see all tokens


def attend_alone(problem, image: int, query: int, tokens: Tensor) -> Tensor:
    """The fast op on one query and the tokens that it sees, by their places; (heads, value width)."""
    q, k, v = problem.q[image, :, query], problem.k[image, :, tokens], problem.v[image, :, tokens]
    if problem.kind == "angular":
        # Its own value counts if it is attn_mask. There is no fast op for a query whose token is not there.
        out = torch.zeros_like(v[:, 0])
        for head in range(len(q)):
            for key, value, token in zip(k[head], v[head], tokens.tolist(), strict=True):
                angle = q[head] @ key / (q[head].norm() * key.norm()) / math.pi
                out[head] += (angle + (0.5 if token == query else 0.0)) * value
        return out / out.norm(dim=-1, keepdim=True)
    options = {name: value for name, value in problem.options.items() if name != "mask"}
    return type(problem)(problem.kind, q[None, :, None], k[None], v[None], options).fast()[0, :, 0]


# MHLA depends on the places of tokens: alone, those that a query sees would be elsewhere. See test_mhla.py.
@pytest.mark.parametrize(("kind", "phi"), [case for case in CASES if case[0] != "mhla"])
@pytest.mark.parametrize("mask", [None, MASK], ids=["whole", "masked"])
@pytest.mark.parametrize("width", [1, 4])
def test_a_row_is_as_if_unseen_tokens_were_not_there(make_problem, kind, phi, mask, width):
    problem = make_problem(kind, phi, queries=6, mask=mask, width=width)
    attn_mask = torch.rand(2, 1, 6, 7) < 0.5
    # Its own token attn_mask and unseen; a single token; all of them.
    attn_mask[:, :, 0, 0], attn_mask[:, :, 1, 1] = True, False
    attn_mask[:, :, 2] = torch.tensor([False, True, True, False, False, False, False])
    attn_mask[:, :, 3] = True
    out = problem.explicit(attn_mask=attn_mask)
    for image in range(2):
        for query in range(6):
            visible = attn_mask[image, 0, query] if mask is None else attn_mask[image, 0, query] & mask[image]
            tokens = visible.nonzero().flatten()
            if len(tokens) > 0:
                expected = attend_alone(problem, image, query, tokens)
                torch.testing.assert_close(out[image, :, query], expected, rtol=0, atol=1e-9)
            else:
                assert torch.all(out[image, :, query] == 0)


@cases
def test_seen_is_broadcast_and_may_differ_by_head(make_problem, kind, phi):
    problem = make_problem(kind, phi, queries=5)
    attn_mask = torch.rand(2, 2, 5, 7) < 0.6
    rows = problem.weights(attn_mask=attn_mask)
    for head, own in enumerate(torch.arange(rows.shape[1]).chunk(2)):
        torch.testing.assert_close(rows[:, own], problem.weights(attn_mask=attn_mask[:, head : head + 1])[:, own])
    everywhere = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    torch.testing.assert_close(problem.weights(attn_mask=everywhere), problem.weights(), rtol=0, atol=1e-12)
    column = attn_mask[:1, :1, :1]
    torch.testing.assert_close(problem.weights(attn_mask=column), problem.weights(attn_mask=column.expand(2, 2, 5, 7)))


@cases
@pytest.mark.parametrize("mask", [None, MASK], ids=["whole", "masked"])
def test_a_query_that_sees_nothing_gets_zeros(make_problem, kind, phi, mask):
    """And no NaN, forward or backward."""
    problem = make_problem(kind, phi, queries=5, mask=mask)
    attn_mask = torch.ones(2, 1, 5, 7, dtype=torch.bool)
    attn_mask[:, :, 1] = False
    attn_mask[0, :, 2] = False if mask is None else ~mask[0]
    out = problem.explicit(attn_mask=attn_mask)
    assert torch.all(out[:, :, 1] == 0)
    assert torch.all(out[0, :, 2] == 0)
    assert torch.all(out[:, :, 3] != 0)
    for name, gradient in problem.gradients(out, torch.ones_like(out)).items():
        assert gradient.isfinite().all(), name


def test_inline_rows_are_the_formula_of_the_paper():
    """1/N + (s/N)·φ(q_i)·(φ(k_j) − mean φ(k)), number by number; some weights are negative."""
    q, k = torch.randn(2, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).relu() * 3
    rows = ops.attention_weights(q[None, None], k[None, None], kind="inline", feature_map="relu")[0, 0]
    for i, j in torch.cartesian_prod(torch.arange(5), torch.arange(5)).tolist():
        expected = 1 / 5 + 3**-0.5 / 5 * float(q[i] @ (k[j] - k.mean(dim=0)))
        assert float(rows[i, j]) == pytest.approx(expected, abs=1e-14)
    assert rows.min() < 0


# Injectivity


def draw_keys(seed: int, tokens: int, width: int) -> Tensor:
    """Keys with rank(K) = width and rank([K, 1]) = width + 1, both safely."""
    keys = torch.randn(tokens, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    assume(torch.linalg.svdvals(keys)[-1] > 0.1)
    assume(torch.linalg.svdvals(keys - keys.mean(dim=0))[-1] > 0.1)
    return keys


def rows_of(kind: str, queries: Tensor, keys: Tensor, **options: object) -> Tensor:
    return ops.attention_weights(queries[None, None], keys[None, None], kind=kind, **options)[0, 0]


injective = given(
    seed=st.integers(0, 10**6), width=st.integers(1, 6), extra=st.integers(2, 9), distance=st.floats(0.01, 5.0)
)


def draw_pair(seed: int, width: int, distance: float) -> Tensor:
    first, step = torch.randn(2, width, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    return torch.stack([first, first + step * (distance / step.norm())])


@PROPERTY
@injective
@pytest.mark.parametrize("phi", ["identity", "leaky_relu", "exp"])
def test_inline_is_injective(phi, seed, width, extra, distance):
    """Rows are as far apart as the smallest singular value of the centred φ(K) says, at least."""
    keys, queries = draw_keys(seed, width + extra, width), draw_pair(seed, width, distance)
    mapped_keys, mapped_queries = ops.apply_feature_map(keys, phi), ops.apply_feature_map(queries, phi)
    floor = torch.linalg.svdvals(mapped_keys - mapped_keys.mean(dim=0))[-1]
    assume(floor > 1e-3)
    rows = rows_of("inline", queries, keys, feature_map=phi)
    least = width**-0.5 / len(keys) * floor * (mapped_queries[0] - mapped_queries[1]).norm()
    assert (rows[0] - rows[1]).norm() >= 0.999 * least > 1e-9


@PROPERTY
@injective
def test_softmax_is_injective(seed, width, extra, distance):
    """The logarithms of the rows are, up to a constant, the scores: different for different queries."""
    keys, queries = draw_keys(seed, width + extra, width), draw_pair(seed, width, distance)
    rows = rows_of("softmax", queries, keys)
    logs = rows.log() - rows.log().mean(dim=1, keepdim=True)
    floor = torch.linalg.svdvals(keys - keys.mean(dim=0))[-1]
    assert (logs[0] - logs[1]).norm() >= 0.999 * width**-0.5 * floor * distance
    assert (rows[0] - rows[1]).abs().max() > 1e-6


@PROPERTY
@given(seed=st.integers(0, 10**6), width=st.integers(1, 6), extra=st.integers(2, 9), t=st.floats(1.1, 20.0))
def test_linear_loses_the_length_of_a_query_and_the_others_keep_it(seed, width, extra, t):
    keys = draw_keys(seed, width + extra, width).abs()
    assume(torch.linalg.svdvals(keys - keys.mean(dim=0))[-1] > 0.05)
    query = draw_pair(seed, width, 1.0)[:1].abs()
    query = query / query.norm()
    queries = torch.cat([query, t * query])
    first, second = rows_of("linear", queries, keys, feature_map="relu", epsilon=0.0)
    torch.testing.assert_close(first, second, rtol=0, atol=1e-12)
    for kind in ("softmax", "inline"):
        first, second = rows_of(kind, queries, keys)
        assert (first - second).norm() > 1e-5


@pytest.mark.parametrize("kind", ["softmax", "inline"])
def test_injectivity_needs_the_rank_of_keys_and_ones(kind):
    """rank(K) = d alone does not do: a constant column of K lies in the span of 1, and queries along it are lost."""
    keys = torch.randn(9, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    keys[:, 0] = 2.0
    assert torch.linalg.matrix_rank(keys) == 3
    first, second = rows_of(kind, torch.tensor([[1.0, 2, 3], [7.0, 2, 3]], dtype=torch.float64), keys)
    torch.testing.assert_close(first, second, rtol=0, atol=1e-12)


# Figure 1 of the paper


@pytest.mark.parametrize("panel", ["a", "b"])
@pytest.mark.parametrize("kind", ["softmax", "linear", "inline"])
def test_figure_1(kind, panel):
    keys, queries = (torch.tensor(FIGURE[name], dtype=torch.float64) for name in ("K", f"Q{panel}"))
    options: dict[str, object] = {}
    if kind != "softmax":
        affine = tuple(torch.tensor(FIGURE[name], dtype=torch.float64) for name in ("A", "b"))
        options = {"feature_map": "relu"} if panel == "a" else {"feature_map": "relu_affine", "affine": affine}
    printed = torch.tensor(FIGURE["printed"][f"{kind}_{panel}"], dtype=torch.float64).expand(4, 4)
    torch.testing.assert_close(rows_of(kind, queries, keys, **options).round(decimals=2), printed, rtol=0, atol=1e-9)


# Errors


def test_unknown_kind():
    q = torch.zeros(1, 1, 2, 3)
    with pytest.raises(
        ValueError,
        match=r"'cosine'.*agent, angular, circulant, efficient, focused, hydra, inline, .*softmax",
    ):
        ops.attention_weights(q, q, kind="cosine")


def test_unknown_option():
    q = torch.zeros(1, 1, 2, 3)
    with pytest.raises(TypeError, match="featuremap"):
        ops.attention_weights(q, q, kind="inline", featuremap="relu")


def test_the_three_of_the_paper_take_the_identity_as_their_feature_map():
    q, k = torch.rand(1, 1, 3, 2, dtype=torch.float64), torch.rand(1, 1, 4, 2, dtype=torch.float64)
    for kind in ("softmax", "linear", "inline"):
        rows = ops.attention_weights(q, k, kind=kind, feature_map="identity")
        torch.testing.assert_close(rows.sum(-1), torch.ones(1, 1, 3, dtype=torch.float64))
    with pytest.raises(ValueError, match="softmax attention has no feature map 'relu'"):
        ops.attention_weights(q, k, kind="softmax", feature_map="relu")
