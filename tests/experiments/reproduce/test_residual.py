"""Measurements of the local residual in training, and their tables."""

import importlib.util
import json
import math

import pytest
import torch

from inlinevit.experiments.reproduce.document import residual_tables
from inlinevit.layers import InLineAttention
from tests import ROOT


def load_tool():
    spec = importlib.util.spec_from_file_location("residual_branch", ROOT / "tools" / "residual_branch.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@torch.no_grad()
def test_shares_are_those_of_attention_with_and_without_its_residual() -> None:
    torch.manual_seed(0)
    attention, x = InLineAttention(12, 3), torch.randn(5, 24, 12)
    found: dict[str, list[float]] = {"residual_share": [], "dynamic_share": []}
    with load_tool().shares_measured(attention, found):
        attention(x, (4, 6))
    assert attention.local_residual is not None
    local, kernels = attention.local_residual, attention.local_residual(x.mean(dim=1), attention.windows(x, (4, 6))[0])
    inputs: list[torch.Tensor] = []
    attention.proj.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    for module in (local, None):
        attention.local_residual = module
        attention(x, (4, 6))
    added = inputs[0] - inputs[1]
    assert found["residual_share"] == [pytest.approx(float(added.norm() / inputs[1].norm()), rel=1e-4)]
    assert found["dynamic_share"] == [
        pytest.approx(float(kernels.var(dim=0).mean() / kernels.square().mean()), rel=1e-4)
    ]


@pytest.mark.integration
def test_steps_are_measured(data: str) -> None:
    record = load_tool().measure(data, 0.002, 3)
    assert [row["step"] for row in record["rows"]] == [0, 2]
    for row in record["rows"]:
        values = [*row["gradients"].values(), *row["updates"].values(), row["residual_share"], row["dynamic_share"]]
        assert all(math.isfinite(value) and value > 0 for value in values)
    # Adam's first step changes each weight by its learning rate; those of W₂ are about seven times as large.
    updates = record["rows"][0]["updates"]
    assert updates["qkv"] / updates["W₂"] == pytest.approx(7, rel=0.1)


def test_tables_have_one_row_per_step() -> None:
    record = json.loads((ROOT / "docs" / "reproduce" / "residual.json").read_text())
    gradients, changes = residual_tables(record)
    assert (
        [row[0] for row in gradients.rows]
        == [row[0] for row in changes.rows]
        == [f"{one['step']:,}" for one in record["rows"]]
    )
    first = record["rows"][0]
    assert gradients.rows[0][gradients.headings.index("gradient: qkv")] == f"{first['gradients']['qkv']:.1e}"
    assert changes.rows[0][changes.headings.index("change: W₁")] == f"{first['updates']['W₁']:.1e}"
