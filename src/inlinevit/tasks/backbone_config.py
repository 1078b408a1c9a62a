"""Config that detection and segmentation share; without torch, so that `--help` answers at once."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from ..engine.config import BANDS, MOST_IMAGES, MOST_WORKERS, DataOptions, PixelConfig
from ..utils.validation import Range, check_fields, require


@dataclass
class SplitConfig:
    """Data of dense tasks, which come in splits and are evaluated one image at a time; a task adds defaults."""

    path: str
    """The folder of the data."""
    train_split: str
    """The split to train on."""
    eval_split: str
    """The split to evaluate on."""
    max_train_samples: int | None = None
    """Train on this many images, the first of the split; null = all."""
    max_eval_samples: int | None = None
    """Evaluate on this many images, the first of the split; null = all."""
    batch_size: int = 2
    """Images in a batch of one process. Evaluation takes one image at a time."""
    workers: int = 2
    """Processes that read images, for each training process; 0 = the training process itself."""


@dataclass
class SplitDataConfig(PixelConfig, SplitConfig):
    """Data of dense tasks, and what the values of their images mean."""

    def __post_init__(self) -> None:
        images = Range(1, MOST_IMAGES)
        check_fields(
            self,
            "data",
            max_train_samples=images,
            max_eval_samples=images,
            batch_size=images,
            workers=Range(0, MOST_WORKERS),
        )
        self.check_pixels()


@dataclass
class SplitDataOptions(DataOptions):
    """Data to evaluate on, where they differ from those of the training run."""

    max_eval_samples: int | Literal["all"] | None = None
    """Evaluate on the first images of the split, or on all of them; null = as in the run."""

    def overrides(self) -> dict[str, Any]:
        """See DataOptions.overrides."""
        return {
            name: None if value == "all" and name == "max_eval_samples" else value
            for name, value in super().overrides().items()
        }


@dataclass
class BackboneConfig:
    """A backbone and its initial weights."""

    ranges: ClassVar[dict[str, Range]] = {
        "drop_path_rate": Range(0, 1, below_most=True),
        "in_chans": Range(1, BANDS.most + 1),
    }

    backbone: str = "inline_pvt_tiny"
    """Any model of this library or of timm with features at strides 4, 8, 16 and 32."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the backbone, such as attention: softmax."""
    pretrained: bool = False
    """Start from the published weights of the backbone, or from those of checkpoint if it is given."""
    checkpoint: str | None = None
    """Start from the weights in a file, of the backbone or of a whole model; their classes may differ."""
    drop_path_rate: float = 0.1
    """Stochastic depth rate of the last block of the backbone; it rises linearly up to there."""
    in_chans: int = 3
    """Channels of the images: 3 for colour, 1 for grey, or any other number of bands; see data.bands."""

    def __post_init__(self) -> None:
        check_fields(self, "model", **self.ranges)


def check_dense_config(config: Any) -> None:
    """Refuse bands that do not fit the model, and layer-wise learning rates, which need a classifier's layers."""
    require(
        config.optimizer.layer_decay is None,
        "optimizer.layer_decay is for plain classifiers: leave it out for this task",
    )
    config.data.check_channels(config.model.in_chans)
