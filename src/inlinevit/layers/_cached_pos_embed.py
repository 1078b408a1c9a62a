"""Position embedding for inference: resized positions are cached by size, as long as the learned ones stay the same."""

from typing import cast

import torch
from torch import Tensor, nn

from ..ops._common import needs_gradient
from ._cache import TensorCache, can_cache
from .embed import ResamplePosEmbed


class CachedResamplePosEmbed(ResamplePosEmbed):
    """ResamplePosEmbed that resizes once for each size and state of the positions; copies have empty caches.

    Args:
        grid: See ResamplePosEmbed.
        num_prefix_tokens: See ResamplePosEmbed.
        interpolation: See ResamplePosEmbed.
    """

    def __init__(self, grid: tuple[int, int], *, num_prefix_tokens: int = 0, interpolation: str = "bicubic") -> None:
        super().__init__(grid, num_prefix_tokens=num_prefix_tokens, interpolation=interpolation)
        self.cache = PosEmbedCache()

    @classmethod
    def replace(cls, module: ResamplePosEmbed) -> None:
        """Change a module in place into one of this class."""
        module.__class__ = cls
        cast(CachedResamplePosEmbed, module).cache = PosEmbedCache()

    def forward(self, pos_embed: Tensor, feat_size: tuple[int, int]) -> Tensor:
        """See ResamplePosEmbed.forward. Cached tensors have no gradients, and are never recorded in a graph."""
        if torch.compiler.is_compiling() or not self.can_use_cache(pos_embed, feat_size):
            return super().forward(pos_embed, feat_size)
        # A tensor that is computed in inference mode could not be used with gradients later.
        with torch.inference_mode(False), torch.no_grad():
            cache = self.cache.of(pos_embed, (self.grid, self.num_prefix_tokens, self.interpolation))
            resized = cache.get(feat_size)
            if resized is None:
                resized = super().forward(pos_embed, feat_size)
                cache.put(feat_size, resized)
        return resized

    def can_use_cache(self, pos_embed: Tensor, feat_size: tuple[int, int]) -> bool:
        """Return whether positions of this size can be cached."""
        return (
            # The learned grid needs no resizing.
            feat_size != self.grid
            # Sizes that are recorded symbolically are not integers.
            and type(feat_size[0]) is int
            and type(feat_size[1]) is int
            # torch.func passes tensors of its own in place of parameters.
            and type(pos_embed) is nn.Parameter
            # In-place changes of inference tensors cannot be detected.
            and not pos_embed.is_inference()
            and not needs_gradient(pos_embed)
            and can_cache(pos_embed.device)
        )


class PosEmbedCache:
    """Resized positions, dropped when the learned positions change; copies are empty."""

    def __init__(self) -> None:
        self.state: PosEmbedState | None = None

    def of(self, pos_embed: Tensor, geometry: tuple[object, ...]) -> TensorCache:
        """Return the positions by size that were resized from the learned positions as they are now.

        Args:
            pos_embed: The learned positions.
            geometry: What else determines how they are resized.
        """
        state = self.state
        if state is None or not state.matches(pos_embed, geometry):
            self.state = state = PosEmbedState(pos_embed, geometry)
        return state.cache

    def __reduce__(self) -> tuple[type["PosEmbedCache"], tuple[()]]:
        return PosEmbedCache, ()


class PosEmbedState:
    """The state of learned positions for which resized ones are cached.

    Args:
        pos_embed: The learned positions.
        geometry: What else determines how they are resized.
    """

    def __init__(self, pos_embed: Tensor, geometry: tuple[object, ...]) -> None:
        # An alias: the memory is not reused, so that another tensor cannot have the same address.
        self.pos_embed = pos_embed.detach()
        self.version = pos_embed._version
        self.geometry = geometry
        # Writing through .data or NumPy does not change the version. On a CPU, comparing values costs little.
        self.values = pos_embed.detach().clone() if pos_embed.device.type == "cpu" else None
        self.cache = TensorCache()

    def matches(self, pos_embed: Tensor, geometry: tuple[object, ...]) -> bool:
        """Return whether the learned positions are the same tensor with the same values."""
        return (
            self.geometry == geometry
            and self.version == pos_embed._version
            and self.pos_embed.device == pos_embed.device
            and self.pos_embed.dtype == pos_embed.dtype
            and self.pos_embed.shape == pos_embed.shape
            and self.pos_embed.stride() == pos_embed.stride()
            and self.pos_embed.data_ptr() == pos_embed.data_ptr()
            and (self.values is None or torch.equal(self.values, pos_embed))
        )
