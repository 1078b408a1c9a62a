"""Metrics of classification: accuracy, calibration, confusion."""

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassCalibrationError, MulticlassConfusionMatrix

from ...data.images import display_name
from ...data.loader import EvalLoader
from ...engine.evaluator import Evaluation, Evaluator
from ...engine.records import rounded, to_picture
from ...utils.validation import require
from ..calibration import CALIBRATION_BINS, CalibrationBins, calibration_details, calibration_section
from .config import ImageDataConfig
from .dataset import NO_LABEL, UnreadableCounter, drop_unreadable, make_eval_loader
from .shards import ShardSource
from .sources import ImageSource
from .transforms import InputSpec, evaluation_transform

if TYPE_CHECKING:
    from PIL import Image

    from ...report import Section

CONFUSION_PNG = "confusion.png"
# Classes of an image in predictions.csv.
TOP_CLASSES = 5


@dataclass
class ClassificationEvaluation(Evaluation):
    """The result of an evaluation.

    Attributes:
        top1: Top-1 accuracy, in percent.
        top5: Top-5 accuracy, in percent.
        calibration_error: Expected calibration error over 15 bins, in percent.
        loss: Mean cross-entropy.
        confusion: (classes, classes) images by true and by predicted class.
        classes: Names of the classes; their indices, if they are not known.
        calibration: See CalibrationBins; None if single images were not recorded.
    """

    worst_caption: ClassVar[str] = (
        "The wrong predictions with the highest confidence. Pictures show what the model gets: resized and cropped."
    )

    top1: float
    top5: float
    calibration_error: float
    loss: float
    confusion: Tensor
    classes: list[str] = field(default_factory=list)
    calibration: Tensor | None = None

    def numbers(self) -> dict[str, float]:
        return {name: vars(self)[name] for name in ("top1", "top5", "calibration_error", "loss")}

    @property
    def images(self) -> int:  # type: ignore[override]
        """How many images were evaluated."""
        return int(self.confusion.sum())

    @property
    def class_accuracy(self) -> list[float | None]:
        """Accuracy of each class, in percent; None for a class without images."""
        correct, images = self.confusion.diagonal().tolist(), self.confusion.sum(dim=1).tolist()
        return [100 * some / all_ if all_ else None for some, all_ in zip(correct, images, strict=True)]

    def tables(self) -> list[list[dict[str, str]]]:
        percents = {"top-1 %": self.top1, "top-5 %": self.top5, "calibration error %": self.calibration_error}
        return [[{**{name: f"{value:.2f}" for name, value in percents.items()}, "loss": f"{self.loss:.4f}"}]]

    def class_scores(self) -> tuple[Sequence[str], Mapping[str, Sequence[float]]]:
        return self.classes, {"accuracy": [math.nan if one is None else one / 100 for one in self.class_accuracy]}

    def per_class(self) -> list[dict[str, Any]]:
        images, right = self.confusion.sum(dim=1).tolist(), self.confusion.diagonal().tolist()
        keys = ("index", "class", "images", "right", "accuracy")
        columns = (range(len(self.classes)), self.classes, images, right, self.class_accuracy)
        return [dict(zip(keys, row, strict=True)) for row in zip(*columns, strict=True)]

    def details(self) -> dict[str, Any]:
        return {"confusion": self.confusion.tolist(), **calibration_details(self.calibration)}

    def sections(self) -> list["Section"]:
        from ..confusion_matrix import confusion_matrix_section

        sections = [confusion_matrix_section(self.confusion, self.classes)]
        if self.calibration is not None and math.isfinite(self.calibration_error):
            sections += [calibration_section(self.calibration, self.calibration_error / 100, "images", "right")]
        return sections

    def save_files(self, folder: Path) -> None:
        # Imported here: matplotlib is slow to import, and training draws nothing.
        from ..confusion_matrix import draw_confusion_matrix

        draw_confusion_matrix(self.confusion, self.classes, folder / CONFUSION_PNG)


class ImageRecord(NamedTuple):
    """What is recorded of an image; see ImageRecorder.add."""

    values: dict[str, Any]
    badness: tuple[float, ...] | None
    lines: tuple[str, ...]


