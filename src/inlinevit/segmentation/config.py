"""What a segmentation run can be told. `inlinevit segment train` and the recipes are these classes."""

from dataclasses import dataclass, field
from typing import Literal

from ..checks import MOST_PIXELS
from ..training.backbone import BackboneConfig
from ..training.config import (
    OptimizerConfig,
    ScheduleConfig,
    SplitDataConfig,
    SplitDataOptions,
    TrainConfig,
    check_fields,
    require,
)

# Factors that images are scaled by are not larger.
MOST_SCALE = 100


@dataclass
class SegmentationDataConfig(SplitDataConfig):
    """Where images and their label maps are, and how they are read."""

    path: str = "path/to/ade20k"
    """A folder laid out as ADE20K's: images/SPLIT/*.jpg, annotations/SPLIT/*.png with the same names."""
    train_split: str = "training"
    """The split to train on."""
    eval_split: str = "validation"
    """The split to evaluate on."""
    labels: str | None = None
    """A YAML file that says what the values of pixels mean; null = as ADE20K has it: 0 is ignored, classes from 1."""


@dataclass
class SegmentationDataOptions(SplitDataOptions):
    """Which images to evaluate on, where they are not those of the training run."""

    labels: str | None = None
    """A YAML file that says what the values of pixels mean; null = as in the run."""


@dataclass
class SegmentationAugmentConfig:
    """How training images are varied."""

    scale: tuple[float, float] = (0.5, 2.0)
    """Images are scaled by a random factor from here to there."""
    shorter_side: int | None = 512
    """Side that images are resized to before that; null = as they are."""
    crop: int = 512
    """Side of the square that is cut out. Smaller images are filled up, with pixels that are ignored."""
    most_of_one: float = 0.75
    """A cut with more of one class than this share is drawn again, ten times at most."""
    hflip: float = 0.5
    """Share of images that are mirrored."""
    photometric: bool = True
    """Vary brightness, contrast, saturation and hue."""

    def __post_init__(self) -> None:
        check_fields(
            self,
            "augment",
            scale=MOST_SCALE,
            shorter_side=MOST_PIXELS,
            crop=MOST_PIXELS,
        )
        require(0 < self.scale[0] <= self.scale[1], "augment.scale should rise from above 0")
        require(self.crop > 0, f"augment.crop is {self.crop}: it should be positive")
        require(
            self.shorter_side is None or self.shorter_side > 0,
            f"augment.shorter_side is {self.shorter_side}: it should be positive",
        )
        require(0 < self.most_of_one <= 1, f"augment.most_of_one is {self.most_of_one}: it should be in 0 ... 1")
        require(0 <= self.hflip <= 1, f"augment.hflip is {self.hflip}: it should be from 0 to 1")


@dataclass
class SegmenterConfig(BackboneConfig):
    """The model, and the weights that it starts from."""

    kind: Literal["semantic_fpn", "upernet"] = "semantic_fpn"
    """A feature pyramid whose levels are added up, or UperNet, with an auxiliary head while it learns."""
    num_classes: int | None = None
    """null = as many as the data have; ADE20K has 150."""
    channels: int | None = None
    """Channels of the decoder; null = 256 for semantic_fpn, 512 for upernet."""
    dropout: float = 0.1
    """Share of the decoder's channels that are left out in training."""
    auxiliary_weight: float = 0.4
    """Share of the auxiliary head's loss, for upernet."""

    def most(self) -> dict[str, float]:
        """See BackboneConfig.most."""
        # Label maps have a byte for each pixel.
        return {"num_classes": 255, "channels": 4096, "auxiliary_weight": 1000}

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.num_classes is None or self.num_classes > 1, "model.num_classes should be at least 2")
        require(self.channels is None or self.channels > 0, "model.channels should be at least 1")
        require(0 <= self.dropout < 1, f"model.dropout is {self.dropout}: it should be from 0 to below 1")
        require(self.auxiliary_weight >= 0, "model.auxiliary_weight should not be negative")


@dataclass
class ViewConfig:
    """How an image is looked at in evaluation and prediction."""

    shorter_side: int | None = 512
    """Side that images are resized to; null = as they are. The answer is resized back."""
    window: int | None = None
    """Side of the square windows that slide over the image; null = the whole image at once."""
    stride: int | None = None
    """From window to window; null = two thirds of the window. Where windows overlap, their answers are blended."""
    scales: list[float] = field(default_factory=lambda: [1.0])
    """Factors that the image is scaled by; the answers are averaged. 0.5, 0.75, 1, 1.25, 1.5, 1.75 is usual."""
    flip: bool = False
    """Average with the answer for the mirrored image."""

    def __post_init__(self) -> None:
        check_fields(self, "view", shorter_side=MOST_PIXELS, window=MOST_PIXELS, stride=MOST_PIXELS, scales=MOST_SCALE)
        for name in ("shorter_side", "window", "stride"):
            value = vars(self)[name]
            require(value is None or value > 0, f"view.{name} is {value}: it should be positive")
        require(
            self.stride is None or (self.window is not None and self.stride <= self.window),
            f"view.stride is {self.stride}: it should not exceed view.window, or pixels would be left out",
        )
        require(bool(self.scales) and min(self.scales) > 0, "view.scales should hold at least one factor above 0")


@dataclass
class SegmentationConfig(TrainConfig):
    """A whole segmentation run. By default it counts steps, as is usual for this task."""

    optimizer: OptimizerConfig = field(
        default_factory=lambda: OptimizerConfig(lr=1e-4, lr_batch_size=32, weight_decay=1e-4)
    )
    schedule: ScheduleConfig = field(
        default_factory=lambda: ScheduleConfig(name="poly", steps=40_000, warmup=0, min_lr=0.0, decay_rate=0.9)
    )
    data: SegmentationDataConfig = field(default_factory=SegmentationDataConfig)
    augment: SegmentationAugmentConfig = field(default_factory=SegmentationAugmentConfig)
    model: SegmenterConfig = field(default_factory=SegmenterConfig)
    view: ViewConfig = field(default_factory=ViewConfig)

    def __post_init__(self) -> None:
        require(
            self.optimizer.layer_decay is None,
            "optimizer.layer_decay is for plain classifiers: leave it out for segmentation",
        )
        require(
            self.model.kind != "upernet" or self.data.batch_size > 1,
            "data.batch_size is 1, but UperNet's batch norms learn from two images at least: choose 2 or more",
        )
