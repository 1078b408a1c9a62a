"""Config of the backbone of a detector or segmenter; without torch, so that `--help` answers at once."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from ..engine.config import TrainConfig
from ..utils.validation import Range, check_fields, check_value, require


def check_ranges(config: Any, section: str, allowed: dict[str, Range]) -> None:
    """Refuse fields of wrong types, and numbers that are out of range.

    Args:
        config: A dataclass.
        section: Its name in recipes and options.
        allowed: The range of each number, or of the numbers in a list.
    """
    check_fields(config, section)
    for name, numbers in allowed.items():
        check_value(f"{section}.{name}", vars(config)[name], Any, numbers)


@dataclass
class BackboneConfig:
    """A backbone and its initial weights."""

    ranges: ClassVar[dict[str, Range]] = {"drop_path_rate": Range(0, 1, below_most=True)}

    backbone: str = "inline_pvt_tiny"
    """Any model of this library or of timm with features at strides 4, 8, 16 and 32."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the backbone, such as attention: softmax."""
    pretrained: bool = False
    """Start from the published weights of the backbone."""
    checkpoint: str | None = None
    """Start from the weights in a file, of the backbone or of a whole model; their classes may differ."""
    drop_path_rate: float = 0.1
    """Share of the backbone's residual branches that are left out in training, in the last block; it rises linearly
    up to there."""

    def __post_init__(self) -> None:
        check_ranges(self, "model", self.ranges)
        require(
            not self.pretrained or self.checkpoint is None,
            "model.pretrained and model.checkpoint both name initial weights: choose one of them",
        )


def refuse_layer_decay(config: TrainConfig) -> None:
    """Refuse layer-wise learning rates, which need a classifier's layers."""
    require(
        config.optimizer.layer_decay is None,
        "optimizer.layer_decay is for plain classifiers: leave it out for this task",
    )
