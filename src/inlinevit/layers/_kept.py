"""Tensors that are kept between calls: few, small, and never part of what a model saves."""

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

# Tensors and bytes that one KeptTensors holds at most.
MOST_KEPT = 8
MOST_BYTES = 2**23


class KeptTensors:
    """A small least-recently-used cache of tensors, safe to use from several threads.

    Copies of it are empty, whether by deepcopy or by pickle: what is kept can be computed again.

    Args:
        most: Tensors to keep at most.
        most_bytes: Bytes to keep at most; a tensor that is larger is not kept.
    """

    def __init__(self, most: int = MOST_KEPT, most_bytes: int = MOST_BYTES) -> None:
        self.most = most
        self.most_bytes = most_bytes
        # Replaced as a whole, so that no thread sees it half-changed; a race loses an entry, never mixes up two.
        self._entries: tuple[tuple[Hashable, Tensor], ...] = ()

    def get(self, key: Hashable) -> Tensor | None:
        """The tensor that is kept under a key; None if there is none."""
        entries = self._entries
        for place, (known, tensor) in enumerate(entries):
            if known == key:
                if place < len(entries) - 1:
                    self._entries = (*entries[:place], *entries[place + 1 :], entries[place])
                return tensor
        return None

    def keep(self, key: Hashable, tensor: Tensor) -> None:
        """Keep a tensor, and drop those that were not used for the longest time if there are too many."""
        if tensor.nbytes > self.most_bytes:
            return
        entries = (*(entry for entry in self._entries if entry[0] != key), (key, tensor))[-self.most :]
        while sum(kept.nbytes for _, kept in entries) > self.most_bytes:
            entries = entries[1:]
        self._entries = entries

    def clear(self) -> None:
        """Drop everything."""
        self._entries = ()

    @property
    def nbytes(self) -> int:
        """Bytes of what is kept."""
        return sum(tensor.nbytes for _, tensor in self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __deepcopy__(self, memo: dict[int, Any]) -> "KeptTensors":
        return KeptTensors(self.most, self.most_bytes)

    def __reduce__(self) -> tuple[Any, ...]:
        return KeptTensors, (self.most, self.most_bytes)


def may_keep(device: torch.device) -> bool:
    """Whether tensors made now can be kept: not while a graph is recorded, nor where tensors hold no numbers."""
    return not (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or device.type == "meta"
        # Fake modes and functorch make tensors of their own.
        or type(torch.empty(0, device=device)) is not Tensor
    )
