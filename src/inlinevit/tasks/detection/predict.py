"""What is where in images: files in, drawings and JSON out."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from accelerate import PartialState
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
from .coco import Record
from .metrics import detect, to_results
from .predictor import DetectionPredictor, load_detector
from .visualize import draw_objects

PREDICTIONS = "predictions.json"
OBJECTS_SHOWN = 3


@dataclass
class Prediction:
    """What a detector sees in an image.

    Attributes:
        file: What the image is called.
        image: The image, upright and in RGB; None if there is an error.
        objects: In COCO's results format, the surest first.
        error: Why the image cannot be used; None if it can.
    """

    file: str
    image: Image.Image | None = None
    objects: list[Record] = field(default_factory=list)
    error: str | None = None


def predict(
    detector: DetectionPredictor, files: ImageFiles, *, threshold: float = 0.5, device: torch.device | str | None = None
) -> Iterator[Prediction]:
    """What a detector sees in images, one after the other, as they are read.

    Args:
        detector: The detector; it is moved to the device.
        files: The images.
        threshold: Objects with lower scores are not told.
        device: Where to compute; None = the best there is.
    """
    check_threshold(threshold)
    device = torch.device(device or PartialState().device)
    model = detector.model.to(device)
    for index in range(len(files)):
        try:
            with decompression_bomb_limit(), files.open(index) as opened:
                image = decode_image(opened, "RGB")
        # A broken file can make Pillow raise anything.
        except Exception as error:
            yield Prediction(files.name(index), error=describe_image_error(files.name(index), error))
            continue
        answer = detect(model, torch.from_numpy(np.array(image)).permute(2, 0, 1).to(device))
        sure = {name: values[answer["scores"] >= threshold] for name, values in answer.items()}
        objects = to_results(sure, index, (image.height, image.width), detector.categories)
        objects.sort(key=lambda one: one["score"], reverse=True)
        yield Prediction(files.name(index), image, objects)


def check_threshold(threshold: float) -> None:
    """Refuse a threshold that no score could be compared with."""
    require(0 <= threshold <= 1, f"threshold is {threshold}: it should be from 0 to 1")


def predict_command(
    run: str,
    images: list[str],
    output: str,
    checkpoint: str | None = None,
    threshold: float = 0.5,
    device: str | None = None,
) -> int:
    """Tell what is where in images, and draw it.

    Args:
        run: The folder of a training run.
        images: Images, folders of them, or glob patterns.
        output: Folder for a drawing of each image, NAME.png, and predictions.json.
        checkpoint: "best" or a checkpoint of the run; null = the final weights.
        threshold: Objects with lower scores are not told.
        device: Where to compute, such as cpu or cuda; null = the best there is.

    Returns:
        The exit code: 1 if an image could not be used, else 0.
    """
    escape_unencodable_output()
    check_threshold(threshold)
    files = ImageFiles(images)
    inputs = [*(path for path, _ in files.files), *([checkpoint] if checkpoint else [])]
    folder = check_output_folder(output, [PREDICTIONS], inputs=inputs)
    found_device = resolve_device(device)
    detector = load_detector(run, checkpoint=checkpoint)
    make_output_dir(folder)
    predictions = predict(detector, files, threshold=threshold, device=found_device)
    names = {category.id: category.name for category in detector.categories}
    failed = 0
    with disk_full_errors(folder), json_list_writer(folder / PREDICTIONS) as write:
        for prediction, drawing in zip(predictions, drawing_files(files, folder), strict=True):
            if prediction.image is None:
                failed += 1
                print(printable(prediction.error or ""), file=sys.stderr)
            else:
                atomic_write_png(drawing, draw_objects(prediction.image, prediction.objects, detector.categories))
                print(printable(summary(prediction, names)))
            write(to_json(prediction, drawing, names))
    return 1 if failed else 0


def drawing_files(files: ImageFiles, folder: Path) -> list[Path]:
    """A file for the drawing of each image: names that clash get numbers, and no image is written over."""
    return [folder / f"{name}.png" for name in unique_names(files, folder)]


def summary(prediction: Prediction, names: dict[int, str]) -> str:
    """A line on an image: how many objects, and the surest of them."""
    count = len(prediction.objects)
    shown = [f"{names[one['category_id']]} {100 * one['score']:.0f} %" for one in prediction.objects[:OBJECTS_SHOWN]]
    more = ["…"] if count > OBJECTS_SHOWN else []
    objects = f"{count} object{'' if count == 1 else 's'}"
    return f"{prediction.file}: {objects}{': ' if shown else ''}{', '.join(shown + more)}"


def to_json(prediction: Prediction, drawing: Path, names: dict[int, str]) -> Record:
    """What predictions.json tells of an image."""
    if prediction.image is None:
        return {"file": prediction.file, "error": prediction.error}
    objects = [
        {
            "category": names[one["category_id"]],
            **{key: one[key] for key in ("category_id", "score", "bbox", "segmentation")},
        }
        for one in prediction.objects
    ]
    width, height = prediction.image.size
    return {
        "file": prediction.file,
        "width": width,
        "height": height,
        "drawing": display_name(drawing.name),
        "objects": objects,
    }
