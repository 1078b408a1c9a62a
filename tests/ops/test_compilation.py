"""The ops under torch.compile give the numbers of eager mode."""

import pytest
import torch

from inlinevit import ops

MASK = torch.tensor([[True, False, True, True, True], [True, True, True, False, False]])
# One of each kind in the fast run, with and without mask and φ in turn.
QUICK = [
    ("softmax", None, MASK),
    ("linear", "relu_affine", MASK),
    ("inline", "identity", None),
    ("hydra", None, MASK),
    ("efficient", None, None),
    ("angular", None, MASK),
    ("focused", None, None),
    ("mala", None, MASK),
    ("rala", None, MASK),
    ("polaformer", None, MASK),
    ("agent", None, MASK),
    ("mhla", None, MASK),
]
SLOW = [
    ("softmax", None, None),
    ("linear", "relu", None),
    ("inline", "exp", MASK),
    ("inline", "relu_affine", MASK),
    ("hydra", None, None),
    ("efficient", None, MASK),
    ("angular", None, None),
    ("focused", None, MASK),
    ("mala", None, None),
    ("rala", None, None),
    ("polaformer", None, None),
    ("agent", None, None),
    ("mhla", None, None),
]
CASES = [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
cases = pytest.mark.parametrize(("kind", "phi", "mask"), CASES)


@pytest.fixture(autouse=True)
def fresh_compiler():
    """Compiled code of one test is not the next one's."""
    torch.compiler.reset()


@pytest.mark.integration
@cases
def test_compile_in_one_graph(make_problem, fast_ops, kind, phi, mask):
    problem = make_problem(kind, phi, queries=4, tokens=5, mask=mask)
    compiled = torch.compile(fast_ops[kind], fullgraph=True, backend="aot_eager")
    out = compiled(problem.q, problem.k, problem.v, **problem.own_options())
    torch.testing.assert_close(out, problem.fast(), rtol=0, atol=1e-12)
    cotangent = torch.randn_like(out)
    expected = problem.gradients(problem.fast(), cotangent)
    torch.testing.assert_close(problem.gradients(out, cotangent), expected, rtol=0, atol=1e-10)


def test_local_residual():
    v, kernels = torch.randn(2, 2, 6, 3), torch.randn(2, 54)
    expected = ops.local_residual(v, kernels, (2, 3))
    compiled = torch.compile(ops.local_residual, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(v, kernels, (2, 3)), expected)


OTHERS = ("linear", "hydra", "efficient", "angular", "focused", "mala", "rala", "polaformer", "agent", "mhla")


@pytest.mark.parametrize("kind", ["inline", *(pytest.param(kind, marks=pytest.mark.slow) for kind in OTHERS)])
def test_compile_in_one_graph_under_autocast(make_problem, fast_ops, kind):
    """Autocast stays switched off inside the op."""
    problem = make_problem(kind, queries=4, tokens=5)
    expected = problem.fast()
    problem.replace({name: leaf.detach().float() for name, leaf in problem.leaves().items()})
    compiled = torch.compile(fast_ops[kind], fullgraph=True, backend="eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = compiled(problem.q, problem.k, problem.v, **problem.own_options())
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_inductor(make_problem):
    problem = make_problem("inline", queries=4, tokens=5, mask=MASK)
    compiled = torch.compile(ops.inline_attention, fullgraph=True)
    out = compiled(problem.q.detach(), problem.k.detach(), problem.v.detach(), mask=MASK)
    torch.testing.assert_close(out, problem.fast().detach(), rtol=0, atol=1e-12)
