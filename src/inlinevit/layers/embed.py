"""Patch embedding, downsampling and position embedding."""

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_function, resample_abs_pos_embed
from torch import Tensor, nn

from ..ops._common import holds, is_exporting, is_symbolic


@register_notrace_function
def pad_to_multiple(x: Tensor, multiple: int) -> Tensor:
    """Pad x (batch, channels, H, W) with zeros at the bottom and on the right, up to the next multiple."""
    height, width = x.shape[-2:]
    # No negative number is divided: runtimes round such quotients towards zero, Python rounds them down.
    bottom, right = ((length + multiple - 1) // multiple * multiple - length for length in (height, width))
    return x if holds(bottom == 0) and holds(right == 0) else F.pad(x, (0, right, 0, bottom))


class ConvEmbed(nn.Module):
    """A strided convolution and a LayerNorm: (batch, in_chans, H, W) to (batch, H / stride, W / stride, dim).

    The map is padded to whole strides, so that no pixel is lost: the sizes above are rounded up.

    Args:
        in_chans: Channels of the map.
        dim: Channels of the tokens.
        kernel: Side length of a patch.
        stride: Distance between patches.
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
        # Large non-overlapping patches of an image are multiplied as rows of a matrix: faster on a CPU.
        self.patches_as_rows = kernel == stride and stride >= 8 and padding == 0 and in_chans <= 4
        self.proj = nn.Conv2d(in_chans, dim, kernel, stride, padding, device=device, dtype=dtype)
        self.norm = nn.LayerNorm(dim, device=device, dtype=dtype) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, in_chans, H, W) to (batch, H / stride, W / stride, dim)."""
        x = pad_to_multiple(x, self.stride)
        if self.patches_as_rows:
            return self.norm(F.linear(patch_rows(x, self.stride), self.proj.weight.flatten(1), self.proj.bias))
        # Residual connections would keep the order of the map in memory, and each norm and product would copy it.
        return self.norm(self.proj(x).permute(0, 2, 3, 1).contiguous())


@register_notrace_function
def patch_rows(x: Tensor, side: int) -> Tensor:
    """Split images (batch, channels, H, W) into patches (batch, H / side, W / side, channels · side · side)."""
    batch, channels, height, width = x.shape
    x = x.reshape(batch, channels, height // side, side, width // side, side)
    return x.permute(0, 2, 4, 1, 3, 5).flatten(3)


class PatchMerging(nn.Module):
    """Swin's downsampling: concatenate four neighbours, LayerNorm, linear.

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
        """Map (batch, dim, H, W) to (batch, H / 2, W / 2, dim_out)."""
        x = pad_to_multiple(x, 2)
        batch, dim, height, width = x.shape
        x = x.permute(0, 2, 3, 1).reshape(batch, height // 2, 2, width // 2, 2, dim)
        # In each square, column by column: (0, 0), (1, 0), (0, 1), (1, 1) as (row, column).
        x = x.permute(0, 1, 3, 4, 2, 5).flatten(3)
        return self.reduction(self.norm(x))


class ResamplePosEmbed(nn.Module):
    """Resize learned absolute positions to the token grid of the input.

    It has no parameters: the positions belong to the module that adds them, as `pos_embed` in its state dict.

    Args:
        grid: (H, W) of the map for which the positions are learned.
        num_prefix_tokens: Tokens before the map; their positions are never resized.
        interpolation: "bicubic" (antialiased, as timm's ViTs) or "bilinear" (as PVT).
    """

    def __init__(self, grid: tuple[int, int], *, num_prefix_tokens: int = 0, interpolation: str = "bicubic") -> None:
        super().__init__()
        if interpolation not in ("bicubic", "bilinear"):
            raise ValueError(f"unknown interpolation {interpolation!r}: choose bicubic or bilinear")
        self.grid = grid
        self.num_prefix_tokens = num_prefix_tokens
        self.interpolation = interpolation

    @property
    def num_tokens(self) -> int:
        """Number of learned positions."""
        return self.num_prefix_tokens + self.grid[0] * self.grid[1]

    def forward(self, pos_embed: Tensor, feat_size: tuple[int, int]) -> Tensor:
        """Return the positions (1, prefix + H·W, dim) of a map of size (H, W) from those of the learned grid."""
        return resample_pos_embed(pos_embed, self.grid, feat_size, self.num_prefix_tokens, self.interpolation)

    def set_grid(self, pos_embed: nn.Parameter, grid: tuple[int, int]) -> nn.Parameter:
        """Use another learned grid from now on, and return the positions for it."""
        resized = resample_pos_embed(pos_embed.detach(), self.grid, grid, self.num_prefix_tokens, self.interpolation)
        self.grid = grid
        return nn.Parameter(resized, requires_grad=pos_embed.requires_grad)


@register_notrace_function
def resample_pos_embed(
    pos_embed: Tensor, old: tuple[int, int], new: tuple[int, int], num_prefix_tokens: int, interpolation: str
) -> Tensor:
    """Resize position embeddings (1, prefix + H·W, dim) from one grid to another."""
    if is_exporting() and is_symbolic(*new):
        return resample_by_products(pos_embed, old, new, num_prefix_tokens, interpolation)
    return resample_abs_pos_embed(
        pos_embed,
        [new[0], new[1]],
        [old[0], old[1]],
        num_prefix_tokens=num_prefix_tokens,
        interpolation=interpolation,
        antialias=interpolation == "bicubic",
    )


def resample_by_products(
    pos_embed: Tensor, old: tuple[int, int], new: tuple[int, int], num_prefix_tokens: int, interpolation: str
) -> Tensor:
    """resample_pos_embed as a product with a matrix for each axis: for sizes that are known when a graph runs.

    Runtimes have no antialiased bicubic interpolation, or another one than torch.
    """
    prefix, grid = pos_embed[:, :num_prefix_tokens], pos_embed[:, num_prefix_tokens:]
    make = {"bicubic": bicubic_matrix, "bilinear": bilinear_matrix}[interpolation]
    rows, columns = (make(before, after, pos_embed.device) for before, after in zip(old, new, strict=True))
    dim = pos_embed.shape[2]
    # (h, w · dim) -> (H, w · dim) -> (w, H · dim) -> (W, H · dim)
    resized = rows @ grid.float().reshape(old[0], old[1] * dim)
    resized = resized.reshape(new[0], old[1], dim).transpose(0, 1).reshape(old[1], new[0] * dim)
    resized = (columns @ resized).reshape(new[1], new[0], dim).transpose(0, 1)
    resized = resized.reshape(1, new[0] * new[1], dim).to(pos_embed.dtype)
    return resized if num_prefix_tokens == 0 else torch.cat([prefix, resized], dim=1)


def bilinear_matrix(old: int, new: int, device: torch.device) -> Tensor:
    """Return the weights (new, old) of torch's bilinear interpolation along one axis, without aligned corners."""
    places = source_places(old, new, device).clamp(0, old - 1)
    return (1 - (torch.arange(old, device=device) - places[:, None]).abs()).clamp(min=0)


def bicubic_matrix(old: int, new: int, device: torch.device) -> Tensor:
    """Return the weights (new, old) of torch's antialiased bicubic interpolation along one axis."""
    places = source_places(old, new, device)
    # Where the map becomes smaller, the filter becomes wider.
    stretch = torch.full((), new, dtype=torch.float32, device=device).div(old).clamp(max=1)
    distance = ((torch.arange(old, device=device) - places[:, None]) * stretch).abs()
    # Keys' cubic convolution with a = -1/2.
    near = (1.5 * distance - 2.5) * distance**2 + 1
    far = ((-0.5 * distance + 2.5) * distance - 4) * distance + 2
    weights = torch.where(distance < 1, near, torch.where(distance < 2, far, 0.0))
    return weights / weights.sum(dim=1, keepdim=True)


def source_places(old: int, new: int, device: torch.device) -> Tensor:
    """Return where the centres of `new` tokens are among `old` ones along the same axis, (new,)."""
    ratio = old / torch.full((), new, dtype=torch.float32, device=device)
    return (torch.arange(new, device=device) + 0.5) * ratio - 0.5
