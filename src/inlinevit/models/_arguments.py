"""What the arguments of models may be: one table for all families."""

import typing
from collections.abc import Callable, Mapping
from functools import wraps
from math import inf
from typing import Any, TypeVar

from ..utils.validation import MOST_CLASSES, MOST_PIXELS, Range, check_value

Init = TypeVar("Init", bound=Callable[..., None])

# Larger values are mistakes. Whether the weights and images of smaller ones fit into memory depends on the machine.
MOST_CHANNELS = 2**16
MOST_BLOCKS = 1000
RATES = Range(0, 1, below_most=True)

RANGES = {
    "img_size": Range(1, MOST_PIXELS),
    "patch_size": Range(1, MOST_PIXELS),
    "in_chans": Range(1, MOST_CHANNELS),
    "num_classes": Range(0, MOST_CLASSES),
    "embed_dim": Range(1, MOST_CHANNELS),
    "embed_dims": Range(1, MOST_CHANNELS),
    # attention_by_stage refuses stages without blocks.
    "depth": Range(-inf, MOST_BLOCKS),
    "depths": Range(-inf, MOST_BLOCKS),
    "num_heads": Range(1, MOST_CHANNELS),
    "mlp_ratio": Range(0, 256, above_least=True),
    "mlp_ratios": Range(0, 256, above_least=True),
    "window_size": Range(1, MOST_PIXELS),
    "softmax_window_size": Range(1, MOST_PIXELS),
    "split_sizes": Range(1, MOST_PIXELS),
    "sr_ratios": Range(1, MOST_PIXELS),
    "drop_rate": RATES,
    "proj_drop_rate": RATES,
    "drop_path_rate": RATES,
}
# torch checks these itself.
UNCHECKED = ("device", "dtype")


def check_arguments(arguments: Mapping[str, Any], hints: Mapping[str, Any]) -> None:
    """Refuse arguments of other types than those annotated, or out of the ranges in RANGES.

    Args:
        arguments: The arguments that are given, by name.
        hints: Their types, by name; arguments without a type are not checked.
    """
    for name, value in arguments.items():
        if name in hints and name not in UNCHECKED:
            check_value(name, value, hints[name], RANGES.get(name))
            if hasattr(value, "__len__") and len(value) == 0 and name in RANGES:
                raise ValueError(f"{name} is {value}: it should have an entry for each stage")


def checked(init: Init) -> Init:
    """Have the constructor of a model check its keyword arguments before it makes anything."""
    hints = typing.get_type_hints(init)

    @wraps(init)
    def check_and_init(self: Any, *positional: Any, **arguments: Any) -> None:
        if "output_stride" in arguments:
            raise ValueError(
                f"{type(self).__name__} has no output_stride, because its strides are fixed: leave it out, and in "
                "segmentation_models.pytorch choose a decoder without encoder_output_stride, such as Unet, FPN or "
                "UPerNet"
            )
        check_arguments(arguments, hints)
        init(self, *positional, **arguments)

    return typing.cast(Init, check_and_init)
