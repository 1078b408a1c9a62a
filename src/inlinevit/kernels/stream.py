"""A block with InLine attention over a map of any size: two passes over chunks of its tokens, for inference.

Keys and values are linear in the normed tokens x, so that for each head

    v̄ + s·q·C,  C = W_k · Cov(x) · W_vᵀ,  q = W_q·x + b_q

is one linear layer of x once the covariance of x is known. The first pass gathers it, the second applies the layer.
"""

from ctypes import byref
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ._library import CBlock, CRows, CWindows, call
from .block import LINEARS, VECTORS, PackedBlock
from .packing import PackedLinear, describe_linear, pack_linear, select_outputs, unpack_weight


@dataclass(frozen=True, eq=False)
class TokenMoments:
    """What a block's attention has to know of some tokens; all of it float64 on the CPU.

    Attributes:
        count: Number of tokens, ().
        mean: Their mean after the first norm, (channels,).
        kernel_mean: The mean token that the kernels of the local residual are made of, (channels,).
        covariance: Sum of the products of the centred normed tokens, not divided by their number,
            (channels, channels).
    """

    count: Tensor
    mean: Tensor
    kernel_mean: Tensor
    covariance: Tensor

    def merge(self, other: "TokenMoments") -> "TokenMoments":
        """Return the moments of the tokens of both: Chan's formula, exact in any order."""
        count = self.count + other.count
        fraction = other.count / count.clamp(min=1.0)
        difference = other.mean - self.mean
        return TokenMoments(
            count,
            self.mean + fraction * difference,
            self.kernel_mean + fraction * (other.kernel_mean - self.kernel_mean),
            self.covariance + other.covariance + self.count * fraction * torch.outer(difference, difference),
        )


@dataclass(frozen=True, eq=False)
class StreamedWeights:
    """The weights of a block for the tokens of one map.

    Attributes:
        attention: The linear layer from normed tokens to v̄ + s·q·C.
        taps: The kernels of the convolution of the values, (9, channels); None without one.
    """

    attention: PackedLinear
    taps: Tensor | None


