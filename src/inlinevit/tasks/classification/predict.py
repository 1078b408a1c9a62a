"""What is in images: files in, classes with probabilities out."""

import csv
import io
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TextIO

import torch
from accelerate import PartialState
from PIL import Image
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch.utils.data import DataLoader

from ...data.images import ImageFiles, printable
from ...engine.config import MOST_IMAGES
from ...engine.outputs import check_output_file
from ...utils.atomic import atomic_text_writer
from ...utils.validation import Range, check_value
from .dataset import LabelledImages, Sample
from .evaluate import check_batch_memory
from .predictor import ClassificationPredictor, check_name_or_run, load_classifier
from .transforms import evaluation_transform

# Width of a table that is not shown on a terminal.
FILE_WIDTH = 120
DIGITS = 6


@dataclass
class ClassProbability:
    """How sure a model is of a class.

    Attributes:
        name: What the class is called.
        index: Its place among the model's classes.
        probability: From 0 to 1.
    """

    name: str
    index: int
    probability: float


@dataclass
class Prediction:
    """What a model sees in an image.

    Attributes:
        file: The image.
        classes: The most probable classes, the most probable first; none if there is an error.
        error: Why the image cannot be used; None if it can.
    """

    file: str
    classes: list[ClassProbability] = field(default_factory=list)
    error: str | None = None


class FileSource(ImageFiles):
    """Images in files, without labels: an ImageSource where all labels are 0."""

    classes: list[str] | None = None

    def read(self, index: int) -> tuple[Image.Image, int]:
        """See ImageSource.read."""
        return self.open(index), 0


@torch.no_grad()
def predict(
    classifier: ClassificationPredictor,
    images: Iterable[str],
    *,
    top: int = 5,
    batch_size: int = 32,
    device: torch.device | str | None = None,
) -> Iterator[Prediction]:
    """What a model sees in images, one after the other, as they are read.

    Args:
        classifier: The model; it is moved to the device.
        images: Files, folders, or glob patterns.
        top: How many classes to tell for each image.
        batch_size: Images that are computed together.
        device: Where to compute; None = the best there is.
    """
    check_numbers(top, batch_size)
    spec, names = classifier.spec, classifier.readable_classes()
    source = FileSource(images)
    samples = LabelledImages(source, evaluation_transform(spec), spec.mode, num_classes=1)
    device = torch.device(device or PartialState().device)
    model = classifier.model.to(device)
    batches: DataLoader[Sample] = DataLoader(samples, batch_size, collate_fn=list)
    index = 0
    for batch in batches:
        inputs = [image for image, _, problems in batch if not problems]
        # Nothing can be stacked where no image of the batch can be used.
        logits = model(torch.stack(inputs).to(device)).float() if inputs else torch.empty(0, len(names))
        chosen = iter(zip(*logits.softmax(dim=1).cpu().topk(min(top, len(names)), dim=1), strict=True))
        for _, _, problems in batch:
            yield _prediction(source.name(index), problems, None if problems else next(chosen), names)
            index += 1


def check_numbers(top: int, batch_size: int) -> None:
    """Refuse numbers that make no sense; arguments as for `predict`."""
    for name, value in {"top": top, "batch_size": batch_size}.items():
        check_value(name, value, int, Range(1, MOST_IMAGES))


def _prediction(
    file: str, problems: list[str], chosen: tuple[torch.Tensor, torch.Tensor] | None, names: Sequence[str]
) -> Prediction:
    """The outcome for an image: its problem or, where it has none, its best probabilities and their classes."""
    if chosen is None:
        return Prediction(file, error=problems[0])
    probabilities, indices = chosen[0].tolist(), chosen[1].tolist()
    if not chosen[0].isfinite().all():
        return Prediction(file, error=f"{file} gives no finite probabilities: check the model's weights")
    return Prediction(
        file, [ClassProbability(names[i], i, round(p, DIGITS)) for p, i in zip(probabilities, indices, strict=True)]
    )


