"""An adapter with which our attention takes the place of timm's in a block."""

from math import isqrt
from typing import Any

import torch
from timm.layers import register_notrace_module, resize_rel_pos_bias_table, to_2tuple
from torch import Tensor, nn

from .. import ops
from ..ops.local import add_convolution
from ..ops.windows import merge_heads
from ._chunks import records_graph
from .base_attention import BaseAttention, HeadGroup
from .layouts import WholeMap
from .softmax_attention import SoftmaxAttention


class PatchGrid:
    """Tells adapters the size of the map that the patch embedding of their model makes.

    A patch embedding that takes images of any size gets a forward pre-hook, which records the size of the map. Sizes
    are remembered by their number of tokens, for gradient checkpointing, which runs blocks again later. Copies of a
    model have grids of their own, without recorded sizes.

    Args:
        patch_embed: The patch embedding: one of timm's, a convolution, or a module with `grid_size` or `patch_size`.
    """

    def __init__(self, patch_embed: nn.Module) -> None:
        self.patch_embed: Any = patch_embed
        self.last: tuple[int, int] | None = None
        self.sizes: dict[int, tuple[int, int]] = {}
        is_fixed = getattr(patch_embed, "strict_img_size", False) and getattr(patch_embed, "grid_size", None)
        if not is_fixed:
            patch_embed.register_forward_pre_hook(self.record)

    def record(self, patch_embed: Any, args: tuple[Any, ...]) -> None:
        """Record the size of the map of some images: a forward pre-hook of the patch embedding."""
        images = args[0]
        if isinstance(images, torch.fx.Proxy):
            raise ValueError(
                "fx cannot trace attention in a model for images of any size, whose map it would not know: create the "
                "model with a fixed img_size (dynamic_img_size=False), or use torch.export"
            )
        height, width = images.shape[-2:]
        patch_size = (
            patch_embed.stride if isinstance(patch_embed, nn.Conv2d) else getattr(patch_embed, "patch_size", None)
        )
        if hasattr(patch_embed, "dynamic_feat_size"):
            height, width = patch_embed.dynamic_feat_size((height, width))
        elif patch_size is not None:
            height, width = height // to_2tuple(patch_size)[0], width // to_2tuple(patch_size)[1]
        else:
            return
        self.last = (height, width)
        if not records_graph(images):
            self.sizes[height * width] = self.last

    def feat_size(self, tokens: int) -> tuple[int, int]:
        """Return (H, W) of the map with this number of tokens."""
        if self.last is not None and self.last[0] * self.last[1] == tokens:
            return self.last
        grid = getattr(self.patch_embed, "grid_size", None)
        if grid is not None and grid[0] * grid[1] == tokens:
            return grid[0], grid[1]
        if not torch.compiler.is_compiling() and tokens in self.sizes:
            return self.sizes[tokens]
        known = self.last or grid
        if known is None:
            raise ValueError(
                f"the size of the map is unknown, since {type(self.patch_embed).__name__} has neither grid_size nor "
                "patch_size: set the feat_size of the AttentionAdapters to (H, W)"
            )
        raise ValueError(
            f"attention got {tokens} tokens beyond the prefix tokens, but the patch embedding makes a map of "
            f"{known[0]}×{known[1]}: attention needs all tokens of the map, none dropped or merged"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {"patch_embed": self.patch_embed, "last": None, "sizes": {}}


@register_notrace_module
class AttentionAdapter(nn.Module):
    """Our attention with the arguments of timm's: `block.attn = AttentionAdapter(InLineAttention(192, 3, …))`.

    It takes the place of timm's `Attention`, called as `attn(x, attn_mask=None, is_causal=False)`, and of Swin's
    `WindowAttention`, called on windows as `attn(x, mask=None)`.

    Args:
        attention: The attention, over the whole map. Its `num_prefix_tokens` are the tokens before the map (class,
            distillation and register tokens); None = none, unless feat_size is a pair.
        feat_size: The size of the map: (H, W), of Swin the size of a window; or a PatchGrid, for models whose images
            are not square or have several sizes; by default, the map is a square.
    """

    def __init__(self, attention: BaseAttention, feat_size: tuple[int, int] | PatchGrid | None = None) -> None:
        super().__init__()
        if not isinstance(attention, BaseAttention):
            raise ValueError(
                f"AttentionAdapter adapts attention of inlinevit.layers, not {type(attention).__name__}: give it "
                "InLineAttention(dim, num_heads), for example"
            )
        if not isinstance(attention.layout, WholeMap):
            raise ValueError(
                f"the attention has the layout {type(attention.layout).__name__}, but a block that needs an adapter "
                "partitions windows itself: leave layout out"
            )
        self.attention = attention
        self.feat_size: tuple[int, int] | PatchGrid | None = feat_size
        if feat_size is not None and not isinstance(feat_size, PatchGrid):
            height, width = feat_size
            self.feat_size = (int(height), int(width))

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, mask: Tensor | None = None
    ) -> Tensor:
        """Attend to the tokens of the map, or of each window.

        Args:
            x: Tokens (batch, prefix + H·W, dim); of Swin (batch · windows, H·W, dim).
            attn_mask: As in scaled_dot_product_attention, boolean (True = attend) or added to the scores. Attention
                other than softmax takes a boolean mask of keys (batch, 1, 1, tokens) only, and computes the N×N
                weights then.
            is_causal: Attend to earlier tokens only; softmax only.
            mask: Swin's mask of shifted windows (windows, tokens, tokens), added to the scores. Attention other than
                softmax attends across the border of the map in shifted windows, as in the published InLine-Swin.

        Returns:
            As x.
        """
        feat_size = self.map_size(x)
        if isinstance(self.attention, SoftmaxAttention):
            bias = self.score_bias(x, attn_mask, is_causal, mask)
            return self.attention(x, feat_size) if bias is None else self.attend_biased(x, feat_size, bias)
        keys = self.key_mask(x, attn_mask, is_causal)
        return self.attention(x, feat_size) if keys is None else self.attend_masked(x, feat_size, keys)

    def map_size(self, x: Tensor) -> tuple[int, int]:
        """Return (H, W) of the map of tokens (batch, prefix + H·W, dim)."""
        if isinstance(self.feat_size, tuple):
            return self.feat_size
        tokens = x.shape[1] - (self.attention.num_prefix_tokens or 0)
        if self.feat_size is not None:
            return self.feat_size.feat_size(tokens)
        side = isqrt(max(tokens, 0))
        if side * side != tokens:
            raise ValueError(
                f"{x.shape[1]} tokens, {x.shape[1] - tokens} of them prefix tokens, are no square map: give the "
                "attention its num_prefix_tokens, and the AttentionAdapter a feat_size=(H, W) or "
                "feat_size=PatchGrid(model.patch_embed)"
            )
        return side, side

    def score_bias(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, mask: Tensor | None = None
    ) -> Tensor | None:
        """Return what the masks of forward add to the scores, broadcastable to (batch, heads, tokens, tokens)."""
        if mask is None and self.is_window_mask(attn_mask):
            attn_mask, mask = None, attn_mask
        if is_causal:
            attn_mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=x.dtype).masked_fill(~attn_mask, float("-inf"))
        if mask is None:
            return attn_mask
        if x.shape[0] % mask.shape[0] != 0:
            raise ValueError(
                f"the mask is for {mask.shape[0]} windows per image, but {x.shape[0]} windows are no multiple of it: "
                "give a mask of shape (windows, tokens, tokens)"
            )
        mask = mask.repeat(x.shape[0] // mask.shape[0], 1, 1).unsqueeze(1)
        return mask if attn_mask is None else mask + attn_mask

    def key_mask(self, x: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor | None:
        """Return which keys are visible, (batch, 1, 1, tokens); refuse masks that softmax attention alone can have."""
        if self.is_window_mask(attn_mask):
            return None
        name = type(self.attention).__name__
        remedy = "keep softmax attention in these blocks (replace_attention(…, blocks=…))"
        if is_causal:
            raise ValueError(f"{name} cannot be causal, since all queries share its sums over keys: {remedy}")
        if attn_mask is None:
            return None
        if type(self.attention).attention_weights is BaseAttention.attention_weights:
            raise ValueError(f"{name} has no N×N weights, with which keys are masked: {remedy}")
        is_key_mask = attn_mask.dim() == 4 and attn_mask.shape[1:3] == (1, 1) and attn_mask.dtype == torch.bool
        if not is_key_mask:
            raise ValueError(
                f"{name} cannot mask single queries, since all queries share its sums over keys, but attn_mask is "
                f"{attn_mask.dtype} of shape {tuple(attn_mask.shape)}: give a boolean mask of keys, (batch, 1, 1, "
                f"{x.shape[1]}), or {remedy}"
            )
        return attn_mask.expand(x.shape[0], 1, 1, x.shape[1])

    def is_window_mask(self, attn_mask: Tensor | None) -> bool:
        """Return whether a mask is that of Swin's shifted windows, given as the second argument."""
        return attn_mask is not None and attn_mask.dim() == 3 and isinstance(self.feat_size, tuple)

    def attend_biased(self, x: Tensor, feat_size: tuple[int, int], bias: Tensor) -> Tensor:
        """Compute softmax attention with a further bias of the scores."""
        attention = self.attention
        assert isinstance(attention, SoftmaxAttention)
        ((q, k, v, windows),) = attention.partition(x, feat_size)
        own = attention.score_bias(k, windows)
        bias = (bias if own is None else own + bias).to(q.dtype)
        out = ops.softmax_attention(attention.map_queries(q), k, v, bias=bias)
        return self.finish(out, HeadGroup(q, k, v, windows), x, x)

    def attend_masked(self, x: Tensor, feat_size: tuple[int, int], keys: Tensor) -> Tensor:
        """Compute attention as if some tokens did not exist, by the explicit weights.

        Args:
            x: Tokens (batch, prefix + H·W, dim).
            feat_size: (H, W) of the map.
            keys: Which tokens are visible, (batch, 1, 1, tokens).
        """
        ((q, k, v, windows),) = self.attention.partition(x, feat_size)
        v = v.masked_fill(~keys.transpose(2, 3), 0.0)
        out = ops.apply_weights(self.attention.attention_weights(q, k, v, windows, keys), v)
        # x̄ of the local residual is the mean of the visible tokens.
        visible = keys.view(x.shape[0], -1, 1)
        mean = x.masked_fill(~visible, 0.0).sum(dim=1, keepdim=True) / visible.sum(dim=1, keepdim=True).clamp(min=1)
        return self.finish(out, HeadGroup(q, k, v, windows), mean.to(x.dtype).expand_as(x), x)

    def finish(self, out: Tensor, group: HeadGroup, kernel_tokens: Tensor, x: Tensor) -> Tensor:
        """Add the convolution of the values to (batch, heads, tokens, head_dim), join the heads, gate, and project."""
        attention, windows = self.attention, group.windows
        kernels, static = attention.local_kernels(kernel_tokens, windows), attention.static_kernels(windows)
        out = add_convolution(merge_heads(out), group.v, kernels, static, windows)
        return attention.project_out(out, x)

    def set_window_size(self, window_size: tuple[int, int]) -> None:
        """Change the size of Swin's windows; called by timm's set_input_size."""
        self.feat_size = height, width = to_2tuple(window_size)
        attention, side = self.attention, max(height, width)
        table = getattr(attention, "relative_position_bias_table", None)
        if isinstance(attention, SoftmaxAttention) and table is not None and side != attention.relative_window:
            shape = ((2 * side - 1) ** 2, attention.num_heads)
            with torch.no_grad():
                table = resize_rel_pos_bias_table(table, new_window_size=(side, side), new_bias_shape=shape)
            attention.relative_window = side
            attention.relative_position_bias_table = nn.Parameter(table)

    @property
    def qkv(self) -> nn.Linear:
        """The projection to queries, keys and values."""
        return self.attention.qkv

    @property
    def proj(self) -> nn.Linear:
        """The output projection."""
        return self.attention.proj

    @property
    def num_heads(self) -> int:
        """Number of heads."""
        return self.attention.num_heads

    def extra_repr(self) -> str:
        """See nn.Module.extra_repr."""
        size: Any = "from patch_embed" if isinstance(self.feat_size, PatchGrid) else self.feat_size
        return f"feat_size={size}, num_prefix_tokens={self.attention.num_prefix_tokens}"

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Also load weights of the attention that was replaced: `qkv.weight` becomes `attention.qkv.weight`."""
        for name in self.attention.state_dict():
            if prefix + name in state_dict:
                state_dict[f"{prefix}attention.{name}"] = state_dict.pop(prefix + name)
        super()._load_from_state_dict(state_dict, prefix, *args)
