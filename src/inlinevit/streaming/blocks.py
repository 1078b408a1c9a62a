"""Blocks over the rows of a map that is never in memory as a whole with its queries, keys and values.

A block is one or two passes over the map. In a pass, chunks of rows are replaced by new ones from top to bottom; if
attention needs a summary of the whole map, all rows are added to it before, as soon as they are known.
"""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import kernels
from ..layers import BaseAttention, SoftmaxAttention, SquareWindows
from ..layers._inference_block import InferenceBlock, pack_block
from ..layers.block import Block, DWConvMlp
from ..layers.inline_attention import InLineAttention
from ..ops.key_value_state import KeyValueState
from ..ops.local import add_convolution, convolve_values
from ..ops.windows import Windows, covers_map, merge_heads, window_mask, window_partition, window_reverse
from .states import STATES, AttentionState, make_state, merge_states

# Elements of the widest tensor that is computed at once, where tokens do not depend on each other.
CHUNK = 2**20
# Pairs of a query and a key beyond which softmax attention would take hours.
MOST_PAIRS = 2**36
# Copies of a chunk that exist at once: its tokens, their norm, values, convolution, attention, and the new tokens.
COPIES = 9
# Parts of the projection to queries, keys and values.
Q, K, V = range(3)


class Chunk(NamedTuple):
    """Rows of a map.

    Attributes:
        tokens: (rows, width, channels).
        above: The rows above, as they were before the pass, (up to `halo` rows, width, channels); fewer at the border.
        below: The rows below, as above.
        mask: Which tokens are real, of the rows above, these and those below, (rows, width); None = all.
        wrapped: How many of the last rows come from the top of the map.
    """

    tokens: Tensor
    above: Tensor
    below: Tensor
    mask: Tensor | None = None
    wrapped: int = 0

    def extended(self) -> Tensor:
        """Return the rows together with those above and below."""
        if len(self.above) == 0 and len(self.below) == 0:
            return self.tokens
        return torch.cat([self.above, self.tokens, self.below])

    def own_rows(self, extended: Tensor) -> Tensor:
        """Return the part of extended rows that are rows of this chunk."""
        return extended[len(self.above) : len(self.above) + len(self.tokens)]


class Pass(ABC):
    """A pass over the map of a stage, by chunks of rows."""

    # Rows above and below a chunk that its new rows depend on.
    halo = 0
    # Chunks, but for the last, have a multiple of this many rows.
    row_height = 1
    # The row at which the first chunk begins; the last one ends with the rows above it.
    shift = 0
    # Whether all rows have to be added to a summary before the first chunk.
    needs_summary = False
    # Rows that are added to the summary at once, but for the last, are a multiple of these.
    summary_height = 1
    # Numbers per token of a chunk that exist at once.
    token_floats = 0

    def start_summary(self) -> Any:
        """Return an empty summary."""
        return None

    def add(self, summary: Any, rows: Tensor, mask: Tensor | None) -> None:
        """Add rows (rows, width, channels) to a summary, or prefix tokens as one row; mask as in Chunk."""
        raise NotImplementedError

    def finish(self, summary: Any) -> Any:
        """Return what `apply` needs of a summary to which all tokens were added."""
        return summary

    @abstractmethod
    def apply(self, chunk: Chunk, finished: Any) -> Tensor:
        """Return the new rows of a chunk, (rows, width, channels)."""

    @abstractmethod
    def apply_prefix(self, prefix: Tensor, finished: Any) -> Tensor:
        """Return the new prefix tokens, (prefix, channels)."""


