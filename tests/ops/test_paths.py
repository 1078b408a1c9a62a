"""Every path of InLine attention against the explicit form, and which of them is taken where."""

import pytest
import torch

from inlinevit import ops
from inlinevit.ops.inline import PATHS, Case, choose_path

OF_THE_OP = ("explicit", "covariance")
CASE = Case(
    tokens=4096,
    channels=192,
    head_dim=32,
    feature_map="identity",
    masked=False,
    foldable=True,
    dtype=torch.float32,
    device="cpu",
)


@pytest.mark.parametrize("path", OF_THE_OP)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("feature_map", ops.FEATURE_MAPS)
@pytest.mark.parametrize("tokens", [1, 3, 20])
def test_a_forced_path_is_the_explicit_form(make_problem, path, masked, feature_map, tokens):
    real = torch.arange(tokens) < torch.tensor([[tokens], [max(1, tokens - 2)]])
    problem = make_problem("inline", feature_map, tokens=tokens, queries=5, mask=real if masked else None)
    out = ops.inline_attention(problem.q, problem.k, problem.v, **problem.options, path=path)
    expected = problem.explicit()
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-10)
    cotangent = torch.randn_like(out)
    torch.testing.assert_close(
        problem.gradients(out, cotangent), problem.gradients(expected, cotangent), rtol=0, atol=1e-10
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("path", OF_THE_OP)
def test_half_precision_rounds_the_result_alone(path, dtype):
    q, k, v = (torch.randn(2, 2, 9, 16).to(dtype) for _ in range(3))
    out = ops.inline_attention(q, k, v, path=path)
    assert out.dtype == dtype
    expected = ops.inline_attention(q.double(), k.double(), v.double())
    torch.testing.assert_close(out.double(), expected, rtol=0.51 * torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({}, "folded"),
        ({"dtype": torch.float64}, "folded"),
        ({"device": "cuda"}, "folded"),
        ({"tokens": 384}, "folded"),
        ({"tokens": 383}, "covariance"),
        ({"dtype": torch.bfloat16}, "covariance"),
        ({"feature_map": "relu"}, "covariance"),
        ({"masked": True}, "covariance"),
        ({"foldable": False}, "covariance"),
        ({"device": "meta"}, "covariance"),
        ({"tokens": 31}, "explicit"),
        ({"tokens": 31, "foldable": False}, "explicit"),
        ({"tokens": 31, "masked": True}, "covariance"),
        ({"tokens": 32}, "covariance"),
    ],
)
def test_the_table(changes, path):
    assert choose_path(CASE._replace(**changes)) == path


def test_any_case_has_a_path_and_every_path_can_be_forced_where_it_is_possible():
    assert choose_path(CASE._replace(tokens=0)) in PATHS
    for name in PATHS:
        assert choose_path(CASE, name) == name


def test_an_unknown_path_is_refused_with_the_list():
    q = torch.randn(1, 1, 4, 8)
    with pytest.raises(ValueError, match="unknown path 'fast': choose one of folded, explicit, covariance"):
        ops.inline_attention(q, q, q, path="fast")


def test_folding_needs_more_than_queries_keys_and_values():
    q = torch.randn(1, 1, 4, 8)
    with pytest.raises(ValueError, match="'folded' is not possible here: it needs a layer's tokens"):
        ops.inline_attention(q, q, q, path="folded")
