"""Chunked execution: on a CPU without gradients, large inputs are computed a few images or tokens at a time."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..ops._common import needs_gradient

# Elements of the widest intermediate tensor that fit into the cache of a CPU.
CHUNK = 2**20


def has_hooks(module: nn.Module) -> bool:
    """Return whether the module or one of its children has hooks: then each must be called, and once per batch."""
    return any(map(has_own_hooks, module.modules()))


def has_own_hooks(module: nn.Module) -> bool:
    """Return whether the module itself has hooks."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks)


def records_graph(x: object) -> bool:
    """Return whether a graph is being recorded: by fx, torch.compile, torch.export or torch.jit.trace."""
    return issubclass(type(x), torch.fx.Proxy) or torch.compiler.is_compiling() or torch.jit.is_tracing()


def is_chunked(block: nn.Module, x: Tensor, hidden_dim: int) -> bool:
    """Return whether to compute a block in chunks: a large input on a CPU, without gradients and hooks.

    Args:
        block: The block.
        x: Its tokens (batch, tokens, dim).
        hidden_dim: Channels of its widest intermediate tensor.
    """
    return (
        # First, because shapes are unknown while fx traces.
        not records_graph(x)
        and x.device.type == "cpu"
        and not block.training
        and x.shape[0] * x.shape[1] * hidden_dim > CHUNK
        and not needs_gradient(x, *block.parameters())
        and not has_hooks(block)
    )


def add_chunked(x: Tensor, branch: Callable[..., Tensor], feat_size: tuple[int, int], elements: int) -> Tensor:
    """Return x + branch(x, feat_size), computed in equal chunks along the first dimension.

    Args:
        x: The input of the residual branch.
        branch: The residual branch.
        feat_size: (H, W) of the token grid.
        elements: Elements of the widest tensor that the branch would make of all of x.
    """
    chunks = -(-elements // CHUNK)
    out = torch.empty_like(x)
    for chunk, target in zip(x.chunk(chunks), out.chunk(chunks), strict=True):
        torch.add(chunk, branch(chunk, feat_size), out=target)
    return out
