"""What the pixels of images are: files in, label maps, drawings and JSON out."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from numpy.typing import NDArray
from PIL import Image

from ...data.images import (
    ImageFiles,
    decode_image,
    decompression_bomb_limit,
    describe_image_error,
    display_name,
    escape_unencodable_output,
    printable,
    unique_names,
)
from ...engine.outputs import check_output_folder
from ...engine.setup import resolve_device
from ...utils.atomic import atomic_write_png, disk_full_errors, json_list_writer, make_output_dir
from ...utils.validation import require
from .config import InferenceConfig, InferenceOptions
from .inference import predict_probs_by_rows
from .labels import LabelMap
from .predictor import SegmentationPredictor, load_segmenter
from .transforms import scaled_size
from .visualize import ROWS_AT_ONCE, ClassShare, class_shares, draw_labels, percent

PREDICTIONS = "predictions.json"
LABELS, OVERLAY = "_labels.png", "_overlay.png"
CLASSES_SHOWN = 3
# Images of more pixels, as the model would see them, are seen in windows, even if nobody has asked for that.
MOST_AT_ONCE = 2048 * 2048
# Images of more pixels are refused: 20,000 × 20,000 are 1.2 GB.
MOST_PIXELS = 400_000_000


@dataclass
class Prediction:
    """What a model takes the pixels of an image for.

    Attributes:
        file: What the image is called.
        image: The image, upright and in RGB; None if there is an error.
        indices: (height, width) the class of each pixel.
        error: Why the image cannot be used; None if it can.
    """

    file: str
    image: Image.Image | None = None
    indices: NDArray[np.uint8] = field(default_factory=lambda: np.zeros((0, 0), np.uint8))
    error: str | None = None


def predict(
    segmenter: SegmentationPredictor,
    files: ImageFiles,
    *,
    inference: InferenceConfig | None = None,
    device: torch.device | str | None = None,
) -> Iterator[Prediction]:
    """What a model takes the pixels of images for, one image after the other, as they are read.

    Args:
        segmenter: The model; it is moved to the device.
        files: The images.
        inference: How it looks at them; None = as in its training run. Large images are seen in windows anyway.
        device: Where to compute; None = the best there is.
    """
    inference = inference or segmenter.config.inference
    device = torch.device(device or PartialState().device)
    model = segmenter.model.to(device)
    for index in range(len(files)):
        try:
            with decompression_bomb_limit(MOST_PIXELS), files.open(index) as opened:
                image = decode_image(opened, "RGB")
        # A broken file can make Pillow raise anything.
        except Exception as error:
            yield Prediction(files.name(index), error=describe_image_error(files.name(index), error))
            continue
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
        seen = in_windows_if_large(inference, image, segmenter.config.augment.crop_size)
        rows = []
        for probabilities in predict_probs_by_rows(model, pixels, seen, segmenter.mean_std, device):
            require(
                bool(probabilities.isfinite().all()),
                f"{files.name(index)} gives no finite probabilities: check the model's weights",
            )
            rows.append(probabilities.argmax(dim=0).to(torch.uint8).cpu())
        yield Prediction(files.name(index), image, torch.cat(rows).numpy())


def in_windows_if_large(inference: InferenceConfig, image: Image.Image, side: int) -> InferenceConfig:
    """A inference that a machine can bear: with windows, if an image is too large to be seen as a whole.

    Args:
        inference: How to look.
        image: At what.
        side: Side of windows, if there are none yet and some are needed: what the model has seen in training.
    """
    height, width = scaled_size(image.height, image.width, inference.min_size, max(inference.scales))
    return (
        replace(inference, window_size=side)
        if inference.window_size is None and height * width > MOST_AT_ONCE
        else inference
    )


def predict_command(
    run: str,
    images: list[str],
    output: str,
    inference: InferenceOptions,
    checkpoint: str | None = None,
    device: str | None = None,
) -> int:
    """Tell the class of each pixel of images, and draw it.

    Args:
        run: The folder of a training run.
        images: Images, folders of them, or glob patterns.
        output: Folder for the label map of each image, NAME_labels.png with the values of the training data, a drawing,
            NAME_overlay.png, and predictions.json.
        inference: Inference settings. Images that are too large to be processed whole are processed in windows.
        checkpoint: "best" or a checkpoint of the run; null = the final weights.
        device: Where to compute, such as cpu or cuda; null = the best there is.

    Returns:
        The exit code: 1 if an image could not be used, else 0.
    """
    escape_unencodable_output()
    files = ImageFiles(images)
    inputs = [*(path for path, _ in files.files), *([checkpoint] if checkpoint else [])]
    folder = check_output_folder(output, [PREDICTIONS], inputs=inputs)
    found_device = resolve_device(device)
    segmenter = load_segmenter(run, checkpoint=checkpoint)
    seen = inference.applied_to(segmenter.config.inference)
    make_output_dir(folder)
    predictions = predict(segmenter, files, inference=seen, device=found_device)
    failed = 0
    with disk_full_errors(folder), json_list_writer(folder / PREDICTIONS) as write:
        for prediction, name in zip(predictions, unique_names(files, folder, (LABELS, OVERLAY)), strict=True):
            if prediction.image is None:
                failed += 1
                print(printable(prediction.error or ""), file=sys.stderr)
                write({"file": prediction.file, "error": prediction.error})
                continue
            save_label_map(prediction.indices, segmenter.labels, folder / f"{name}{LABELS}")
            classes = segmenter.labels.classes
            atomic_write_png(folder / f"{name}{OVERLAY}", draw_labels(prediction.image, prediction.indices, classes))
            shares = class_shares(prediction.indices, classes)
            print(printable(summary(prediction.file, shares)))
            write(to_json(prediction, shares, name))
    return 1 if failed else 0


def save_label_map(indices: NDArray[np.uint8], labels: LabelMap, file: Path) -> None:
    """Write a label map like those that the model was trained on: of 8 bits a pixel, or 16 if values need them.

    Args:
        indices: (height, width) the class of each pixel.
        labels: The values that stand for classes.
        file: Where it goes.
    """
    # In parts, because the table behind to_values needs eight bytes a pixel.
    parts = [labels.to_values(part).numpy() for part in torch.from_numpy(indices).split(ROWS_AT_ONCE)]
    atomic_write_png(file, Image.fromarray(np.concatenate(parts)))


def summary(file: str, shares: list[ClassShare]) -> str:
    """A line on an image: what most of it is."""
    shown = [f"{one.kind.name} {percent(one.share)}" for one in shares[:CLASSES_SHOWN]]
    return f"{file}: {', '.join([*shown, *(['…'] if len(shares) > CLASSES_SHOWN else [])])}"


def to_json(prediction: Prediction, shares: list[ClassShare], name: str) -> dict[str, Any]:
    """What predictions.json tells of an image.

    Args:
        prediction: The image.
        shares: What it shows.
        name: What its drawings are called.
    """
    height, width = prediction.indices.shape
    return {
        "file": prediction.file,
        "width": width,
        "height": height,
        "labels": display_name(f"{name}{LABELS}"),
        "overlay": display_name(f"{name}{OVERLAY}"),
        "classes": [{"name": one.kind.name, "share": one.share} for one in shares],
    }
