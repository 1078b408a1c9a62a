"""Multi-head linear attention with token-level mixing (MHLA): linear attention by blocks of the map.

The map is cut into 4 × 4 blocks. Each block b has the sums S_b = Σ_{j∈b} φ(k_j)v_jᵀ and ζ_b = Σ_{j∈b} φ(k_j) of its
own, and the queries of a block attend to a mixture of them, with learned coefficients M (16, 16):

    out_i = φ(q_i)·Σ_b M_{b(i)b} S_b / (φ(q_i)·Σ_b M_{b(i)b} ζ_b + ε),    φ = ReLU + 1e-6
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ._common import autocast_off, check_map, check_qkv, hide_padding, hide_pairs, promote, visible_pairs
from .weights import register_weights

# Blocks along each axis of the map.
BLOCKS = 4
# Added to ReLU, and to the divisor.
EPSILON = 1e-6


class BlockGrid(NamedTuple):
    """How a map is cut into BLOCKS × BLOCKS blocks: it is padded at the bottom and on the right to whole blocks."""

    height: int
    width: int
    # Of a block.
    block_height: int
    block_width: int


def block_grid(feat_size: tuple[int, int]) -> BlockGrid:
    """Return the blocks of a map of size (H, W)."""
    height, width = feat_size
    return BlockGrid(height, width, (height + BLOCKS - 1) // BLOCKS, (width + BLOCKS - 1) // BLOCKS)


def split_blocks(x: Tensor, grid: BlockGrid) -> Tensor:
    """Split tokens (batch, heads, H·W, dim) into blocks (batch, heads, 16, tokens of a block, dim); padding is zero."""
    batch, heads, _, dim = x.shape
    height, width = BLOCKS * grid.block_height, BLOCKS * grid.block_width
    x = x.reshape(batch, heads, grid.height, grid.width, dim)
    x = F.pad(x, (0, 0, 0, width - grid.width, 0, height - grid.height))
    x = x.view(batch, heads, BLOCKS, grid.block_height, BLOCKS, grid.block_width, dim)
    return x.transpose(3, 4).reshape(batch, heads, BLOCKS * BLOCKS, grid.block_height * grid.block_width, dim)


def join_blocks(x: Tensor, grid: BlockGrid) -> Tensor:
    """Invert split_blocks; padding is dropped."""
    batch, heads, _, _, dim = x.shape
    x = x.view(batch, heads, BLOCKS, BLOCKS, grid.block_height, grid.block_width, dim).transpose(3, 4)
    x = x.reshape(batch, heads, BLOCKS * grid.block_height, BLOCKS * grid.block_width, dim)
    return x[:, :, : grid.height, : grid.width].reshape(batch, heads, grid.height * grid.width, dim)


def initial_mixing(device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Return the initial M (16, 16): 1 − dist(i, j)/max_k dist(i, k) between block centres, rows sum to 1."""
    places = torch.arange(BLOCKS, dtype=torch.float64)
    centres = torch.cartesian_prod(places, places)
    distances = torch.linalg.vector_norm(centres[:, None] - centres[None, :], dim=-1)
    mixing = 1 - distances / distances.amax(dim=1, keepdim=True)
    return (mixing / mixing.sum(dim=1, keepdim=True)).to(device=device, dtype=dtype or torch.get_default_dtype())


