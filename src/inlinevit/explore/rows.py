"""The attention weights of one query: for all heads of a layer, in time and memory linear in the number of tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import ops
from ..analysis.confusion import DELTA, EPSILON, distances
from ..analysis.layer import PADDING, PREFIX, Layer
from ..analysis.maps import on_map
from ..ops.feature_maps import apply_feature_map

# The attentions that are compared on the same queries and keys, with their feature maps.
FEATURE_MAPS = {"softmax": "identity", "linear": "relu", "inline": "identity"}
KINDS = tuple(FEATURE_MAPS)
# Of other attentions, confused queries are found from the rows themselves, in windows of at most so many tokens.
MOST_EXPLICIT_TOKENS = 256
# Softmax: rows whose distance is at most this many times epsilon in first order are compared exactly, so many at most.
CANDIDATE_FACTOR = 3.0
MOST_CANDIDATES = 64


@dataclass
class LocalWeights:
    """What a convolution of the values adds to the row of one query, averaged over the channels of a head.

    Attributes:
        places: The neighbours on the map, row · W + column.
        weights: (heads, neighbours).
    """

    places: list[int]
    weights: Tensor


@dataclass
class QueryRow:
    """The weights of one query in one layer, by one kind of attention.

    Attributes:
        kind: The kind of attention, such as "softmax".
        is_own: Whether it is that of the model.
        weights: (heads, H, W) without any convolution; NaN outside of the query's window.
        prefix: (heads, prefix tokens), the weights of class tokens.
        local: What the layer's convolution adds, such as InLine's local residual; of the model's own attention only.
        confused: By head, the places of other queries that have the same row; None if that is not known.
        uniform: Each weight in uniform attention.
    """

    kind: str
    is_own: bool
    weights: Tensor
    prefix: Tensor
    local: LocalWeights | None
    confused: list[list[int]] | None
    uniform: float


def locate(layer: Layer, query: tuple[int, int]) -> tuple[int, int]:
    """Return the window and the token of the query at (row, column) of a layer's map."""
    window, token = torch.nonzero(layer.places == query[0] * layer.size[1] + query[1])[0].tolist()
    return window, token


def query_row(
    layer: Layer, query: tuple[int, int], kind: str, *, epsilon: float = EPSILON, delta: float = DELTA
) -> QueryRow:
    """Return the weights of one query of the first image.

    Args:
        layer: The layer, whose keys are tokens of the map.
        query: (row, column) on its map.
        kind: One of KINDS, computed from the layer's queries and keys, or the layer's own attention.
        epsilon: Rows nearer than this, relative to the larger norm, are the same.
        delta: Queries farther apart than this, relative to the larger norm, are different.
    """
    window, token = locate(layer, query)
    places = layer.places[window]
    is_own = kind == layer.attention
    row = weights_of_query(layer, window, token, kind)
    return QueryRow(
        kind,
        is_own,
        on_map(row, places, layer.size),
        row[:, places == PREFIX],
        local_weights(layer, window, token) if is_own else None,
        confused_queries(layer, window, token, kind, row, epsilon, delta),
        1.0 / int((places != PADDING).sum()),
    )


def weights_of_query(layer: Layer, window: int, token: int, kind: str) -> Tensor:
    """Return the row of one query, (heads, tokens of the window), by a kind or by the layer's own attention."""
    if kind == layer.attention:
        return layer.attention_weights(token, token + 1)[window, :, 0]
    return plain_row(layer, window, layer.q[window, :, token], kind)


def plain_row(layer: Layer, window: int, q: Tensor, kind: str) -> Tensor:
    """Return the row of a query (heads, width) by one of KINDS over the keys of a window, (heads, tokens)."""
    k = layer.k[window : window + 1]
    real = layer.is_real[window : window + 1]
    mask = None if bool(real.all()) else real
    feature_map = FEATURE_MAPS[kind]
    return ops.attention_weights(q[None, :, None], k, kind=kind, feature_map=feature_map, mask=mask)[0, :, 0]


def local_weights(layer: Layer, window: int, token: int) -> LocalWeights | None:
    """Return what the layer's convolution adds to the row of a query; None if there is no convolution."""
    if layer.convolution is None:
        return None
    kernels = layer.convolution.kernels[window].mean(dim=1)
    places, taps = [], []
    for tap, queries, neighbours in layer.convolution.taps(layer.tokens, token, token + 1):
        place = int(layer.places[window, neighbours[0]]) if len(queries) else PADDING
        if place >= 0:
            places.append(place)
            taps.append(tap)
    return LocalWeights(places, kernels[:, taps])