class HeadGroup:
    """The heads of an attention that attend within the same windows.

    Args:
        attn: The attention.
        windows: The windows of the map.
        num_prefix_tokens: Tokens before the map.
    """

    def __init__(self, attn: BaseAttention, windows: Windows, num_prefix_tokens: int) -> None:
        self.attn, self.windows = attn, windows
        self.num_heads = attn.num_heads // windows.num_head_groups
        self.channels = self.num_heads * attn.head_dim
        self.static = attn.static_kernels(windows)
        self.local_residual = attn.local_residual if isinstance(attn, InLineAttention) else None
        # Windows as high as the map are summarized; others are computed as a whole.
        self.is_tall = windows.window_height >= windows.map_height and windows.shift_left == 0
        self.is_reduced = isinstance(attn, SoftmaxAttention) and attn.reduce is not None
        self.num_prefix_tokens = num_prefix_tokens
        if self.is_tall and isinstance(attn, SoftmaxAttention):
            if attn.relative_window > 0:
                # A map of no more rows than a window.
                self.is_tall = False
            self.check_pairs()

    def check_pairs(self) -> None:
        """Refuse softmax attention whose time grows beyond all bounds."""
        queries = self.windows.map_height * self.windows.map_width
        pairs = queries * self.num_keys * (1 if self.is_reduced else self.windows.window_width / self.windows.map_width)
        if pairs > MOST_PAIRS:
            raise ValueError(
                f"softmax attention over a map of {self.windows.map_height} × {self.windows.map_width} tokens compares "
                f"{pairs:.0e} pairs of tokens, which takes hours: use a model with InLine attention, or a smaller image"
            )

    @property
    def halo(self) -> int:
        """Rows above and below that the convolutions of the values need, where windows are as high as the map."""
        if not self.is_tall:
            return 0
        static = 0 if self.static is None else self.static[0].shape[2] // 2
        return max(static, 0 if self.local_residual is None else 1)

    @property
    def num_keys(self) -> int:
        """Keys of each window that is as high as the map."""
        if self.is_reduced:
            side = cast(Any, self.attn).reduce.stride
            return -(-self.windows.map_height // side) * -(-self.windows.map_width // side)
        return self.windows.map_height * self.windows.window_width + self.num_prefix_tokens

    def project(self, x: Tensor, *parts: int) -> list[Tensor]:
        """Return queries, keys or values of the group, each (…, channels of the group)."""
        qkv, group = self.attn.qkv, self.windows.head_group
        shape = (3, self.windows.num_head_groups, self.channels)
        # A layer that was replaced is called as it is.
        if type(qkv) is not nn.Linear:
            projected = qkv(x).unflatten(-1, shape)
            return [projected[..., part, group, :] for part in parts]
        weights, biases = qkv.weight.view(*shape, -1), None if qkv.bias is None else qkv.bias.view(shape)
        weight = torch.cat([weights[part, group] for part in parts])
        bias = None if biases is None else torch.cat([biases[part, group] for part in parts])
        return list(F.linear(x, weight, bias).split(self.channels, dim=-1))

    def split_heads(self, x: Tensor) -> Tensor:
        """Map (windows, tokens, channels of the group) to (windows, heads, tokens, head_dim)."""
        return x.unflatten(2, (self.num_heads, -1)).transpose(1, 2)

    def kernel_tokens(self, x: Tensor) -> Tensor:
        """Return the channels of the group of (…, channels)."""
        first = self.windows.head_group * self.channels
        return x[..., first : first + self.channels]

    def local_kernels(self, state: AttentionState) -> Tensor | None:
        """Return the kernels of the local residual, (windows, channels of the group, 9), if it has one."""
        mean = state.token_mean()
        return None if self.local_residual is None or mean is None else self.local_residual(mean, self.windows)

    # Windows as high as the map: added to a state by rows, then attended to by rows.

    def tall_windows(self, rows: Tensor, is_prefix: bool = False) -> Windows:
        """Return the windows of some rows (rows, width, …) of the map, or of prefix tokens as one row."""
        width = rows.shape[1] if is_prefix else self.windows.window_width
        return Windows(rows.shape[0], rows.shape[1], rows.shape[0], width)

    def start(self) -> AttentionState:
        """Return an empty state."""
        return make_state(self.attn, self.windows, self.num_keys)

    def add(
        self, state: AttentionState, normed: Tensor, kernel_tokens: Tensor, mask: Tensor | None, is_prefix: bool
    ) -> None:
        """Add rows (rows, width, channels) to a state."""
        if self.is_reduced:
            normed = cast(Any, self.attn).reduce(normed.permute(2, 0, 1).unsqueeze(0)).squeeze(0)
        windows = self.tall_windows(normed, is_prefix or self.is_reduced)
        k, v = (window_partition(part.flatten(0, 1).unsqueeze(0), windows) for part in self.project(normed, K, V))
        tokens = None
        if self.local_residual is not None:
            tokens = window_partition(self.kernel_tokens(kernel_tokens).flatten(0, 1).unsqueeze(0), windows)
        state.add(self.split_heads(k), self.split_heads(v), partition_mask(mask, windows), tokens)

    def attend_tall(self, chunk: Chunk, normed: Tensor, state: AttentionState, taps: Tensor | None) -> Tensor:
        """Return the rows of a chunk before the output projection, (rows, width, channels of the group).

        Args:
            chunk: The rows.
            normed: Norm of the extended rows.
            state: Of all tokens.
            taps: Kernels of the local residual.
        """
        (q,) = self.project(chunk.own_rows(normed), Q)
        windows = self.tall_windows(chunk.tokens)
        q = self.split_heads(window_partition(q.flatten(0, 1).unsqueeze(0), windows))
        out = merge_heads(state.attend(q))
        if taps is not None or self.static is not None:
            (v,) = self.project(normed, V)
            if chunk.mask is not None:
                v = v.masked_fill(~chunk.mask.unsqueeze(2), 0.0)
            extended = self.tall_windows(normed)
            maps = window_partition(v.flatten(0, 1).unsqueeze(0), extended)
            maps = maps.unflatten(1, (extended.window_height, extended.window_width))
            convolved = convolve_values(maps, taps, self.static)[:, len(chunk.above) :][:, : len(chunk.tokens)]
            out = out.add_(convolved.flatten(1, 2))
        return window_reverse(out, windows).view(*chunk.tokens.shape[:2], self.channels)

    # Lower windows: each is computed at once.

    def attend_low(self, chunk: Chunk, normed: Tensor, kernel_tokens: Tensor) -> Tensor:
        """Return the rows of a chunk of whole windows before the output projection; arguments as in attend_tall."""
        rows, width, _ = normed.shape
        height, window_width = self.windows.window_height, self.windows.window_width
        bottom, right = -rows % height, -width % window_width
        mask = chunk.mask
        if bottom > 0 or right > 0:
            normed, kernel_tokens = (F.pad(x, (0, 0, 0, right, 0, bottom)) for x in (normed, kernel_tokens))
            mask = torch.ones(rows, width, dtype=torch.bool) if mask is None else mask
            mask = F.pad(mask, (0, right, 0, bottom))
        regions = self.regions(rows + bottom, width + right, chunk.wrapped)
        if (shift := self.windows.shift_left) > 0:
            normed, kernel_tokens = (torch.roll(x, -shift, dims=1) for x in (normed, kernel_tokens))
            mask = None if mask is None else torch.roll(mask, -shift, dims=1)
        # As many columns of windows as fit into CHUNK elements.
        step = max(1, CHUNK // (3 * self.channels * (rows + bottom) * window_width)) * window_width
        parts = []
        for left in range(0, width + right, step):
            columns = slice(left, left + step)
            parts.append(
                self.attend_windows(
                    normed[:, columns],
                    kernel_tokens[:, columns],
                    None if mask is None else mask[:, columns],
                    None if regions is None else regions[:, columns],
                )
            )
        out = torch.cat(parts, dim=1)
        if shift > 0:
            out = torch.roll(out, shift, dims=1)
        return out[:rows, :width]

    def regions(self, rows: int, width: int, wrapped: int) -> Tensor | None:
        """Return a number for each token of rolled rows, (rows, width): softmax attends to equal ones. None = to all.

        InLine attention ignores the border of a shifted map, as published.
        """
        shift = self.windows.shift_left
        if not isinstance(self.attn, SoftmaxAttention) or (shift == 0 and wrapped == 0):
            return None
        from_top, from_left = torch.arange(rows) >= rows - wrapped, torch.arange(width) >= width - shift
        return 2 * from_top.int()[:, None] + from_left.int()

    def attend_windows(
        self, normed: Tensor, kernel_tokens: Tensor, mask: Tensor | None, regions: Tensor | None
    ) -> Tensor:
        """Return what whole windows give before the output projection; all arguments are (rows, width, …)."""
        rows, width, _ = normed.shape
        height, window_width = self.windows.window_height, self.windows.window_width
        windows, window = (
            Windows(rows, width, height, window_width),
            Windows(height, window_width, height, window_width),
        )

        def partition(x: Tensor) -> Tensor:
            return window_partition(x.reshape(1, rows * width, -1), windows)

        q, k, v = (self.split_heads(partition(part)) for part in self.project(normed, Q, K, V))
        real = None if mask is None else partition(mask).squeeze(2)
        if real is not None:
            v = v.masked_fill(~real[:, None, :, None], 0.0)
        if isinstance(self.attn, SoftmaxAttention):
            ids = None if regions is None else partition(regions).squeeze(2)
            out, taps = softmax_windows(self.attn, q, k, v, window, real, ids), None
        else:
            state = make_state(self.attn, self.windows, height * window_width)
            tokens = None if self.local_residual is None else partition(self.kernel_tokens(kernel_tokens))
            state.add(k, v, real, tokens)
            out, taps = state.attend(q), self.local_kernels(state)
        added = add_convolution(merge_heads(out), v, taps, self.static, window)
        return window_reverse(added, windows).view(rows, width, self.channels)


class AttentionPass(Pass):
    """norm → attention → add and, unless it has a convolution, norm → MLP → add.

    Args:
        block: The block.
        feat_size: (H, W) of the map.
        num_prefix_tokens: Tokens before the map.
    """

    def __init__(self, block: Block, feat_size: tuple[int, int], num_prefix_tokens: int) -> None:
        self.block, self.attn = block, cast(BaseAttention, block.attn)
        self.groups = [HeadGroup(self.attn, windows, num_prefix_tokens) for windows in self.attn.layout(feat_size)]
        low = [group.windows for group in self.groups if not group.is_tall]
        self.row_height = max((windows.window_height for windows in low), default=1)
        self.shift = max((windows.shift_up for windows in low), default=0)
        self.halo = max(group.halo for group in self.groups)
        self.needs_summary = any(group.is_tall for group in self.groups)
        self.token_floats = COPIES * self.attn.dim
        self.summary_height = max(
            cast(Any, self.attn).reduce.stride if group.is_reduced else 1 for group in self.groups
        )

    def start_summary(self) -> Any:
        """See Pass.start_summary: a state for each head group whose windows are as high as the map."""
        return [group.start() if group.is_tall else None for group in self.groups]

    def add(self, summary: Any, rows: Tensor, mask: Tensor | None, is_prefix: bool = False) -> None:
        """See Pass.add."""
        normed = self.block.norm1(rows)
        for group, state in zip(self.groups, summary, strict=True):
            if state is not None:
                group.add(state, normed, rows if self.block.kernels_before_norm else normed, mask, is_prefix)

    def finish(self, summary: Any) -> Any:
        """See Pass.finish: the states, and the kernels of the local residual."""
        return [
            (state, None if state is None else group.local_kernels(state))
            for group, state in zip(self.groups, summary, strict=True)
        ]

    def apply(self, chunk: Chunk, finished: Any) -> Tensor:
        """See Pass.apply."""
        extended = chunk.extended()
        normed, outputs = self.block.norm1(extended), []
        for group, (state, taps) in zip(self.groups, finished, strict=True):
            if state is not None:
                outputs.append(group.attend_tall(chunk, normed, state, taps))
            else:
                own = normed if len(extended) == len(chunk.tokens) else chunk.own_rows(normed)
                outputs.append(group.attend_low(own_chunk(chunk), own, self.own_kernel_tokens(chunk, own)))
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
        return self.add_branches(chunk.tokens, out)

    def own_kernel_tokens(self, chunk: Chunk, normed: Tensor) -> Tensor:
        """Return the tokens whose mean makes the kernels of the local residual."""
        return chunk.tokens if self.block.kernels_before_norm else normed

    def apply_prefix(self, prefix: Tensor, finished: Any) -> Tensor:
        """See Pass.apply_prefix: they have no convolution."""
        (group,), ((state, _),) = self.groups, finished
        assert state is not None
        (q,) = group.project(self.block.norm1(prefix), Q)
        out = merge_heads(state.attend(group.split_heads(q.unsqueeze(0)))).squeeze(0)
        return self.add_branches(prefix.unsqueeze(0), out.unsqueeze(0)).squeeze(0)

    def add_branches(self, x: Tensor, attended: Tensor) -> Tensor:
        """Return rows after the output projection and the MLP.

        Args:
            x: Rows before the block, (rows, width, channels).
            attended: Rows before the output projection, as x.
        """
        block, out = self.block, torch.empty_like(x)
        step = max(1, CHUNK // block.hidden_dim)
        flat = (rows.reshape(-1, x.shape[2]).split(step) for rows in (x, attended, out))
        for before, attention, target in zip(*flat, strict=True):
            torch.add(before, self.attn.proj(attention), out=target)
            if not block.dwconv_mlp:
                target.add_(block.mlp(block.norm2(target)))
        return out


class FoldedPass(AttentionPass):
    """A pass of InLine attention over the whole map, φ = identity, without queries and keys (InLineAttention).

    The summary is the covariance of the normed tokens.
    """

    def start_summary(self) -> Any:
        """See Pass.start_summary."""
        return {}

    def add(self, summary: Any, rows: Tensor, mask: Tensor | None, is_prefix: bool = False) -> None:
        """See Pass.add."""
        normed = self.block.norm1(rows).flatten(0, 1)
        tokens = rows.reshape(1, *normed.shape) if self.block.kernels_before_norm else None
        mask = None if mask is None else mask.reshape(1, -1)
        added = KeyValueState.from_tokens(normed[None, None], normed[None, None], tokens, mask)
        summary["state"] = merge_states(summary.get("state"), added)

    def finish(self, summary: Any) -> Any:
        """See Pass.finish."""
        (group,), attn = self.groups, self.attn
        state: KeyValueState = summary["state"]
        heads, head_dim, dim = attn.num_heads, attn.head_dim, attn.dim
        weight_q, weight_k, weight_v = attn.qkv.weight.double().view(3, heads, head_dim, dim).unbind(0)
        # (heads, head_dim, head_dim), divided by the number of tokens and multiplied by the scale
        covariance = weight_k @ state.scaled_covariance(head_dim**-0.5)[0] @ weight_v.transpose(1, 2)
        fold = (weight_q.transpose(1, 2) @ covariance).transpose(0, 1).flatten(1)
        constant = weight_v.flatten(0, 1) @ state.k_mean.flatten()
        if attn.qkv.bias is not None:
            bias_q, _, bias_v = attn.qkv.bias.double().view(3, heads, 1, head_dim).unbind(0)
            constant = constant + bias_v.flatten() + (bias_q @ covariance).flatten()
        taps = None
        if group.local_residual is not None:
            mean = state.k_mean.flatten(1) if state.token_mean is None else state.token_mean
            taps = group.local_residual(mean.float(), group.windows)
        return Folded(fold.float(), constant.float(), taps)

    def apply(self, chunk: Chunk, finished: Any) -> Tensor:
        """See Pass.apply."""
        (group,) = self.groups
        normed = self.block.norm1(chunk.extended())
        own = chunk.own_rows(normed)
        out = torch.addmm(finished.constant, own.flatten(0, 1), finished.fold).view_as(own)
        if finished.taps is not None or group.static is not None:
            (v,) = group.project(normed, V)
            if chunk.mask is not None:
                v = v.masked_fill(~chunk.mask.unsqueeze(2), 0.0)
            out += chunk.own_rows(convolve_values(v.unsqueeze(0), finished.taps, group.static).squeeze(0))
        return self.add_branches(chunk.tokens, out)

    def apply_prefix(self, prefix: Tensor, finished: Any) -> Tensor:
        """See Pass.apply_prefix."""
        out = torch.addmm(finished.constant, self.block.norm1(prefix), finished.fold)
        return self.add_branches(prefix.unsqueeze(0), out.unsqueeze(0)).squeeze(0)


class Folded(NamedTuple):
    """InLine attention to all tokens, as a function of a normed token: x·fold + constant.

    Attributes:
        fold: (channels, channels).
        constant: (channels,).
        taps: Kernels of the local residual, (1, channels, 9), if there is one.
    """

    fold: Tensor
    constant: Tensor
    taps: Tensor | None


class NativePass(AttentionPass):
    """A pass of InLine attention over the whole map, φ = identity, by the native kernels. Chunks are overwritten.

    Args:
        block: See AttentionPass.
        feat_size: See AttentionPass.
        num_prefix_tokens: See AttentionPass.
        packed: The weights of the block.
    """

    def __init__(
        self, block: Block, feat_size: tuple[int, int], num_prefix_tokens: int, packed: kernels.PackedBlock
    ) -> None:
        super().__init__(block, feat_size, num_prefix_tokens)
        self.native = kernels.StreamedBlock(packed)
        self.token_floats = 2 * self.attn.dim

    def start_summary(self) -> Any:
        """See Pass.start_summary."""
        return {}

    def add(self, summary: Any, rows: Tensor, mask: Tensor | None, is_prefix: bool = False) -> None:
        """See Pass.add."""
        added = self.native.summarize(rows.flatten(0, 1), None if mask is None else mask.flatten())
        summary["moments"] = summary["moments"].merge(added) if summary else added

    def finish(self, summary: Any) -> Any:
        """See Pass.finish."""
        return summary["moments"]

    def apply(self, chunk: Chunk, finished: Any) -> Tensor:
        """See Pass.apply."""
        tokens = chunk.tokens.flatten(0, 1)
        above, below = (rows[0] if len(rows) > 0 else None for rows in (chunk.above, chunk.below))
        masks: dict[str, Tensor | None] = {}
        if chunk.mask is not None:
            masks["mask"] = chunk.own_rows(chunk.mask).flatten()
            masks["mask_above"] = None if above is None else chunk.mask[0]
            masks["mask_below"] = None if below is None else chunk.mask[-1]
        self.native.apply(tokens, finished, chunk.tokens.shape[1], above, below, tokens, **masks)
        return chunk.tokens

    def apply_prefix(self, prefix: Tensor, finished: Any) -> Tensor:
        """See Pass.apply_prefix."""
        return self.native.apply_prefix(prefix, finished)


class NativeWindowPass(AttentionPass):
    """A pass of attention within square windows, by the native kernels where a chunk has whole windows only.

    Args:
        block: See AttentionPass.
        feat_size: See AttentionPass.
        num_prefix_tokens: See AttentionPass.
        packed: The weights of the block.
    """

    def __init__(
        self, block: Block, feat_size: tuple[int, int], num_prefix_tokens: int, packed: kernels.PackedBlock
    ) -> None:
        super().__init__(block, feat_size, num_prefix_tokens)
        self.packed = packed

    def apply(self, chunk: Chunk, finished: Any) -> Tensor:
        """See Pass.apply."""
        (group,), tokens = self.groups, chunk.tokens
        if chunk.mask is not None or chunk.wrapped > 0 or len(tokens) < group.windows.window_height:
            return super().apply(chunk, finished)
        windows = group.windows._replace(map_height=len(tokens), shift_up=0)
        return self.packed(tokens.flatten(0, 1).unsqueeze(0), [windows]).view_as(tokens)


class ConvMlpPass(Pass):
    """norm → MLP with a convolution → add.

    Args:
        block: The block.
    """

    halo = 1

    def __init__(self, block: Block) -> None:
        self.block, self.mlp = block, cast(DWConvMlp, block.mlp)
        self.token_floats = 4 * self.mlp.fc1.in_features + 5 * self.mlp.fc1.out_features

    def apply(self, chunk: Chunk, finished: Any) -> Tensor:
        """See Pass.apply."""
        hidden = self.mlp.fc1(self.block.norm2(chunk.extended()))
        if chunk.mask is not None:
            hidden = hidden.masked_fill(~chunk.mask.unsqueeze(2), 0.0)
        convolved = self.mlp.conv(hidden.permute(2, 0, 1).unsqueeze(0)).squeeze(0).permute(1, 2, 0)
        return chunk.tokens + self.mlp.fc2(F.gelu(chunk.own_rows(convolved)))

    def apply_prefix(self, prefix: Tensor, finished: Any) -> Tensor:
        """See Pass.apply_prefix: they skip the convolution."""
        return prefix + self.mlp(self.block.norm2(prefix).unsqueeze(0), (0, 0)).squeeze(0)


def make_passes(block: Block, feat_size: tuple[int, int], num_prefix_tokens: int) -> list[Pass]:
    """Return the passes that a block needs over a map of size (H, W), in their order."""
    attn = cast(BaseAttention, block.attn)
    if type(attn) not in STATES:
        raise ValueError(
            f"{type(attn).__name__} cannot be streamed: use a model with attention of "
            f"{', '.join(kind.__name__ for kind in STATES)}"
        )
    passes: list[Pass] = [attention_pass(block, feat_size, num_prefix_tokens)]
    if block.dwconv_mlp:
        passes.append(ConvMlpPass(block))
    return passes


def attention_pass(block: Block, feat_size: tuple[int, int], num_prefix_tokens: int) -> AttentionPass:
    """Return the fastest pass for the attention of a block, and its MLP if that has no convolution."""
    attn = cast(BaseAttention, block.attn)
    groups = attn.layout(feat_size)
    is_whole = len(groups) == 1 and covers_map(groups[0])
    is_inline = isinstance(attn, InLineAttention) and attn.feature_map.name == "identity"
    is_square = isinstance(attn.layout, SquareWindows) and not is_whole
    if (is_whole and is_inline) or is_square:
        packed = pack_block(block, int8=isinstance(block, InferenceBlock) and block.int8)
        if packed is not None:
            native = NativePass if is_whole else NativeWindowPass
            return native(block, feat_size, num_prefix_tokens, packed)
    is_folded = is_whole and is_inline and type(attn.qkv) is nn.Linear
    return (FoldedPass if is_folded else AttentionPass)(block, feat_size, num_prefix_tokens)


def own_chunk(chunk: Chunk) -> Chunk:
    """Return a chunk without the rows above and below."""
    mask = None if chunk.mask is None else chunk.own_rows(chunk.mask)
    return Chunk(chunk.tokens, chunk.tokens[:0], chunk.tokens[:0], mask, chunk.wrapped)


def partition_mask(mask: Tensor | None, windows: Windows) -> Tensor | None:
    """Return which tokens of each window are real, (windows, tokens); None if all are.

    Args:
        mask: Which tokens of the map are real, (rows, width); None = all.
        windows: How the map is split.
    """
    if mask is None:
        return window_mask(windows, torch.device("cpu"))
    return window_partition(mask.reshape(1, -1, 1), windows).squeeze(2)


def softmax_windows(
    attn: SoftmaxAttention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: Windows,
    real: Tensor | None,
    regions: Tensor | None,
) -> Tensor:
    """Return softmax attention within windows.

    Args:
        attn: The attention.
        q: Queries (windows, heads, tokens, head_dim).
        k: Keys, as q.
        v: Values, as q.
        window: The size of a window.
        real: Which tokens are real, (windows, tokens); None = all.
        regions: Tokens attend to those with the same number, (windows, tokens); None = to all.
    """
    q, bias = attn.map_queries(q), attn.relative_position_bias(window)
    if regions is None and bias is None:
        mask = None if real is None else real[:, None, None, :]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    # Most windows have neither padding nor several regions: they share the biases of positions.
    is_masked = torch.zeros(len(q), dtype=torch.bool)
    if real is not None:
        is_masked |= ~real.all(dim=1)
    if regions is not None:
        is_masked |= (regions != regions[:, :1]).any(dim=1)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    tokens = q.shape[2]
    step = max(1, CHUNK // (attn.num_heads * tokens**2))
    for part in is_masked.nonzero().squeeze(1).split(step):
        visible = torch.ones(len(part), 1, tokens, tokens, dtype=torch.bool)
        if real is not None:
            visible = visible & real[part, None, None, :]
        if regions is not None:
            visible = visible & (regions[part, :, None] == regions[part, None, :]).unsqueeze(1)
        scores = torch.zeros(1) if bias is None else bias
        out[part] = F.scaled_dot_product_attention(
            q[part], k[part], v[part], attn_mask=torch.where(visible, scores, float("-inf"))
        )
    return out
