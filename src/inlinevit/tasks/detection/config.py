"""Configuration of detection: the fields of recipes, and the options of `inlinevit detect train`, `eval`, `predict`."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from ...engine.config import (
    DrawingPredictOptions,
    EvalOptions,
    OptimizerConfig,
    ScheduleConfig,
    TrainConfig,
)
from ...utils.validation import FRACTION, MOST_CLASSES, MOST_PIXELS, Range, check_fields, check_value, require
from ..backbone_config import BackboneConfig, SplitDataConfig, SplitDataOptions, check_dense_config


@dataclass
class DetectionDataConfig(SplitDataConfig):
    """Images and annotations, and how they are read."""

    path: str = "path/to/coco"
    """A folder laid out as COCO's: images in SPLIT/, annotations in annotations/instances_SPLIT.json."""
    train_split: str = "train2017"
    eval_split: str = "val2017"
    train_annotations: str | None = None
    """The annotations to train on, if they are elsewhere."""
    train_folder: str | None = None
    """The folder of the images to train on, if it is elsewhere."""
    eval_annotations: str | None = None
    """The annotations to evaluate on, if they are elsewhere."""
    eval_folder: str | None = None
    """The folder of the images to evaluate on, if it is elsewhere."""
    group_by_aspect: bool = True
    """Batch images of the same orientation, portrait or landscape, which need less padding."""


@dataclass
class DetectionDataOptions(SplitDataOptions):
    """Images to evaluate on, where they differ from those of the training run."""

    source_fields: ClassVar[tuple[str, ...]] = ("path",)

    eval_annotations: str | None = None
    """The annotations to evaluate on, if they are elsewhere; null = as in the run."""
    eval_folder: str | None = None
    """The folder of the images to evaluate on, if it is elsewhere; null = as in the run."""

    def applied_to(self, run: Any, default: Any) -> Any:
        named = self.overrides().keys()
        # Both together are other data; one of them alone replaces its part of the run's.
        is_elsewhere = {"eval_annotations", "eval_folder"} <= named
        data = super().applied_to(None if is_elsewhere else run, default)
        unused = [name for name in ("path", "eval_split") if name in named]
        require(
            not unused or data.eval_annotations is None or data.eval_folder is None,
            f"data.{' and data.'.join(unused)} would not be used, because data.eval_annotations and data.eval_folder "
            "name the files: leave out one or the other",
        )
        return data


@dataclass
class DetectionAugmentConfig:
    """How training images are varied."""

    min_sizes: list[int] = field(default_factory=lambda: [800])
    """Shorter sides that images are resized to, one of them at random; 480, 512, …, 800 is usual for long trainings."""
    max_size: int = 1333
    """Images whose longer side would exceed this become smaller."""
    hflip: float = 0.5
    """Probability of a horizontal flip."""
    scale_jitter: tuple[float, float] | None = None
    """Large-scale jitter: images are scaled by a factor from here to there, relative to a square of jitter_size, and
    cropped or padded to it, in place of `min_sizes`; (0.1, 2.0) is usual."""
    jitter_size: int = 1024
    """Side of the square for large-scale jitter."""
    copy_paste: float = 0.0
    """Probability that objects of another image are pasted into an image."""

    def __post_init__(self) -> None:
        sides = dict.fromkeys(("min_sizes", "max_size", "jitter_size"), Range(1, MOST_PIXELS))
        fractions = dict.fromkeys(("hflip", "copy_paste"), FRACTION)
        check_fields(self, "augment", scale_jitter=Range(0, 100, above_least=True), **sides, **fractions)
        require(bool(self.min_sizes), "augment.min_sizes should hold at least one side")
        require(
            self.max_size >= max(self.min_sizes),
            f"augment.max_size is {self.max_size}, which is below the shorter side {max(self.min_sizes)}: raise it",
        )
        jitter = self.scale_jitter
        require(jitter is None or jitter[0] <= jitter[1], "augment.scale_jitter should rise from above 0")