def confused_queries(
    layer: Layer, window: int, token: int, kind: str, row: Tensor, epsilon: float = EPSILON, delta: float = DELTA
) -> list[list[int]] | None:
    """Find the other queries of a window that differ from one query and have the same row.

    Rows of linear and InLine attention are linear in a vector of head_dim numbers, so the distance of two rows follows
    from these vectors and from the Gram matrix of the keys. Rows of softmax are compared in first order, and the
    nearest ones exactly. No other rows are computed, but for attentions without such a form in small windows.

    Args:
        layer: See query_row.
        window: The query's window.
        token: The query's place in the window.
        kind: See query_row.
        row: The row of the query, (heads, tokens).
        epsilon: See query_row.
        delta: See query_row.

    Returns:
        By head, the places of these queries on the map; None if the rows have no such form and are too many.
    """
    differ = relative_distances(layer.q[window].float(), token) > delta
    if kind in KINDS and (kind != layer.attention or is_plain(layer, window, token, kind, row)):
        if kind == "softmax":
            apart = softmax_distances(layer, window, token, row, differ, CANDIDATE_FACTOR * epsilon)
        else:
            apart = linear_distances(layer, window, token, kind)
    elif layer.tokens <= MOST_EXPLICIT_TOKENS:
        rows = torch.cat([layer.attention_weights(first, last)[window] for first, last in layer.chunks()], dim=1)
        apart = distances(row.unsqueeze(1), rows)[:, 0]
    else:
        return None
    places = layer.places[window]
    same = (apart <= epsilon) & differ & (places >= 0)
    return [places[found].tolist() for found in same]


def is_plain(layer: Layer, window: int, token: int, kind: str, row: Tensor) -> bool:
    """Whether the layer's own row is that of plain attention: without a bias, a mask, or another feature map."""
    return torch.allclose(plain_row(layer, window, layer.q[window, :, token], kind), row, rtol=1e-3, atol=1e-6)


def relative_distances(x: Tensor, token: int) -> Tensor:
    """Return the distances (heads, tokens) of vectors (heads, tokens, width) to one of them, by the larger norm."""
    norms = x.norm(dim=-1)
    longer = torch.maximum(norms, norms[:, token, None])
    return (x - x[:, token, None]).norm(dim=-1) / longer.clamp(min=torch.finfo(x.dtype).tiny)


def linear_distances(layer: Layer, window: int, token: int, kind: str) -> Tensor:
    """Return the relative distances of all rows to that of one query, (heads, tokens), for linear and InLine attention.

    Row i is K·u_i, with u_i = φ(q_i) / Σ_j φ(q_i)·φ(k_j) for linear attention; or 1/N + K·u_i with centred keys and
    u_i = s·φ(q_i)/N for InLine, where 1 and K·u_i are orthogonal. Hence ‖row_i − row_j‖² = (u_i−u_j)ᵀ·KᵀK·(u_i−u_j).
    """
    feature_map = FEATURE_MAPS[kind]
    real = layer.is_real[window]
    q = apply_feature_map(layer.q[window].float()[None], feature_map)[0]
    k = apply_feature_map(layer.k[window].float()[None], feature_map)[0][:, real]
    if kind == "linear":
        divisor = q @ k.sum(dim=1, keepdim=True).transpose(1, 2)
        # A query that is mapped to zero has no row; it stays at zero, as in the attention itself.
        u, constant = torch.where(divisor > 0, q / divisor.clamp(min=1e-30), 0.0), 0.0
    else:
        k = k - k.mean(dim=1, keepdim=True)
        u, constant = q * (q.shape[-1] ** -0.5 / k.shape[1]), 1.0 / k.shape[1]
    gram = k.transpose(1, 2) @ k
    norms = (quadratic(u, gram) + constant).sqrt()
    longer = torch.maximum(norms, norms[:, token, None])
    return quadratic(u - u[:, token, None], gram).sqrt() / longer.clamp(min=torch.finfo(u.dtype).tiny)


def quadratic(u: Tensor, gram: Tensor) -> Tensor:
    """Return uᵀ·G·u of vectors (heads, tokens, width) with positive semidefinite (heads, width, width)."""
    return ((u @ gram) * u).sum(dim=-1).clamp(min=0)


def softmax_distances(layer: Layer, window: int, token: int, row: Tensor, differ: Tensor, near: float) -> Tensor:
    """Return the relative distances of rows to that of one query, (heads, tokens), for softmax attention.

    With z_m = s·k_m·(q_j − q_i), row_j − row_i = row_i ∘ (z − row_i·z) in first order. Of queries that differ, the
    nearest rows within `near` are compared exactly.
    """
    q, k = layer.q[window].float(), layer.k[window].float()
    row = row.float()
    scale = q.shape[-1] ** -0.5
    centred = (k - row.unsqueeze(1) @ k) * (row * scale).unsqueeze(-1)
    moved = quadratic(q - q[:, token, None], centred.transpose(1, 2) @ centred).sqrt()
    apart = moved / row.norm(dim=-1, keepdim=True)
    for head in range(q.shape[0]):
        candidates = torch.nonzero(differ[head] & (apart[head] <= near))[:, 0]
        if len(candidates) == 0:
            continue
        nearest = candidates[apart[head, candidates].argsort()[:MOST_CANDIDATES]]
        keys = k[None, head : head + 1]
        real = layer.is_real[window : window + 1]
        mask = None if bool(real.all()) else real
        rows = ops.softmax_weights(q[None, head : head + 1, nearest], keys, mask=mask)[0, 0]
        longer = torch.maximum(rows.norm(dim=-1), row[head].norm())
        apart[head, nearest] = (rows - row[head]).norm(dim=-1) / longer
    return apart
