"""Configuration of classification: the fields of recipes, and the options of `inlinevit train`, `eval`, `predict`."""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from ...engine.config import (
    BANDS,
    MOST_IMAGES,
    MOST_WORKERS,
    ClassPredictOptions,
    DataOptions,
    EvalOptions,
    PixelConfig,
    TrainConfig,
)
from ...utils.validation import FRACTION, MOST_CLASSES, MOST_PIXELS, Range, check_fields, check_value, require

# Beginnings of the paths of diagnostics, whose images are drawn when they are read (diagnostics.py).
DIAGNOSTIC_PREFIXES = ("recall:", "connectivity:")
# Prefixes of data that may have a root.
ROOTED = ("torch", "hfds", "wds")


@dataclass
class ImageSetConfig:
    """Images for training and evaluation, and how they are loaded."""

    path: str
    """The images."""
    eval_path: str | None = None
    """The images for evaluation, if they are not beside those for training."""
    train_split: str | None = None
    """Name of the split to train on; null = train."""
    eval_split: str | None = None
    """Name of the split to evaluate on; null = val."""
    batch_size: int = 128
    """Images in a batch of one process."""
    workers: int = 2
    """Processes that read images, for each training process; 0 = the training process itself."""
    max_unreadable: int = 0
    """Images that cannot be used are reported and skipped up to this number; 0 = stop at the first."""
    max_train_samples: int | None = None
    """How many of the training images to use; null = all."""


@dataclass
class ImageDataConfig(PixelConfig, ImageSetConfig):
    """Images for training and evaluation, how they are loaded, and what their values mean."""

    cache: bool = False
    """Keep decoded training images in memory, for data sets of small images: each is decoded once instead of in every
    epoch. Each data worker has a cache of its own."""

    def __post_init__(self) -> None:
        check_fields(
            self,
            "data",
            batch_size=Range(1, MOST_IMAGES),
            workers=Range(0, MOST_WORKERS),
            max_unreadable=Range(0, MOST_IMAGES),
            max_train_samples=Range(1, MOST_IMAGES),
        )
        self.check_pixels()


@dataclass
class ClassificationDataConfig(ImageDataConfig):
    """Images in class folders and the like, and how they are read."""

    path: str = "embedded"
    """A folder of class folders, a tar file of them, or a folder with train and val (or validation, test) of either
    kind; "embedded"; "fashion-mnist:FOLDER"; images that are drawn when they are read, with options as in
    "recall:pairs=8,grid=8" and "connectivity:pairs=8,grid=16"; or a name that timm.data knows by its prefix:
    torch/cifar10, hfds/NAME, wds/FOLDER."""
    train_split: str | None = None
    """Name of the split to train on, which must exist; null = train or training, or data that are not divided."""
    eval_split: str | None = None
    """Name of the split to evaluate on, which must exist; null = val, validation, valid, eval, evaluation, test or
    testing, the first that exists (of hfds/ not test)."""
    eval_share: float | None = None
    """Share of each class that is held out of training, for evaluation, if class folders or a tar file have no splits
    and eval_path is not given; the names of the files decide which images. null = 0.2."""
    root: str | None = None
    """Folder of the data that timm.data knows by a prefix."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.eval_share is not None:
            check_value("data.eval_share", self.eval_share, float, Range(0, 1, above_least=True, below_most=True))
        for field_name in ("path", "eval_path"):
            path = vars(self)[field_name] or ""
            kind, _, name = path.partition("/")
            require(
                bool(name) or kind not in (*ROOTED, "hfids") or (kind == "wds" and self.root is not None),
                f"data.{field_name} is {path}, which names no data set: write {kind}/NAME",
            )


@dataclass
class ImageDataOptions(DataOptions):
    """Images to evaluate on, where they differ from those of the training run.

    Options that are not given are as in the run or, without a run or with other images, the defaults of training.
    """

    source_fields: ClassVar[tuple[str, ...]] = ("path", "eval_path")

    path: str | None = None
    """The images, as for training; null = those of the run."""
    eval_path: str | None = None
    """The same as path: give one of them."""
    batch_size: int | None = None
    """Images in a batch of one process; null = as in the run, or 128."""
    max_unreadable: int | None = None
    """Images that cannot be used are reported and skipped up to this number; null = as in the run, or 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.path is None or self.eval_path is None,
            "data.path and data.eval_path both name the images to evaluate on: give one of them",
        )

    def applied_to(self, run: Any, default: Any) -> Any:
        """See DataOptions.applied_to; the images to evaluate on become a data set of their own."""
        data = super().applied_to(run, default)
        path = data.eval_path or data.path
        return replace(data, path=path, eval_path=path)


