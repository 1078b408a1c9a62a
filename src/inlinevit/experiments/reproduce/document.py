"""Tables and figures of docs/, from the records of studies and of `inlinevit bench attentions`."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from timm import create_model, is_model

from ...benchmark.results import Results
from ...layers import ATTENTIONS
from ...models.catalog import count_parameters
from ...report import Point, Style, Table, markdown_table, points_figure, replace_between
from .comparison import COMPARED, CONNECTIVITY, CORES, RECALL, SET_LABELS
from .design import Cell
from .page import style_of
from .record import CellRecord, Record
from .statistics import mean_interval
from .studies import STUDIES
from .tables import MISSING, changes_table, former_table, study_markdown, summary_markdown

NOT_RECORDED = "Not recorded yet.\n"
# The figures, with what is on their x axes.
TIME_FIGURE, PARAMETERS_FIGURE = "accuracy-time", "accuracy-parameters"
ALT = {
    TIME_FIGURE: "Accuracy on CIFAR-10 over time per image, one panel per resolution",
    PARAMETERS_FIGURE: "Accuracy on CIFAR-10 over parameters, without and with the common surroundings",
}
# Columns of the table of all attentions: the cells of each.
COLUMNS: dict[str, Mapping[str, Cell]] = {
    "CIFAR-10, plain": COMPARED["plain"],
    "CIFAR-10, LePE and gate": COMPARED["common"],
    "recall, 32 pairs": RECALL[1],
    "connectivity, LePE and gate": CONNECTIVITY[0],
}


class Records(NamedTuple):
    """What the pages are made of.

    Attributes:
        studies: Results of the studies.
        former: Results of shorter runs.
        times: Record of `inlinevit bench attentions`; None = it is not measured yet.
        residual: Record of tools/residual_branch.py; None = it is not measured yet.
    """

    studies: Record
    former: Record
    times: Results | None = None
    residual: dict[str, Any] | None = None


def generated_parts(records: Records) -> dict[str, dict[str, str]]:
    """Return the generated parts of pages in docs/, in Markdown: by page, and by the name of their place in it.

    A part goes between <!-- NAME --> and <!-- /NAME -->. NAME is "reproduce" (runs, time and machine),
    "reproduce-STUDY", "changes" (what changed with the length), "former" (accuracies of the shorter runs), "residual"
    (steps of a training), "attentions" (one row per attention) or "figures".
    """
    record, former, times, residual = records
    residuals = [] if residual is None else map(markdown_table, residual_tables(residual))
    figures = [f"![{ALT[name]}](reproduce/{name}.svg)\n" for name in make_figures(record, times)]
    return {
        "choosing_attention.md": {
            "attentions": f"{markdown_table(attentions_table(record, times))}\n",
            "figures": "\n".join(figures) or NOT_RECORDED,
        },
        "studies.md": {
            "reproduce": summary_markdown(record),
            **{f"reproduce-{name}": study_markdown(name, record) for name in STUDIES},
            "changes": f"{markdown_table(changes_table(record, former))}\n",
            "former": f"{markdown_table(former_table(former))}\n",
            "residual": "\n\n".join(residuals) + "\n" if residual else NOT_RECORDED,
        },
    }


def rewritten(page: str, parts: Mapping[str, str]) -> str:
    """Return a page in Markdown with its generated parts, by name."""
    for name, content in parts.items():
        page = replace_between(page, name, content)
    return page


def residual_tables(residual: Mapping[str, Any]) -> list[Table]:
    """Return what tools/residual_branch.py measured, one row per step: gradients and shares, and changes of weights."""
    rows, words = residual["rows"], list(residual["rows"][0]["gradients"])

    def relative(kind: str) -> list[tuple[str, ...]]:
        return [(f"{row['step']:,}", *(f"{row[kind][word]:.1e}" for word in words)) for row in rows]

    shares = [(f"{row['residual_share']:.2f}", f"{row['dynamic_share']:.2f}") for row in rows]
    gradients = [(*left, *right) for left, right in zip(relative("gradients"), shares, strict=True)]
    headings = ("step", *(f"gradient: {word}" for word in words), "residual / attention", "share of images")
    return [
        Table(headings, gradients, f"{residual['label']}: gradients"),
        Table(("step", *(f"change: {word}" for word in words)), relative("updates"), f"{residual['label']}: changes"),
    ]


def attentions_table(record: Record, times: Results | None) -> Table:
    """Return one row per attention: its accuracies, and the parameters and times of DeiT-T with it."""
    sizes = times_by_size(times)
    rows = []
    for name, (label, _) in CORES.items():
        model = f"{name}_deit_tiny"
        rows.append(
            (
                label,
                *(short_accuracy(record, cells[name]) for cells in COLUMNS.values()),
                deit_parameters(model),
                *(f"{1000 * found[model]:.1f}" if model in found else MISSING for found in sizes.values()),
                *supports(name),
            )
        )
    times_headings = (f"ms at {size}²" for size in sizes)
    headings = ("attention", *COLUMNS, "DeiT-T: parameters", *times_headings, "windows", "class token")
    return Table(headings, rows, "All attentions")


def short_accuracy(record: Record, cell: Cell) -> str:
    """Return the mean accuracy of a cell and its interval; a dash if it is not measured, or has diverged."""
    found = record.cells.get(cell.key, CellRecord({}))
    if found.diverged:
        return "diverged"
    if not found.top1:
        return MISSING
    error = mean_interval(found.top1)
    return f"{mean(found.top1):.1f}" + (f" ± {error:.1f}" if error is not None else "")


@cache
def deit_parameters(model: str) -> str:
    """Return the number of parameters of a model; a dash if there is no such model."""
    if not is_model(model):
        return MISSING
    with torch.device("meta"):
        return f"{count_parameters(create_model(model)):,}"


def supports(attention: str) -> tuple[str, str]:
    """Return whether an attention supports windows and a class token; dashes if there is no such attention."""
    kind = ATTENTIONS.get(attention)
    if kind is None:
        return MISSING, MISSING
    return "yes" if kind.supports_windows else "no", "yes" if kind.supports_prefix_tokens else "no"


def times_by_size(times: Results | None) -> dict[int, dict[str, float]]:
    """Return seconds per image in the best mode, by side length and model."""
    found: dict[int, dict[str, float]] = {}
    for one in times.best if times is not None else ():
        found.setdefault(one.size, {})[one.name] = 1 / one.images_per_second
    return found


def make_figures(record: Record, times: Results | None) -> dict[str, Figure]:
    """Return the figures for which there are measurements, by name."""
    figures = {}
    panels = {
        f"{size}²": [
            point
            for name, seconds in models.items()
            if (point := point_of(record, name.removesuffix("_deit_tiny"), "common", 1000 * seconds)) is not None
        ]
        for size, models in times_by_size(times).items()
    }
    y_label = "top-1 on CIFAR-10, %"
    if any(panels.values()):
        figures[TIME_FIGURE] = points_figure(panels, "ms per image, DeiT-T", y_label, log_x=True)
    panels = {}
    for word, cells in COMPARED.items():
        counts = {name: record.cells[cell.key].parameters for name, cell in cells.items() if cell.key in record.cells}
        points = [point_of(record, name, word, count) for name, count in counts.items() if count]
        panels[SET_LABELS[word]] = [point for point in points if point is not None]
    if any(panels.values()):
        figures[PARAMETERS_FIGURE] = points_figure(panels, "parameters of the small model", y_label)
    return figures


def point_of(record: Record, attention: str, surroundings: str, x: float) -> Point | None:
    """Return the accuracy of an attention as a point; None if it is not measured, or has diverged."""
    cell = COMPARED[surroundings].get(attention)
    found = record.cells.get(cell.key) if cell is not None else None
    if found is None or not found.top1 or found.diverged:
        return None
    label, style = CORES[attention][0], style_of(attention)
    return Point(label, plain_style(style), x, mean(found.top1), mean_interval(found.top1) or 0.0)


def plain_style(style: Style) -> Style:
    """Return a style with a plain marker: points have their names beside them."""
    return Style(style.name, style.color, style.marker, "")


def figure_path(docs: Path, name: str) -> Path:
    """Return where a figure of the pages is."""
    return docs / "reproduce" / f"{name}.svg"
