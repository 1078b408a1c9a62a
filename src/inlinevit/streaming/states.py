"""What each kind of attention needs to know of tokens that are read in chunks, to answer queries.

All but softmax attention summarize keys and values in a few matrices; states of chunks are merged in float64. Softmax
attention has to keep its keys and values.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..layers import BaseAttention, SoftmaxAttention
from ..layers.angular_attention import TAPS, AngularAttention
from ..layers.efficient_attention import EfficientAttention
from ..layers.enhanced_attention import EnhancedAttention
from ..layers.focused_attention import FocusedAttention
from ..layers.hydra_attention import HydraAttention
from ..layers.inline_attention import InLineAttention
from ..layers.linear_attention import LinearAttention
from ..ops._common import hide_padding, unit_length
from ..ops.efficient import padding_to_minus_infinity
from ..ops.feature_maps import apply_feature_map, map_keys
from ..ops.focused import EPSILON as FOCUSED_EPSILON
from ..ops.focused import focus
from ..ops.key_value_state import KeyValueState
from ..ops.linear import EPSILON
from ..ops.windows import Windows
from ..parallel.collectives import SequenceGroup, all_reduce, reduce_state


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
    def attend(self, q: Tensor, v: Tensor | None = None) -> Tensor:
        """Return the attention of queries to all tokens that were added; v: values of the queries' own tokens."""

    @abstractmethod
    def reduce(self, group: SequenceGroup) -> None:
        """Add the tokens of all other processes; this one may have none."""

    def token_mean(self) -> Tensor | None:
        """Return the mean of `tokens`, (windows, channels), if there were any."""
        return None

    @property
    def num_windows(self) -> int:
        """Windows that are as high as the map."""
        return -(-self.windows.map_width // self.windows.window_width)

    @property
    def num_heads(self) -> int:
        """Heads of the group."""
        return self.attn.num_heads // self.windows.num_head_groups


class InLineState(AttentionState):
    """The state of InLine attention: KeyValueState."""

    state: KeyValueState | None = None

    def add(self, k: Tensor, v: Tensor, mask: Tensor | None, tokens: Tensor | None) -> None:
        """See AttentionState.add."""
        phi, affine = self.feature_map()
        added = KeyValueState.from_tokens(k, v, tokens, mask, phi, affine)
        self.state = merge_states(self.state, added)

    def attend(self, q: Tensor, v: Tensor | None = None) -> Tensor:
        """See AttentionState.attend."""
        assert self.state is not None
        return to_float32(self.state).attend(q, None, *self.feature_map())

    def token_mean(self) -> Tensor | None:
        """See AttentionState.token_mean."""
        assert self.state is not None
        return None if self.state.token_mean is None else self.state.token_mean.float()

    def reduce(self, group: SequenceGroup) -> None:
        """See AttentionState.reduce."""
        if self.state is None:
            attn = cast(InLineAttention, self.attn)
            channels = None if attn.local_residual is None else self.num_heads * attn.head_dim
            self.state = KeyValueState.empty(
                self.num_windows, self.num_heads, attn.head_dim, channels=channels, dtype=torch.float64
            )
        self.state = reduce_state(self.state, group)

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

    def reduce(self, group: SequenceGroup) -> None:
        """See AttentionState.reduce."""
        if self.sums is None:
            head_dim = self.attn.head_dim
            key = torch.zeros(self.num_windows, self.num_heads, 1, head_dim, dtype=torch.float64)
            count, key_value = key.new_zeros(self.num_windows, 1, 1, 1), key.new_zeros(*key.shape[:2], *(head_dim,) * 2)
            self.sums = Summary(count, key, key_value, torch.full_like(key, torch.finfo(torch.float32).min))
        largest = self.sums.largest.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group.group)
        # Brought to the largest key of all processes, then added.
        own = merge_sums(self.sums, empty_sums(self.sums, largest))
        parts = (own.count, own.key, own.key_value)
        flat = all_reduce(torch.cat([part.flatten() for part in parts]), group)
        totals = flat.split([part.numel() for part in parts])
        count, key, key_value = (total.view_as(part) for total, part in zip(totals, parts, strict=True))
        self.sums = Summary(count, key, key_value, largest)

    @abstractmethod
    def summarize(self, k: Tensor, v: Tensor, mask: Tensor | None) -> Summary:
        """Return the sums of some tokens; values of padding are zero."""

    def divide(self, queries: Tensor, epsilon: float) -> Tensor:
        """Return linear attention of queries φ(q), with a constant that is added to the divisor."""
        if self.sums is None:
            return torch.zeros_like(queries)
        count = self.sums.count.clamp(min=1)
        key, key_value = (self.sums.key / count).float(), (self.sums.key_value / count).float()
        return queries @ key_value / (queries @ key.transpose(2, 3) + (epsilon / count).float())

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

    def attend(self, q: Tensor, v: Tensor | None = None) -> Tensor:
        """See AttentionState.attend."""
        return self.divide(apply_feature_map(q, *self.feature_map()) * q.shape[-1] ** -0.5, EPSILON)

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

    def attend(self, q: Tensor, v: Tensor | None = None) -> Tensor:
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

    def attend(self, q: Tensor, v: Tensor | None = None) -> Tensor:
        """See AttentionState.attend."""
        if self.sums is None:
            return torch.zeros_like(q)
        return unit_length(q, [1, 3]) @ self.sums.key_value.float()


