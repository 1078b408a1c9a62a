"""InLine attention over chunks of tokens: of temporary tensors, only those of one chunk are in memory."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ._common import autocast_off, check_qkv, default_scale, hide_padding, promote
from .feature_maps import apply_feature_map
from .key_value_state import KeyValueState

Affine = tuple[Tensor, Tensor] | None


def chunked_inline_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    feature_map: str = "identity",
    affine: tuple[Tensor, Tensor] | None = None,
    mask: Tensor | None = None,
    *,
    chunk: int = 16384,
) -> Tensor:
    """Return inline_attention(q, k, v, …), computed in two passes over chunks of tokens.

    The first pass summarizes keys and values (KeyValueState), the second answers the queries. The backward pass works
    in the same way and stores nothing but q, k, v and the state. Besides inputs, outputs and their gradients, memory is
    needed for one chunk. It has no second derivatives.

    Args:
        q: Queries (batch, heads, queries, head_dim).
        k: Keys (batch, heads, tokens, head_dim).
        v: Values (batch, heads, tokens, value_dim).
        scale: Factor of φ(q)·φ(k); head_dim^-1/2 by default.
        feature_map: φ, one of FEATURE_MAPS.
        affine: (A, b) of `relu_affine`.
        mask: (batch, tokens), True = real token. Padding is excluded from all means and sums, whatever values it has.
        chunk: Number of tokens, or queries, of a chunk.

    Returns:
        (batch, heads, queries, value_dim), in q's dtype; sums are kept in float32 or better.
    """
    check_qkv(q, k, v, mask)
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}: it should be at least 1 token")
    matrix, bias = (None, None) if affine is None else affine
    out: Tensor = ChunkedInLineAttention.apply(q, k, v, matrix, bias, mask, default_scale(q, scale), feature_map, chunk)
    return out


class ChunkedInLineAttention(torch.autograd.Function):
    """Forward and backward pass of chunked_inline_attention.

    With D = (s / N)·Σ_i φ(q_i)ᵀ g_i for the gradients g of the outputs, the gradients are

        φ(q_i): (s / N)·g_i·Cᵀ      φ(k_j): (v_j − v̄)·Dᵀ      v_j: (φ(k_j) − mean φ(k))·D + (1 / N)·Σ_i g_i

    The means in C have no gradients of their own, since centred keys and values sum to zero.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        matrix: Tensor | None,
        bias: Tensor | None,
        mask: Tensor | None,
        scale: float,
        feature_map: str,
        chunk: int,
    ) -> Tensor:
        affine = _pair(matrix, bias)
        batch, heads, _, head_dim = k.shape
        dtype = promote(k.new_empty(0)).dtype
        state = KeyValueState.empty(batch, heads, head_dim, v.shape[3], device=k.device, dtype=dtype)
        for part in _chunks(k.shape[2], chunk):
            real = None if mask is None else mask[:, part]
            state = state.merge(
                KeyValueState.from_tokens(
                    k[:, :, part], v[:, :, part], mask=real, feature_map=feature_map, affine=affine
                )
            )
        out = q.new_empty(*q.shape[:3], v.shape[3])
        for part in _chunks(q.shape[2], chunk):
            out[:, :, part] = state.attend(q[:, :, part], scale, feature_map, affine)
        ctx.save_for_backward(q, k, v, matrix, bias, mask, state.count, state.k_mean, state.v_mean, state.covariance)
        ctx.scale, ctx.feature_map, ctx.chunk = scale, feature_map, chunk
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, matrix, bias, mask, *saved = ctx.saved_tensors
        state = KeyValueState(*saved)
        affine = _pair(matrix, bias)
        factor = ctx.scale / state.count.clamp(min=1).to(state.covariance.dtype)
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        grad_affine = [None if x is None else torch.zeros_like(x) for x in (matrix, bias)]
        with autocast_off(q):
            by_covariance = torch.zeros_like(state.covariance)
            by_mean = torch.zeros_like(state.v_mean)
            to_queries = (state.covariance * factor).transpose(-2, -1)
            for part in _chunks(q.shape[2], ctx.chunk):
                step = promote(grad[:, :, part])
                mapped, back = _map(promote(q[:, :, part]), ctx.feature_map, affine, grad_affine)
                by_covariance += mapped.transpose(-2, -1) @ step
                by_mean += step.sum(dim=-2, keepdim=True)
                grad_q[:, :, part] = back(step @ to_queries)
            by_covariance *= factor
            by_mean *= factor / ctx.scale
            for part in _chunks(k.shape[2], ctx.chunk):
                real = None if mask is None else mask[:, part]
                keys = hide_padding(promote(k[:, :, part]), real)
                values = hide_padding(promote(v[:, :, part]), real)
                mapped, back = _map(keys, ctx.feature_map, affine, grad_affine)
                step = hide_padding(values - state.v_mean, real) @ by_covariance.transpose(-2, -1)
                grad_k[:, :, part] = hide_padding(back(step), real)
                grad_v[:, :, part] = hide_padding((mapped - state.k_mean) @ by_covariance + by_mean, real)
        return grad_q, grad_k, grad_v, *grad_affine, None, None, None, None


def _pair(matrix: Tensor | None, bias: Tensor | None) -> Affine:
    return None if matrix is None or bias is None else (matrix, bias)


def _chunks(tokens: int, chunk: int) -> Iterator[slice]:
    """Return the places of each chunk."""
    return (slice(start, min(start + chunk, tokens)) for start in range(0, tokens, chunk))


def _map(x: Tensor, feature_map: str, affine: Affine, grad_affine: list[Tensor | None]) -> tuple[Tensor, Any]:
    """Return φ(x), and a function from gradients of φ(x) to those of x, which adds those of (A, b) to grad_affine."""
    if feature_map == "identity":
        return x, lambda grad: grad
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        weights = () if affine is None else tuple(weight.detach().requires_grad_() for weight in affine)
        mapped = apply_feature_map(leaf, feature_map, (weights[0], weights[1]) if weights else None)

    def back(grad: Tensor) -> Tensor:
        # Maps other than relu_affine do not use (A, b).
        grads = torch.autograd.grad(mapped, (leaf, *weights), grad, allow_unused=True)
        for total, part in zip(grad_affine, grads[1:], strict=False):
            if total is not None and part is not None:
                total += part
        return grads[0]

    return mapped.detach(), back
