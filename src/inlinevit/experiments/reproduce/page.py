"""The page of a record: a plot and the tables of each study."""

from pathlib import Path
from statistics import mean

from ...report import STYLES, Block, Interval, Picture, Report, Section, Style, Text, intervals_figure, styles_of
from .design import Cell, Study
from .record import CellRecord, Record
from .statistics import CONFIDENCE, judge, mean_interval
from .studies import STUDIES
from .tables import accuracy_words, cells_tables, claims_table

CAPTION = (
    "Top-1 accuracy on the test images. Dots are single runs; the larger marks are means, and their bars are "
    f"{CONFIDENCE:.0%} confidence intervals by Student's t distribution, if there are several runs."
)


def write_page(folder: Path, record: Record) -> Path | None:
    """Write report.html and report.json about all studies with finished runs.

    Returns:
        The path of the page; None if no run is finished.
    """
    report = Report(
        "Ablations, comparison and diagnostics",
        "Small models on CIFAR-10 and on generated images.",
    )
    for name, study in STUDIES.items():
        if any(record.cells[cell.key].runs for cell in study.cells):
            report.add(study_section(name, study, record))
    return report.write(folder) if report.sections else None


def study_section(name: str, study: Study, record: Record) -> Section:
    """Return a study: its question, a plot of its accuracies, and its tables."""
    rows = [interval_of(cell, record.cells[cell.key]) for cell in study.cells if record.cells[cell.key].runs]
    words = [f"{full_label(cell)}: {accuracy_words(record.cells[cell.key])}" for cell in study.cells]
    figure = intervals_figure(rows, "top-1 accuracy, %")
    blocks: list[Block] = [
        Text(study.question),
        Picture(figure, f"Top-1 accuracy in percent. {'; '.join(words)}.", CAPTION),
        *cells_tables(study, record),
    ]
    if study.claims:
        blocks.append(claims_table(study, record))
    data = {
        "cells": {cell.key: {"label": full_label(cell), "top1": record.cells[cell.key].top1} for cell in study.cells},
        "claims": {claim.text: judge(claim, record.cells)._asdict() for claim in study.claims},
    }
    return Section(name, study.title, blocks, data)


def interval_of(cell: Cell, found: CellRecord) -> Interval:
    """Return the accuracies of a cell with finished runs, in the style of its attention."""
    note = f"diverged in {len(found.diverged)} of {len(found.runs)} seeds" if found.diverged else ""
    return Interval(
        full_label(cell),
        style_of(found.options.get("attention", "softmax")),
        found.top1,
        mean(found.top1) if found.top1 else None,
        mean_interval(found.top1) or 0.0,
        note,
    )


def full_label(cell: Cell) -> str:
    """Return the label of a cell with that of its group."""
    return f"{cell.label}, {cell.group}" if cell.group else cell.label


def style_of(attention: str) -> Style:
    """Return the style of an attention; those without one of their own are gray."""
    return STYLES.get(attention) or next(iter(styles_of({attention: attention}).values()))
