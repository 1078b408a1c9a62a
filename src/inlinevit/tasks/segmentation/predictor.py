"""Segmentation models that are ready to use, from a training run."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from ...data.pixels import AnyImage, PixelFormat, image_to_tensor, preview
from ...engine.config import CommandOptions
from ...engine.evaluator import EvalData
from ...engine.exported import REMEDY
from ...engine.exported_run import load_exported
from ...engine.predictor import DrawingPredictor, Rendering
from ...engine.results import shorten_list
from ...engine.runs import Run, open_run
from ...utils.validation import require
from ..backbone import load_trained, mean_and_std
from ..pixels import MeanStd, make_pixel_format
from .config import (
    InferenceConfig,
    SegmentationConfig,
    SegmentationDataConfig,
    SegmentationEvalOptions,
    SegmentationPredictOptions,
)
from .inference import describe, normalize, predict_probs
from .labels import LabelMap, open_labels
from .metrics import SegmentationEvaluator
from .model import build_segmenter
from .transforms import resize_image, scaled_size
from .visualize import class_shares, draw_labels, draw_legend, whole_percent

LABELS_JSON = "labels.json"
CLASSES_SHOWN = 3
# Larger images, in pixels at the size that the model gets, are processed in windows even by default.
MOST_AT_ONCE = 2048 * 2048
# Images with more pixels are refused by default: 20,000 × 20,000 are 1.2 GB.
MOST_PIXELS = 400_000_000
# Rows of a label map that are made at a time, so that large images need little memory.
ROWS_AT_ONCE = 256

Indices = NDArray[np.uint8]


@dataclass
class SegmentationPredictor(DrawingPredictor[Indices]):
    """A segmentation model that is ready to use; its results are class indices (height, width).

    Attributes:
        config: The run that it comes from; `config.inference` are the default inference settings.
        labels: Its classes, and the values that stand for them in files.
        mean_std: What its images are normalised by.
    """

    config: SegmentationConfig
    labels: LabelMap
    mean_std: MeanStd

    options_class = SegmentationPredictOptions
    drawing_suffixes: ClassVar[dict[str, str]] = {
        "labels": "_labels.png",
        "overlay": "_overlay.png",
        "legend": "_legend.png",
    }
    max_pixels: int | None = field(default=MOST_PIXELS, kw_only=True)

    @property
    def classes(self) -> list[str]:
        return [one.name for one in self.labels.classes]

    @property
    def pixel_format(self) -> PixelFormat:
        return make_pixel_format(self.config.data, self.config.model.in_chans)

    @property
    def to_tensor(self) -> Callable[[AnyImage], Tensor]:
        """See Predictor.to_tensor; whole images, resized as the run's inference settings say, without windows."""
        return partial(resized_tensor, min_size=self.config.inference.min_size, mean_std=self.mean_std)

    def predict_images(
        self, images: list[AnyImage], options: SegmentationPredictOptions, device: torch.device
    ) -> list[Indices | None]:
        inference = options.inference.applied_to(self.config.inference)
        return [self.predict_indices(image, inference, device) for image in images]

    def predict_indices(self, image: AnyImage, inference: InferenceConfig, device: torch.device) -> Indices | None:
        """Return the class of each pixel; None if a probability is not finite."""
        settings = in_windows_if_large(inference, image, self.config.augment.crop_size)
        rows = []
        for probabilities in predict_probs(self.model, image_to_tensor(image), settings, self.mean_std, device):
            if not bool(probabilities.isfinite().all()):
                return None
            rows.append(probabilities.argmax(dim=0).to(torch.uint8).cpu())
        return torch.cat(rows).numpy()

    def render(self, image: AnyImage, result: Indices) -> Rendering:
        shares = class_shares(result, self.labels.classes)
        drawings = {
            "labels": make_label_map(result, self.labels),
            "overlay": draw_labels(preview(image), result, self.labels.classes),
            "legend": draw_legend(shares),
        }
        record = {"classes": [{"name": one.name, "share": share} for one, share in shares]}
        shown = [f"{one.name} {whole_percent(share)}" for one, share in shares]
        return Rendering(drawings, record, shorten_list(shown, CLASSES_SHOWN))

    def description(self, options: SegmentationEvalOptions) -> str:
        return f"{self.name}, {describe(options.inference.applied_to(self.config.inference))}"

    def settings(self, options: SegmentationEvalOptions) -> dict[str, Any]:
        return {"inference": vars(options.inference.applied_to(self.config.inference))}

    def make_evaluator(self, data: EvalData, options: SegmentationEvalOptions) -> SegmentationEvaluator:
        inference = options.inference.applied_to(self.config.inference)
        return SegmentationEvaluator(data.source, data.config.workers, inference, self.mean_std)


