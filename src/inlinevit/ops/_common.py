"""Helpers that all attentions use: shape checks, accumulation in float32, means over real tokens."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def check_qkv(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> None:
    """Raise ValueError for shapes that do not fit together; all tensors are (batch, heads, tokens, head_dim)."""
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        raise ValueError("q, k and v must have four dimensions: (batch, heads, tokens, head_dim)")
    if q.shape[:2] != k.shape[:2] or k.shape[:2] != v.shape[:2]:
        raise ValueError(
            f"q, k and v must have the same batch size and number of heads, but are {q.shape}, {k.shape}, {v.shape}"
        )
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q and k must have the same head_dim, but have {q.shape[-1]} and {k.shape[-1]}")
    if k.shape[-2] != v.shape[-2]:
        raise ValueError(f"k and v must have the same number of tokens, but have {k.shape[-2]} and {v.shape[-2]}")
    if k.shape[-2] == 0:
        raise ValueError("there must be at least one key to attend to")
    if mask is not None:
        if mask.dtype != torch.bool:
            raise ValueError(f"mask must be boolean (True = real token), but it is {mask.dtype}")
        if mask.dim() != 2 or mask.shape[0] != k.shape[0] or mask.shape[1] != k.shape[-2]:
            raise ValueError(f"mask must be (batch, {k.shape[-2]} tokens), but it is {mask.shape}")


def check_map(k: Tensor, feat_size: tuple[int, int]) -> None:
    """Raise ValueError for keys (batch, heads, tokens, head_dim) that are not the tokens of a map of size (H, W)."""
    height, width = feat_size
    if k.shape[-2] != height * width:
        raise ValueError(
            f"{k.shape[-2]} tokens do not make a map of {height}×{width}: pass (H, W) of the token grid as feat_size"
        )


def default_scale(q: Tensor, scale: float | None) -> float:
    """Return the given scale, or head_dim^-1/2."""
    return q.shape[-1] ** -0.5 if scale is None else scale


def promote(x: Tensor) -> Tensor:
    """Convert half precision to float32, so that sums over many tokens neither overflow nor lose digits."""
    return x.float() if x.dtype == torch.float16 or x.dtype == torch.bfloat16 else x


def autocast_off(x: Tensor) -> AbstractContextManager[object]:
    """Return a context in which autocast does not convert float32 matrix products on x's device to half precision."""
    if is_exporting() and not torch.is_autocast_enabled(x.device.type):
        # Such a context becomes a subgraph, which is recorded several times.
        return nullcontext()
    if torch.amp.is_autocast_available(x.device.type):
        return torch.autocast(x.device.type, enabled=False)
    return nullcontext()


def is_exporting() -> bool:
    """Return whether torch.export records a graph, in which sizes may be symbols."""
    # Added in torch 2.7.
    return hasattr(torch.compiler, "is_exporting") and torch.compiler.is_exporting()


def is_symbolic(*sizes: object) -> bool:
    """Return whether one of the sizes is a symbol, whose value is known when the graph runs."""
    return any(isinstance(size, torch.SymInt) for size in sizes)


def holds(condition: bool) -> bool:
    """Return whether a condition on sizes holds; for symbols, whether it holds for all sizes that they stand for.

    In an exported graph, a branch on the size of the example would be wrong for other sizes.
    """
    if not is_exporting():
        return bool(condition)
    # Here, because it imports sympy.
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def needs_gradient(*tensors: Tensor) -> bool:
    """Return whether there may be a backward pass through these tensors."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def hide_padding(x: Tensor, mask: Tensor | None) -> Tensor:
    """Zero the tokens of x (batch, heads, tokens, head_dim) that are padding according to mask (batch, tokens)."""
    return x if mask is None else x.masked_fill(~mask[:, None, :, None], 0.0)


def visible_pairs(mask: Tensor | None, attn_mask: Tensor | None) -> Tensor | None:
    """Combine both masks: broadcastable to (batch, heads, queries, tokens), True = visible; None if all pairs are.

    Args:
        mask: (batch, tokens), True = real token.
        attn_mask: Broadcastable to (batch, heads, queries, tokens), True = the query may attend to the token.
    """
    if mask is None:
        return attn_mask
    real = mask[:, None, None, :]
    return real if attn_mask is None else real & attn_mask


def hide_pairs(weights: Tensor, pairs: Tensor | None) -> Tensor:
    """Zero the weights (batch, heads, queries, tokens) of tokens that are not visible to their query."""
    return weights if pairs is None else weights.masked_fill(~pairs, 0.0)


def unit_length(x: Tensor, dims: list[int], shortest: float = 1e-12) -> Tensor:
    """Divide x by its length over these dimensions, or by `shortest` if that is longer: zero stays zero."""
    return x / torch.linalg.vector_norm(x, dim=dims, keepdim=True).clamp(min=shortest)


def count_tokens(k: Tensor, mask: Tensor | None) -> Tensor:
    """Return the number of real tokens of each image, (batch or 1, 1, 1, 1), at least 1."""
    if mask is None:
        return torch.full((1, 1, 1, 1), k.shape[-2], dtype=k.dtype, device=k.device)
    return mask.sum(dim=1).clamp(min=1).to(k.dtype)[:, None, None, None]