@dataclass
class DetectorConfig(BackboneConfig):
    """The detector, and the weights that it starts from."""

    ranges: ClassVar[dict[str, Range]] = {
        **BackboneConfig.ranges,
        **dict.fromkeys(("min_size", "max_size", "anchor_size"), Range(1, MOST_PIXELS)),
        **dict.fromkeys(("box_batch_size_per_image", "box_detections_per_img"), Range(1, 10**6)),
        **dict.fromkeys(("box_score_thresh", "box_nms_thresh"), Range(0, 1)),
        "num_classes": Range(1, MOST_CLASSES),
        "frozen_stages": Range(0, 4),
        "channels": Range(1, 2048),
        "box_channels": Range(1, 8192),
    }

    arch: Literal["mask_rcnn", "cascade_mask_rcnn"] = "mask_rcnn"
    """Mask R-CNN, or Cascade Mask R-CNN with three stages that refine each other's boxes."""
    num_classes: int | None = None
    """Categories, without background; null = as many as the data have."""
    frozen_stages: int = 0
    """Number of the first stages of the backbone whose weights are frozen."""
    min_size: int = 800
    """Shorter side that images are resized to for evaluation and prediction."""
    max_size: int = 1333
    """Images whose longer side would exceed this become smaller."""
    channels: int = 256
    """Channels of the feature pyramid and of the mask heads."""
    box_channels: int = 1024
    """Width of the box heads."""
    class_agnostic_boxes: bool = False
    """Refine boxes in one way for all categories, instead of one for each."""
    anchor_size: int = 32
    """Side of the smallest anchors; it doubles from level to level of the pyramid."""
    box_batch_size_per_image: int = 512
    """Regions of an image that the heads learn from in a step."""
    box_score_thresh: float = 0.05
    """Detections with lower scores are left out."""
    box_nms_thresh: float = 0.5
    """Of two boxes of a category with a larger IoU, one is left out."""
    box_detections_per_img: int = 100
    """Largest number of objects in an image."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.max_size >= self.min_size,
            f"model.max_size is {self.max_size}, which is below model.min_size {self.min_size}: raise it",
        )


@dataclass
class DetectionConfig(TrainConfig):
    """A whole detection run. Rates are for a total batch of 16, the schedule is the shorter of the two usual ones."""

    free_on_resume: ClassVar[tuple[str, ...]] = (
        *TrainConfig.free_on_resume,
        "data.train_annotations",
        "data.train_folder",
        "data.eval_annotations",
        "data.eval_folder",
    )

    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-4, lr_base_size=16))
    schedule: ScheduleConfig = field(
        default_factory=lambda: ScheduleConfig(
            name="multistep", epochs=12, warmup=0.07, warmup_lr=1e-7, milestones=[8, 11], decay_rate=0.1
        )
    )
    data: DetectionDataConfig = field(default_factory=DetectionDataConfig)
    augment: DetectionAugmentConfig = field(default_factory=DetectionAugmentConfig)
    model: DetectorConfig = field(default_factory=DetectorConfig)

    def __post_init__(self) -> None:
        check_dense_config(self)


@dataclass(kw_only=True)
class DetectionEvalOptions(EvalOptions):
    """Options of `inlinevit detect eval`. With --output, it also writes results_bbox.json and results_segm.json."""

    data: DetectionDataOptions = field(default_factory=DetectionDataOptions)
    results: list[str] | None = None
    """Evaluate the results in these files, in COCO's format, instead of a model; boxes and masks may be in files of
    their own."""
    threshold: float | None = None
    """Score from which a detection counts in predictions.csv and evaluation.html; null = 0.5. COCO's metrics have no
    threshold."""

    def __post_init__(self) -> None:
        if self.threshold is not None:
            check_value("threshold", self.threshold, float, Range(0, 1))
            require(
                self.output is not None, "--threshold is for the files of an evaluation: name a folder with --output"
            )
        given = {name: vars(self)[name] for name in ("checkpoint", "precision", "device")}
        given |= {f"data.{name}": vars(self.data)[name] for name in ("workers", "bands", "range")}
        unused = [name for name, value in given.items() if value not in (None, "no")]
        require(
            not self.results or not unused,
            f"results are evaluated without a model: leave out --{' and --'.join(unused)}, or --results",
        )


@dataclass(kw_only=True)
class DetectionPredictOptions(DrawingPredictOptions):
    """Options of `inlinevit detect predict`."""

    output: str
    """Folder for a drawing of each image, NAME.png, and predictions.json."""
    threshold: float = 0.5
    """Objects with lower scores are left out."""

    def __post_init__(self) -> None:
        check_value("threshold", self.threshold, float, Range(0, 1))