def load_segmenter(run: str, *, checkpoint: str | None = None) -> SegmentationPredictor:
    """Load the model of a training run.

    Args:
        run: The folder of the run.
        checkpoint: "best" for its best checkpoint, the folder of another one, or a file; None = the final weights.
    """
    opened: Run[SegmentationConfig] = open_run(SegmentationConfig, run)
    classes = len(run_labels(opened).classes)
    return _make_predictor(opened, load_trained(opened, checkpoint, lambda bare: build_segmenter(bare, classes)))


def load_exported_segmenter(file: str, options: CommandOptions) -> SegmentationPredictor:
    """Load an exported segmentation model."""
    model, run = load_exported(SegmentationConfig, file, options)
    names, classes = [one.name for one in run_labels(run).classes], model.metadata.classes
    require(names == classes, f"{file} has metadata that cannot be used (labels are not those of classes): {REMEDY}")
    return _make_predictor(run, model)


def _make_predictor(run: Run[SegmentationConfig], model: nn.Module) -> SegmentationPredictor:
    """Return the predictor of a run, or of an exported model."""
    config = run.config
    return SegmentationPredictor(
        model,
        f"{config.model.arch} on {config.model.backbone}",
        config,
        run_labels(run),
        mean_and_std(config.model, config.data),
        max_pixels=config.data.max_pixels or MOST_PIXELS,
    )


def run_labels(run: Run[Any]) -> LabelMap:
    """Return the classes that a run was trained on, and their values in files."""
    return run.metadata(LABELS_JSON, lambda content: LabelMap.from_plain(content, LABELS_JSON))


def evaluation_labels(run: Run[Any], data: SegmentationDataConfig, *, is_given: bool = False) -> LabelMap:
    """Return the meaning of the values in the data's label maps: the model's classes, in its order.

    Args:
        run: The run; its own labels are used, unless the data have a file of others.
        data: The data.
        is_given: Whether the user has named the file of labels: then it is read, even if the run had the same one.
    """
    own = run_labels(run)
    if not is_given and data.labels == run.config.data.labels:
        return own
    labels = open_labels(data, None)
    ours, theirs = ([one.name for one in some.classes] for some in (own, labels))
    require(
        ours == theirs,
        f"{data.labels} has other classes than the model, or has them in another order ({shorten_list(theirs, 5)} in "
        f"place of {shorten_list(ours, 5)}): write one with the model's classes, or evaluate another run",
    )
    return labels


def resized_tensor(image: AnyImage, min_size: int | None, mean_std: MeanStd) -> Tensor:
    """Return the normalised tensor (channels, height, width) of an image whose shorter side is resized to min_size."""
    pixels = resize_image(image_to_tensor(image), scaled_size(image.height, image.width, min_size))
    return normalize(pixels, *mean_std)


def in_windows_if_large(inference: InferenceConfig, image: AnyImage, window_size: int) -> InferenceConfig:
    """Return inference settings with windows of a side, if they have none and an image is too large to be whole."""
    height, width = scaled_size(image.height, image.width, inference.min_size, max(inference.scales))
    is_large = inference.window_size is None and height * width > MOST_AT_ONCE
    return replace(inference, window_size=window_size) if is_large else inference


def make_label_map(indices: Indices, labels: LabelMap) -> Image.Image:
    """Return a label map like those of the training data: 8 bits per pixel, or 16 if values need them."""
    # In parts, because to_values needs eight bytes per pixel.
    parts = [labels.to_values(part).numpy() for part in torch.from_numpy(indices).split(ROWS_AT_ONCE)]
    return Image.fromarray(np.concatenate(parts))
