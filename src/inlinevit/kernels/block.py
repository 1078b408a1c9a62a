"""The transformer block with InLine or softmax attention for inference: one operator, float32 or int8."""

import math
from collections.abc import Sequence
from ctypes import byref
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ._library import CBlock, CWindows, call
from .attention import OPS, WindowSizes, check_windows
from .packing import PackedLinear, describe_linear, pack_linear

# The tensors of a packed block: these, then four of each linear layer.
LOCAL = ("local1_weight", "local1_bias", "local2_weight", "local2_bias")
OPTIONAL = (*LOCAL, "lepe_weight", "lepe_bias", "relative_bias")
VECTORS = ("norm1_weight", "norm1_bias", "norm2_weight", "norm2_bias", *OPTIONAL)
LINEARS = ("qkv", "proj", "fc1", "fc2")
# The kernel reads whole vectors of LePE's bias and of the biases of relative positions.
PADDING = 16
# Tokens that the kernel computes at once (native/block.h); the prefix tokens of an image are not divided.
TILE_TOKENS = 128


@dataclass(frozen=True)
class PackedBlock:
    """The weights of a block, packed. It does not follow later changes of the weights.

    Attributes:
        tensors: Those named by VECTORS, of which the OPTIONAL ones may be empty; then a PackedLinear for each of
            LINEARS.
        hidden_dim: Width of the MLP.
        num_heads: Heads.
        kernels_before_norm: Whether the local residual's mean token is that of the block's input, or of its norm.
        norm1_eps: eps of the first norm.
        norm2_eps: eps of the second norm.
        softmax: Whether attention is softmax, or InLine.
        relative_window: See pack_block.
    """

    tensors: tuple[Tensor, ...]
    hidden_dim: int
    num_heads: int
    kernels_before_norm: bool
    norm1_eps: float
    norm2_eps: float
    softmax: bool
    relative_window: int

    def __call__(self, x: Tensor, windows: Sequence[WindowSizes], *, prefix_only: bool = False) -> Tensor:
        """Map tokens to tokens, without a gradient.

        Args:
            x: (batch, prefix + H·W, channels), float32 on the CPU.
            windows: layers.layouts.Windows of each head group: what a layout returns.
            prefix_only: Compute the outputs of the prefix tokens only; the window must cover the map.

        Returns:
            (batch, prefix + H·W, channels), or (batch, prefix, channels).
        """
        if type(x) is Tensor and not torch.compiler.is_compiling() and not torch.jit.is_tracing():
            # The dispatcher and the checks of all tensors would take longer than a small block.
            return compute(self.description, x, windows, prefix_only)
        numbers = [number for group in windows for number in group]
        return torch.ops.inlinevit.block(x, list(self.tensors), numbers, *self.options, prefix_only)

    @property
    def options(self) -> tuple[Any, ...]:
        """All that is not a tensor, as describe_block takes it."""
        norms = (self.kernels_before_norm, self.norm1_eps, self.norm2_eps)
        return (self.hidden_dim, self.num_heads, *norms, self.softmax, self.relative_window)

    @cached_property
    def description(self) -> CBlock:
        """The weights for the library; it has addresses of the tensors, and is never copied or pickled."""
        return describe_block(self.tensors, *self.options)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "description"}