class StreamedBlock:
    """A packed block with InLine attention over the whole map, which takes the map in chunks of rows.

    Summarise all chunks and the prefix tokens, if there are any, and merge the moments; then apply the block to each of
    them. Memory for intermediate results does not depend on the size of a chunk, except for two rows of tokens.

    Args:
        block: The weights, float32 or int8.
    """

    def __init__(self, block: PackedBlock) -> None:
        if block.softmax:
            raise ValueError("softmax attention cannot be streamed: a query needs all keys, not only their covariance")
        self.block = block
        self.vectors = dict(zip(VECTORS, block.tensors, strict=False))
        self.channels = block.tensors[0].numel()
        first = len(VECTORS) + 4 * LINEARS.index("qkv")
        self.qkv = PackedLinear(*block.tensors[first : first + 4])
        self.int8 = self.qkv.weight.dtype == torch.int8
        self.values = select_outputs(self.qkv, 2 * self.channels, 3 * self.channels)
        # The last moments and their weights: all chunks of a map have the same.
        self.last: tuple[TokenMoments, StreamedWeights] | None = None

    def summarize(self, x: Tensor, mask: Tensor | None = None) -> TokenMoments:
        """Return the moments of tokens of the map, or of prefix tokens.

        Args:
            x: (tokens, channels), float32 on the CPU.
            mask: (tokens,), boolean; tokens that are False take no part in any mean or sum.
        """
        self.check_tokens(x, "x", x.shape[0] if x.dim() == 2 else None)
        check_mask(mask, "mask", x.shape[0])
        channels = self.channels
        moments = TokenMoments(
            torch.zeros((), dtype=torch.float64),
            torch.zeros(channels, dtype=torch.float64),
            torch.zeros(channels, dtype=torch.float64),
            torch.zeros(channels, channels, dtype=torch.float64),
        )
        if x.shape[0] > 0:
            x, mask = x.contiguous(), None if mask is None else mask.contiguous()
            results = (moments.count, moments.mean, moments.kernel_mean, moments.covariance)
            pointers = [result.data_ptr() for result in results]
            call("summarize", byref(self.describe(x.shape[0], 1)), x.shape[0], x.data_ptr(), address(mask), *pointers)
        return moments

    def apply(
        self,
        x: Tensor,
        moments: TokenMoments,
        width: int,
        above: Tensor | None,
        below: Tensor | None,
        out: Tensor,
        *,
        mask: Tensor | None = None,
        mask_above: Tensor | None = None,
        mask_below: Tensor | None = None,
    ) -> None:
        """Compute the block for a chunk of rows.

        Args:
            x: (rows · width, channels), float32 on the CPU.
            moments: Those of all tokens of the map and of the prefix tokens.
            width: Tokens in a row.
            above: The row above the chunk before the block, (width, channels); None at the border of the map.
            below: The row below the chunk, likewise.
            out: (rows · width, channels): the result; it may be x.
            mask: (rows · width,), boolean: as given to summarize. The values of tokens that are False count as zero in
                the convolution.
            mask_above: (width,): the mask of above.
            mask_below: (width,): the mask of below.
        """
        if width < 1 or x.dim() != 2 or x.shape[0] % width != 0:
            raise ValueError(f"expected whole rows of {width} tokens, but x is of shape {tuple(x.shape)}")
        self.check_tokens(x, "x", x.shape[0])
        self.check_tokens(out, "out", x.shape[0])
        if not out.is_contiguous() or not x.is_contiguous():
            raise ValueError("x and out must be contiguous: pass whole rows of a map")
        if overlaps(out, x) and out.data_ptr() != x.data_ptr():
            raise ValueError("out must be x, or share no memory with it")
        halo = ((above, "above", mask_above), (below, "below", mask_below))
        for tokens, name, _ in halo:
            if tokens is not None:
                self.check_tokens(tokens, name, width)
                if overlaps(out, tokens):
                    raise ValueError(f"{name} shares memory with out: keep a copy of the row before it is overwritten")
        check_mask(mask, "mask", x.shape[0])
        for tokens, name, its_mask in halo:
            check_mask(its_mask, f"mask_{name}", width)
            if tokens is None and its_mask is not None:
                raise ValueError(f"mask_{name} needs the tokens of {name}")
            if tokens is not None and (its_mask is None) != (mask is None):
                raise ValueError(f"mask and mask_{name} belong together: pass both or none")
        weights = self.weights(moments)
        tensors = (above, below, mask, mask_above, mask_below)
        kept = [None if tensor is None else tensor.contiguous() for tensor in tensors]
        self.compute(x, weights.attention, weights.taps, width, kept, out)

    def apply_prefix(self, x: Tensor, moments: TokenMoments) -> Tensor:
        """Compute the block for prefix tokens, which have no neighbours.

        Args:
            x: (tokens, channels), float32 on the CPU.
            moments: As for apply.

        Returns:
            (tokens, channels).
        """
        self.check_tokens(x, "x", x.shape[0] if x.dim() == 2 else None)
        x = x.contiguous()
        out = torch.empty_like(x)
        self.compute(x, self.weights(moments).attention, None, max(1, x.shape[0]), [None] * 5, out)
        return out

    def compute(
        self,
        x: Tensor,
        attention: PackedLinear,
        taps: Tensor | None,
        width: int,
        tensors: list[Tensor | None],
        out: Tensor,
    ) -> None:
        """Call the library; tensors: above, below and the three masks, contiguous."""
        if x.shape[0] == 0:
            return
        rows = CRows(x.shape[0] // width, width)
        rows.attention = describe_linear(attention, self.channels, self.channels)
        rows.values = describe_linear(self.values, self.channels, self.channels)
        rows.taps = address(taps)
        rows.above, rows.below, rows.mask, rows.mask_above, rows.mask_below = map(address, tensors)
        block = self.describe(rows.height, width)
        call("apply", byref(block), byref(rows), x.data_ptr(), out.data_ptr())

    def describe(self, height: int, width: int) -> CBlock:
        """Return the weights for the library, with one window of this size."""
        block = CBlock.from_buffer_copy(self.block.description)
        block.batch, block.prefix, block.threads, block.num_head_groups = 1, 0, torch.get_num_threads(), 1
        block.windows[0] = CWindows(height, width, height, width, 0, 0, 0, 1)
        return block

    def weights(self, moments: TokenMoments) -> StreamedWeights:
        """Return the weights for a map of these moments."""
        if moments.mean.shape != (self.channels,):
            raise ValueError(f"expected moments of {self.channels} channels, but they have {moments.mean.shape[0]}")
        last = self.last
        if last is None or last[0] is not moments:
            taps = self.make_taps(moments.kernel_mean)
            self.last = last = (moments, StreamedWeights(self.make_attention(moments), taps))
        return last[1]

    def make_attention(self, moments: TokenMoments) -> PackedLinear:
        """Return the linear layer from normed tokens to v̄ + s·q·C."""
        channels, heads = self.channels, self.block.num_heads
        weight = unpack_weight(self.qkv, channels).double()[: 3 * channels].view(3, heads, -1, channels)
        bias = self.qkv.bias.double()[: 3 * channels].view(3, heads, -1, 1)
        (w_q, w_k, w_v), (b_q, _, b_v) = weight.unbind(), bias.unbind()
        scale = self.block.description.scale / moments.count.clamp(min=1.0)
        # (heads, value width, key width)
        covariance = scale * (w_v @ moments.covariance @ w_k.transpose(1, 2))
        v_mean = (w_v @ moments.mean[:, None] + b_v) * (moments.count > 0)
        folded_weight = (covariance @ w_q).view(channels, channels)
        return pack_linear(folded_weight, (v_mean + covariance @ b_q).flatten(), int8=self.int8)

    def make_taps(self, mean: Tensor) -> Tensor | None:
        """Return the kernels of the convolution of the values, (9, channels), or None if there is none."""
        taps, heads = None, self.block.num_heads
        if self.vectors["local1_weight"].numel() > 0:
            weight1, bias1, weight2, bias2 = (
                self.vectors[f"local{layer}_{part}"].double() for layer in (1, 2) for part in ("weight", "bias")
            )
            hidden = F.gelu(mean.view(heads, 1, -1) @ weight1 + bias1.view(heads, 1, -1))
            # (heads, width in, 9, width out)
            made = torch.einsum("hi,hito->tho", hidden[:, 0], weight2)
            taps = made.flatten(1) + bias2
        if self.vectors["lepe_weight"].numel() > 0:
            static = self.vectors["lepe_weight"].double()
            taps = static if taps is None else taps + static
        return None if taps is None else taps.float().contiguous()

    def check_tokens(self, x: Tensor, name: str, tokens: int | None) -> None:
        """Raise ValueError for tokens that the kernels cannot take."""
        if x.shape != (tokens, self.channels) or x.dtype != torch.float32 or x.device.type != "cpu":
            expected = "tokens" if tokens is None else tokens
            raise ValueError(
                f"expected {name} to be float32 of shape ({expected}, {self.channels}) on the CPU, but got {x.dtype} "
                f"of shape {tuple(x.shape)} on {x.device}"
            )


def check_mask(mask: Tensor | None, name: str, tokens: int) -> None:
    """Raise ValueError for a mask that does not belong to this many tokens."""
    if mask is not None and (mask.dtype != torch.bool or mask.shape != (tokens,) or mask.device.type != "cpu"):
        raise ValueError(
            f"expected {name} to be boolean of shape ({tokens},) on the CPU, but got {mask.dtype} of shape "
            f"{tuple(mask.shape)} on {mask.device}"
        )


def overlaps(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors of rows share memory."""
    (a_begin, a_end), (b_begin, b_end) = extent(a), extent(b)
    return a_begin < b_end and b_begin < a_end


def extent(x: Tensor) -> tuple[int, int]:
    """Return the addresses where the memory of a tensor begins and ends."""
    if x.numel() == 0:
        return x.data_ptr(), x.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


def address(tensor: Tensor | None) -> int | None:
    """Return where the elements of a tensor begin, for the library."""
    return None if tensor is None else tensor.data_ptr()
