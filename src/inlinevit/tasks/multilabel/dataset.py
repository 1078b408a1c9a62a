"""Images with several labels, from a CSV file."""

import csv
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from ...data.images import open_image
from ...data.pixels import AnyImage
from ...utils.files import is_inside
from ...utils.validation import require, shorten
from .config import MultilabelDataConfig

SEPARATORS = re.compile(r"[\s;|]+")
SPLIT = "split"
# Line, image and labels of a row.
Row = tuple[int, str, list[str]]


class CsvSource:
    """The images of a CSV file: an ImageSource whose labels are indices of rows of `targets`.

    Args:
        file: The CSV file.
        rows: The rows to use.
        classes: Names of the labels; None = all that occur, sorted.

    Attributes:
        targets: (rows, classes) 1 where a row has a label, else 0.
    """

    def __init__(self, file: Path, rows: Sequence[Row], classes: Sequence[str] | None = None) -> None:
        self.file, self.files = file, [image for _, image, _ in rows]
        self.classes = list(classes) if classes else sorted({label for _, _, labels in rows for label in labels})
        indices = {name: index for index, name in enumerate(self.classes)}
        self.targets = torch.zeros(len(rows), len(self.classes))
        for number, (line, _, labels) in enumerate(rows):
            unknown = [label for label in labels if label not in indices]
            require(not unknown, f"{file}, line {line}: training does not know {shorten(unknown)}: correct the line")
            self.targets[number, [indices[label] for label in labels]] = 1

    def __len__(self) -> int:
        return len(self.files)

    def read(self, index: int) -> tuple[AnyImage, int]:
        return open_image(self.files[index]), index

    def name(self, index: int) -> str:
        return self.files[index]


def open_csv(config: MultilabelDataConfig, training: bool, classes: Sequence[str] | None = None) -> CsvSource:
    """Open the images for training or for evaluation; see CsvSource."""
    wanted, option = (config.train_split, "train_split") if training else (config.eval_split, "eval_split")
    own = config.path if training else config.eval_path
    file, split = Path(own or config.path).expanduser(), wanted or ("train" if training else "val")
    if not file.is_file():
        raise FileNotFoundError(f"no CSV file at {file}: check --data.{'path' if training else 'eval_path'}")
    rows: list[Row] = []
    lines: dict[str, int] = {}
    has_splits = False
    for line, record in read_csv(file):
        row = parse_row(file, line, record)
        first = lines.setdefault(row[1], line)
        require(first == line, f"{file}, line {line}: the image is already in line {first}: remove one of them")
        has_splits = SPLIT in record
        if not has_splits or record[SPLIT].strip() == split:
            rows.append(row)
    require(
        has_splits or (wanted is None and own is not None),
        f"{file} has no column {SPLIT}: add it, or name the images for evaluation with --data.eval_path",
    )
    require(bool(rows), f"{file} has no images of the {SPLIT} {split}: add some, or choose with --data.{option}")
    return CsvSource(file, rows, classes)


def parse_row(file: Path, line: int, record: dict[str, str]) -> Row:
    """Check one line of a CSV file; images must be files in its folder."""
    where, image = f"{file}, line {line}", record["image"].strip()
    path = os.path.normpath(file.parent / image)
    labels = [label for label in SEPARATORS.split(record["labels"]) if label]
    require(is_inside(path, file.parent), f"{where}: {shorten(image)} leads out of the folder of the file: correct it")
    require(os.path.isfile(path), f"{where}: there is no image at {shorten(path, 200)}: correct or remove the line")
    require(len(set(labels)) == len(labels), f"{where}: a label occurs twice: remove one of them")
    return line, path, labels


def read_csv(file: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the lines of a CSV file with their numbers."""
    try:
        with file.open(encoding="utf-8-sig", newline="") as stream:
            reader = csv.DictReader(stream, strict=True)
            header = [name.strip() for name in reader.fieldnames or []]
            is_known = {*header, SPLIT} == {"image", "labels", SPLIT} and len(header) == len(set(header))
            require(is_known, f"{file}, line 1: the columns are {shorten(header)}: write image,labels[,split]")
            reader.fieldnames = header
            for record in reader:
                is_complete = None not in record and None not in record.values()
                require(is_complete, f"{file}, line {reader.line_num}: it needs {len(header)} fields: correct it")
                yield reader.line_num, record
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not valid CSV in UTF-8 ({error}): save it again") from error