def predict_command(
    model: str,
    images: list[str],
    checkpoint: str | None = None,
    img_size: int | None = None,
    top: int = 5,
    format: Literal["table", "json", "csv"] = "table",
    output: str | None = None,
    batch_size: int = 32,
) -> int:
    """Tell what is in images.

    Args:
        model: The folder of a training run, or the name of a model of ours or of timm's.
        images: Images, folders of them, or glob patterns.
        checkpoint: With a name, the file of its weights (default: the published ones); with a run, "best" or a
            checkpoint (default: the final weights).
        img_size: Side of the images that the model sees; null = what it was trained for.
        top: How many classes to tell for each image.
        format: How to tell them.
        output: File for them; null = show them.
        batch_size: Images that are computed together.

    Returns:
        The exit code: 1 if an image could not be used, else 0.
    """
    check_numbers(top, batch_size)
    check_name_or_run(model)
    files = ImageFiles(images)
    if output is not None:
        check_output_file(output, [*(path for path, _ in files.files), *([checkpoint] if checkpoint else [])])
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Programs expect UTF-8; people want names to be shown, even in letters that their terminal does not know.
        sys.stdout.reconfigure(errors="backslashreplace", encoding=None if format == "table" else "utf-8")
    classifier = load_classifier(model, checkpoint=checkpoint, img_size=img_size)
    check_batch_memory(classifier.spec, batch_size, len(files))
    predictions = predict(classifier, images, top=top, batch_size=batch_size)
    failed: list[str] = []
    # csv writes its own ends of lines.
    with nullcontext(sys.stdout) if output is None else atomic_text_writer(Path(output), newline="") as stream:
        WRITERS[format](_with_problems_told(predictions, failed), stream)
    return 1 if failed else 0


def _with_problems_told(predictions: Iterable[Prediction], failed: list[str]) -> Iterator[Prediction]:
    """The same predictions; those that failed are noted, and told in a line each."""
    for prediction in predictions:
        if prediction.error is not None:
            failed.append(prediction.file)
            print(printable(prediction.error), file=sys.stderr)
        yield prediction


def write_table(predictions: Iterable[Prediction], stream: TextIO) -> None:
    """A table for people; images that failed are left out, and nothing is shown if all did."""
    table = Table("image", "class")
    table.add_column("%", justify="right")
    for prediction in predictions:
        for rank, chosen in enumerate(prediction.classes):
            table.add_row(
                Text(printable(prediction.file) if rank == 0 else "", overflow="fold"),
                Text(printable(chosen.name)),
                f"{100 * chosen.probability:.1f}",
                end_section=rank == len(prediction.classes) - 1,
            )
    if table.row_count:
        Console(file=stream, width=None if stream.isatty() else FILE_WIDTH).print(table)


def write_json(predictions: Iterable[Prediction], stream: TextIO) -> None:
    """A list of objects; those of images that failed have an error in place of predictions."""
    separator = "[\n"
    for prediction in predictions:
        content: dict[str, object] = {"file": prediction.file}
        if prediction.error is not None:
            content["error"] = prediction.error
        else:
            content["predictions"] = [
                {"class": chosen.name, "index": chosen.index, "probability": chosen.probability}
                for chosen in prediction.classes
            ]
        stream.write(separator + json.dumps(content, ensure_ascii=False))
        separator = ",\n"
    stream.write("[]\n" if separator == "[\n" else "\n]\n")


def write_csv(predictions: Iterable[Prediction], stream: TextIO) -> None:
    """A line for each class of each image; images that failed have one line, with the error."""
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["file", "rank", "class", "index", "probability", "error"])
    for prediction in predictions:
        if prediction.error is not None:
            writer.writerow([prediction.file, "", "", "", "", prediction.error])
        for rank, chosen in enumerate(prediction.classes, start=1):
            writer.writerow([prediction.file, rank, chosen.name, chosen.index, chosen.probability, ""])


WRITERS = {"table": write_table, "json": write_json, "csv": write_csv}
