"""Every path of InLine attention against the explicit form, and which of them is taken where."""

import pytest
import torch

from inlinevit import ops
from inlinevit.ops.inline import PATHS, PathParams, select_path

OF_THE_OP = ("explicit", "covariance")
PARAMS = PathParams(
    tokens=4096,
    channels=192,
    head_dim=32,
    masked=False,
    dtype=torch.float32,
    device="cpu",
    compiled_training=False,
    eager=True,
    exporting=False,
    unavailable={},
)
# A graph is recorded, of tokens in one window.
GRAPH = {"eager": False}
# There are q, k and v alone.
QKV = {"unavailable": {"native": "", "folded": ""}}


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
        ({}, "native"),
        ({"masked": True}, "native"),
        ({"tokens": 1}, "native"),
        ({"eager": False, "compiled_training": True}, "native"),
        ({"eager": False, "compiled_training": True, "unavailable": {"native": "not compiled"}}, "folded"),
        ({"unavailable": {"native": "not compiled"}}, "folded"),
        ({"dtype": torch.float64}, "folded"),
        ({"device": "cuda", "unavailable": {"native": "on cuda"}}, "folded"),
        (GRAPH, "folded"),
        (GRAPH | {"tokens": 384}, "folded"),
        (GRAPH | {"tokens": 383}, "covariance"),
        ({"dtype": torch.bfloat16}, "covariance"),
        (GRAPH | {"device": "meta"}, "covariance"),
        (QKV, "covariance"),
        (QKV | {"tokens": 31}, "explicit"),
        (QKV | {"tokens": 31, "masked": True}, "covariance"),
        (QKV | {"tokens": 31, "device": "meta"}, "covariance"),
        (QKV | {"tokens": 32}, "covariance"),
        (GRAPH | {"tokens": 31}, "explicit"),
    ],
)
def test_the_table(changes, path):
    assert select_path(PARAMS._replace(**changes)) == path


def test_there_is_always_a_path_and_each_can_be_forced_where_it_is_available():
    assert select_path(PARAMS._replace(tokens=0, **QKV)) in PATHS
    for name in PATHS:
        assert select_path(PARAMS, name) == name
        if name not in OF_THE_OP:
            with pytest.raises(ValueError, match=f"path '{name}' is not possible here: it rains"):
                select_path(PARAMS._replace(unavailable={name: "it rains"}), name)


def test_an_unknown_path_is_refused_with_the_list():
    q = torch.randn(1, 1, 4, 8)
    with pytest.raises(ValueError, match="unknown path 'fast': choose one of native, folded, explicit, covariance"):
        ops.inline_attention(q, q, q, path="fast")


@pytest.mark.parametrize("path", ["native", "folded"])
def test_some_paths_need_more_than_queries_keys_and_values(path):
    q = torch.randn(1, 1, 4, 8)
    with pytest.raises(ValueError, match=f"'{path}' is not possible here: it starts from .* of InLineAttention"):
        ops.inline_attention(q, q, q, path=path)
