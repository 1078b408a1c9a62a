"""evaluation.html: what an evaluation found, as a page of text, tables and pictures, the same for all tasks."""

import math
from pathlib import Path
from typing import TYPE_CHECKING

from ..report import Block, Case, CaseList, Report, Section, Table, Text
from .results import percent

if TYPE_CHECKING:
    from .evaluator import Evaluation

# The table of classes has at most this many; per_class.csv has all.
MOST_CLASSES = 200
# Columns of per_class.csv that say which class it is, not how much there is of it.
IDENTIFIERS = ("index", "id")


def write_page(evaluation: "Evaluation", title: str, path: Path) -> None:
    """Write evaluation.html: summary, worst images, the task's sections, and classes.

    Args:
        evaluation: The evaluation, with its records.
        title: What was evaluated, and on which data.
        path: The file.
    """
    images = f"{evaluation.images:,} image{'' if evaluation.images == 1 else 's'}"
    report = Report("Evaluation", f"{title}: {images}. predictions.csv has one line per image.")
    report.add(
        Section("summary", "Summary", [summary_table(evaluation)]),
        Section("worst", "Worst images", worst_images(evaluation)),
        *evaluation.sections(),
        Section("classes", "Classes", [class_table(evaluation)]),
    )
    report.write_page(path)


def summary_table(evaluation: "Evaluation") -> Table:
    """Return the printed tables of numbers as one, with a row per metric, which also fits a phone."""
    parts = list(zip(*evaluation.tables(), strict=True))
    columns = [{name: text for row in part for name, text in row.items()} for part in parts]
    headings = ["metric", *(column.pop("", "value") for column in columns)]
    return Table(headings, [[name, *(column[name] for column in columns)] for name in columns[0]], "Metrics")


def worst_images(evaluation: "Evaluation") -> list[Block]:
    """Return the worst images, and the images that could not be used."""
    assert evaluation.records is not None
    blocks: list[Block] = []
    cases = [Case(case.pictures, [*case.lines, case.file]) for case in evaluation.records.worst]
    if cases:
        blocks.append(CaseList(cases, evaluation.worst_caption))
    else:
        blocks.append(Text("There are no mistakes."))
    unusable = sum(bool(row.error) for row in evaluation.records.rows)
    if unusable:
        what = "image was" if unusable == 1 else "images were"
        blocks.append(Text(f"{unusable:,} {what} left out: the column error of predictions.csv says why."))
    return blocks


def class_table(evaluation: "Evaluation") -> Table:
    """Return the scores and counts of classes, the worst first; of very many classes, the worst only."""
    names, scores = evaluation.class_scores()
    records = evaluation.per_class()
    counts = [key for key, value in records[0].items() if isinstance(value, int) and key not in IDENTIFIERS]
    first = next(iter(scores.values()))
    # NaN, where there is no score, comes last.
    order = sorted(range(len(names)), key=lambda index: (math.isnan(first[index]), first[index]))
    rows = [
        [
            names[index],
            *(percent(values[index]) for values in scores.values()),
            *(f"{records[index][key]:,}" for key in counts),
        ]
        for index in order[:MOST_CLASSES]
    ]
    caption = "The lowest score comes first."
    if len(order) > MOST_CLASSES:
        caption = f"The {MOST_CLASSES} of {len(order):,} classes with the lowest scores; per_class.csv has all."
    return Table(["class", *(f"{name} %" for name in scores), *counts], rows, caption)