@dataclass
class ClassificationDataOptions(ImageDataOptions):
    """Images to evaluate on, where they differ from those of the training run.

    Options that are not given are as in the run or, without a run or with other images, the defaults of training.
    """

    path: str | None = None
    """The images, as for inlinevit train, or a plain folder of class folders; null = those of the run."""
    root: str | None = None
    """Folder of the data that timm.data knows by a prefix; null = as in the run."""

    def applied_to(self, run: Any, default: Any) -> Any:
        data = super().applied_to(run, default)
        if run is not None and run.eval_path is None and self.path is None and self.eval_path is None:
            # Images that were held out of training are found as training has found them.
            data = replace(data, eval_path=None)
        require(
            self.root is None or data.path.partition("/")[0] in ROOTED,
            f"data.root is for data whose name begins with {'/, '.join(ROOTED)}/, not for {data.path}: leave it out",
        )
        return data


@dataclass
class AugmentConfig:
    """How training images are varied: timm's augmentation."""

    scale: tuple[float, float] | None = (0.08, 1.0)
    """Area of a random crop, relative to the image's; null = pad and crop instead, as is usual for small images."""
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Width to height of a random crop."""
    crop_padding: int = 4
    """Pixels of padding before a random crop, where scale is null."""
    hflip: float = 0.5
    """Probability of a horizontal flip."""
    color_jitter: float = 0.4
    """How much brightness, contrast and saturation vary, where auto_augment is null."""
    auto_augment: str | None = "rand-m9-mstd0.5-inc1"
    """A policy of timm's: RandAugment, AugMix, AutoAugment."""
    random_erasing: float = 0.25
    """Probability of random erasing."""
    random_erasing_mode: Literal["const", "rand", "pixel"] = "pixel"
    """Erase with zeros, with one random colour, or with random pixels."""
    mixup: float = 0.8
    """Alpha of mixup; 0 = none."""
    cutmix: float = 1.0
    """Alpha of cutmix; 0 = none."""
    mixup_switch: float = 0.5
    """Probability of cutmix instead of mixup for a batch, where both are on."""
    label_smoothing: float = 0.1
    """Label smoothing."""
    repeats: int = 1
    """Repeated augmentation: how often an image comes in succession, each time augmented again; an epoch has as many
    images as without."""

    def __post_init__(self) -> None:
        check_fields(
            self,
            "augment",
            scale=Range(0, 1, above_least=True),
            ratio=Range(0, 100, above_least=True),
            crop_padding=Range(0, MOST_PIXELS),
            color_jitter=Range(0, 10),
            mixup=Range(0, 1000),
            cutmix=Range(0, 1000),
            repeats=Range(1, 1000),
            **dict.fromkeys(("hflip", "random_erasing", "mixup_switch", "label_smoothing"), FRACTION),
        )
        require(self.scale is None or self.scale[0] <= self.scale[1], "augment.scale should rise from least to most")
        require(self.ratio[0] <= self.ratio[1], "augment.ratio should rise from the narrowest to the widest")

    def check_channels(self, channels: int) -> None:
        """Refuse augmentation of colours for images that are neither RGB nor grey."""
        changes = f"auto_augment {self.auto_augment}" if self.auto_augment else f"color_jitter {self.color_jitter}"
        require(
            channels in (1, 3) or (self.auto_augment is None and self.color_jitter == 0),
            f"augment.{changes} changes colours of RGB or grey images, but model.in_chans is {channels}: set "
            "--augment.auto_augment null --augment.color_jitter 0",
        )

    @property
    def mixes(self) -> bool:
        """Whether images of a batch are mixed."""
        return self.mixup > 0 or self.cutmix > 0