class ImageEvaluator(Evaluator):
    """Evaluates models on batches of whole images.

    Args:
        source: The images.
        spec: The model's input.
        config: How they are read.
        num_targets: Labels of the source are below this: the number of classes, or of rows in a table of targets.
        labels: For each label of the source, that of the model; None = they are the same.
    """

    def __init__(
        self,
        source: ImageSource | ShardSource,
        spec: InputSpec,
        config: ImageDataConfig,
        num_targets: int,
        labels: Sequence[int] | None = None,
    ) -> None:
        self.source, self.spec, self.config, self.labels = source, spec, config, labels
        self.num_targets = num_targets

    def loader(self, process: int, processes: int) -> EvalLoader:
        """See Evaluator.loader: images, labels, problems; if they are recorded, with indices and names."""
        transform, named = evaluation_transform(self.spec), self.recorder is not None
        return make_eval_loader(
            self.source, transform, self.spec.pixel_format, self.num_targets, self.config, process, processes, named
        )

    def reset(self, device: torch.device) -> None:
        super().reset(device)
        self.unreadable = UnreadableCounter(self.config.max_unreadable)
        self.calibration_bins = CalibrationBins()

    def update(self, model: nn.Module, batch: Any) -> None:
        """See Evaluator.update; unreadable images are left out."""
        indices, batch = batch if self.recorder is not None else ([], batch)
        for images, labels in drop_unreadable([batch[:3]], self.unreadable, self.labels):
            logits = model(images.to(self.device, non_blocking=True)).float()
            self.add(logits, labels)
            if self.recorder is not None:
                self.record(indices, batch, images, logits.cpu(), labels)

    def record(self, indices: list[int], batch: Any, images: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Record the images of a batch; see drop_unreadable and add for the images that can be used."""
        assert self.recorder is not None
        _, truth, problems, names = batch
        usable, records, unusable = iter(images), self.make_records(logits, labels), iter(problems)
        for index, name, label in zip(indices, names, truth.tolist(), strict=True):
            if label == NO_LABEL:
                self.recorder.skip(index, name, next(unusable))
                continue
            values, badness, lines = next(records)
            draw = partial(self.draw, next(usable))
            self.recorder.add(index, name, values, badness=badness, lines=lines, draw=draw)

    def draw(self, image: Tensor) -> dict[str, "Image.Image"]:
        """Return the picture of an image (channels, height, width), as the model gets it."""
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (self.spec.mean, self.spec.std))
        return {"": to_picture(image * std + mean)}

    @abstractmethod
    def make_records(self, logits: Tensor, labels: Tensor) -> Iterator[ImageRecord]:
        """Yield what to record of each image of a batch; arguments as for add, all on the CPU."""

    @abstractmethod
    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Add the logits (images, classes) and the labels (images,) of a batch; the labels are on the CPU."""

    def top_classes(self, logits: Tensor, probabilities: Tensor, classes: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Yield the most probable classes of images (images, classes), as columns of predictions.csv."""
        # Logits, because large probabilities may all be 1; stable, so that the first of equals comes first.
        order = logits.argsort(dim=1, descending=True, stable=True)[:, :TOP_CLASSES]
        for indices, values in zip(order.tolist(), probabilities.gather(1, order).tolist(), strict=True):
            row: dict[str, Any] = {}
            for rank, (index, value) in enumerate(zip(indices, values, strict=True), start=1):
                row |= {f"top{rank}": classes[index], **rounded({f"top{rank}_probability": value})}
            yield row

    @staticmethod
    def require_images(images: int) -> None:
        """Refuse to compute metrics of nothing."""
        require(images > 0, "there is not one image to evaluate on: check the data")


class ClassificationEvaluator(ImageEvaluator):
    """Evaluates classifiers on one data set; see ImageEvaluator.

    Args:
        num_classes: Width of the model's head.
        classes: Names of the model's classes; None = their indices.
    """

    def __init__(
        self,
        source: ImageSource | ShardSource,
        spec: InputSpec,
        config: ImageDataConfig,
        num_classes: int,
        *,
        labels: Sequence[int] | None = None,
        classes: Sequence[str] | None = None,
    ) -> None:
        super().__init__(source, spec, config, num_classes if labels is None else len(labels), labels)
        self.num_classes = num_classes
        names = [str(index) for index in range(num_classes)] if classes is None else classes
        # Folders may have names that are not valid text.
        self.classes = list(map(display_name, names))

    def reset(self, device: torch.device) -> None:
        super().reset(device)
        top_k = min(5, self.num_classes)
        self.top5 = MulticlassAccuracy(self.num_classes, top_k=top_k, average="micro", validate_args=False).to(device)
        self.calibration = MulticlassCalibrationError(self.num_classes, CALIBRATION_BINS, validate_args=False)
        self.calibration.to(device)
        self.loss = MeanMetric(nan_strategy="disable").to(device)
        self.confusion = MulticlassConfusionMatrix(self.num_classes, validate_args=False).to(device)

    def add(self, logits: Tensor, labels: Tensor) -> None:
        labels = labels.to(self.device)
        # Ranks come from logits, because the smallest probabilities are all 0. Calibration gets probabilities, because
        # torchmetrics takes logits that are all in 0 … 1 for probabilities.
        self.top5.update(logits, labels)
        self.confusion.update(logits, labels)
        self.calibration.update(logits.softmax(dim=1), labels)
        self.loss.update(F.cross_entropy(logits, labels, reduction="none"))

    def make_records(self, logits: Tensor, labels: Tensor) -> Iterator[ImageRecord]:
        """See ImageEvaluator.make_records; the worst images are those that are wrong with the highest confidence."""
        probabilities, losses = logits.softmax(dim=1), F.cross_entropy(logits, labels, reduction="none").tolist()
        guesses = logits.argmax(dim=1)
        confidences = probabilities.gather(1, guesses[:, None])[:, 0]
        self.calibration_bins.update(confidences, guesses == labels)
        tops = self.top_classes(logits, probabilities, self.classes)
        columns = zip(labels.tolist(), guesses.tolist(), confidences.tolist(), losses, tops, strict=True)
        for truth, guess, confidence, loss, top in columns:
            values: dict[str, Any] = {
                "truth": self.classes[truth],
                "prediction": self.classes[guess],
                **rounded({"confidence": confidence}),
                "correct": int(truth == guess),
                **rounded({"loss": loss}),
            }
            # A confidence that is not a number is the worst.
            badness = math.inf if values["confidence"] is None else values["confidence"]
            lines = (f"{self.classes[guess]} {100 * confidence:.1f} %", f"truth: {self.classes[truth]}")
            yield ImageRecord(values | top, None if truth == guess else (badness,), lines)

    def compute(self, accelerator: Accelerator) -> ClassificationEvaluation:
        confusion = self.confusion.compute().cpu()
        self.require_images(int(confusion.sum()))
        return ClassificationEvaluation(
            top1=100 * int(confusion.diagonal().sum()) / int(confusion.sum()),
            top5=100 * self.top5.compute().item(),
            calibration_error=100 * self.calibration.compute().item(),
            loss=self.loss.compute().item(),
            confusion=confusion,
            classes=self.classes,
            calibration=None if self.recorder is None else self.calibration_bins.gather(),
        )
