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

from ..images import (
    ImageFiles,
    bombs_refused,
    free_names,
    on_one_line,
    readable_name,
    show_any_letter,
    upright,
    why_unusable,
)
from ..training.config import require
from ..training.files import json_list, make_folder, replace_png, space_for
from ..training.outputs import check_output_folder
from ..training.setup import find_device
from .config import ViewConfig
from .drawing import ROWS_AT_ONCE, ClassShare, class_shares, draw_labels, percent
from .labels import LabelMap
from .segmenter import ReadySegmenter, open_segmenter
from .transforms import scaled_size
from .view import ViewOptions, look_by_rows

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
    segmenter: ReadySegmenter,
    files: ImageFiles,
    *,
    view: ViewConfig | None = None,
    device: torch.device | str | None = None,
) -> Iterator[Prediction]:
    """What a model takes the pixels of images for, one image after the other, as they are read.

    Args:
        segmenter: The model; it is moved to the device.
        files: The images.
        view: How it looks at them; None = as in its training run. Large images are seen in windows anyway.
        device: Where to compute; None = the best there is.
    """
    view = view or segmenter.config.view
    device = torch.device(device or PartialState().device)
    model = segmenter.model.to(device)
    for index in range(len(files)):
        try:
            with bombs_refused(MOST_PIXELS), files.open(index) as opened:
                image = upright(opened, "RGB")
        # A broken file can make Pillow raise anything.
        except Exception as error:
            yield Prediction(files.name(index), error=why_unusable(files.name(index), error))
            continue
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
        seen = in_windows_if_large(view, image, segmenter.config.augment.crop)
        rows = []
        for probabilities in look_by_rows(model, pixels, seen, segmenter.mean_std, device):
            require(
                bool(probabilities.isfinite().all()),
                f"{files.name(index)} gives no finite probabilities: check the model's weights",
            )
            rows.append(probabilities.argmax(dim=0).to(torch.uint8).cpu())
        yield Prediction(files.name(index), image, torch.cat(rows).numpy())


def in_windows_if_large(view: ViewConfig, image: Image.Image, side: int) -> ViewConfig:
    """A view that a machine can bear: with windows, if an image is too large to be seen as a whole.

    Args:
        view: How to look.
        image: At what.
        side: Side of windows, if there are none yet and some are needed: what the model has seen in training.
    """
    height, width = scaled_size(image.height, image.width, view.shorter_side, max(view.scales))
    return replace(view, window=side) if view.window is None and height * width > MOST_AT_ONCE else view


def predict_command(
    run: str,
    images: list[str],
    output: str,
    view: ViewOptions,
    checkpoint: str | None = None,
    device: str | None = None,
) -> int:
    """Tell the class of each pixel of images, and draw it.

    Args:
        run: The folder of a training run.
        images: Images, folders of them, or glob patterns.
        output: Folder for the label map of each image, NAME_labels.png with the values of the training data, a drawing,
            NAME_overlay.png, and predictions.json.
        view: How the model looks at them. Images that are too large to be seen as a whole are seen in windows anyway.
        checkpoint: "best" or a checkpoint of the run; null = the final weights.
        device: Where to compute, such as cpu or cuda; null = the best there is.

    Returns:
        The exit code: 1 if an image could not be used, else 0.
    """
    show_any_letter()
    files = ImageFiles(images)
    inputs = [*(path for path, _ in files.files), *([checkpoint] if checkpoint else [])]
    folder = check_output_folder(output, [PREDICTIONS], inputs=inputs)
    found_device = find_device(device)
    segmenter = open_segmenter(run, checkpoint=checkpoint)
    seen = view.applied_to(segmenter.config.view)
    make_folder(folder)
    predictions = predict(segmenter, files, view=seen, device=found_device)
    failed = 0
    with space_for(folder), json_list(folder / PREDICTIONS) as write:
        for prediction, name in zip(predictions, free_names(files, folder, (LABELS, OVERLAY)), strict=True):
            if prediction.image is None:
                failed += 1
                print(on_one_line(prediction.error or ""), file=sys.stderr)
                write({"file": prediction.file, "error": prediction.error})
                continue
            save_label_map(prediction.indices, segmenter.labels, folder / f"{name}{LABELS}")
            classes = segmenter.labels.classes
            replace_png(folder / f"{name}{OVERLAY}", draw_labels(prediction.image, prediction.indices, classes))
            shares = class_shares(prediction.indices, classes)
            print(on_one_line(summary(prediction.file, shares)))
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
    replace_png(file, Image.fromarray(np.concatenate(parts)))


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
        "labels": readable_name(f"{name}{LABELS}"),
        "overlay": readable_name(f"{name}{OVERLAY}"),
        "classes": [{"name": one.kind.name, "share": one.share} for one in shares],
    }
