"""The attention of a head group over the rows of a map: in windows as high as the map, or in lower ones."""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..layers import BaseAttention, SoftmaxAttention
from ..layers.angular_attention import AngularAttention
from ..layers.focused_attention import FocusedAttention
from ..layers.inline_attention import InLineAttention
from ..ops._common import hide_padding
from ..ops.local import add_convolution, convolve_values
from ..ops.windows import Windows, merge_heads, take_head_group, window_mask, window_partition, window_reverse
from .embed import PositionRows
from .passes import Chunk
from .states import AngularState, AttentionState, make_state

# Elements of the widest tensor that is computed at once, where tokens do not depend on each other.
CHUNK = 2**20
# Pairs of a query and a key beyond which softmax attention would take hours.
MOST_PAIRS = 2**36
# Parts of the projection to queries, keys and values.
Q, K, V = range(3)


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
        # The convolution of angular attention along the tokens of a window, (heads, 1, taps, 1).
        self.token_conv: Tensor | None = None
        if isinstance(attn, AngularAttention):
            self.token_conv = take_head_group(attn.token_conv.weight, windows)
        # The positions that focused attention adds to its keys, by rows.
        self.key_positions: PositionRows | None = None
        if isinstance(attn, FocusedAttention) and self.is_tall:
            size = (windows.window_height, windows.window_width)
            self.key_positions = PositionRows(attn.resample_pos_embed, attn.pos_embed.detach(), size)
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
        sequence = 0 if self.token_conv is None else -(-(self.token_conv.shape[2] // 2) // self.windows.window_width)
        return max(static, sequence, 0 if self.local_residual is None else 1)

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
        self, state: AttentionState, normed: Tensor, kernel_tokens: Tensor, mask: Tensor | None, top: int | None
    ) -> None:
        """Add rows (rows, width, channels), the first of which is row `top`, to a state; None = prefix tokens."""
        is_prefix, height = top is None, normed.shape[0]
        if self.is_reduced:
            normed = cast(Any, self.attn).reduce(normed.permute(2, 0, 1).unsqueeze(0)).squeeze(0)
        windows = self.tall_windows(normed, is_prefix or self.is_reduced)
        k, v = (window_partition(part.flatten(0, 1).unsqueeze(0), windows) for part in self.project(normed, K, V))
        tokens = None
        if self.local_residual is not None:
            tokens = window_partition(self.kernel_tokens(kernel_tokens).flatten(0, 1).unsqueeze(0), windows)
        k, v, real = self.split_heads(k), self.split_heads(v), partition_mask(mask, windows)
        if self.key_positions is not None:
            k = k + self.positions_of_keys(top, height, k.shape[2])
        if isinstance(state, AngularState) and self.num_prefix_tokens > 0:
            # The first token of the map has as many before it as there are tokens above its row.
            first = None if top is None else top * self.windows.map_width
            state.keep_first(hide_padding(v, real), first)
        state.add(k, v, real, tokens)

    def positions_of_keys(self, top: int | None, height: int, tokens: int) -> Tensor:
        """Return the positions of the keys of rows, or of prefix tokens, (heads, tokens, head_dim)."""
        assert self.key_positions is not None
        if top is None:
            # Prefix tokens beyond those of the attention have no positions.
            table = F.pad(self.key_positions.prefix, (0, 0, tokens - len(self.key_positions.prefix), 0))
        else:
            table = self.key_positions.rows(top, top + height).flatten(0, 1)
        return take_head_group(table.unflatten(1, (self.attn.num_heads, -1)).transpose(0, 1), self.windows)

    def attend_prefix(self, normed: Tensor, state: AttentionState) -> Tensor:
        """Return the attention of normed prefix tokens (prefix, channels), (1, heads, prefix, head_dim)."""
        q, v = (self.split_heads(part.unsqueeze(0)) for part in self.project(normed, Q, V))
        if self.token_conv is None:
            return state.attend(q)
        assert isinstance(state, AngularState)
        sequence = torch.cat([v, state.first], dim=2)
        return state.attend(q, v) + convolve_sequence(sequence, self.token_conv)[:, :, : q.shape[2]]

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
        out = merge_heads(state.attend(q) if self.token_conv is None else self.attend_angular(chunk, normed, q, state))
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

    def attend_angular(self, chunk: Chunk, normed: Tensor, q: Tensor, state: AttentionState) -> Tensor:
        """Return angular attention of the rows of a chunk, with the convolution along the tokens; as q."""
        assert isinstance(state, AngularState)
        assert self.token_conv is not None
        (v,) = self.project(normed, V)
        if chunk.mask is not None:
            v = v.masked_fill(~chunk.mask.unsqueeze(2), 0.0)
        v = self.split_heads(window_partition(v.flatten(0, 1).unsqueeze(0), self.tall_windows(normed)))
        first = len(chunk.above) * self.windows.window_width
        # Prefix tokens are before the first row, if that is among these.
        if self.num_prefix_tokens > 0 and len(chunk.above) < self.halo:
            v, first = torch.cat([state.prefix, v], dim=2), first + state.prefix.shape[2]
        own = slice(first, first + q.shape[2])
        return state.attend(q, v[:, :, own]) + convolve_sequence(v, self.token_conv)[:, :, own]

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
            if isinstance(self.attn, FocusedAttention):
                k = self.attn.add_pos_embed(k, self.windows)
            state = make_state(self.attn, self.windows, height * window_width)
            tokens = None if self.local_residual is None else partition(self.kernel_tokens(kernel_tokens))
            state.add(k, v, real, tokens)
            out, taps = state.attend(q, v), self.local_kernels(state)
            if self.token_conv is not None:
                out = out + convolve_sequence(v, self.token_conv)
        added = add_convolution(merge_heads(out), v, taps, self.static, window)
        return window_reverse(added, windows).view(rows, width, self.channels)


def convolve_sequence(v: Tensor, weight: Tensor) -> Tensor:
    """Convolve values (windows, heads, tokens, head_dim) along the tokens; weight: (heads, 1, taps, 1)."""
    return F.conv2d(v, weight, padding=(weight.shape[2] // 2, 0), groups=weight.shape[0])


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
