"""What each kind of attention needs to know of tokens that are read in chunks, to answer queries.

All but softmax attention summarize keys and values in a few matrices; states of chunks are merged in float64. Softmax
attention has to keep its keys and values.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ..layers import BaseAttention, SoftmaxAttention
from ..layers.efficient_attention import EfficientAttention
from ..layers.enhanced_attention import EnhancedAttention
from ..layers.hydra_attention import HydraAttention
from ..layers.inline_attention import InLineAttention
from ..layers.linear_attention import LinearAttention
from ..ops._common import hide_padding, unit_length
from ..ops.efficient import padding_to_minus_infinity
from ..ops.feature_maps import apply_feature_map, map_keys
from ..ops.key_value_state import KeyValueState
from ..ops.linear import EPSILON
from ..ops.windows import Windows


@dataclass(frozen=True)
class Summary:
    """Sums over tokens, in float64.

    Attributes:
        count: Number of tokens (batch, 1, 1, 1).
        key: Σ φ(k), (batch, heads, 1, head_dim).
        key_value: Σ φ(k)ᵀ v, (batch, heads, head_dim, value_dim).
        largest: What was subtracted from the keys before an exponential, (batch, heads, 1, head_dim), or zeros.
    """

    count: Tensor
    key: Tensor
    key_value: Tensor
    largest: Tensor


class AttentionState(ABC):
    """Accumulates the keys and values of the windows of one head group, then answers queries.

    q, k and v are (windows, heads, tokens, head_dim), masks (windows, tokens), True = real token.

    Args:
        attn: The attention.
        windows: The head group and its windows.
    """

    def __init__(self, attn: BaseAttention, windows: Windows) -> None:
        self.attn, self.windows = attn, windows

    @abstractmethod
    def add(self, k: Tensor, v: Tensor, mask: Tensor | None, tokens: Tensor | None) -> None:
        """Add tokens. `tokens` (windows, tokens, channels) are those whose mean makes the local residual."""

    @abstractmethod
    def attend(self, q: Tensor) -> Tensor:
        """Return the attention of queries to all tokens that were added."""

    def token_mean(self) -> Tensor | None:
        """Return the mean of `tokens`, (windows, channels), if there were any."""
        return None


class InLineState(AttentionState):
    """The state of InLine attention: KeyValueState."""

    state: KeyValueState | None = None

    def add(self, k: Tensor, v: Tensor, mask: Tensor | None, tokens: Tensor | None) -> None:
        """See AttentionState.add."""
        phi, affine = self.feature_map()
        added = KeyValueState.from_tokens(k, v, tokens, mask, phi, affine)
        self.state = merge_states(self.state, added)

    def attend(self, q: Tensor) -> Tensor:
        """See AttentionState.attend."""
        assert self.state is not None
        return to_float32(self.state).attend(q, None, *self.feature_map())

    def token_mean(self) -> Tensor | None:
        """See AttentionState.token_mean."""
        assert self.state is not None
        return None if self.state.token_mean is None else self.state.token_mean.float()

    def feature_map(self) -> tuple[str, tuple[Tensor, Tensor] | None]:
        """Return the name and the parameters of φ."""
        feature_map = cast(InLineAttention, self.attn).feature_map
        return feature_map.name, feature_map.affine(self.windows)


class SummedState(AttentionState):
    """A state of sums of keys and values."""

    sums: Summary | None = None

    def add(self, k: Tensor, v: Tensor, mask: Tensor | None, tokens: Tensor | None) -> None:
        """See AttentionState.add."""
        if mask is not None and not bool(mask.any()):
            # A maximum over no keys does not exist.
            return
        added = self.summarize(k, hide_padding(v, mask), mask)
        self.sums = added if self.sums is None else merge_sums(self.sums, added)

    @abstractmethod
    def summarize(self, k: Tensor, v: Tensor, mask: Tensor | None) -> Summary:
        """Return the sums of some tokens; values of padding are zero."""

    def sum(self, k: Tensor, v: Tensor, mask: Tensor | None, largest: Tensor | None = None) -> Summary:
        """Return the sums of φ(k), zero at padding, and v."""
        count = torch.full((k.shape[0], 1, 1, 1), float(k.shape[2])) if mask is None else mask.sum(1).view(-1, 1, 1, 1)
        key, key_value = k.sum(dim=2, keepdim=True), k.transpose(2, 3) @ v
        largest = torch.zeros_like(key) if largest is None else largest
        return Summary(count.double(), key.double(), key_value.double(), largest.double())


class LinearState(SummedState):
    """The state of linear attention."""

    def summarize(self, k: Tensor, v: Tensor, mask: Tensor | None) -> Summary:
        """See SummedState.summarize."""
        return self.sum(map_keys(k, *self.feature_map(), mask), v, mask)

    def attend(self, q: Tensor) -> Tensor:
        """See AttentionState.attend."""
        if self.sums is None:
            return torch.zeros_like(q)
        count = self.sums.count.clamp(min=1)
        key, key_value = (self.sums.key / count).float(), (self.sums.key_value / count).float()
        queries = apply_feature_map(q, *self.feature_map()) * q.shape[-1] ** -0.5
        return queries @ key_value / (queries @ key.transpose(2, 3) + (EPSILON / count).float())

    def feature_map(self) -> tuple[str, tuple[Tensor, Tensor] | None]:
        """Return the name and the parameters of φ."""
        feature_map = cast(LinearAttention, self.attn).feature_map
        return feature_map.name, feature_map.affine(self.windows)


class EfficientState(SummedState):
    """The state of efficient attention: a softmax of the keys over the tokens, with a running maximum."""

    def summarize(self, k: Tensor, v: Tensor, mask: Tensor | None) -> Summary:
        """See SummedState.summarize."""
        k = padding_to_minus_infinity(k, mask)
        # Clamped for windows of nothing but padding.
        largest = k.amax(dim=2, keepdim=True).clamp(min=torch.finfo(k.dtype).min)
        return self.sum((k - largest).exp(), v, mask, largest)

    def attend(self, q: Tensor) -> Tensor:
        """See AttentionState.attend."""
        if self.sums is None:
            return torch.zeros_like(q)
        key = self.sums.key.clamp(min=torch.finfo(torch.float32).tiny)
        return q.softmax(dim=-1) @ (self.sums.key_value / key.transpose(2, 3)).float()


class HydraState(SummedState):
    """The state of hydra attention."""

    def summarize(self, k: Tensor, v: Tensor, mask: Tensor | None) -> Summary:
        """See SummedState.summarize."""
        return self.sum(unit_length(hide_padding(k, mask), [1, 3]), v, mask)

    def attend(self, q: Tensor) -> Tensor:
        """See AttentionState.attend."""
        if self.sums is None:
            return torch.zeros_like(q)
        return unit_length(q, [1, 3]) @ self.sums.key_value.float()


class SoftmaxState(AttentionState):
    """All keys and values of softmax attention, in memory that is taken for all of them at once.

    Args:
        attn: See AttentionState.
        windows: See AttentionState.
        tokens: Tokens of a window that will be added.
    """

    def __init__(self, attn: BaseAttention, windows: Windows, tokens: int) -> None:
        super().__init__(attn, windows)
        self.tokens, self.count = tokens, 0
        self.kv: Tensor | None = None
        self.mask: Tensor | None = None

    def add(self, k: Tensor, v: Tensor, mask: Tensor | None, tokens: Tensor | None) -> None:
        """See AttentionState.add."""
        first, self.count = self.count, self.count + k.shape[2]
        assert self.count <= self.tokens
        if self.kv is None:
            self.kv = k.new_empty(2, *k.shape[:2], self.tokens, k.shape[3])
        self.kv[0, :, :, first : self.count] = hide_padding(k, mask)
        self.kv[1, :, :, first : self.count] = hide_padding(v, mask)
        if mask is not None and self.mask is None:
            self.mask = torch.ones(k.shape[0], self.tokens, dtype=torch.bool)
        if self.mask is not None and mask is not None:
            self.mask[:, first : self.count] = mask

    def attend(self, q: Tensor) -> Tensor:
        """See AttentionState.attend."""
        assert self.kv is not None
        q = cast(SoftmaxAttention, self.attn).map_queries(q)
        kv = self.kv[:, :, :, : self.count]
        mask = None if self.mask is None else self.mask[:, None, None, : self.count]
        return F.scaled_dot_product_attention(q, kv[0], kv[1], attn_mask=mask)


# The state of each kind of attention: of these classes only, since a subclass may compute something else.
STATES: dict[type[BaseAttention], type[AttentionState]] = {
    InLineAttention: InLineState,
    LinearAttention: LinearState,
    EnhancedAttention: LinearState,
    EfficientAttention: EfficientState,
    HydraAttention: HydraState,
    SoftmaxAttention: SoftmaxState,
}


def make_state(attn: BaseAttention, windows: Windows, tokens: int) -> AttentionState:
    """Return an empty state of the windows of a head group, to which so many tokens of each window will be added."""
    kind: Any = STATES[type(attn)]
    return kind(attn, windows, tokens) if kind is SoftmaxState else kind(attn, windows)


def merge_states(state: KeyValueState | None, added: KeyValueState) -> KeyValueState:
    """Merge two states in float64."""
    added = convert_state(added, torch.float64)
    return added if state is None else state.merge(added)


def to_float32(state: KeyValueState) -> KeyValueState:
    """Return a state in float32."""
    return convert_state(state, torch.float32)


def convert_state(state: KeyValueState, dtype: torch.dtype) -> KeyValueState:
    """Return a state in another dtype."""
    means = (state.k_mean.to(dtype), state.v_mean.to(dtype), state.covariance.to(dtype))
    return KeyValueState(state.count, *means, None if state.token_mean is None else state.token_mean.to(dtype))


def merge_sums(first: Summary, second: Summary) -> Summary:
    """Add sums; those of exponentials are brought to the same largest key first."""
    largest = torch.maximum(first.largest, second.largest)
    scales = [(sums.largest - largest).exp() for sums in (first, second)]
    return Summary(
        count=first.count + second.count,
        key=first.key * scales[0] + second.key * scales[1],
        key_value=first.key_value * scales[0].transpose(2, 3) + second.key_value * scales[1].transpose(2, 3),
        largest=largest,
    )
