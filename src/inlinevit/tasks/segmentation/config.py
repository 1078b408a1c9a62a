"""Configuration of segmentation: the fields of recipes, and the options of `inlinevit segment train, eval, predict`."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from ...engine.config import (
    DrawingPredictOptions,
    EvalOptions,
    OptimizerConfig,
    ScheduleConfig,
    TrainConfig,
)
from ...utils.validation import MOST_PIXELS, check_fields, require
from ..backbone_config import BackboneConfig, SplitDataConfig, SplitDataOptions, refuse_layer_decay

# Factors that images are scaled by are not larger.
MOST_SCALE = 100


@dataclass
class SegmentationDataConfig(SplitDataConfig):
    """Images and their label maps, and how they are read."""

    path: str = "path/to/ade20k"
    """A folder laid out as ADE20K's: images/SPLIT/*.jpg, annotations/SPLIT/*.png with the same names."""
    labels: str | None = None
    """A YAML file with the meaning of pixel values; null = as in ADE20K: 0 is ignored, classes from 1."""
    train_split: str = "training"
    eval_split: str = "validation"


@dataclass
class SegmentationDataOptions(SplitDataOptions):
    """Images to evaluate on, where they differ from those of the training run."""

    labels: str | None = None
    """A YAML file with the meaning of pixel values; null = as in the run."""


@dataclass
class SegmentationAugmentConfig:
    """Augmentation of training images."""

    scale: tuple[float, float] = (0.5, 2.0)
    """Images are scaled by a random factor from here to there."""
    min_size: int | None = 512
    """Side that images are resized to before that; null = as they are."""
    crop_size: int = 512
    """Side of the square crop. Smaller images are padded, with pixels that are ignored."""
    cat_max_ratio: float = 0.75
    """A crop in which one class has a larger share is drawn again, ten times at most."""
    hflip: float = 0.5
    """Share of images that are mirrored."""
    photometric_distortion: bool = True
    """Vary brightness, contrast, saturation and hue."""

    def __post_init__(self) -> None:
        check_fields(
            self,
            "augment",
            scale=MOST_SCALE,
            min_size=MOST_PIXELS,
            crop_size=MOST_PIXELS,
        )
        require(0 < self.scale[0] <= self.scale[1], "augment.scale should rise from above 0")
        require(self.crop_size > 0, f"augment.crop_size is {self.crop_size}: it should be positive")
        require(
            self.min_size is None or self.min_size > 0,
            f"augment.min_size is {self.min_size}: it should be positive",
        )
        require(0 < self.cat_max_ratio <= 1, f"augment.cat_max_ratio is {self.cat_max_ratio}: it should be in 0 ... 1")
        require(0 <= self.hflip <= 1, f"augment.hflip is {self.hflip}: it should be from 0 to 1")


@dataclass
class SegmenterConfig(BackboneConfig):
    """The model and its initial weights."""

    arch: Literal["semantic_fpn", "upernet"] = "semantic_fpn"
    """A feature pyramid whose levels are added up, or UperNet, with an auxiliary head while it learns."""
    num_classes: int | None = None
    """null = as many as the data have; ADE20K has 150."""
    channels: int | None = None
    """Channels of the decoder; null = 256 for semantic_fpn, 512 for upernet."""
    dropout: float = 0.1
    """Share of the decoder's channels that are left out in training."""
    aux_weight: float = 0.4
    """Share of the auxiliary head's loss, for upernet."""

    def most(self) -> dict[str, float]:
        # Label maps have a byte for each pixel.
        return {"num_classes": 255, "channels": 4096, "aux_weight": 1000}

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.num_classes is None or self.num_classes > 1, "model.num_classes should be at least 2")
        require(self.channels is None or self.channels > 0, "model.channels should be at least 1")
        require(0 <= self.dropout < 1, f"model.dropout is {self.dropout}: it should be from 0 to below 1")
        require(self.aux_weight >= 0, "model.aux_weight should not be negative")


