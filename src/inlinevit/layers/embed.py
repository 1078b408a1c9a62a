"""From pixels or a finer map to tokens."""

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_function, resample_abs_pos_embed, trunc_normal_
from torch import Tensor, nn

from ..ops._common import needs_gradient
from ._kept import KeptTensors, may_keep


@register_notrace_function
def pad_to_multiple(x: Tensor, multiple: int) -> Tensor:
    """Zeros at the bottom and on the right of x (batch, channels, H, W), up to the next multiple."""
    height, width = x.shape[-2:]
    bottom, right = -height % multiple, -width % multiple
    return F.pad(x, (0, right, 0, bottom)) if bottom > 0 or right > 0 else x


class ConvEmbed(nn.Module):
    """A strided convolution and a LayerNorm: (batch, in_chans, H, W) to (batch, H / stride, W / stride, dim).

    The map is padded to whole strides, so that no pixel is lost: the sizes above are rounded up.

    Args:
        in_chans: Channels of the map.
        dim: Channels of the tokens.
        kernel: Side of a patch.
        stride: Distance of patches.
        padding: Border of zeros around the map, for overlapping patches.
        norm: Whether a LayerNorm (eps 1e-5) follows.
    """

    def __init__(
        self,
        in_chans: int,
        dim: int,
        *,
        kernel: int,
        stride: int,
        padding: int = 0,
        norm: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, value in {"in_chans": in_chans, "dim": dim, "kernel": kernel, "stride": stride}.items():
            if value < 1:
                raise ValueError(f"{name} is {value}: it should be at least 1")
        self.stride = stride
        # Large patches of an image, side by side, are multiplied as rows of a matrix: faster on a CPU.
        self.patches_as_rows = kernel == stride and stride >= 8 and padding == 0 and in_chans <= 4
        self.proj = nn.Conv2d(in_chans, dim, kernel, stride, padding, device=device, dtype=dtype)
        self.norm = nn.LayerNorm(dim, device=device, dtype=dtype) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """(batch, in_chans, H, W) to (batch, H / stride, W / stride, dim)."""
        x = pad_to_multiple(x, self.stride)
        if self.patches_as_rows:
            return self.norm(F.linear(patch_rows(x, self.stride), self.proj.weight.flatten(1), self.proj.bias))
        return self.norm(self.proj(x).permute(0, 2, 3, 1))


@register_notrace_function
def patch_rows(x: Tensor, side: int) -> Tensor:
    """Images (batch, channels, H, W) to patches (batch, H / side, W / side, channels · side · side)."""
    batch, channels, height, width = x.shape
    x = x.reshape(batch, channels, height // side, side, width // side, side)
    return x.permute(0, 2, 4, 1, 3, 5).flatten(3)


class PatchMerging(nn.Module):
    """Swin's way to a coarser map: four neighbours side by side, LayerNorm, linear.

    Args:
        dim: Channels of the map.
        dim_out: Channels of the tokens.
    """

    def __init__(
        self,
        dim: int,
        dim_out: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * dim, device=device, dtype=dtype)
        self.reduction = nn.Linear(4 * dim, dim_out, bias=False, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, dim, H, W) to (batch, H / 2, W / 2, dim_out)."""
        x = pad_to_multiple(x, 2)
        batch, dim, height, width = x.shape
        x = x.permute(0, 2, 3, 1).reshape(batch, height // 2, 2, width // 2, 2, dim)
        # Of each square, column by column: (0, 0), (1, 0), (0, 1), (1, 1) as (row, column).
        x = x.permute(0, 1, 3, 4, 2, 5).flatten(3)
        return self.reduction(self.norm(x))


class TableState:
    """What a table of positions was like when positions were resized from it, and the resized positions by size.

    Args:
        table: The table.
        geometry: What else decides how it is resized.
    """

    def __init__(self, table: Tensor, geometry: tuple[object, ...]) -> None:
        # An alias: the memory is not handed out again, so that another table cannot have the same address.
        self.table = table.detach()
        self.version = table._version
        self.geometry = geometry
        # Writing through table.data or NumPy changes no version. On a CPU, values are compared at little cost.
        self.values = table.detach().clone() if table.device.type == "cpu" else None
        self.kept = KeptTensors()

    def still_holds(self, table: Tensor, geometry: tuple[object, ...]) -> bool:
        """Whether the table is still the same, with the same values."""
        return (
            self.geometry == geometry
            and self.version == table._version
            and self.table.device == table.device
            and self.table.dtype == table.dtype
            and self.table.shape == table.shape
            and self.table.stride() == table.stride()
            and self.table.data_ptr() == table.data_ptr()
            and (self.values is None or torch.equal(self.values, table))
        )


class ResizedPositions:
    """Positions that were resized from a table, dropped when it changes; copies are empty."""

    def __init__(self) -> None:
        self.state: TableState | None = None

    def of_table(self, table: Tensor, geometry: tuple[object, ...]) -> KeptTensors:
        """Positions by size that were resized from the table as it is now.

        Args:
            table: The table.
            geometry: What else decides how it is resized.
        """
        state = self.state
        if state is None or not state.still_holds(table, geometry):
            self.state = state = TableState(table, geometry)
        return state.kept

    def __reduce__(self) -> tuple[type["ResizedPositions"], tuple[()]]:
        return ResizedPositions, ()


class PositionEmbedding(nn.Module):
    """Learned absolute positions, resized to the grid at hand.

    Args:
        dim: Channels.
        grid: (H, W) of the map for which the positions are learned.
        num_prefix_tokens: Tokens before the map; they have positions of their own, which are never resized.
        interpolation: "bicubic" (antialiased, as timm's ViTs) or "bilinear" (as PVT).
    """

    def __init__(
        self,
        dim: int,
        grid: tuple[int, int],
        *,
        num_prefix_tokens: int = 0,
        interpolation: str = "bicubic",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if interpolation not in ("bicubic", "bilinear"):
            raise ValueError(f"unknown interpolation {interpolation!r}: choose bicubic or bilinear")
        self.grid = grid
        self.num_prefix_tokens = num_prefix_tokens
        self.interpolation = interpolation
        table = torch.empty(1, num_prefix_tokens + grid[0] * grid[1], dim, device=device, dtype=dtype)
        self.table = nn.Parameter(table)
        # Resized positions that are kept; None = none are.
        self.resized: ResizedPositions | None = None
        self.reset_parameters()

    @torch.jit.ignore
    def reset_parameters(self) -> None:
        """Draw the positions anew."""
        trunc_normal_(self.table, std=0.02)

    def forward(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        """x (batch, prefix + H·W, dim) plus the positions of a map of this size."""
        return x + self.at(size)

    def at(self, size: tuple[int, int]) -> Tensor:
        """The positions of a map of this size, (1, prefix + H·W, dim)."""
        if not torch.jit.is_scripting() and self.resized is not None and not torch.compiler.is_compiling():
            return self.keep_resized(size)
        return resize_positions(self.table, self.grid, size, self.num_prefix_tokens, self.interpolation)

    @torch.jit.ignore
    def freeze(self) -> None:
        """Take no gradients, and keep resized positions from now on, as long as the table stays the same."""
        self.table.requires_grad_(False)
        self.resized = ResizedPositions()

    @torch.jit.ignore
    def keep_resized(self, size: tuple[int, int]) -> Tensor:
        """The positions of a map of this size, resized once for each state of the table.

        Kept ones are for inference alone, and never become constants of a graph that is being recorded.
        """
        table, grid, prefix, mode = self.table, self.grid, self.num_prefix_tokens, self.interpolation
        if (
            self.resized is None
            # The table itself.
            or size == grid
            # Sizes that are recorded symbolically are no integers.
            or not (type(size[0]) is int and type(size[1]) is int)
            # torch.func passes tensors of its own for parameters; in-place changes of inference tensors leave no trace.
            or type(table) is not nn.Parameter
            or table.is_inference()
            or needs_gradient(table)
            or not may_keep(table.device)
        ):
            return resize_positions(table, grid, size, prefix, mode)
        # What was computed in inference mode could not be used with gradients later.
        with torch.inference_mode(False), torch.no_grad():
            kept = self.resized.of_table(table, (grid, prefix, mode))
            positions = kept.get(size)
            if positions is None:
                positions = resize_positions(table, grid, size, prefix, mode)
                kept.keep(size, positions)
        return positions

    @torch.jit.ignore
    def set_grid(self, grid: tuple[int, int]) -> None:
        """Keep positions for another grid from now on, resized from those at hand."""
        prefix, mode = self.num_prefix_tokens, self.interpolation
        table = resize_positions(self.table.detach(), self.grid, grid, prefix, mode)
        self.table = nn.Parameter(table, requires_grad=self.table.requires_grad)
        self.grid = grid


@register_notrace_function
def resize_positions(
    table: Tensor, old: tuple[int, int], new: tuple[int, int], num_prefix_tokens: int, interpolation: str
) -> Tensor:
    """Position embeddings (1, prefix + H·W, dim) of one grid, resized to another."""
    return resample_abs_pos_embed(
        table,
        [new[0], new[1]],
        [old[0], old[1]],
        num_prefix_tokens=num_prefix_tokens,
        interpolation=interpolation,
        antialias=interpolation == "bicubic",
    )
