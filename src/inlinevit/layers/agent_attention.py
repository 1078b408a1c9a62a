"""Agent attention as a module."""

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module, trunc_normal_
from torch import Tensor, nn

from .. import ops
from ..ops._common import is_exporting, is_symbolic, promote, visible_pairs
from ..ops.windows import Windows, padding_mask, take_head_group
from .base_attention import BaseAttention, HeadGroup
from .embed import bilinear_matrix
from .surroundings import Surroundings

# Side of the learned maps of biases, which are resized to the map.
BIAS_SIDE = 7


@register_notrace_module
class AgentAttention(BaseAttention):
    """Agent attention, with learned biases of its scores, and LePE.

    Agents are pooled from the queries of all tokens of the map: `k` of `partition`, `attend` and `attention_weights`
    holds the key and the query of each token, (batch · windows, heads, tokens, 2 · head_dim).

    Args:
        dim: Channels.
        num_heads: Heads; they divide the channels.
        grid: (H, W) of the map, or window, for which biases are learned; other sizes work, too.
        agent_side: Rows and columns of agents.
        **kwargs: Arguments of BaseAttention.
    """

    row_wise = True
    learns_grid = True
    attn_kwargs_names = ("agent_side",)
    surroundings = Surroundings(lepe=3)
    no_weight_decay_names = (
        *("key_map_bias", "key_row_bias", "key_column_bias", "key_prefix_bias"),
        *("query_map_bias", "query_row_bias", "query_column_bias", "query_prefix_bias"),
    )

    def __init__(
        self, dim: int, num_heads: int, *, grid: tuple[int, int] = (14, 14), agent_side: int = 7, **kwargs: Any
    ) -> None:
        super().__init__(dim, num_heads, **kwargs)
        if not 1 <= agent_side <= 64:
            raise ValueError(f"agent_side is {agent_side}: it should be from 1 to 64")
        self.grid, self.agent_side = (grid[0], grid[1]), agent_side
        height, width = self.grid
        agents, prefix = agent_side**2, self.num_prefix_tokens or 0

        def table(*shape: int) -> nn.Parameter:
            values = torch.empty(num_heads, *shape, device=kwargs.get("device"), dtype=kwargs.get("dtype"))
            return nn.Parameter(values)

        # Of the scores of agents with keys.
        self.key_map_bias = table(agents, BIAS_SIDE, BIAS_SIDE)
        self.key_row_bias, self.key_column_bias = table(agents, height, 1), table(agents, 1, width)
        self.key_prefix_bias = table(agents, prefix) if prefix > 0 else None
        # Of the scores of queries with agents.
        self.query_map_bias = table(agents, BIAS_SIDE, BIAS_SIDE)
        self.query_row_bias, self.query_column_bias = table(height, 1, agents), table(1, width, agents)
        self.query_prefix_bias = table(prefix, agents) if prefix > 0 else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the biases; child modules have their own reset_parameters."""
        for bias in self.parameters(recurse=False):
            trunc_normal_(bias, std=0.02)

    def partition(self, x: Tensor, feat_size: tuple[int, int]) -> list[HeadGroup]:
        """See BaseAttention.partition; keys are followed by the queries of the same tokens."""
        return [
            HeadGroup(q, torch.cat([k, q], dim=-1), v, windows) for q, k, v, windows in super().partition(x, feat_size)
        ]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, windows: Windows) -> Tensor:
        """See BaseAttention.attend."""
        k, queries = k.chunk(2, dim=-1)
        mask = padding_mask(k, windows)
        size = (windows.window_height, windows.window_width)
        agents, visible = ops.pool_agents(queries, size, self.agent_side, None if mask is None else mask.unsqueeze(1))
        query_bias, key_bias = self.query_bias(windows, k.shape[2]), self.key_bias(windows, k.shape[2])
        return ops.agent_attention(
            q, k, v, agents, query_bias[:, : q.shape[2]], key_bias, mask=mask, agent_mask=visible
        )

    def attention_weights(
        self, q: Tensor, k: Tensor, v: Tensor, windows: Windows, attn_mask: Tensor | None = None, first: int = 0
    ) -> Tensor:
        """See BaseAttention.attention_weights. Agents of a row are pooled from the tokens that its query sees."""
        if attn_mask is not None and attn_mask.dim() == 4 and attn_mask.shape[2] > 1:
            # Each query has agents of its own.
            rows = (
                self.attention_weights(q[:, :, i : i + 1], k, v, windows, attn_mask[:, :, i : i + 1], first + i)
                for i in range(q.shape[2])
            )
            return torch.cat(list(rows), dim=2)
        k, queries = k.chunk(2, dim=-1)
        mask = padding_mask(k, windows)
        pairs = visible_pairs(mask, attn_mask)
        seen = None if pairs is None else pairs[:, :, 0].expand(k.shape[0], -1, k.shape[2])
        agents, visible = ops.pool_agents(queries, (windows.window_height, windows.window_width), self.agent_side, seen)
        return ops.agent_weights(
            q,
            k,
            agents=agents,
            query_bias=self.query_bias(windows, k.shape[2])[:, first : first + q.shape[2]],
            key_bias=self.key_bias(windows, k.shape[2]),
            mask=mask,
            agent_mask=visible,
            attn_mask=attn_mask,
        )

    def key_bias(self, windows: Windows, tokens: int) -> Tensor:
        """Return the biases of keys, (heads of the group, tokens, agents), in float32 or better."""
        tables = (self.key_map_bias, self.key_row_bias, self.key_column_bias)
        maps = [take_head_group(table, windows) for table in tables]
        prefix = self.key_prefix_bias
        return join_biases(maps, None if prefix is None else prefix.transpose(1, 2), windows, tokens)

    def query_bias(self, windows: Windows, tokens: int) -> Tensor:
        """Return the biases of queries, (heads of the group, tokens, agents), in float32 or better."""
        # Rows and columns have the agents last.
        rows, columns = (table.permute(0, 3, 1, 2) for table in (self.query_row_bias, self.query_column_bias))
        maps = [take_head_group(table, windows) for table in (self.query_map_bias, rows, columns)]
        return join_biases(maps, self.query_prefix_bias, windows, tokens)

    def set_grid(self, grid: tuple[int, int]) -> None:
        """Learn biases for another grid from now on."""
        self.grid = (grid[0], grid[1])
        for name in ("key_row_bias", "key_column_bias", "query_row_bias", "query_column_bias"):
            bias = self.get_parameter(name)
            resized = self.fit_parameter(name, bias.detach())
            self.register_parameter(name, nn.Parameter(resized, requires_grad=bias.requires_grad))

    def fit_parameter(self, name: str, value: Tensor) -> Tensor:
        """Resize biases of rows or columns for another grid, as in a file, to those for the grid of this module.

        Args:
            name: Of the parameter.
            value: Biases for a grid of another size.

        Returns:
            Biases in the shape of the parameter; others as they are.
        """
        if name not in ("key_row_bias", "key_column_bias", "query_row_bias", "query_column_bias") or value.dim() != 4:
            return value
        of_keys = name.startswith("key")
        maps = value if of_keys else value.permute(0, 3, 1, 2)
        size = (self.grid[0], 1) if name.endswith("row_bias") else (1, self.grid[1])
        if 1 not in maps.shape[2:]:
            return value
        resized = resize_bias(maps, size).to(value.dtype)
        return (resized if of_keys else resized.permute(0, 2, 3, 1)).contiguous()


def join_biases(maps: list[Tensor], prefix: Tensor | None, windows: Windows, tokens: int) -> Tensor:
    """Return the biases of all tokens, (heads, tokens, agents), in float32 or better.

    Args:
        maps: Tables of places, rows (W′ = 1) and columns (H′ = 1), (heads of the group, agents, H′, W′) each, which are
            resized to the window and added.
        prefix: Biases of prefix tokens (heads, prefix, agents). Tokens beyond num_prefix_tokens have none.
        windows: How the map was split.
        tokens: Of a window, with prefix tokens.
    """
    height, width = windows.window_height, windows.window_width
    full, rows, columns = maps
    bias = resize_bias(full, (height, width)) + resize_bias(rows, (height, 1)) + resize_bias(columns, (1, width))
    bias = bias.flatten(2).transpose(1, 2)
    before = tokens - height * width
    if prefix is not None and before > 0:
        own = promote(prefix)[:, :before]
        return torch.cat([F.pad(own, (0, 0, before - own.shape[1], 0)), bias], dim=1)
    return F.pad(bias, (0, 0, before, 0))


def resize_bias(x: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize maps (heads, agents, H′, W′) bilinearly to (heads, agents, H, W), in float32 or better."""
    x = promote(x)
    if is_exporting() and is_symbolic(*size):
        for dim, length in ((2, size[0]), (3, size[1])):
            if is_symbolic(length) or length != x.shape[dim]:
                x = (bilinear_matrix(x.shape[dim], length, x.device) @ x.transpose(dim, 2)).transpose(dim, 2)
        return x
    return x if x.shape[2:] == size else F.interpolate(x, size, mode="bilinear", align_corners=False)
