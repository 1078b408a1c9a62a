"""One image over several processes: each process holds rows of the map (sequence parallelism)."""

from .collectives import SequenceGroup, all_reduce, exchange, gather_items, plan_exchange, reduce_state
from .model import parallelize_sequence, whole_images
from .rows import LocalSize, RowSharding, add_halo, split_rows

__all__ = [
    "LocalSize",
    "RowSharding",
    "SequenceGroup",
    "add_halo",
    "all_reduce",
    "exchange",
    "gather_items",
    "parallelize_sequence",
    "plan_exchange",
    "reduce_state",
    "split_rows",
    "whole_images",
]
