"""The local residual: a dynamic depthwise 3×3 convolution, with a kernel for each image and channel."""

import torch.nn.functional as F
from torch import Tensor

from ._common import promote


def local_residual(v: Tensor, kernels: Tensor, size: tuple[int, int]) -> Tensor:
    """Convolve each channel of each image with its own 3×3 kernel (correlation, zero padding).

    Args:
        v: Values (batch, heads, H·W, width).
        kernels: Any shape that holds batch × heads × width × 3 × 3 numbers in this order.
        size: (H, W) of the map.

    Returns:
        (batch, heads, H·W, width), in v's dtype.
    """
    if v.dim() != 4:
        raise ValueError("v must have four dimensions: (batch, heads, tokens, width)")
    batch, heads, tokens, width = v.shape
    height, breadth = size
    if tokens != height * breadth:
        raise ValueError(f"{tokens} tokens do not make a map of {height}×{breadth}: pass the size of the token grid")
    if kernels.numel() != 9 * batch * heads * width:
        raise ValueError(f"expected 9 numbers for each of {batch}×{heads}×{width} channels, but got {kernels.shape}")
    # (9, batch, 1, 1, channels): each tap is spread over the map.
    taps = promote(kernels).reshape(batch, heads * width, 9).permute(2, 0, 1).contiguous()[:, :, None, None]
    # Channels last: (batch, H, W, channels), a border of zeros around it.
    padded = F.pad(promote(v).transpose(1, 2).reshape(batch, height, breadth, heads * width), (0, 0, 1, 1, 1, 1))
    # Nine shifted copies, each scaled by its tap. A grouped convolution (groups = batch × channels) would freeze the
    # batch size in exported graphs.
    out = padded[:, :height, :breadth] * taps[0]
    for tap in range(1, 9):
        row, column = tap // 3, tap % 3
        out.addcmul_(padded[:, row : row + height, column : column + breadth], taps[tap])
    return out.view(batch, tokens, heads, width).transpose(1, 2).to(v.dtype)
