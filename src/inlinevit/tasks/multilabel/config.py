"""Configuration of multi-label classification: the fields of recipes, and the options of `inlinevit multilabel`."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from ...engine.config import ClassPredictOptions, EvalOptions, TrainConfig
from ...utils.validation import Range, check_fields, check_value, require
from ..classification.config import AugmentConfig, ImageDataConfig, ImageDataOptions, ModelConfig


@dataclass
class MultilabelDataConfig(ImageDataConfig):
    """Images and their labels, and how they are read."""

    path: str = "path/to/labels.csv"
    """A CSV file with the columns image and labels and, for several splits, split (train, val). Labels are separated by
    spaces, semicolons or |; images are relative to the file."""


@dataclass
class MultilabelLossConfig:
    """The loss."""

    name: Literal["bce", "asymmetric"] = "bce"
    """Binary cross-entropy, or the asymmetric loss of Ridnik et al., for many labels with few positives."""
    gamma_neg: float = 4.0
    """Focusing exponent of negatives, for asymmetric."""
    gamma_pos: float = 0.0
    """Focusing exponent of positives, for asymmetric."""
    clip: float = 0.05
    """Probabilities of negatives below this do not count, for asymmetric."""

    def __post_init__(self) -> None:
        gamma, clip = Range(0, 100), Range(0, 1, below_most=True)
        check_fields(self, "loss", gamma_neg=gamma, gamma_pos=gamma, clip=clip)


@dataclass
class MultilabelConfig(TrainConfig):
    """A whole multi-label run."""

    free_on_resume: ClassVar[tuple[str, ...]] = (*TrainConfig.free_on_resume, "data.cache", "data.eval_path")

    data: MultilabelDataConfig = field(default_factory=MultilabelDataConfig)
    augment: AugmentConfig = field(default_factory=lambda: AugmentConfig(mixup=0, cutmix=0, label_smoothing=0))
    model: ModelConfig = field(default_factory=ModelConfig)
    loss: MultilabelLossConfig = field(default_factory=MultilabelLossConfig)

    def __post_init__(self) -> None:
        self.data.check_channels(self.model.in_chans)
        self.augment.check_channels(self.model.in_chans)
        unused = [name for name in ("mixup", "cutmix", "label_smoothing") if vars(self.augment)[name] != 0]
        require(
            not unused,
            f"augment.{' and augment.'.join(unused)} do not apply to images with several labels: set them to 0",
        )


@dataclass(kw_only=True)
class MultilabelEvalOptions(EvalOptions):
    """Options of `inlinevit multilabel eval`."""

    data: ImageDataOptions = field(default_factory=ImageDataOptions)
    threshold: float = 0.5
    """Probability from which a label counts as predicted, for F1."""

    def __post_init__(self) -> None:
        check_value("threshold", self.threshold, float, Range(0, 1))


@dataclass(kw_only=True)
class MultilabelPredictOptions(ClassPredictOptions):
    """Options of `inlinevit multilabel predict`."""

    threshold: float = 0.5
    """Labels with lower probabilities are left out."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_value("threshold", self.threshold, float, Range(0, 1))
