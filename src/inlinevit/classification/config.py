"""What a classification run can be told. `inlinevit train` and the recipes are these classes."""

from dataclasses import dataclass, field
from typing import Any, Literal

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from ..training.config import TrainConfig


@dataclass
class DataConfig:
    """Where the images are, and how they are read."""

    # A folder of class folders, a tar file of them, or a folder with train and val (or validation, test) of either kind;
    # "embedded"; "fashion-mnist:FOLDER"; or what timm.data knows by a prefix: "torch/cifar10", "hfds/NAME", "wds/NAME".
    path: str = "embedded"
    # The images for evaluation, if they are not beside those for training.
    eval_path: str | None = None
    # Folder of the data that timm.data knows by a prefix, and the names of their parts.
    root: str | None = None
    train_split: str = "train"
    eval_split: str = "validation"
    # Images in a batch of one process.
    batch_size: int = 128
    # Processes that read images, for each training process.
    workers: int = 2
    # Images that cannot be read are skipped up to this number; 0 = stop at the first.
    max_unreadable: int = 0
    # How many of the training images to use; None = all.
    train_images: int | None = None


@dataclass
class AugmentConfig:
    """How training images are varied; timm's augmentation."""

    # None = no crops of other scales: pad and crop instead, as is usual for small images.
    scale: tuple[float, float] | None = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    # Pixels of padding before a random crop, where scale is None.
    crop_padding: int = 4
    hflip: float = 0.5
    color_jitter: float = 0.4
    auto_augment: str | None = "rand-m9-mstd0.5-inc1"
    random_erasing: float = 0.25
    random_erasing_mode: Literal["const", "rand", "pixel"] = "pixel"
    mixup: float = 0.8
    cutmix: float = 1.0
    # Share of batches that get cutmix instead of mixup.
    mixup_switch: float = 0.5
    label_smoothing: float = 0.1
    # How often an image comes in an epoch's row, each time varied anew.
    repeats: int = 1


@dataclass
class ModelConfig:
    """The model, and the weights it starts from."""

    # Any model of ours or of timm.
    name: str = "inline_deit_tiny"
    # None = as many as the data have.
    num_classes: int | None = None
    img_size: int = 224
    # 3 for colour images, 1 for grey ones.
    in_chans: Literal[1, 3] = 3
    # Share of an image's side that evaluation sees.
    crop_pct: float = 224 / 256
    drop_path: float = 0.1
    # Start from the published weights.
    pretrained: bool = False
    # Start from a file instead.
    checkpoint: str | None = None
    # Further arguments of the model.
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def image_mode(self) -> str:
        """How images are converted when they are read."""
        return "RGB" if self.in_chans == 3 else "L"

    @property
    def normalization(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and spread by which images are normalised: ImageNet's, or half and half for grey ones."""
        return (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD) if self.in_chans == 3 else ((0.5,), (0.5,))


@dataclass
class DistillationConfig:
    """Learn from a teacher, too."""

    # Any model of ours or of timm; None = no teacher.
    teacher: str | None = None
    checkpoint: str | None = None
    # Match the teacher's probabilities, or its choices.
    kind: Literal["soft", "hard"] = "soft"
    # Share of the teacher in the loss.
    weight: float = 0.5
    temperature: float = 1.0


@dataclass
class ClassificationConfig(TrainConfig):
    """A whole classification run."""

    data: DataConfig = field(default_factory=DataConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
