"""A small cache of tensors between calls, which is never part of what a model saves."""

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

# Defaults of TensorCache.
MAX_ENTRIES = 8
MAX_BYTES = 2**23


class TensorCache:
    """A small least-recently-used cache of tensors, safe to use from several threads.

    Copies of it are empty, whether by deepcopy or by pickle: the tensors can be computed again.

    Args:
        max_entries: Maximum number of tensors.
        max_bytes: Maximum number of bytes of all tensors; a larger tensor is not cached.
    """

    def __init__(self, max_entries: int = MAX_ENTRIES, max_bytes: int = MAX_BYTES) -> None:
        self.max_entries = max_entries
        self.max_bytes = max_bytes
        # Replaced as a whole, so that no thread sees it half-changed; a race loses an entry, never mixes up two.
        self._entries: tuple[tuple[Hashable, Tensor], ...] = ()

    def get(self, key: Hashable) -> Tensor | None:
        """Return the tensor of a key, or None."""
        entries = self._entries
        for index, (known, tensor) in enumerate(entries):
            if known == key:
                if index < len(entries) - 1:
                    self._entries = (*entries[:index], *entries[index + 1 :], entries[index])
                return tensor
        return None

    def put(self, key: Hashable, tensor: Tensor) -> None:
        """Cache a tensor, and drop the least recently used ones if there are too many."""
        if tensor.nbytes > self.max_bytes:
            return
        entries = (*(entry for entry in self._entries if entry[0] != key), (key, tensor))[-self.max_entries :]
        while sum(cached.nbytes for _, cached in entries) > self.max_bytes:
            entries = entries[1:]
        self._entries = entries

    def clear(self) -> None:
        """Drop all tensors."""
        self._entries = ()

    @property
    def nbytes(self) -> int:
        """Number of bytes of all tensors."""
        return sum(tensor.nbytes for _, tensor in self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __deepcopy__(self, memo: dict[int, Any]) -> "TensorCache":
        return TensorCache(self.max_entries, self.max_bytes)

    def __reduce__(self) -> tuple[Any, ...]:
        return TensorCache, (self.max_entries, self.max_bytes)


def can_cache(device: torch.device) -> bool:
    """Return whether new tensors can be cached: not while a graph is recorded, nor where tensors have no values."""
    return not (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or device.type == "meta"
        # Fake modes and functorch create tensors of their own type.
        or type(torch.empty(0, device=device)) is not Tensor
    )