@dataclass
class InferenceConfig:
    """How images are processed in evaluation and prediction."""

    min_size: int | None = 512
    """Side that images are resized to; null = as they are. Predictions are resized back."""
    window_size: int | None = None
    """Side of the square windows that slide over the image; null = the whole image at once."""
    stride: int | None = None
    """From window to window; null = two thirds of the window. Where windows overlap, their logits are blended."""
    scales: list[float] = field(default_factory=lambda: [1.0])
    """Factors that the image is scaled by; probabilities are averaged. 0.5, 0.75, 1, 1.25, 1.5, 1.75 is usual."""
    flip: bool = False
    """Average with the prediction for the mirrored image."""

    def __post_init__(self) -> None:
        check_fields(
            self, "inference", min_size=MOST_PIXELS, window_size=MOST_PIXELS, stride=MOST_PIXELS, scales=MOST_SCALE
        )
        for name in ("min_size", "window_size", "stride"):
            value = vars(self)[name]
            require(value is None or value > 0, f"inference.{name} is {value}: it should be positive")
        require(
            self.stride is None or (self.window_size is not None and self.stride <= self.window_size),
            f"inference.stride is {self.stride}: it should not exceed inference.window_size, or pixels are left out",
        )
        require(bool(self.scales) and min(self.scales) > 0, "inference.scales should hold at least one factor above 0")


@dataclass
class InferenceOptions:
    """Inference settings, where they differ from those of the training run."""

    min_size: int | Literal["original"] | None = None
    """Side that images are resized to, or original; null = as in the run. Predictions are resized back."""
    window_size: int | Literal["whole"] | None = None
    """Side of the square windows that slide over the image, or whole for the image at once; null = as in the run."""
    stride: int | None = None
    """From window to window; null = as in the run or, if window_size is given, two thirds of it."""
    scales: list[float] | None = None
    """Factors that the image is scaled by; probabilities are averaged. null = as in the run."""
    flip: bool | None = None
    """Average with the prediction for the mirrored image; null = as in the run."""

    def __post_init__(self) -> None:
        # Refuse what is wrong whatever the run's settings. A stride without windows may have those of the run.
        window = MOST_PIXELS if self.stride is not None else None
        InferenceConfig(
            min_size=self.min_size if isinstance(self.min_size, int) else None,
            window_size=self.window_size if isinstance(self.window_size, int) else window,
            stride=self.stride,
            scales=[1.0] if self.scales is None else self.scales,
        )

    def applied_to(self, inference: InferenceConfig) -> InferenceConfig:
        """Return the inference settings of a run, with these options in place of its own."""
        sides = {
            "min_size": (self.min_size, inference.min_size),
            "window_size": (self.window_size, inference.window_size),
        }
        chosen = {
            name: own if override is None else None if isinstance(override, str) else override
            for name, (override, own) in sides.items()
        }
        return InferenceConfig(
            **chosen,
            stride=inference.stride if self.stride is None and self.window_size is None else self.stride,
            scales=inference.scales if self.scales is None else self.scales,
            flip=inference.flip if self.flip is None else self.flip,
        )


@dataclass
class SegmentationConfig(TrainConfig):
    """A whole segmentation run. By default it counts steps, as is usual for this task."""

    free_on_resume: ClassVar[tuple[str, ...]] = (*TrainConfig.free_on_resume, "data.labels")

    optimizer: OptimizerConfig = field(
        default_factory=lambda: OptimizerConfig(lr=1e-4, lr_base_size=32, weight_decay=1e-4)
    )
    schedule: ScheduleConfig = field(
        default_factory=lambda: ScheduleConfig(name="poly", steps=40_000, warmup=0, min_lr=0.0, decay_rate=0.9)
    )
    data: SegmentationDataConfig = field(default_factory=SegmentationDataConfig)
    augment: SegmentationAugmentConfig = field(default_factory=SegmentationAugmentConfig)
    model: SegmenterConfig = field(default_factory=SegmenterConfig)
    inference: InferenceConfig = field(default_factory=InferenceConfig)

    def __post_init__(self) -> None:
        refuse_layer_decay(self)
        require(
            self.model.arch != "upernet" or self.data.batch_size > 1,
            "data.batch_size is 1, but UperNet's batch norms learn from two images at least: choose 2 or more",
        )


@dataclass(kw_only=True)
class SegmentationEvalOptions(EvalOptions):
    """Options of `inlinevit segment eval`. With --output, it also writes confusion.png."""

    data: SegmentationDataOptions = field(default_factory=SegmentationDataOptions)
    inference: InferenceOptions = field(default_factory=InferenceOptions)


@dataclass(kw_only=True)
class SegmentationPredictOptions(DrawingPredictOptions):
    """Options of `inlinevit segment predict`. Images that are too large for one pass are processed in windows."""

    output: str
    """Folder for the label map of each image, NAME_labels.png with the values of the training data, a drawing,
    NAME_overlay.png, and predictions.json."""
    inference: InferenceOptions = field(default_factory=InferenceOptions)
