"""Configuration of segmentation: the fields of recipes, and the options of `inlinevit segment train, eval, predict`."""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from ...engine.config import (
    DrawingPredictOptions,
    EvalOptions,
    OptimizerConfig,
    ScheduleConfig,
    TrainConfig,
)
from ...utils.validation import MOST_PIXELS, Range, check_fields, require
from ..backbone_config import BackboneConfig, SplitDataConfig, SplitDataOptions, check_dense_config

# Factors that images are scaled by.
SCALES = Range(0, 100, above_least=True)


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
    """Shorter side that images are resized to before that; null = as they are."""
    crop_size: int = 512
    """Side of the square crop. Smaller images are padded, with pixels that are ignored."""
    cat_max_ratio: float = 0.75
    """A crop in which one class has a larger share is drawn again, ten times at most."""
    hflip: float = 0.5
    """Probability of a horizontal flip."""
    photometric_distortion: bool = True
    """Vary brightness, contrast, saturation and hue."""

    def __post_init__(self) -> None:
        ranges = dict.fromkeys(("min_size", "crop_size"), Range(1, MOST_PIXELS))
        ranges |= {"scale": SCALES, "cat_max_ratio": Range(0, 1, above_least=True), "hflip": Range(0, 1)}
        check_fields(self, "augment", **ranges)
        require(self.scale[0] <= self.scale[1], "augment.scale should rise from above 0")


@dataclass
class SegmenterConfig(BackboneConfig):
    """The model and its initial weights."""

    ranges: ClassVar[dict[str, Range]] = {
        **BackboneConfig.ranges,
        # Label maps have a byte for each pixel.
        "num_classes": Range(2, 255),
        "channels": Range(1, 4096),
        "dropout": Range(0, 1, below_most=True),
        "aux_weight": Range(0, 1000),
    }

    arch: Literal["semantic_fpn", "upernet"] = "semantic_fpn"
    """SemanticFPN, which adds up the levels of a feature pyramid, or UperNet, with an auxiliary head in training."""
    num_classes: int | None = None
    """Number of classes; null = as many as the data have; ADE20K has 150."""
    channels: int | None = None
    """Channels of the decoder; null = 256 for semantic_fpn, 512 for upernet."""
    dropout: float = 0.1
    """Dropout of the decoder's channels."""
    aux_weight: float = 0.4
    """Weight of the auxiliary head's loss, for upernet."""


@dataclass
class InferenceConfig:
    """How images are processed in evaluation and prediction."""

    min_size: int | None = 512
    """Shorter side that images are resized to; null = as they are. Predictions are resized back."""
    window_size: int | None = None
    """Side of the square windows that slide over the image; null = the whole image at once."""
    stride: int | None = None
    """Pixels from window to window; null = two thirds of the window. Logits of windows that overlap are blended."""
    scales: list[float] = field(default_factory=lambda: [1.0])
    """Factors that the image is scaled by; probabilities are averaged. 0.5, 0.75, 1, 1.25, 1.5, 1.75 is usual."""
    flip: bool = False
    """Average with the prediction for the mirrored image."""

    def __post_init__(self) -> None:
        sides = dict.fromkeys(("min_size", "window_size", "stride"), Range(1, MOST_PIXELS))
        check_fields(self, "inference", scales=SCALES, **sides)
        require(
            self.stride is None or (self.window_size is not None and self.stride <= self.window_size),
            f"inference.stride is {self.stride}: it should not exceed inference.window_size, or pixels are left out",
        )
        require(bool(self.scales), "inference.scales should hold at least one factor above 0")


@dataclass
class InferenceOptions:
    """Inference settings, where they differ from those of the training run."""

    min_size: int | Literal["original"] | None = None
    """Shorter side that images are resized to, or original; null = as in the run. Predictions are resized back."""
    window_size: int | Literal["whole"] | None = None
    """Side of the square windows that slide over the image, or whole for the image at once; null = as in the run."""
    stride: int | None = None
    """Pixels from window to window; null = as in the run or, if window_size is given, two thirds of it."""
    scales: list[float] | None = None
    """Factors that the image is scaled by; probabilities are averaged. null = as in the run."""
    flip: bool | None = None
    """Average with the prediction for the mirrored image; null = as in the run."""

    def __post_init__(self) -> None:
        # Refuse what is wrong whatever the run's settings. A stride without windows may have those of the run.
        self.applied_to(InferenceConfig(window_size=MOST_PIXELS))

    def applied_to(self, inference: InferenceConfig) -> InferenceConfig:
        """Return the inference settings of a run, with these options in place of its own."""
        overrides: dict[str, Any] = {name: value for name, value in vars(self).items() if value is not None}
        if "window_size" in overrides:
            # The run's stride belongs to its own windows.
            overrides.setdefault("stride", None)
        # The words "original" and "whole" stand for null.
        plain: dict[str, Any] = {name: None if isinstance(value, str) else value for name, value in overrides.items()}
        return replace(inference, **plain)


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
        check_dense_config(self)
        require(
            self.model.in_chans in (1, 3) or not self.augment.photometric_distortion,
            "augment.photometric_distortion changes colours of RGB or grey images, but model.in_chans is "
            f"{self.model.in_chans}: set --augment.photometric_distortion false",
        )
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
    """Folder for the label map of each image, NAME_labels.png with the values of the training data, a drawing of the
    same size, NAME_overlay.png, its legend, NAME_legend.png, and predictions.json. With --stream, a .tif file for the
    label map of the image."""
    inference: InferenceOptions = field(default_factory=InferenceOptions)
