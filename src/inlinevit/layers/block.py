"""The transformer block of all four families."""

from collections.abc import Callable
from functools import cache
from typing import Any, Final

import torch
from timm.layers import DropPath, Mlp
from torch import Tensor, nn

from ..ops._common import needs_gradient
from .local_mlp import LocalMlp
from .token_mixer import has_hooks

# Numbers of the widest intermediate tensor that stay in a CPU's cache, and in memory that is used again at once.
PIECE = 2**20


class Block(nn.Module):
    """norm → attention → add, norm → MLP → add.

    Args:
        attn: The attention, a TokenMixer.
        dim: Channels.
        mlp_ratio: Width of the MLP's hidden layer, in channels.
        proj_drop: Dropout in the MLP.
        drop_path: Rate of stochastic depth.
        norm_eps: eps of the LayerNorms.
        context_before_norm: Whether x̄ of the local residual is the mean of the block's input (CSWin), or of its norm.
        local_mlp: Whether the MLP has a convolution between its layers.
    """

    # Final, so that TorchScript sees but the MLP that there is.
    mlp_is_local: Final[bool]

    def __init__(
        self,
        attn: nn.Module,
        dim: int,
        *,
        mlp_ratio: float = 4.0,
        proj_drop: float = 0.0,
        drop_path: float = 0.0,
        norm_eps: float = 1e-5,
        context_before_norm: bool = False,
        local_mlp: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.context_before_norm = context_before_norm
        self.norm1 = nn.LayerNorm(dim, eps=norm_eps, device=device, dtype=dtype)
        self.attn = attn
        self.drop_path1 = DropPath(drop_path) if drop_path > 0 else nn.Identity()
        self.norm2 = nn.LayerNorm(dim, eps=norm_eps, device=device, dtype=dtype)
        self.hidden_dim = int(dim * mlp_ratio)
        if self.hidden_dim < 1:
            raise ValueError(f"mlp_ratio is {mlp_ratio}, which leaves no hidden channels of {dim}: choose a larger one")
        self.mlp_is_local = local_mlp
        mlp = LocalMlp if local_mlp else Mlp
        self.mlp = mlp(dim, self.hidden_dim, drop=proj_drop, device=device, dtype=dtype)
        self.drop_path2 = DropPath(drop_path) if drop_path > 0 else nn.Identity()
        # Set by optimize_for_inference. A flag, because compiled methods as attributes would be shared with copies.
        self.compiles_branches = False

    def forward(self, x: Tensor, size: tuple[int, int], prefix_only: bool = False) -> Tensor:
        """Tokens (batch, prefix + H·W, dim) to the same, for a map of size (H, W); or to the prefix tokens alone."""
        if prefix_only:
            prefix = x.shape[1] - size[0] * size[1]
            return self.add_mlp(x[:, :prefix] + self.run_attention(x, size, True), (0, 0))
        if not torch.jit.is_scripting() and self.works_in_pieces(x):
            return self.forward_in_pieces(x, size)
        return self.add_mlp(x + self.run_attention(x, size, False), size)

    def attention_branch(self, x: Tensor, size: tuple[int, int], prefix_only: bool) -> Tensor:
        """norm → attention."""
        normed = self.norm1(x)
        context = x if self.context_before_norm else normed
        return self.drop_path1(self.attn(normed, size, context, prefix_only))

    def mlp_branch(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        """norm → MLP, for tokens of which H·W are a map of size (H, W)."""
        if self.mlp_is_local:
            return self.drop_path2(self.mlp(self.norm2(x), size))
        return self.drop_path2(self.mlp(self.norm2(x)))

    def add_mlp(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        """norm → MLP → add."""
        return x + self.run_mlp(x, size)

    def run_attention(self, x: Tensor, size: tuple[int, int], prefix_only: bool) -> Tensor:
        """attention_branch, compiled if that is wanted."""
        if not torch.jit.is_scripting() and self.compiles(x):
            return compiled(type(self).attention_branch)(self, x, size, prefix_only)
        return self.attention_branch(x, size, prefix_only)

    def run_mlp(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        """mlp_branch, compiled if that is wanted."""
        if not torch.jit.is_scripting() and self.compiles(x):
            return compiled(type(self).mlp_branch)(self, x, size)
        return self.mlp_branch(x, size)

    @torch.jit.ignore
    def compiles(self, x: Tensor) -> bool:
        """Whether to call compiled branches: not while a graph is recorded."""
        return self.compiles_branches and not (
            issubclass(type(x), torch.fx.Proxy) or torch.compiler.is_compiling() or torch.jit.is_tracing()
        )

    @torch.jit.ignore
    def works_in_pieces(self, x: Tensor) -> bool:
        """Whether a CPU is to compute much, and nobody will ask for what is computed on the way."""
        return (
            # While fx traces, nothing is known of x.
            not issubclass(type(x), torch.fx.Proxy)
            and x.device.type == "cpu"
            and not (self.training or torch.compiler.is_compiling() or torch.jit.is_tracing())
            and x.shape[0] * x.shape[1] * self.hidden_dim > PIECE
            and not needs_gradient(x, *self.parameters())
            and not has_hooks(self)
        )

    @torch.jit.ignore
    def forward_in_pieces(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        """The same as forward: attention over a few images at a time, the MLP over a few tokens."""
        numbers = x.shape[0] * x.shape[1] * self.hidden_dim
        x = add_in_pieces(x, lambda images: self.run_attention(images, size, False), numbers)
        if self.mlp_is_local:
            return add_in_pieces(x, lambda images: self.run_mlp(images, size), numbers)
        # Tokens one by one: the size of the map does not matter.
        return add_in_pieces(x.flatten(0, 1), lambda tokens: self.run_mlp(tokens, size), numbers).view_as(x)


@cache
def compiled(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method, compiled for all objects of its class; importing the compiler takes seconds."""
    return torch.compile(method)


def add_in_pieces(x: Tensor, branch: Callable[[Tensor], Tensor], numbers: int) -> Tensor:
    """x + branch(x) in equal pieces along the first dimension, for a branch that makes so many numbers at once."""
    pieces = -(-numbers // PIECE)
    out = torch.empty_like(x)
    for piece, target in zip(x.chunk(pieces), out.chunk(pieces), strict=True):
        torch.add(piece, branch(piece), out=target)
    return out
