"""The page of a record: a plot and the tables of each study."""

from pathlib import Path
from statistics import mean

from ...report import STYLES, Block, Interval, Picture, Report, Section, Text, intervals_figure
from .record import STANDARD_ERRORS, CellRecord, Record, judge
from .studies import STUDIES, Cell, Study
from .tables import accuracy_words, cells_table, claims_table

CAPTION = (
    "Top-1 accuracy on the test images. Dots are single runs; the larger marks are means, and their bars are "
    f"{STANDARD_ERRORS} standard errors of the mean to either side, if there are several runs."
)


def write_page(folder: Path, record: Record) -> Path | None:
    """Write report.html and report.json about all studies with finished runs.

    Returns:
        The path of the page; None if no run is finished.
    """
    report = Report(
        "The paper's ablations on CIFAR-10",
        f"Small models, {record.settings['steps']:,} training steps of {record.settings['batch_size']} images each.",
    )
    for name, study in STUDIES.items():
        if any(record.cells[cell.key].runs for cell in study.cells):
            report.add(study_section(name, study, record))
    return report.write(folder) if report.sections else None


def study_section(name: str, study: Study, record: Record) -> Section:
    """Return a study: its question, a plot of its accuracies, and its tables."""
    rows = [interval_of(cell, record.cells[cell.key]) for cell in study.cells if record.cells[cell.key].runs]
    words = [f"{cell.label}: {accuracy_words(record.cells[cell.key])}" for cell in study.cells]
    figure = intervals_figure(rows, "top-1 accuracy, %")
    blocks: list[Block] = [
        Text(study.question),
        Picture(figure, f"Top-1 accuracy in percent. {'; '.join(words)}.", CAPTION),
        cells_table(name, record),
    ]
    if study.claims:
        blocks.append(claims_table(study, record))
    data = {
        "cells": {cell.key: {"label": cell.label, "top1": record.cells[cell.key].top1} for cell in study.cells},
        "claims": {claim.text: judge(claim, record.cells)._asdict() for claim in study.claims},
    }
    return Section(name, study.title, blocks, data)


def interval_of(cell: Cell, found: CellRecord) -> Interval:
    """Return the accuracies of a cell with finished runs, in the style of its attention."""
    note = f"diverged in {len(found.diverged)} of {len(found.runs)} seeds" if found.diverged else ""
    return Interval(
        cell.label,
        STYLES[found.options.get("attention", "softmax")],
        found.top1,
        mean(found.top1) if found.top1 else None,
        STANDARD_ERRORS * found.standard_error if len(found.top1) > 1 else 0.0,
        note,
    )
