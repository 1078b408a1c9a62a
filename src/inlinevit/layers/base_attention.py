"""The base class of all attention modules."""

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ..ops.local import add_convolution
from ..ops.rope import rotate_qkv, window_rope_tables
from ..ops.windows import Windows, covers_map, merge_heads, partition_heads, take_head_group, window_reverse
from .layouts import CrossStripes, SquareWindows, WholeMap
from .surroundings import Surroundings, check_lepe


class HeadGroup(NamedTuple):
    """The input of attention for one group of heads.

    Attributes:
        q: Queries (batch · windows, heads, queries, head_dim).
        k: Keys (batch · windows, heads, tokens, head_dim).
        v: Values, as k. Padding is zero.
        windows: How the map is split into windows.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    windows: Windows


class BaseAttention(nn.Module):
    """Multi-head attention over tokens on a grid: project, partition, attend, reverse, project.

    A kind of attention is a subclass with `attend` and, if there is one, its explicit form `attention_weights`. It may
    also add a depthwise convolution of the values (`local_kernels`, `static_kernels`). docs/attentions.md describes how
    to write one.

    Args:
        dim: Channels.
        num_heads: Heads; they divide the channels.
        layout: How the map is split into windows; the whole map by default.
        qkv_bias: Whether the projection to q, k and v has a bias.
        lepe: Side of a learned depthwise convolution of the values that is added to the output (CSWin's locally
            enhanced positional encoding); 0 = none, True = 3. None = as in `surroundings` of the class.
        gate: Multiply the output by a linear map of the tokens before the output projection; None as above.
        rope: Rotate queries and keys by their places on the map; None as above.
        proj_drop: Dropout after the output projection.
        num_prefix_tokens: Tokens before the map (class tokens). By default, all tokens beyond H·W are prefix tokens.
    """

    # Names of the constructor arguments that models accept in `attn_kwargs`.
    attn_kwargs_names: ClassVar[tuple[str, ...]] = ()
    # Whether the MLPs of its blocks have a convolution.
    wants_dwconv_mlp: ClassVar[bool] = False
    # Whether it has learned positions, and the constructor takes `grid`, (H, W) of the map.
    learns_grid: ClassVar[bool] = False
    # Names of parameters with several dimensions that have no weight decay.
    no_weight_decay_names: ClassVar[tuple[str, ...]] = ()
    # Whether it takes windows, prefix tokens, and `lepe`; what it does not take is refused.
    supports_windows: ClassVar[bool] = True
    supports_prefix_tokens: ClassVar[bool] = True
    supports_lepe: ClassVar[bool] = True
    # Whether it takes `gate` and `rope`: False for a class with a forward of its own, unless it says otherwise.
    supports_gate: ClassVar[bool] = True
    supports_rope: ClassVar[bool] = True
    # What surrounds it by default.
    surroundings: ClassVar[Surroundings] = Surroundings()
    # Matrices of attention weights per head, each for a part of the values of the head.
    matrices_per_head: ClassVar[int] = 1
    # Whether `attend` and `attention_weights` rotate queries and keys themselves (`rope_tables`), after a feature map.
    # Otherwise they get rotated ones.
    rotates_in_attend: ClassVar[bool] = False
    # Whether `attend` gives the same rows for the first queries alone as for all of them: optimize_for_inference then
    # computes the class token alone in the last block.
    row_wise: ClassVar[bool] = False

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        layout: WholeMap | SquareWindows | CrossStripes | None = None,
        qkv_bias: bool = True,
        lepe: int | bool | None = None,
        gate: bool | None = None,
        rope: bool | None = None,
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
        self.num_prefix_tokens = num_prefix_tokens
        self.layout = WholeMap() if layout is None else layout
        if num_heads % self.layout.num_head_groups != 0:
            raise ValueError(f"{type(layout).__name__} divides the heads in two: num_heads={num_heads} must be even")
        kind = type(self).__name__
        if not self.supports_windows and not isinstance(self.layout, WholeMap):
            raise ValueError(f"{kind} attends to the whole map: leave out windows (window_size)")
        if not self.supports_prefix_tokens and num_prefix_tokens:
            raise ValueError(f"{kind} has no place for prefix tokens: use class_token=False and global_pool='avg'")
        default = self.surroundings
        gate, self.rope = (default.gate if gate is None else gate), (default.rope if rope is None else rope)
        side = default.lepe if lepe is None else 3 if lepe is True else int(lepe)
        check_lepe("lepe", side)
        if not self.supports_lepe and side:
            raise ValueError(
                f"{kind} does not add lepe, which models of the CSWin family need: use another family, and leave lepe "
                "out of attn_kwargs"
            )
        if not self.supports_gate and gate:
            raise ValueError(f"{kind} has no gate: leave it out of attn_kwargs, or use another attention")
        if not self.supports_rope and self.rope:
            raise ValueError(f"{kind} does not rotate queries and keys: leave rope out of attn_kwargs")
        if self.rope and self.head_dim % 4 != 0:
            raise ValueError(
                f"rope needs heads of a multiple of 4 channels, but {num_heads} heads of {dim} channels have "
                f"{self.head_dim}: use another num_heads, or leave rope out"
            )
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias, device=device, dtype=dtype)
        self.lepe = (
            nn.Conv2d(dim, dim, side, padding=side // 2, groups=dim, device=device, dtype=dtype) if side else None
        )
        self.gate = nn.Linear(dim, dim, device=device, dtype=dtype) if gate else None
        self.proj = nn.Linear(dim, dim, device=device, dtype=dtype)
        self.proj_drop = nn.Dropout(proj_drop)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "forward" in vars(cls):
            # It may not call what computes them: without a declaration they are refused, not ignored.
            for flag in ("supports_gate", "supports_rope"):
                if flag not in vars(cls):
                    setattr(cls, flag, False)

    def forward(self, x: Tensor, feat_size: tuple[int, int], kernel_tokens: Tensor | None = None) -> Tensor:
        """Attend to the tokens of each window.

        Args:
            x: Tokens (batch, prefix + H·W, dim), the map row by row.
            feat_size: (H, W) of the map.
            kernel_tokens: Tokens whose mean x̄ makes the kernels of the local residual, shaped as x; x by default.

        Returns:
            (batch, prefix + H·W, dim).
        """
        self.check_tokens(x, feat_size, kernel_tokens)
        kernel_tokens = x if kernel_tokens is None else kernel_tokens
        out = self.attend_fused(x, feat_size, kernel_tokens)
        if out is None:
            outputs = []
            for q, k, v, windows in self.partition(x, feat_size):
                group = merge_heads(self.attend(q, k, v, windows))
                dynamic, static = self.local_kernels(kernel_tokens, windows), self.static_kernels(windows)
                group = add_convolution(group, v, dynamic, static, windows)
                outputs.append(window_reverse(group, windows))
            out = join_head_groups(outputs)
        return self.project_out(out, x)

    def project_out(self, out: Tensor, x: Tensor) -> Tensor:
        """Return the gated output after the output projection: the end of forward.

        Args:
            out: The result of attention, with its convolutions, (batch, tokens, dim).
            x: The tokens that forward was given, as out.
        """
        return self.proj_drop(self.proj(self.apply_gate(out, x)))

    def apply_gate(self, out: Tensor, x: Tensor) -> Tensor:
        """Return the output of attention times the gate of the same tokens, if there is one; both (…, dim)."""
        return out if self.gate is None else out * self.gate(x)

    def attend_fused(self, x: Tensor, feat_size: tuple[int, int], kernel_tokens: Tensor) -> Tensor | None:
        """Compute at once what partition, attend and the convolutions give, where that is faster.

        Args:
            x: See forward.
            feat_size: See forward.
            kernel_tokens: See forward.

        Returns:
            (batch, prefix + H·W, dim), before the output projection; or None.
        """
        return None

    def partition(self, x: Tensor, feat_size: tuple[int, int]) -> list[HeadGroup]:
        """Project tokens (batch, prefix + H·W, dim), and split them into the windows of each head group."""
        qkv = self.project_qkv(x, feat_size)
        return [
            HeadGroup(*partition_heads(qkv, windows, self.num_heads), windows) for windows in self.windows(x, feat_size)
        ]

    def project_qkv(self, x: Tensor, feat_size: tuple[int, int], first_row: int = 0) -> Tensor:
        """Project tokens to q, k and v, and rotate q and k by their places, unless `attend` does.

        Args:
            x: Tokens (batch, prefix + H·W, dim).
            feat_size: (H, W) of the map.
            first_row: Index of its first row, where it is a part of a larger map.

        Returns:
            (batch, prefix + H·W, 3 · dim).
        """
        qkv = self.qkv(x)
        if not self.rope or self.rotates_in_attend:
            return qkv
        return rotate_qkv(qkv, feat_size, self.num_heads, first_row)

    def rope_tables(self, k: Tensor, windows: Windows) -> tuple[Tensor, Tensor] | None:
        """Return the tables with which `attend` rotates queries and keys itself (ops.rope.rotate); None without rope.

        Args:
            k: See attend.
            windows: See attend.
        """
        return window_rope_tables(k, windows) if self.rope and self.rotates_in_attend else None

    def windows(self, x: Tensor, feat_size: tuple[int, int]) -> list[Windows]:
        """Return the windows of each head group; with prefix tokens, there must be one that covers the map."""
        found = self.layout(feat_size)
        if x.shape[1] > feat_size[0] * feat_size[1]:
            for windows in found:
                if not covers_map(windows):
                    raise ValueError(
                        f"windows of {windows.window_height}×{windows.window_width} do not cover the map of "
                        f"{feat_size[0]}×{feat_size[1]}, and prefix tokens are in no window: use the whole map, or no "
                        "prefix tokens"
                    )
        return found

    def attend(self, q: Tensor, k: Tensor, v: Tensor, windows: Windows) -> Tensor:
        """Compute the attention of one head group, within each window.

        Args:
            q: Queries (batch · windows, heads, queries, head_dim), of all tokens or of the prefix tokens.
            k: Keys (batch · windows, heads, prefix + tokens of a window, head_dim).
            v: Values, as k. Padding is zero.
            windows: How the map was split.

        Returns:
            As q.
        """
        raise NotImplementedError

    def attention_weights(
        self, q: Tensor, k: Tensor, v: Tensor, windows: Windows, attn_mask: Tensor | None = None, first: int = 0
    ) -> Tensor:
        """Return the explicit weights: attend(q, k, v, windows) equals attention_weights(q, k, v, windows) @ v.

        With several matrices per head, ops.apply_weights multiplies them with v. The gate and the convolutions of the
        values are not part of the weights.

        Args:
            q: Consecutive queries.
            k: See attend.
            v: See attend.
            windows: See attend.
            attn_mask: Broadcastable to (batch · windows, heads, queries, tokens), True = the query may attend to the
                token; all by default. A row is computed as if the other tokens did not exist.
            first: Index of the first query among the tokens.

        Returns:
            (batch · windows, heads · matrices_per_head, queries, tokens).

        Raises:
            NotImplementedError: This attention has no such form.
        """
        raise NotImplementedError

    def local_kernels(self, kernel_tokens: Tensor, windows: Windows) -> Tensor | None:
        """Return the kernels of a dynamic 3×3 convolution of the values (InLine's local residual).

        Args:
            kernel_tokens: Tokens before the partition, (batch, prefix + H·W, dim).
            windows: How the map was split.

        Returns:
            (batch · windows, channels of the head group, 9), or None.
        """
        return None

    def static_kernels(self, windows: Windows) -> tuple[Tensor, Tensor] | None:
        """Return the weight and bias of a learned depthwise convolution of the values: LePE, if it is used.

        Returns:
            (channels of the head group, 1, side, side) and (channels of the head group,), or None.
        """
        if self.lepe is None:
            return None
        return take_head_group(self.lepe.weight, windows), take_head_group(self.lepe.bias, windows)

    def project_parameters(self) -> None:
        """Move parameters back to where they are defined, after a step of an optimizer; called without gradients."""

    def check_tokens(self, x: Tensor, feat_size: tuple[int, int], kernel_tokens: Tensor | None) -> None:
        """Raise ValueError for tokens that do not fit this module or the map."""
        if x.dim() != 3 or x.shape[2] != self.dim:
            raise ValueError(f"expected tokens of shape (batch, tokens, {self.dim}), but got {x.shape}")
        if not x.is_floating_point():
            raise ValueError(f"expected floating-point tokens, but got {x.dtype}")
        height, width = feat_size
        prefix = x.shape[1] - height * width
        if prefix < 0 or (self.num_prefix_tokens is not None and prefix != self.num_prefix_tokens):
            expected = "any number of" if self.num_prefix_tokens is None else str(self.num_prefix_tokens)
            raise ValueError(
                f"{x.shape[1]} tokens do not match feat_size={feat_size}: expected {expected} prefix tokens, "
                f"then {height * width} tokens of the map"
            )
        if prefix > 0 and not self.supports_prefix_tokens:
            raise ValueError(f"{type(self).__name__} has no place for prefix tokens, but got {prefix}: leave them out")
        if kernel_tokens is not None and kernel_tokens.shape != x.shape:
            raise ValueError(
                f"kernel_tokens must have the shape of the tokens, {x.shape}, but it is {kernel_tokens.shape}"
            )


def project_parameters(model: nn.Module) -> None:
    """Move the parameters of all attentions of a model back to where they are defined.

    To be called after each step of an optimizer, as the trainer of this package does. Processes with the same weights
    have the same afterwards, and a moving average of such weights is one, too.
    """
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, BaseAttention):
                module.project_parameters()


def join_head_groups(outputs: list[Tensor]) -> Tensor:
    """Concatenate the channels of the head groups, each (batch, tokens, channels of the group)."""
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