def pack_block(
    *,
    norm1: nn.LayerNorm,
    qkv: nn.Linear,
    proj: nn.Linear,
    norm2: nn.LayerNorm,
    fc1: nn.Linear,
    fc2: nn.Linear,
    num_heads: int,
    local_residual: tuple[nn.Conv1d, nn.Conv1d] | None = None,
    lepe: nn.Conv2d | None = None,
    kernels_before_norm: bool = False,
    softmax: bool = False,
    relative_position_bias_table: Tensor | None = None,
    relative_window: int = 0,
    int8: bool = False,
) -> PackedBlock:
    """Pack the modules of layers.Block with InLineAttention (φ = identity) or SoftmaxAttention, and a plain MLP.

    Args:
        norm1: Before attention.
        qkv: To queries, keys and values.
        proj: After attention.
        norm2: Before the MLP.
        fc1: First layer of the MLP, followed by GELU.
        fc2: Second layer of the MLP.
        num_heads: Heads.
        local_residual: fc1 and fc2 of LocalResidual.
        lepe: LePE, a depthwise 3×3 convolution.
        kernels_before_norm: See PackedBlock.
        softmax: Whether attention is softmax, which has no local residual, or InLine.
        relative_position_bias_table: Biases of relative positions for softmax, ((2 · relative_window - 1)², heads).
        relative_window: The side of the windows that they are made for; smaller ones use the middle of the table.
        int8: Quantise the weights of the four linear layers.
    """
    if softmax and local_residual is not None:
        raise ValueError("softmax attention has no local residual: leave out local_residual")
    if not softmax and relative_position_bias_table is not None:
        raise ValueError("InLine attention has no biases of relative positions: leave out the table, or pass softmax")
    channels = proj.out_features
    width = channels // num_heads
    tensors = [parameter.detach() for norm in (norm1, norm2) for parameter in (norm.weight, norm.bias)]
    if local_residual is None:
        tensors += [torch.empty(0)] * 4
    else:
        first, second = (layer.weight.detach().view(num_heads, -1, width) for layer in local_residual)
        bias1, bias2 = (layer.bias.detach() for layer in local_residual if layer.bias is not None)
        # Inputs before outputs, taps before channels: outputs are computed a vector at a time.
        tensors += [first.transpose(1, 2), bias1]
        tensors += [second.view(num_heads, width, 9, width).permute(0, 3, 2, 1), bias2.view(channels, 9).t()]
    if lepe is None:
        tensors += [torch.empty(0)] * 2
    else:
        assert lepe.bias is not None
        tensors += [lepe.weight.detach().view(channels, 9).t(), F.pad(lepe.bias.detach(), (0, PADDING))]
    if relative_position_bias_table is None:
        tensors.append(torch.empty(0))
        relative_window = 0
    else:
        # From the last position to the first, so that the biases of consecutive keys are consecutive; to base 2.
        table = relative_position_bias_table.detach().t().flip(1) * math.log2(math.e)
        tensors.append(F.pad(table.flatten(), (0, PADDING)))
    # Copies, also of what could be used as it is: the weights of the modules may change.
    packed = [tensor.to("cpu", torch.float32, copy=True, memory_format=torch.contiguous_format) for tensor in tensors]
    for layer in (qkv, proj, fc1, fc2):
        packed += pack_linear(layer.weight, layer.bias, int8=int8)
    return PackedBlock(
        tuple(packed),
        hidden_dim=fc1.out_features,
        num_heads=num_heads,
        kernels_before_norm=kernels_before_norm,
        norm1_eps=norm1.eps,
        norm2_eps=norm2.eps,
        softmax=softmax,
        relative_window=relative_window,
    )


OPS.define(
    "block(Tensor x, Tensor[] tensors, SymInt[] windows, int hidden_dim, int num_heads, bool kernels_before_norm, "
    "float norm1_eps, float norm2_eps, bool softmax, int relative_window, bool prefix_only) -> Tensor"
)


@torch.library.register_fake("inlinevit::block", lib=OPS)
def make_output(x: Tensor, tensors: Sequence[Tensor], windows: Sequence[int], *options: Any) -> Tensor:
    """Return an empty output."""
    prefix_only = options[-1]
    tokens = x.shape[1] - windows[0] * windows[1] if prefix_only else x.shape[1]
    return x.new_empty(x.shape[0], tokens, x.shape[2])


@torch.library.impl("inlinevit::block", "CPU", lib=OPS)
def block(x: Tensor, tensors: Sequence[Tensor], windows: Sequence[int], *options: Any) -> Tensor:
    """Compute a block; see PackedBlock.__call__. options: those of describe_block, and prefix_only."""
    groups = [windows[i : i + 8] for i in range(0, len(windows), 8)]
    return compute(describe_block(tensors, *options[:-1]), x, groups, options[-1])


