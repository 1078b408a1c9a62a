"""Queries, keys and values for the tests of the ops."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from inlinevit import ops

FAST: dict[str, Callable[..., Tensor]] = {
    "softmax": ops.softmax_attention,
    "linear": ops.linear_attention,
    "inline": ops.inline_attention,
    "hydra": ops.hydra_attention,
    "efficient": ops.efficient_attention,
    "angular": ops.angular_attention,
    "focused": ops.focused_attention,
    "mala": ops.mala_attention,
    "rala": ops.rala_attention,
    "polaformer": ops.polaformer_attention,
    "agent": ops.agent_attention,
    "mhla": ops.mhla_attention,
    "circulant": ops.circulant_attention,
}
# Options that can be differentiated.
LEAVES = ("bias", "spread", "power", "agents", "mixing")


def map_of(tokens: int) -> tuple[int, int]:
    """The map of so many tokens that is nearest to a square."""
    height = max(side for side in range(1, math.isqrt(tokens) + 1) if tokens % side == 0)
    return height, tokens // height


@dataclass
class Problem:
    """One attention with its inputs; `fast` and `explicit` are the two ways to compute it."""

    kind: str
    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any] = field(default_factory=dict)

    def own_options(self) -> dict[str, Any]:
        """The options; the queries of all tokens, which RALA needs, are made from the keys."""
        return {**self.options, "queries": self.k.flip(-1)} if self.kind == "rala" else self.options

    def fast(self) -> Tensor:
        return FAST[self.kind](self.q, self.k, self.v, **self.own_options())

    def weights(self, **more: Any) -> Tensor:
        if self.kind == "angular":
            # Its rows are divided by the length of what they give.
            more["v"] = self.v
        return ops.attention_weights(self.q, self.k, kind=self.kind, **self.own_options(), **more)

    def explicit(self, **more: Any) -> Tensor:
        return ops.apply_weights(self.weights(**more), self.v)

    def leaves(self) -> dict[str, Tensor]:
        """All that can be differentiated."""
        found = {"q": self.q, "k": self.k, "v": self.v}
        if self.options.get("affine") is not None:
            found["A"], found["b"] = self.options["affine"]
        found.update({name: self.options[name] for name in LEAVES if self.options.get(name) is not None})
        return found

    def replace(self, leaves: dict[str, Tensor]) -> None:
        """Compute with other tensors from now on."""
        self.q, self.k, self.v = (leaves[name] for name in "qkv")
        if "A" in leaves:
            self.options["affine"] = (leaves["A"], leaves["b"])
        self.options.update({name: leaves[name] for name in LEAVES if name in leaves})

    def gradients(self, out: Tensor, cotangent: Tensor) -> dict[str, Tensor]:
        leaves = self.leaves()
        return dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), cotangent), strict=True))


@pytest.fixture(scope="session")
def make_problem() -> Callable[..., Problem]:
    def make(
        kind: str,
        feature_map: str | None = None,
        *,
        queries: int = 7,
        tokens: int = 7,
        batch: int = 2,
        heads: int = 2,
        width: int = 4,
        value_width: int = 3,
        seed: int = 0,
        **options: Any,
    ) -> Problem:
        """A random problem in float64. Attentions that divide get inputs whose divisors stay away from zero."""
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        q, k = draw(batch, heads, queries, width), draw(batch, heads, tokens, width)
        # Two matrices, each for one half.
        value_width += value_width % 2 if kind == "polaformer" else 0
        v = draw(batch, heads, tokens, value_width) + 1
        if kind in ("linear", "focused", "mhla"):
            # q and k lean to the same side in each coordinate. Signed maps get a negative one too.
            lean = torch.ones(width, dtype=torch.float64)
            lean[-1] = -1 if feature_map in ("identity", "leaky_relu") else 1
            q, k = 0.4 * q + 2 * lean, 0.4 * k + 2 * lean
        if feature_map is not None:
            options["feature_map"] = feature_map
        if feature_map == "relu_affine":
            matrix = 0.3 * draw(heads, width, width) + torch.eye(width, dtype=torch.float64)
            options["affine"] = (matrix, draw(heads, width) + 1)
        if kind in ("focused", "polaformer"):
            options["spread"] = draw(heads, width).abs() + 0.5
        if kind == "polaformer":
            # Its scores are products of powers: small ones would not count beside its ε.
            q, k = 2 * q, 2 * k
            options["power"] = 1 + 4 * draw(heads, width).sigmoid()
        if kind == "agent":
            # The same for all images, so that images can be computed alone.
            options["agents"] = draw(1, heads, 3, width)
        if kind == "mhla":
            options["mixing"] = draw(16, 16).abs() + 0.1
        if kind in ("mhla", "circulant"):
            options["feat_size"] = map_of(tokens)
        problem = Problem(kind, q, k, v, options)
        for leaf in problem.leaves().values():
            leaf.requires_grad_()
        return problem

    return make


@pytest.fixture(scope="session")
def fast_ops() -> dict[str, Callable[..., Tensor]]:
    """The fast function of every kind."""
    return FAST


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
