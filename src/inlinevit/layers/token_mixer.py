"""What all attention modules share: the projections, the way through the windows, LePE."""

from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops._common import needs_gradient, promote
from ..ops.local import convolve_maps
from .layouts import (
    CrossStripes,
    SquareWindows,
    WholeMap,
    Windows,
    covers_map,
    take_share,
    window_mask,
    window_partition,
    window_reverse,
)


class Share(NamedTuple):
    """What one share of the heads computes with.

    Attributes:
        q: Queries (batch · windows, heads, queries, width).
        k: Keys (batch · windows, heads, tokens, width).
        v: Values, as k. Padding is zero.
        windows: How the map was cut.
        kernels: A depthwise convolution of the values that is added, (batch · windows, channels, side · side); or None.
        bias: What is added to each channel along with it, (channels); or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    windows: Windows
    kernels: Tensor | None
    bias: Tensor | None


class TokenMixer(nn.Module):
    """Multi-head attention over tokens on a grid: project, cut into windows, mix, merge, project.

    A kind of attention is a subclass that says how the tokens of a window are mixed (`mix`, and written out `rows`),
    and by which kernels their neighbourhood is added, if any (`local_kernels`, `fixed_kernels`).

    Args:
        dim: Channels.
        num_heads: Heads; they divide the channels.
        layout: How the map is cut into windows; the whole map by default.
        qkv_bias: Whether the projection to q, k and v has a bias.
        lepe: Add CSWin's locally enhanced positional encoding, a learned depthwise 3×3 convolution of the values.
        proj_drop: Dropout after the output projection.
        num_prefix_tokens: Tokens before the map (class tokens). By default as many as there are beyond H·W.
    """

    # Options of a kind of its own that models pass on (their `attn_kwargs`).
    own_options: ClassVar[tuple[str, ...]] = ()
    # Whether the MLPs of its blocks have a convolution.
    wants_local_mlp: ClassVar[bool] = False

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        layout: WholeMap | SquareWindows | CrossStripes | None = None,
        qkv_bias: bool = True,
        lepe: bool = False,
        proj_drop: float = 0.0,
        num_prefix_tokens: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if dim < 1:
            raise ValueError(f"dim is {dim}: it should be at least 1")
        if num_heads < 1 or dim % num_heads != 0:
            raise ValueError(f"dim must be divisible by num_heads, but dim is {dim} and num_heads is {num_heads}")
        self.dim = dim
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        # -1 stands for "as many as there are".
        self.num_prefix_tokens = -1 if num_prefix_tokens is None else num_prefix_tokens
        self.layout = WholeMap() if layout is None else layout
        if num_heads % self.layout.shares != 0:
            raise ValueError(f"{type(layout).__name__} divides the heads in two: num_heads={num_heads} must be even")
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias, device=device, dtype=dtype)
        self.lepe = nn.Conv2d(dim, dim, 3, padding=1, groups=dim, device=device, dtype=dtype) if lepe else None
        self.proj = nn.Linear(dim, dim, device=device, dtype=dtype)
        self.proj_drop = nn.Dropout(proj_drop)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, windows: Windows) -> Tensor:
        """How this kind of attention mixes the tokens of each window.

        Args:
            q: Queries (batch · windows, heads, queries, width): the prefix and the tokens of a window, or the prefix.
            k: Keys (batch · windows, heads, prefix + tokens of a window, width).
            v: Values, as k. Padding is zero.
            windows: How the map was cut; the heads are those of its share.

        Returns:
            As q.
        """
        raise NotImplementedError

    @torch.jit.unused
    def rows(
        self, q: Tensor, k: Tensor, v: Tensor, windows: Windows, seen: Tensor | None = None, first: int = 0
    ) -> Tensor:
        """What `mix` does to the values, written out: mix(q, k, v, windows) is rows(q, k, v, windows) @ v.

        Args:
            q: Some of the queries, in order.
            k: See mix.
            v: See mix.
            windows: See mix.
            seen: Which tokens each query may see, broadcastable to (batch · windows, heads, queries, tokens), True =
                seen; all by default. A row is as if the others were not there.
            first: The first query's place among the tokens.

        Returns:
            (batch · windows, heads, queries, tokens).
        """
        raise NotImplementedError

    def local_kernels(self, context: Tensor, windows: Windows) -> Tensor | None:
        """Kernels of a depthwise 3×3 convolution of the values that is added to the tokens of the map.

        Args:
            context: Tokens whose mean a kind may use, not cut yet (batch, prefix + H·W, channels of the share).
            windows: How the map was cut.

        Returns:
            (batch · windows, channels of the share, 9), or None.
        """
        return None

    def fixed_kernels(self, windows: Windows) -> tuple[Tensor, Tensor] | None:
        """A learned depthwise convolution of the values that is added to the tokens of the map: LePE, if it is wanted.

        Returns:
            Kernels (channels of the share, 1, side, side) and bias (channels of the share), or None.
        """
        lepe = self.lepe
        return None if lepe is None else (take_share(lepe.weight, windows), take_share(lepe.bias, windows))

    def forward(
        self, x: Tensor, size: tuple[int, int], context: Tensor | None = None, prefix_only: bool = False
    ) -> Tensor:
        """Mix the tokens.

        Args:
            x: Tokens (batch, prefix + H·W, dim), the map row by row. Without num_prefix_tokens, all tokens beyond H·W
                are taken for prefix tokens.
            size: (H, W) of the map.
            context: Tokens whose mean stands for x̄, shaped as x; x itself by default.
            prefix_only: Whether the answer for the prefix tokens is all that is wanted.

        Returns:
            (batch, prefix + H·W, dim), or (batch, prefix, dim).
        """
        self.check_tokens(x, size)
        if context is not None and context.shape != x.shape:
            raise ValueError(f"context must be shaped as the tokens, {x.shape}, but it is {context.shape}")
        if prefix_only:
            return self.proj_drop(self.proj(self.attend_prefix(x, size)))
        return self.proj_drop(self.proj(self.attend(x, size, x if context is None else context)))

    def attend(self, x: Tensor, size: tuple[int, int], context: Tensor) -> Tensor:
        """Everything but the output projection; shapes as in forward."""
        return self.attend_windows(x, size, context)

    def attend_prefix(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        """The attention of the prefix tokens to all tokens; they have no neighbours."""
        batch, tokens, _ = x.shape
        prefix = tokens - size[0] * size[1]
        q, k, v = self.qkv(x).view(batch, tokens, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        out = self.mix(q[:, :, :prefix], k, v, self.windows_with_prefix(size, prefix)[0])
        return out.transpose(1, 2).reshape(batch, prefix, self.dim)

    def windows_with_prefix(self, size: tuple[int, int], prefix: int) -> list[Windows]:
        """The windows of each share of the heads; prefix tokens need one that covers the map."""
        layout = self.layout(size)
        for windows in layout:
            if prefix > 0 and not covers_map(windows):
                raise ValueError(
                    f"windows of {windows.height}×{windows.width} do not cover the map of {size[0]}×{size[1]}, "
                    "and prefix tokens belong to no window: use the whole map, or no prefix tokens"
                )
        return layout

    def attend_windows(self, x: Tensor, size: tuple[int, int], context: Tensor) -> Tensor:
        """Attention within the windows of the layout."""
        batch, tokens, _ = x.shape
        qkv = self.qkv(x).view(batch, tokens, 3, self.num_heads, self.head_dim)
        shares: list[Tensor] = []
        for windows in self.windows_with_prefix(size, tokens - size[0] * size[1]):
            shares.append(self.attend_share(qkv, context, windows))
        return shares[0] if len(shares) == 1 else torch.cat(shares, dim=-1)

    def attend_share(self, qkv: Tensor, context: Tensor, windows: Windows) -> Tensor:
        """One share of the heads: qkv (batch, tokens, 3, all heads, width) to (batch, tokens, its channels)."""
        heads = self.num_heads // windows.shares
        channels = heads * self.head_dim
        qkv = self.cut_share(qkv, windows)
        # (batch · windows, tokens, 3 · channels) -> 3 × (batch · windows, heads, tokens, width)
        q, k, v = qkv.view(-1, qkv.shape[1], 3, heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        out = self.mix(q, k, v, windows).transpose(1, 2).reshape(-1, q.shape[2], channels)
        context = context[:, :, windows.share * channels : (windows.share + 1) * channels]
        out = self.add_neighbours(out, qkv[:, :, 2 * channels :], self.local_kernels(context, windows), windows)
        return window_reverse(out, windows)

    def cut_share(self, qkv: Tensor, windows: Windows) -> Tensor:
        """The heads of one share: (batch, tokens, 3, all heads, width) to (batch · windows, tokens, 3 · channels)."""
        heads = self.num_heads // windows.shares
        qkv = qkv[:, :, :, windows.share * heads : (windows.share + 1) * heads]
        return window_partition(qkv.flatten(2), windows)

    @torch.jit.unused
    def shares(self, x: Tensor, size: tuple[int, int], context: Tensor) -> list[Share]:
        """What each share of the heads computes with, for whoever wants to look inside; arguments as in forward."""
        batch, tokens, _ = x.shape
        qkv = self.qkv(x).view(batch, tokens, 3, self.num_heads, self.head_dim)
        found = []
        for windows in self.windows_with_prefix(size, tokens - size[0] * size[1]):
            cut = self.cut_share(qkv, windows)
            heads = self.num_heads // windows.shares
            q, k, v = cut.view(*cut.shape[:2], 3, heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
            channels = self.dim // windows.shares
            context_share = context[:, :, windows.share * channels : (windows.share + 1) * channels]
            kernels, bias = self.local_kernels(context_share, windows), None
            if (fixed := self.fixed_kernels(windows)) is not None:
                weight, bias = fixed
                weight = weight.flatten(1).expand(q.shape[0], -1, -1)
                kernels = weight if kernels is None else kernels + weight
            found.append(Share(q, k, v, windows, kernels, bias))
        return found

    def add_neighbours(self, out: Tensor, v: Tensor, kernels: Tensor | None, windows: Windows) -> Tensor:
        """Add the convolutions of the values, of out and v (batch · windows, prefix + tokens, channels), to the map."""
        fixed = self.fixed_kernels(windows)
        if kernels is None and fixed is None:
            return out
        prefix = v.shape[1] - windows.height * windows.width
        maps = v[:, prefix:].unflatten(1, (windows.height, windows.width))
        if fixed is None:
            assert kernels is not None
            added = convolve_maps(promote(maps), promote(kernels))
        else:
            weight, bias = fixed
            if kernels is None:
                padding, groups = weight.shape[2] // 2, weight.shape[0]
                added = F.conv2d(maps.permute(0, 3, 1, 2), weight, bias, padding=padding, groups=groups)
                added = added.permute(0, 2, 3, 1)
            else:
                # The sum of two convolutions of the same map is one, by the sum of their kernels.
                added = convolve_maps(promote(maps), promote(kernels) + promote(weight.flatten(1)), promote(bias))
        added = added.flatten(1, 2).to(out.dtype)
        if prefix == 0:
            return out + added
        if torch.jit.is_scripting():
            return out + F.pad(added, (0, 0, prefix, 0))
        if torch.compiler.is_compiling() or needs_gradient(out, added):
            return out + F.pad(added, (0, 0, prefix, 0))
        # Nobody else has seen it yet.
        out[:, prefix:].add_(added)
        return out

    def check_tokens(self, x: Tensor, size: tuple[int, int]) -> None:
        """Refuse tokens that do not fit this module or the map."""
        if x.dim() != 3 or x.shape[2] != self.dim:
            raise ValueError(f"expected tokens of shape (batch, tokens, {self.dim}), but got {x.shape}")
        if not x.is_floating_point():
            raise ValueError(f"expected tokens in floating point, but got {x.dtype}")
        prefix = x.shape[1] - size[0] * size[1]
        if prefix < 0 or (self.num_prefix_tokens >= 0 and prefix != self.num_prefix_tokens):
            expected = "any number of" if self.num_prefix_tokens < 0 else str(self.num_prefix_tokens)
            raise ValueError(
                f"{x.shape[1]} tokens do not match size={size}: expected {expected} prefix tokens, "
                f"then {size[0] * size[1]} tokens of the map"
            )


def window_means(x: Tensor, windows: Windows) -> Tensor:
    """The mean of each window's real tokens: (batch, tokens, channels) to (batch · windows, channels)."""
    if covers_map(windows):
        return x.mean(dim=1)
    # Padding is zero, so a window's mean over all places is too small by the share of real ones. No sum is formed: it
    # might leave the range of float16.
    means = window_partition(x, windows).mean(dim=1)
    mask = window_mask(windows, x.device)
    if mask is None:
        return means
    share = mask.to(x.dtype).mean(dim=1)
    return (means.view(-1, mask.shape[0], x.shape[2]) / share[:, None]).view(-1, x.shape[2])


def padding_mask(q: Tensor, windows: Windows) -> Tensor | None:
    """Which tokens of q (batch · windows, heads, tokens, width) are real, (batch · windows, tokens); None if all."""
    mask = window_mask(windows, q.device)
    return None if mask is None else mask.repeat(q.shape[0] // mask.shape[0], 1)


def has_hooks(module: nn.Module) -> bool:
    """Whether someone has put hooks on the module or on one within: then all of it must be called, and as a whole."""
    return any(
        part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks
        for part in module.modules()
    )
