"""Layers of attention made by hand."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from inlinevit import ops
from inlinevit.analysis import Convolution, Layer


@pytest.fixture(scope="session")
def make_layer() -> Callable[..., Layer]:
    def make(
        q: Tensor,
        k: Tensor,
        *,
        kind: str = "softmax",
        v: Tensor | None = None,
        size: tuple[int, int] | None = None,
        places: Tensor | None = None,
        convolution: Convolution | None = None,
        **options: object,
    ) -> Layer:
        """A layer of one window with these queries and keys (batch, heads, tokens, width)."""
        tokens = q.shape[2]
        size = (1, tokens) if size is None else size
        if places is None:
            places = torch.arange(-(tokens - size[0] * size[1]), size[0] * size[1]).clamp(min=-1)[None]

        def rows(first: int, last: int, seen: Tensor | None) -> Tensor:
            return ops.attention_weights(q[:, :, first:last], k, kind=kind, attn_mask=seen, **options)

        return Layer("layer", kind, size, q, k, k if v is None else v, places, True, rows, convolution)

    return make


@pytest.fixture(scope="session")
def layer_of_rows() -> Callable[..., Layer]:
    def make(rows: Tensor, size: tuple[int, int], convolution: Convolution | None = None) -> Layer:
        """A layer whose rows (tokens, tokens) are given; queries are drawn."""
        tokens = rows.shape[0]
        q = torch.randn(1, 1, tokens, 3, generator=torch.Generator().manual_seed(0), dtype=rows.dtype)
        prefix = tokens - size[0] * size[1]
        places = torch.arange(-prefix, size[0] * size[1]).clamp(min=-1)[None]

        def piece(first: int, last: int, seen: Tensor | None) -> Tensor:
            return rows[None, None, first:last].clone()

        return Layer("layer", "made", size, q, q, q, places, True, piece, convolution)

    return make


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