class FocusedState(SummedState):
    """The state of focused linear attention; positions have been added to the keys."""

    def summarize(self, k: Tensor, v: Tensor, mask: Tensor | None) -> Summary:
        """See SummedState.summarize."""
        return self.sum(hide_padding(focus(hide_padding(k, mask), self.spread()), mask), v, mask)

    def attend(self, q: Tensor, v: Tensor | None = None) -> Tensor:
        """See AttentionState.attend."""
        return self.divide(focus(q, self.spread()), FOCUSED_EPSILON)

    def spread(self) -> Tensor:
        """Return the divisors of the channels."""
        return cast(FocusedAttention, self.attn).positive_spread(self.windows)


class AngularState(SummedState):
    """The state of angular attention, and the values at the beginning of the sequence, for its convolution.

    Attributes:
        prefix: Values of the prefix tokens, (1, heads, prefix, head_dim).
        first: Values of the first tokens of the map, as many as the convolution of a prefix token reaches.
    """

    def __init__(self, attn: BaseAttention, windows: Windows) -> None:
        super().__init__(attn, windows)
        self.prefix = self.first = torch.empty(1, self.num_heads, 0, attn.head_dim)

    def keep_first(self, v: Tensor, before: int | None) -> None:
        """Keep the values at the beginning of the sequence.

        Args:
            v: Values of tokens that are added, (1, heads, tokens, head_dim).
            before: Tokens of the map before them; None = they are prefix tokens.
        """
        if before is None:
            self.prefix = v.clone()
        elif before < TAPS // 2:
            self.first = torch.cat([self.first, v[:, :, : TAPS // 2 - before]], dim=2)

    def summarize(self, k: Tensor, v: Tensor, mask: Tensor | None) -> Summary:
        """See SummedState.summarize."""
        return self.sum(unit_length(hide_padding(k, mask), [3]), v, mask)

    def attend(self, q: Tensor, v: Tensor | None = None) -> Tensor:
        """See AttentionState.attend."""
        assert v is not None
        out = 0.5 * v
        if self.sums is not None:
            out = out + unit_length(q, [3]) @ self.sums.key_value.float() / math.pi
        return unit_length(out, [3])

    def reduce(self, group: SequenceGroup) -> None:
        """See AttentionState.reduce."""
        super().reduce(group)
        kept: list[Any] = [None] * group.size
        dist.all_gather_object(kept, (self.prefix, self.first), group=group.group)
        prefixes, firsts = zip(*kept, strict=True)
        self.prefix, self.first = torch.cat(prefixes, dim=2), torch.cat(firsts, dim=2)


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

    def reduce(self, group: SequenceGroup) -> None:
        """See AttentionState.reduce: all keys and values are sent to all processes."""
        counts: list[Any] = [None] * group.size
        dist.all_gather_object(counts, (self.count, self.mask is not None), group=group.group)
        # Of reduced keys, there is one window.
        is_reduced = cast(SoftmaxAttention, self.attn).reduce is not None
        shape = (2, 1 if is_reduced else self.num_windows, self.num_heads)
        own, mask = self.kv, self.mask
        if own is None:
            own = torch.empty(*shape, 0, self.attn.head_dim)
        own = own[:, :, :, : self.count].contiguous()
        mask = (
            torch.ones(shape[1], self.count, dtype=torch.bool) if mask is None else mask[:, : self.count].contiguous()
        )
        self.kv = torch.empty(*shape, sum(count for count, _ in counts), self.attn.head_dim)
        self.mask = torch.ones(shape[1], self.kv.shape[3], dtype=torch.bool) if any(one for _, one in counts) else None
        first = 0
        for rank, (count, _) in enumerate(counts):
            part = own if rank == group.rank else own.new_empty(*shape, count, own.shape[4])
            dist.broadcast(part, group=group.group, group_src=rank)
            self.kv[:, :, :, first : first + count] = part
            if self.mask is not None:
                visible = mask if rank == group.rank else torch.empty(shape[1], count, dtype=torch.bool)
                dist.broadcast(visible, group=group.group, group_src=rank)
                self.mask[:, first : first + count] = visible
            first += count
        self.count = first

    def attend(self, q: Tensor, v: Tensor | None = None) -> Tensor:
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
    FocusedAttention: FocusedState,
    AngularAttention: AngularState,
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


def empty_sums(sums: Summary, largest: Tensor) -> Summary:
    """Return the sums over no tokens, of the shape of others and with a given largest key."""
    count, key, key_value = (torch.zeros_like(part) for part in (sums.count, sums.key, sums.key_value))
    return Summary(count, key, key_value, largest)


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
