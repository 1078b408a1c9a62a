"""What a detection run can be told. `inlinevit detect train` and the recipes are these classes."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from ..checks import MOST_CLASSES, MOST_PIXELS
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


@dataclass
class DetectionDataConfig(SplitDataConfig):
    """Where images and annotations are, and how they are read."""

    path: str = "path/to/coco"
    """A folder laid out as COCO's: images in SPLIT/, annotations in annotations/instances_SPLIT.json."""
    train_split: str = "train2017"
    """The split to train on."""
    eval_split: str = "val2017"
    """The split to evaluate on."""
    train_annotations: str | None = None
    """The annotations to train on, if they lie elsewhere."""
    train_folder: str | None = None
    """The folder of the images to train on, if it lies elsewhere."""
    eval_annotations: str | None = None
    """The annotations to evaluate on, if they lie elsewhere."""
    eval_folder: str | None = None
    """The folder of the images to evaluate on, if it lies elsewhere."""
    group_by_aspect: bool = True
    """Have upright and lying images in batches of their own, which need less padding."""


@dataclass
class DetectionDataOptions(SplitDataOptions):
    """Which images to evaluate on, where they are not those of the training run."""

    places: ClassVar[tuple[str, ...]] = ("path", "eval_annotations", "eval_folder")

    eval_annotations: str | None = None
    """The annotations to evaluate on, if they lie elsewhere; null = as in the run."""
    eval_folder: str | None = None
    """The folder of the images to evaluate on, if it lies elsewhere; null = as in the run."""


@dataclass
class DetectionAugmentConfig:
    """How training images are varied."""

    sides: list[int] = field(default_factory=lambda: [800])
    """Shorter sides that images are resized to, one of them at random; 480, 512, …, 800 is usual for long trainings."""
    longest_side: int = 1333
    """Images whose longer side would exceed this become smaller."""
    hflip: float = 0.5
    """Share of images that are mirrored."""
    scale_jitter: tuple[float, float] | None = None
    """Large-scale jitter: images are scaled by a factor from here to there, relative to a square of jitter_side, and
    cropped or padded to it, in place of `sides`; (0.1, 2.0) is usual."""
    jitter_side: int = 1024
    """Side of the square for large-scale jitter."""
    copy_paste: float = 0.0
    """Share of images into which objects of another image are pasted."""

    def __post_init__(self) -> None:
        check_fields(
            self,
            "augment",
            sides=MOST_PIXELS,
            longest_side=MOST_PIXELS,
            scale_jitter=100,
            jitter_side=MOST_PIXELS,
        )
        for name in ("hflip", "copy_paste"):
            value = vars(self)[name]
            require(0 <= value <= 1, f"augment.{name} is {value}: it should be from 0 to 1")
        require(bool(self.sides) and min(self.sides) > 0, "augment.sides should hold at least one side above 0")
        require(
            self.longest_side >= max(self.sides),
            f"augment.longest_side is {self.longest_side}, which is below the shorter side {max(self.sides)}: raise it",
        )
        jitter = self.scale_jitter
        require(jitter is None or 0 < jitter[0] <= jitter[1], "augment.scale_jitter should rise from above 0")
        require(self.jitter_side > 0, f"augment.jitter_side is {self.jitter_side}: it should be positive")


@dataclass
class DetectorConfig(BackboneConfig):
    """The detector, and the weights that it starts from."""

    kind: Literal["mask_rcnn", "cascade_mask_rcnn"] = "mask_rcnn"
    """One stage of boxes and masks, or three that refine each other's boxes."""
    num_classes: int | None = None
    """Categories, without background; null = as many as the data have."""
    frozen_stages: int = 0
    """So many stages of the backbone, from the first, do not learn."""
    side: int = 800
    """Shorter side that images are resized to for evaluation and prediction."""
    longest_side: int = 1333
    """Images whose longer side would exceed this become smaller."""
    channels: int = 256
    """Channels of the feature pyramid and of the mask heads."""
    box_channels: int = 1024
    """Width of the box heads."""
    class_agnostic_boxes: bool = False
    """Refine boxes in one way for all categories, instead of one for each."""
    anchor_side: int = 32
    """Side of the smallest anchors; it doubles from level to level of the pyramid."""
    rois: int = 512
    """Regions of an image that the heads learn from in a step."""
    score_threshold: float = 0.05
    """Detections with lower scores are not told."""
    nms_threshold: float = 0.5
    """Of two boxes of a category that overlap more than this, one is told."""
    detections: int = 100
    """How many objects are told of an image, at most."""

    def most(self) -> dict[str, float]:
        """See BackboneConfig.most."""
        return {
            "num_classes": MOST_CLASSES,
            "side": MOST_PIXELS,
            "longest_side": MOST_PIXELS,
            "channels": 2048,
            "box_channels": 8192,
            "anchor_side": MOST_PIXELS,
            "rois": 10**6,
            "detections": 10**6,
        }

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("side", "channels", "box_channels", "anchor_side", "rois", "detections"):
            value = vars(self)[name]
            require(value > 0, f"model.{name} is {value}: it should be at least 1")
        for name in ("score_threshold", "nms_threshold"):
            value = vars(self)[name]
            require(0 <= value <= 1, f"model.{name} is {value}: it should be from 0 to 1")
        require(self.num_classes is None or self.num_classes > 0, "model.num_classes should be at least 1")
        require(0 <= self.frozen_stages <= 4, f"model.frozen_stages is {self.frozen_stages}: there are 4 stages")
        require(
            self.longest_side >= self.side,
            f"model.longest_side is {self.longest_side}, which is below model.side {self.side}: raise it",
        )


@dataclass
class DetectionConfig(TrainConfig):
    """A whole detection run. Rates are for a total batch of 16, the schedule is the shorter of the two usual ones."""

    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-4, lr_batch_size=16))
    schedule: ScheduleConfig = field(
        default_factory=lambda: ScheduleConfig(
            name="multistep", epochs=12, warmup=0.07, warmup_lr=1e-7, decay_at=[8, 11], decay_rate=0.1
        )
    )
    data: DetectionDataConfig = field(default_factory=DetectionDataConfig)
    augment: DetectionAugmentConfig = field(default_factory=DetectionAugmentConfig)
    model: DetectorConfig = field(default_factory=DetectorConfig)

    def __post_init__(self) -> None:
        require(
            self.optimizer.layer_decay is None,
            "optimizer.layer_decay is for plain classifiers: leave it out for detectors",
        )
