"""Two-dimensional rotary position embedding: pairs of channels turn by an angle that grows along the map.

The first half of the channels of a head turns by the row, the second half by the column, in adjacent pairs (2m, 2m+1):
(a, b) becomes (a·cos − b·sin, b·cos + a·sin). Pair m of a half turns by θ_m = 10000^(−m/(head_dim/4 − 1)) per row or
column. The product of a rotated query and a rotated key depends on the distance of their tokens, not on their places.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ._common import promote
from .windows import Windows, covers_map, window_partition

BASE = 10000.0


def rope_tables(
    feat_size: tuple[int, int],
    head_dim: int,
    *,
    num_prefix_tokens: int = 0,
    first_row: int = 0,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of the angles of all tokens, each (prefix + H·W, head_dim / 2).

    Args:
        feat_size: (H, W) of the map.
        head_dim: Channels of a head, a multiple of 4.
        num_prefix_tokens: Tokens before the map, which are not rotated.
        first_row: Index of the first row, where the map is a part of a larger one.
        device: Of the result.
        dtype: Of the result, float32 or float64.
    """
    if head_dim < 1 or head_dim % 4 != 0:
        raise ValueError(
            f"rotary positions need heads of a multiple of 4 channels, but they have {head_dim}: use another num_heads"
        )
    height, width = feat_size
    steps = BASE ** -torch.linspace(0, 1, head_dim // 4, device=device, dtype=dtype)
    rows = (torch.arange(height, device=device) + first_row).to(dtype)[:, None] * steps
    columns = torch.arange(width, device=device).to(dtype)[:, None] * steps

    def table(of_rows: Tensor, of_columns: Tensor, of_prefix: float) -> Tensor:
        shape = (height, width, head_dim // 4)
        halves = [of_rows[:, None].expand(shape), of_columns[None].expand(shape)]
        return F.pad(torch.cat(halves, dim=2).flatten(0, 1), (0, 0, num_prefix_tokens, 0), value=of_prefix)

    return table(rows.cos(), columns.cos(), 1.0), table(rows.sin(), columns.sin(), 0.0)


def window_rope_tables(k: Tensor, windows: Windows) -> tuple[Tensor, Tensor]:
    """Return cosine and sine for the tokens of each window, by their places on the whole map.

    Args:
        k: Keys (batch · windows, heads, tokens of a window, head_dim), for their shape, device and dtype.
        windows: How the map is split.

    Returns:
        Each (windows, 1, tokens, head_dim / 2); padding is zero.
    """
    is_whole = covers_map(windows)
    prefix = k.shape[2] - windows.window_height * windows.window_width if is_whole else 0
    dtype = torch.float64 if k.dtype == torch.float64 else torch.float32
    size = (windows.map_height, windows.map_width)
    tables = rope_tables(size, k.shape[3], num_prefix_tokens=prefix, device=k.device, dtype=dtype)
    cos, sin = (window_partition(table.unsqueeze(0), windows).unsqueeze(1) for table in tables)
    return cos, sin


def rotate(x: Tensor, tables: tuple[Tensor, Tensor] | None, first: int = 0) -> Tensor:
    """Rotate queries or keys, in float32 or better; without tables, return x.

    Args:
        x: (batch · windows, heads, tokens, head_dim).
        tables: Of window_rope_tables, each (windows, 1, all tokens, head_dim / 2).
        first: Index of the first token of x among all tokens.

    Returns:
        As x, in its dtype.
    """
    if tables is None:
        return x
    cos, sin = (table[:, :, first : first + x.shape[2]] for table in tables)
    windows, pairs = cos.shape[0], promote(x).unflatten(-1, (-1, 2))
    if windows != 1:
        # (batch, windows, heads, tokens, head_dim / 2, 2)
        pairs = pairs.unflatten(0, (-1, windows))
    a, b = pairs.unbind(-1)
    return torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).view(x.shape).to(x.dtype)


def rotate_qkv(qkv: Tensor, feat_size: tuple[int, int], num_heads: int, first_row: int = 0) -> Tensor:
    """Rotate the queries and keys of packed q, k and v.

    Args:
        qkv: (batch, prefix + H·W, 3 · channels of all heads), the map row by row.
        feat_size: (H, W) of the map.
        num_heads: Number of heads.
        first_row: See rope_tables.

    Returns:
        As qkv, in its dtype.
    """
    batch, tokens, channels = qkv.shape
    head_dim = channels // (3 * num_heads)
    tables = rope_tables(
        feat_size,
        head_dim,
        num_prefix_tokens=tokens - feat_size[0] * feat_size[1],
        first_row=first_row,
        device=qkv.device,
        dtype=torch.float64 if qkv.dtype == torch.float64 else torch.float32,
    )
    q_and_k, v = qkv.split([2 * num_heads * head_dim, num_heads * head_dim], dim=2)
    heads = q_and_k.view(batch, tokens, 2 * num_heads, head_dim).transpose(1, 2)
    rotated = rotate(heads, (tables[0][None, None], tables[1][None, None]))
    return torch.cat([rotated.transpose(1, 2).reshape(batch, tokens, -1), v], dim=2)