@dataclass
class ModelConfig:
    """The model, and the weights that it starts from."""

    name: str = "inline_deit_tiny"
    """Any model of this library or of timm, or a published one: hf-hub:USER/NAME or local-dir:FOLDER."""
    num_classes: int | None = None
    """Number of classes; null = as many as the data have."""
    img_size: int | None = None
    """Side of the images that the model sees; null = what the model was made for."""
    in_chans: int = 3
    """Channels: 3 for colour images, 1 for grey ones, or any other number of bands; see data.bands."""
    crop_pct: float | None = None
    """Side of the centre crop for evaluation, relative to the image's; null = what the model was made for."""
    drop_path_rate: float = 0.1
    """Stochastic depth rate of the last block; it rises linearly up to there."""
    pretrained: bool = False
    """Start from the published weights, or from those of checkpoint if it is given."""
    checkpoint: str | None = None
    """Start from the weights in a file; their size and number of classes may differ."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the model, such as attention: softmax."""

    def __post_init__(self) -> None:
        check_fields(
            self,
            "model",
            num_classes=Range(2, MOST_CLASSES),
            img_size=Range(1, MOST_PIXELS),
            in_chans=Range(1, BANDS.most + 1),
            crop_pct=Range(0, 1, above_least=True),
            drop_path_rate=Range(0, 1, below_most=True),
        )


@dataclass
class DistillationConfig:
    """Knowledge distillation from a teacher."""

    teacher: str | None = None
    """Any model of this library or of timm; null = no teacher."""
    checkpoint: str | None = None
    """File with the teacher's weights; null = its published ones."""
    kind: Literal["soft", "hard"] = "soft"
    """Match the teacher's probabilities, or its choices."""
    weight: float = 0.5
    """Weight of the distillation loss; that of the labels is 1 - weight."""
    temperature: float = 1.0
    """Temperature of the probabilities to match."""

    def __post_init__(self) -> None:
        check_fields(self, "distillation", weight=FRACTION, temperature=Range(0, 1000, above_least=True))
        require(
            self.teacher is not None or self.checkpoint is None,
            "distillation.checkpoint is given without a teacher: name its model with --distillation.teacher",
        )


@dataclass
class ClassificationConfig(TrainConfig):
    """A whole classification run.

    Its sections are those of TrainConfig, and data (ClassificationDataConfig), augment (AugmentConfig), model
    (ModelConfig) and distillation (DistillationConfig).
    """

    free_on_resume: ClassVar[tuple[str, ...]] = (
        *TrainConfig.free_on_resume,
        "data.cache",
        "data.eval_path",
        "data.root",
    )

    data: ClassificationDataConfig = field(default_factory=ClassificationDataConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    distillation: DistillationConfig = field(default_factory=DistillationConfig)

    def __post_init__(self) -> None:
        self.data.check_channels(self.model.in_chans)
        self.augment.check_channels(self.model.in_chans)
        require(
            not self.augment.mixes or self.data.batch_size % 2 == 0,
            f"data.batch_size is {self.data.batch_size}, but mixup pairs the images of a batch: choose an even one, or "
            "set augment.mixup and augment.cutmix to 0",
        )

    def fixed_on_resume(self) -> set[str]:
        """The path of a diagnostic is not a place, but says what its images show."""
        return {"data.path"} if self.data.path.startswith(DIAGNOSTIC_PREFIXES) else set()


@dataclass(kw_only=True)
class ClassificationEvalOptions(EvalOptions):
    """Options of `inlinevit eval`. With --output, it also writes confusion.png."""

    data: ClassificationDataOptions = field(default_factory=ClassificationDataOptions)
    checkpoint: str | None = None
    """With the name of a model, the file of its weights (null = the published ones); with a run, "best" or a checkpoint
    (null = the final weights)."""
    img_size: int | None = None
    """Side of the model's input; null = what it was trained for."""
    crop_pct: float | None = None
    """Side of the centre crop, relative to the image's; null = what it was trained for."""


@dataclass(kw_only=True)
class ClassificationPredictOptions(ClassPredictOptions):
    """Options of `inlinevit predict`."""

    command_only: ClassVar[tuple[str, ...]] = (*ClassPredictOptions.command_only, "img_size")

    checkpoint: str | None = None
    """With the name of a model, the file of its weights (null = the published ones); with a run, "best" or a checkpoint
    (null = the final weights)."""
    img_size: int | None = None
    """Side of the model's input; null = what it was trained for."""
    top: int = 5
    """How many classes to list for each image."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_value("top", self.top, int, Range(1, MOST_IMAGES))