def map_tokens(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return φ(x) in float32 or better, zero at padding according to mask (batch, tokens)."""
    return hide_padding(torch.relu(promote(hide_padding(x, mask))) + EPSILON, mask)


def mhla_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mixing: Tensor,
    feat_size: tuple[int, int],
    mask: Tensor | None = None,
    shared_divisor: bool = False,
) -> Tensor:
    """MHLA, O(N).

    Args:
        q: Queries (batch, heads, queries, head_dim), of the first tokens or of all tokens.
        k: Keys (batch, heads, H·W, head_dim).
        v: Values (batch, heads, H·W, value_dim).
        mixing: M (16, 16), not negative: how much the queries of a block (row) see of each block (column).
        feat_size: (H, W) of the map; any, since it is padded to whole blocks.
        mask: (batch, H·W), True = real token.
        shared_divisor: Divide by Σ_b M_{b(i)b} φ(q_{b,w})·ζ_b + ε, with queries at the same place w of all blocks b,
            as the published code does; rows do not sum to 1 then. By default, the divisor is that of the paper.

    Returns:
        (batch, heads, queries, value_dim), in q's dtype; sums are kept in float32 or better.
    """
    check_mhla(q, k, v, mixing, feat_size, mask)
    queries, tokens = q.shape[2], k.shape[2]
    if queries > tokens or (shared_divisor and queries < tokens):
        raise ValueError(f"queries are those of the tokens, but there are {queries} of them for {tokens} tokens")
    grid = block_grid(feat_size)
    with autocast_off(q):
        mapped = map_tokens(q, mask if shared_divisor else None)
        # Where there are no queries, rows are computed and dropped.
        mapped = split_blocks(mapped if shared_divisor else F.pad(mapped, (0, 0, 0, tokens - queries)), grid)
        keys, values = split_blocks(map_tokens(k, mask), grid), split_blocks(promote(hide_padding(v, mask)), grid)
        mixing = mixing.to(keys.dtype)
        # (batch, heads, 16, head_dim, value_dim) and (batch, heads, 16, head_dim, 1)
        key_value, key = keys.transpose(-2, -1) @ values, keys.sum(dim=-2).unsqueeze(-1)
        out = mapped @ mix(mixing, key_value)
        divisor = mix(mixing, mapped @ key) if shared_divisor else mapped @ mix(mixing, key)
        return join_blocks(out / (divisor + EPSILON), grid)[:, :, :queries].to(q.dtype)


def mix(mixing: Tensor, x: Tensor) -> Tensor:
    """Return Σ_b M_{ab} x_b for blocks x (batch, heads, 16, …)."""
    return (mixing @ x.flatten(3)).view_as(x)


@register_weights("mhla")
def mhla_weights(
    q: Tensor,
    k: Tensor,
    *,
    mixing: Tensor,
    feat_size: tuple[int, int],
    mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    first: int = 0,
    shared_queries: Tensor | None = None,
) -> Tensor:
    """Return the weights of MHLA, (batch, heads, queries, tokens); masks as in attention_weights.

    Args:
        q: Consecutive queries of the map (batch, heads, queries, head_dim).
        k: Keys (batch, heads, H·W, head_dim).
        mixing: See mhla_attention.
        feat_size: See mhla_attention.
        mask: See attention_weights.
        attn_mask: See attention_weights.
        first: Index of the first query among the tokens.
        shared_queries: All queries, (batch, heads, H·W, head_dim), for the divisor of the published code.
    """
    check_mhla(q, k, k, mixing, feat_size, mask)
    pairs = visible_pairs(mask, attn_mask)
    places = block_places(feat_size, k.device)
    own = places[first : first + q.shape[2]]
    queries, keys = map_tokens(q, None), map_tokens(k, mask)
    coefficients = mixing.to(keys.dtype)[own[:, :1], places[:, 0]]
    scores = hide_pairs(coefficients * (queries @ keys.transpose(-2, -1)), pairs)
    if shared_queries is None:
        return (scores / (scores.sum(dim=-1, keepdim=True) + EPSILON)).to(q.dtype)
    # Of the queries at i's place, the one in the block of j meets k_j; there is none where i does not see that place.
    blocks, spots = places.unbind(1)
    products = map_tokens(shared_queries, mask) @ keys.transpose(-2, -1)
    products = hide_pairs(products, blocks[:, None] == blocks)
    same_spot = own[:, 1:] == spots
    same_spot = same_spot if pairs is None else same_spot & pairs
    terms = hide_pairs(coefficients * (same_spot.to(products.dtype) @ products), pairs)
    return (scores / (terms.sum(dim=-1, keepdim=True) + EPSILON)).to(q.dtype)


def block_places(feat_size: tuple[int, int], device: torch.device) -> Tensor:
    """Return the block of each token of a map, and its place in that block, (H·W, 2)."""
    grid = block_grid(feat_size)
    rows, columns = torch.arange(grid.height, device=device)[:, None], torch.arange(grid.width, device=device)
    block = rows // grid.block_height * BLOCKS + columns // grid.block_width
    place = rows % grid.block_height * grid.block_width + columns % grid.block_width
    return torch.stack([block, place], dim=-1).flatten(0, 1)


def check_mhla(
    q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, feat_size: tuple[int, int], mask: Tensor | None
) -> None:
    """Raise ValueError for shapes that do not fit together."""
    check_qkv(q, k, v, mask)
    check_map(k, feat_size)
    if mixing.shape != (BLOCKS**2, BLOCKS**2):
        raise ValueError(f"mixing must be ({BLOCKS**2}, {BLOCKS**2}), one row per block, but it is {mixing.shape}")
