"""Collective operations with gradients.

Every process computes the same loss. Backward passes compute the gradients of the sum of these losses with respect to
the parameters of each process, as all operations here are differentiated as operations on the values of all processes.
The gradient of the loss is therefore the mean of the gradients over the processes: what DistributedDataParallel and
fully_shard compute. Nothing else needs to know which values are the same in all processes and which are not.

All processes of a group must call the same operations in the same order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops import KeyValueState


class SequenceGroup:
    """The processes that share an image. A copy of it is the group itself.

    Args:
        group: The process group; None = all processes.

    Attributes:
        rank: The index of this process in the group.
        size: Number of processes of the group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank: int = dist.get_rank(group)
        self.size: int = dist.get_world_size(group)

    def __deepcopy__(self, memo: dict[int, Any]) -> "SequenceGroup":
        return self


class AllReduce(torch.autograd.Function):
    """The sum over processes; gradients are summed as well, because each output depends on each input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: SequenceGroup) -> Tensor:
        ctx.group = group
        out = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(out, group=group.group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return AllReduce.apply(grad, ctx.group), None


class AllToAll(torch.autograd.Function):
    """Send parts of x, along the first dimension, to each process; gradients are sent back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: SequenceGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        out = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), received, sent, group=group.group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return AllToAll.apply(grad, ctx.received, ctx.sent, ctx.group), None, None, None


def all_reduce(x: Tensor, group: SequenceGroup) -> Tensor:
    """Return the sum of x over the processes, with gradients."""
    out: Tensor = AllReduce.apply(x, group)
    return out


@dataclass(frozen=True, eq=False)
class Exchange:
    """Which items this process sends to the others, and how many it receives from each.

    Attributes:
        send: Indices among the items of this process, those for process 0 first.
        sent: Number of items for each process.
        received: Number of items from each process.
    """

    send: Tensor
    sent: list[int]
    received: list[int]


def plan_exchange(bounds: Sequence[int], wanted: Sequence[Tensor], rank: int) -> Exchange:
    """Return what a process sends and receives, so that each process gets the items that it wants.

    Args:
        bounds: Process i holds the items from bounds[i] to bounds[i + 1].
        wanted: The items that each process wants, as sorted indices without repetitions.
        rank: This process.
    """
    edges = torch.tensor(list(bounds))
    # How many of the items that a process wants are below each bound.
    below = [torch.searchsorted(items, edges).tolist() for items in wanted]
    send = [items[low[rank] : low[rank + 1]] - bounds[rank] for items, low in zip(wanted, below, strict=True)]
    own = below[rank]
    return Exchange(
        send=torch.cat(send),
        sent=[len(items) for items in send],
        received=[own[source + 1] - own[source] for source in range(len(wanted))],
    )


def exchange(x: Tensor, plan: Exchange, group: SequenceGroup) -> Tensor:
    """Return the items that this process wants, sorted by their indices: (batch, items, …) to (batch, wanted, …)."""
    items = x.index_select(1, plan.send.to(x.device)).transpose(0, 1)
    received: Tensor = AllToAll.apply(items, plan.sent, plan.received, group)
    return received.transpose(0, 1)


def return_items(x: Tensor, plan: Exchange, group: SequenceGroup) -> Tensor:
    """Invert `exchange`, where every item was wanted by one process: (batch, wanted, …) to (batch, items, …)."""
    returned: Tensor = AllToAll.apply(x.transpose(0, 1), plan.received, plan.sent, group)
    return returned.index_select(0, plan.send.argsort().to(x.device)).transpose(0, 1)


def gather_items(x: Tensor, bounds: Sequence[int], group: SequenceGroup) -> Tensor:
    """Return the items of all processes in all processes: (batch, items, …) to (batch, all items, …)."""
    everything = torch.arange(bounds[-1])
    return exchange(x, plan_exchange(bounds, [everything] * group.size, group.rank), group)


def reduce_state(state: KeyValueState, group: SequenceGroup) -> KeyValueState:
    """Return the state of the tokens of all processes, merged: one all-reduce of counts and means, one of covariances.

    Args:
        state: Of the tokens of this process, which may be none.
        group: The processes.
    """
    dtype, batch = state.covariance.dtype, state.count.shape[0]
    means = [state.k_mean, state.v_mean, *([] if state.token_mean is None else [state.token_mean])]
    # In float64, so that counts are exact.
    number = state.count.view(batch, 1).double()
    sums = [mean.reshape(batch, -1).double() * number for mean in means]
    count, *totals = all_reduce(torch.cat([number, *sums], dim=1), group).split([1, *(x.shape[1] for x in sums)], dim=1)
    k_mean, v_mean, *token_mean = (
        (total / count.clamp(min=1)).to(dtype).view_as(mean) for total, mean in zip(totals, means, strict=True)
    )
    # The covariance around the common means.
    v_step = (state.v_mean - v_mean) * state.count.to(dtype)
    between = (state.k_mean - k_mean).transpose(-2, -1) @ v_step
    return KeyValueState(
        count=count.detach().round().long().view_as(state.count),
        k_mean=k_mean,
        v_mean=v_mean,
        covariance=all_reduce(state.covariance + between, group),
        token_mean=token_mean[0] if token_mean else None,
    )
