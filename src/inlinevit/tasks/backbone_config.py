"""Config of the backbone of a detector or segmenter; without torch, so that `--help` answers at once."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..engine.config import TrainConfig
from ..utils.validation import Range, check_fields, require


@dataclass
class BackboneConfig:
    """A backbone and its initial weights."""

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
        check_fields(self, "model", **self.most())
        require(
            0 <= self.drop_path_rate < 1,
            f"model.drop_path_rate is {self.drop_path_rate}: it should be from 0 to below 1",
        )
        require(
            not self.pretrained or self.checkpoint is None,
            "model.pretrained and model.checkpoint both name initial weights: choose one of them",
        )

    def most(self) -> Mapping[str, float | Range]:
        """The largest values of the fields that a task adds, by name."""
        return {}


def refuse_layer_decay(config: TrainConfig) -> None:
    """Refuse layer-wise learning rates, which need a classifier's layers."""
    require(
        config.optimizer.layer_decay is None,
        "optimizer.layer_decay is for plain classifiers: leave it out for this task",
    )
