"""Agent attention: a few agents, pooled from the queries, attend to all tokens, and the queries to the agents.

With agents a_1 … a_n, out = softmax(s·q aᵀ + B₂)·softmax(s·a kᵀ + B₁)·v: the product of two softmax matrices, of rank n
at most. It is efficient attention of the scores of queries and keys with the agents.
"""

import torch
from torch import Tensor

from ._common import autocast_off, check_qkv, default_scale, hide_padding, promote
from .efficient import efficient_attention, efficient_weights
from .pooling import pool_maps
from .weights import register_weights


def pool_agents(
    q: Tensor, feat_size: tuple[int, int], side: int, mask: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Pool the queries of the map to side × side agents, by adaptive average pooling.

    Args:
        q: Queries (batch, heads, prefix + H·W, head_dim). Prefix tokens are not pooled.
        feat_size: (H, W) of the map.
        side: Rows and columns of agents.
        mask: (batch, heads or 1, prefix + H·W), True = real token: an agent is the mean of the real tokens in its cell.

    Returns:
        The agents (batch, heads, side², head_dim), in float32 or better; and which of them have real tokens,
        (batch, heads or 1, side²), or None for all.
    """
    batch, heads, tokens, head_dim = q.shape
    height, width = feat_size
    prefix = tokens - height * width
    with autocast_off(q):
        queries = promote(q if mask is None else q.masked_fill(~mask.unsqueeze(-1), 0.0))
        # (batch, heads, H·W, head_dim) -> (batch, H, W, heads · head_dim)
        maps = queries[:, :, prefix:].transpose(1, 2).reshape(batch, height, width, heads * head_dim)
        agents = pool_maps(maps, (side, side)).view(batch, side * side, heads, head_dim).transpose(1, 2)
        if mask is None:
            return agents, None
        # Of the tokens in a cell, the fraction that is real, (batch, heads or 1, side²).
        real = mask[:, :, prefix:].transpose(1, 2).reshape(batch, height, width, mask.shape[1]).to(maps.dtype)
        fraction = pool_maps(real, (side, side)).flatten(1, 2).transpose(1, 2)
        return agents / fraction.clamp(min=torch.finfo(maps.dtype).tiny).unsqueeze(-1), fraction > 0


def agent_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    agents: Tensor,
    query_bias: Tensor | None = None,
    key_bias: Tensor | None = None,
    scale: float | None = None,
    mask: Tensor | None = None,
    agent_mask: Tensor | None = None,
) -> Tensor:
    """Agent attention, O(N).

    Args:
        q: Queries (batch, heads, queries, head_dim).
        k: Keys (batch, heads, tokens, head_dim).
        v: Values (batch, heads, tokens, value_dim).
        agents: (batch, heads, agents, head_dim).
        query_bias: B₂, added to the scores of the queries, broadcastable to (batch, heads, queries, agents).
        key_bias: B₁ᵀ, added to the scores of the keys, broadcastable to (batch, heads, tokens, agents).
        scale: Factor of the scores; head_dim^-1/2 by default.
        mask: (batch, tokens), True = real token.
        agent_mask: (batch, heads or 1, agents), True = the queries may attend to the agent.

    Returns:
        (batch, heads, queries, value_dim), in q's dtype; scores and sums are kept in float32 or better.
    """
    check_qkv(q, k, v, mask)
    with autocast_off(q):
        queries, keys = agent_scores(q, k, agents, query_bias, key_bias, scale, mask, agent_mask)
        return efficient_attention(queries, keys, promote(v), mask).to(q.dtype)


@register_weights("agent")
def agent_weights(
    q: Tensor,
    k: Tensor,
    *,
    agents: Tensor,
    query_bias: Tensor | None = None,
    key_bias: Tensor | None = None,
    scale: float | None = None,
    mask: Tensor | None = None,
    agent_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
) -> Tensor:
    """Return the weights of agent attention, (batch, heads, queries, tokens); masks as in attention_weights.

    The agents are given: they are the same for all queries, whatever these may attend to.
    """
    check_qkv(q, k, k, mask)
    queries, keys = agent_scores(q, k, agents, query_bias, key_bias, scale, mask, agent_mask)
    return efficient_weights(queries, keys, mask=mask, attn_mask=attn_mask).to(q.dtype)


def agent_scores(
    q: Tensor,
    k: Tensor,
    agents: Tensor,
    query_bias: Tensor | None,
    key_bias: Tensor | None,
    scale: float | None,
    mask: Tensor | None,
    agent_mask: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the scores of queries and keys with the agents, (batch, heads, tokens, agents); see agent_attention."""
    agents = promote(agents).transpose(-2, -1) * default_scale(q, scale)
    queries, keys = promote(q) @ agents, promote(hide_padding(k, mask)) @ agents
    if query_bias is not None:
        queries = queries + query_bias.to(queries.dtype)
    if key_bias is not None:
        keys = keys + key_bias.to(keys.dtype)
    if agent_mask is not None:
        # If no agent has a token, all agents are alike, which gives zeros.
        visible = agent_mask | ~agent_mask.any(dim=-1, keepdim=True)
        queries = queries.masked_fill(~visible.unsqueeze(2), float("-inf"))
    return queries, keys