def describe_block(
    tensors: Sequence[Tensor],
    hidden_dim: int,
    num_heads: int,
    kernels_before_norm: bool,
    norm1_eps: float,
    norm2_eps: float,
    softmax: bool,
    relative_window: int,
) -> CBlock:
    """Return the weights of a block for the library, which keeps no reference to them.

    Raises:
        ValueError: The tensors are not those of a packed block of this size.
    """
    if len(tensors) != len(VECTORS) + 4 * len(LINEARS):
        raise ValueError("expected the tensors of a PackedBlock")
    channels = tensors[0].numel()
    width = channels // num_heads
    described = CBlock(num_heads=num_heads, head_dim=width, scale=width**-0.5)
    described.kernels_before_norm = kernels_before_norm
    described.norm1_eps, described.norm2_eps = norm1_eps, norm2_eps
    described.softmax, described.relative_window = softmax, relative_window
    shapes: list[tuple[int, ...]] = [(channels,)] * 4
    shapes += [(num_heads, width, width), (channels,), (num_heads, width, 9, width), (9, channels)]
    shapes += [(9, channels), (channels + PADDING,), (num_heads * (2 * relative_window - 1) ** 2 + PADDING,)]
    for name, shape, tensor in zip(VECTORS, shapes, tensors, strict=False):
        if tensor.numel() == 0 and name in OPTIONAL:
            continue
        if tensor.dtype != torch.float32 or tuple(tensor.shape) != shape or not tensor.is_contiguous():
            raise ValueError(f"{name} of a packed block must be float32 of shape {shape}, but it is {tensor.shape}")
        if name in (LOCAL if softmax else ("relative_bias",)):
            raise ValueError(f"{name} does not belong to a block with {'softmax' if softmax else 'InLine'} attention")
        setattr(described, name, tensor.data_ptr())
    sizes = [(channels, 3 * channels), (channels, channels), (channels, hidden_dim), (hidden_dim, channels)]
    for index, (name, size) in enumerate(zip(LINEARS, sizes, strict=True)):
        first = len(VECTORS) + 4 * index
        setattr(described, name, describe_linear(PackedLinear(*tensors[first : first + 4]), *size))
    return described


def compute(weights: CBlock, x: Tensor, windows: Sequence[WindowSizes], prefix_only: bool) -> Tensor:
    """Compute a block; see PackedBlock.__call__."""
    block = describe_call(weights, x, windows, prefix_only)
    out = x.new_empty(x.shape[0], block.prefix if prefix_only else x.shape[1], x.shape[2])
    if out.numel() > 0:
        x = x.contiguous()
        call("blocks", byref(block), 1, x.data_ptr(), out.data_ptr())
    return out


def run_blocks(blocks: Sequence[PackedBlock], x: Tensor, windows: Sequence[Sequence[WindowSizes]]) -> Tensor:
    """Compute consecutive blocks in one call of the library, without a gradient.

    In between, Python takes a noticeable part of the time of small blocks.

    Args:
        blocks: At least one.
        x: (batch, prefix + H·W, channels), float32 on the CPU.
        windows: Of each block, see PackedBlock.__call__.

    Returns:
        (batch, prefix + H·W, channels).
    """
    described = [
        describe_call(block.description, x, groups, False) for block, groups in zip(blocks, windows, strict=True)
    ]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if out.numel() > 0:
        x = x.contiguous()
        call("blocks", (CBlock * len(described))(*described), len(described), x.data_ptr(), out.data_ptr())
    return out


def describe_call(weights: CBlock, x: Tensor, windows: Sequence[WindowSizes], prefix_only: bool) -> CBlock:
    """Return a block with the sizes of a call, for the library; see PackedBlock.__call__."""
    channels = weights.num_heads * weights.head_dim
    if x.dim() != 3 or x.shape[2] != channels or x.dtype != torch.float32 or x.device.type != "cpu":
        raise ValueError(
            f"expected float32 tokens of shape (batch, tokens, {channels}) on the CPU, but got {x.dtype} of shape "
            f"{tuple(x.shape)} on {x.device}"
        )
    for group in windows:
        check_windows(group, x.shape[1], weights.num_heads)
    if [tuple(group[6:]) for group in windows] not in ([(0, 1)], [(0, 2), (1, 2)]):
        raise ValueError(f"expected the windows of one head group or of two, but got {windows}")
    map_height, map_width, height, width = windows[0][:4]
    prefix = x.shape[1] - map_height * map_width
    if weights.relative_bias and (prefix > 0 or max(max(group[2:4]) for group in windows) > weights.relative_window):
        raise ValueError(
            f"biases of relative positions for windows of up to {weights.relative_window}×{weights.relative_window} do "
            f"not fit {prefix} prefix tokens and {windows}"
        )
    if prefix_only and (prefix == 0 or (height, width) != (map_height, map_width) or len(windows) > 1):
        raise ValueError("prefix_only needs prefix tokens, and one window that covers the map")
    if prefix_only and prefix > TILE_TOKENS:
        raise ValueError(f"prefix_only supports up to {TILE_TOKENS} prefix tokens, but there are {prefix}")
    # A copy, since several threads may compute with the same weights.
    block = CBlock.from_buffer_copy(weights)
    block.batch, block.prefix, block.threads = x.shape[0], prefix, torch.get_num_threads()
    block.prefix_only, block.num_head_groups = prefix_only, len(windows)
    for index, group in enumerate(windows):
        block.windows[index] = CWindows(*group)
    return block
