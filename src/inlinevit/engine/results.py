"""Tables, CSV and JSON: how the results of evaluations and predictions are printed and written."""

import csv
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TextIO, TypeVar

from rich.table import Table
from rich.text import Text

from ..data.images import printable
from ..data.pixels import AnyImage
from ..utils.atomic import json_items
from ..utils.console import new_console

if TYPE_CHECKING:
    from .evaluator import Evaluation

Result = TypeVar("Result")

# Up to this number of classes, a table lists all of them; otherwise this number of the worst and of the best.
MOST_LISTED = 20
CLASSES_SHOWN = 5
NAMES_SHOWN = 3
# Width of a table that is not printed to a terminal.
FILE_WIDTH = 120
IMAGES_PER_ROW_GROUP = 10_000


def percent(share: float) -> str:
    """Return a share in percent, for tables; a dash for NaN."""
    return "–" if math.isnan(share) else f"{100 * share:.2f}"


def shorten_list(names: Sequence[str], most: int = NAMES_SHOWN) -> str:
    """Return the first of some names, for messages: a, b, c, …."""
    return ", ".join(names[:most]) + (", …" if len(names) > most else "")


def make_table(rows: Sequence[Mapping[str, str]]) -> Table:
    """Return a table for the terminal: one row for each mapping from headings to cells, numbers to the right."""
    table = Table()
    for heading in rows[0]:
        table.add_column(heading.strip(), justify="right" if "%" in heading or heading == "loss" else "left")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row.values()))
    return table


def class_rows(names: Sequence[str], scores: Mapping[str, Sequence[float]]) -> list[dict[str, str]]:
    """Return the rows of a table of classes: all or, if there are many, the worst and the best by the first heading."""
    if len(names) <= MOST_LISTED:
        columns = zip(names, *scores.values(), strict=True)
        return [
            {"class": name, **{f"{heading} %": percent(one) for heading, one in zip(scores, values, strict=True)}}
            for name, *values in columns
        ]
    heading, values = next(iter(scores.items()))
    ranked = sorted((value, name) for value, name in zip(values, names, strict=True) if not math.isnan(value))
    worst, best = ranked[:CLASSES_SHOWN], ranked[::-1][:CLASSES_SHOWN]
    return [
        {"worst": poor, f"{heading} %": percent(low), "best": good, f"{heading} % ": percent(high)}
        for (low, poor), (high, good) in zip(worst, best, strict=True)
    ]


def print_evaluation(title: str, evaluation: "Evaluation") -> None:
    """Print what was evaluated, the tables of an evaluation and the scores of its classes."""
    console = new_console()
    console.print(Text(f"{title}, {evaluation.images} images"), soft_wrap=True)
    for rows in [*evaluation.tables(), class_rows(*evaluation.class_scores())]:
        if rows:
            console.print(make_table(rows))


@dataclass
class ClassProbability:
    """A predicted class.

    Attributes:
        name: What the class is called.
        index: Its index among the model's classes.
        probability: From 0 to 1.
    """

    name: str
    index: int
    probability: float


@dataclass
class Prediction(Generic[Result]):
    """What a model predicts for an image.

    Attributes:
        file: What the image is called.
        image: The image, transposed as its EXIF data say and with the model's bands; None if it is unreadable.
        result: What the task predicts; None if there is an error.
        error: Why there is no result; None if there is one.
    """

    file: str
    image: AnyImage | None = None
    result: Result | None = None
    error: str | None = None


ClassPredictions = Iterable[Prediction[list[ClassProbability]]]


def write_table(predictions: ClassPredictions, stream: TextIO) -> None:
    """Write a table for people; images with an error are left out, and nothing is written if all have one."""
    table = Table("image", "class")
    table.add_column("%", justify="right")
    for prediction in predictions:
        classes = prediction.result or []
        for rank, one in enumerate(classes):
            table.add_row(
                Text(printable(prediction.file) if rank == 0 else "", overflow="fold"),
                Text(printable(one.name)),
                f"{100 * one.probability:.1f}",
                end_section=rank == len(classes) - 1,
            )
    if table.row_count:
        new_console(file=stream, width=None if stream.isatty() else FILE_WIDTH).print(table)


def class_record(prediction: Prediction[list[ClassProbability]]) -> dict[str, Any]:
    """Return the JSON object of an image; one with an error has it in place of predictions."""
    if prediction.error is not None:
        return {"file": prediction.file, "error": prediction.error}
    classes = [
        {"class": one.name, "index": one.index, "probability": one.probability} for one in prediction.result or []
    ]
    return {"file": prediction.file, "predictions": classes}


def from_class_record(record: dict[str, Any]) -> Prediction[list[ClassProbability]]:
    """Return what class_record was given, without the image."""
    if "error" in record:
        return Prediction(record["file"], error=record["error"])
    classes = [ClassProbability(one["class"], one["index"], one["probability"]) for one in record["predictions"]]
    return Prediction(record["file"], result=classes)


def write_json(predictions: ClassPredictions, stream: TextIO) -> None:
    """Write a list of objects; see class_record."""
    with json_items(stream) as write:
        for prediction in predictions:
            write(class_record(prediction))


def write_jsonl(predictions: ClassPredictions, stream: TextIO) -> None:
    """Write one object per line; see class_record."""
    for prediction in predictions:
        stream.write(json.dumps(class_record(prediction), ensure_ascii=False) + "\n")


# The columns of CSV and Parquet files.
CLASS_COLUMNS = ("file", "rank", "class", "index", "probability", "error")


def class_cells(prediction: Prediction[list[ClassProbability]]) -> list[tuple[Any, ...]]:
    """Return one row for each class of an image, or one for an image without a class, with its error if any."""
    if not prediction.result:
        return [(prediction.file, None, None, None, None, prediction.error)]
    return [
        (prediction.file, rank, one.name, one.index, one.probability, None)
        for rank, one in enumerate(prediction.result, start=1)
    ]


def write_csv(predictions: ClassPredictions, stream: TextIO) -> None:
    """Write the rows of class_cells; None is an empty cell."""
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(CLASS_COLUMNS)
    for prediction in predictions:
        writer.writerows(class_cells(prediction))


def write_parquet(predictions: ClassPredictions, path: Path) -> None:
    """Write the rows of class_cells to a Parquet file; None is null."""
    # Imported here: it comes with an extra, and takes a while.
    import pyarrow as pa
    import pyarrow.parquet as pq

    types = (pa.string(), pa.int32(), pa.string(), pa.int32(), pa.float64(), pa.string())
    schema = pa.schema(list(zip(CLASS_COLUMNS, types, strict=True)))
    images = iter(predictions)
    with pq.ParquetWriter(path, schema) as writer:
        while some := list(islice(images, IMAGES_PER_ROW_GROUP)):
            columns = zip(*(row for prediction in some for row in class_cells(prediction)), strict=True)
            arrays = [pa.array(column, kind) for column, kind in zip(columns, types, strict=True)]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))


# Of the formats that are text.
CLASS_WRITERS = {"table": write_table, "json": write_json, "jsonl": write_jsonl, "csv": write_csv}
