"""`inlinevit models`: all models with their size, cost and accuracy, from stored tables."""

import fnmatch
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from .commands import Command
from .parsing import new_parser


@dataclass(frozen=True)
class Column:
    """A column of a table of models.

    Attributes:
        heading: Its heading.
        field: The field of the stored table that it shows.
        format: How, as for str.format; numbers of parameters are in millions.
    """

    heading: str
    field: str
    format: str

    def cell(self, facts: dict[str, Any]) -> str:
        """Return the text for a model; a dash if the value is not known."""
        value = facts[self.field]
        if value is None:
            return "–"
        return self.format.format(value / 1e6 if self.field.endswith("parameters") else value)


@dataclass(frozen=True)
class ModelTable:
    """What `inlinevit models` lists for a task.

    Attributes:
        file: The stored table, a JSON file in this package; tools/model_tables.py writes it.
        name: Heading of the first column.
        columns: The other columns.
        caption: What the numbers are.
    """

    file: str
    name: str
    columns: tuple[Column, ...]
    caption: str

    def read(self) -> dict[str, dict[str, Any]]:
        """Return the facts of each model, by name."""
        return json.loads((files("inlinevit") / self.file).read_text(encoding="utf-8"))

    def headings(self) -> list[str]:
        """Return the headings of all columns."""
        return [self.name, *(column.heading for column in self.columns)]

    def row(self, name: str, facts: dict[str, Any]) -> list[str]:
        """Return the cells of a model."""
        return [name, *(column.cell(facts) for column in self.columns)]


TABLES = {
    "classification": ModelTable(
        "models/catalog.json",
        "model",
        (
            Column("input", "input_size", "{}²"),
            Column("params M", "parameters", "{:.2f}"),
            Column("GMACs", "gmacs", "{:.2f}"),
            Column("top-1 %", "top1", "{:.1f}"),
        ),
        "GMACs for one image; top-1 as published, on ImageNet-1K",
    ),
    "detection": ModelTable(
        "tasks/detection/catalog.json",
        "backbone",
        (
            Column("Mask R-CNN M", "parameters", "{:.2f}"),
            Column("GMACs", "gmacs", "{:.1f}"),
            Column("Cascade M", "cascade_parameters", "{:.2f}"),
            Column("GMACs", "cascade_gmacs", "{:.1f}"),
        ),
        "Millions of parameters and GMACs of whole detectors: 80 categories, one image of 1280×800",
    ),
    "segmentation": ModelTable(
        "tasks/segmentation/catalog.json",
        "backbone",
        (
            Column("SemanticFPN M", "parameters", "{:.2f}"),
            Column("GMACs", "gmacs", "{:.1f}"),
            Column("UperNet M", "upernet_parameters", "{:.2f}"),
            Column("GMACs", "upernet_gmacs", "{:.1f}"),
        ),
        "Millions of parameters and GMACs of whole models: 150 classes, one image of 2048×512",
    ),
}


def make_parser() -> ArgumentParser:
    """Return the parser of `inlinevit models`."""
    parser = new_parser("models", "List all models with their size, cost and accuracy.")
    parser.add_argument(
        "--task",
        choices=tuple(TABLES),
        default="classification",
        help="classification, or models for another task on our backbones and on their softmax counterparts",
    )
    parser.add_argument("--filter", default="*", help="show the models whose name matches, such as '*swin*'")
    formats = parser.add_mutually_exclusive_group()
    formats.add_argument("--json", dest="format", action="store_const", const="json", help="print JSON")
    formats.add_argument("--markdown", dest="format", action="store_const", const="markdown", help="print Markdown")
    return parser


def run(settings: Namespace) -> None:
    """Print the models whose name matches, as a table, as "json" or as "markdown"."""
    table = TABLES[settings.task]
    models = {name: facts for name, facts in table.read().items() if fnmatch.fnmatch(name, settings.filter)}
    if not models:
        words = "inlinevit models" if settings.task == "classification" else f"inlinevit models --task {settings.task}"
        raise ValueError(f"no model matches {settings.filter!r}: `{words}` lists all of them")
    rows = [table.row(name, facts) for name, facts in models.items()]
    if settings.format == "json":
        print(json.dumps([{"name": name, **facts} for name, facts in models.items()], indent=2))
    elif settings.format == "markdown":
        lines = [table.headings(), ["---"] * len(table.headings()), *rows]
        print("\n".join(f"| {' | '.join(row)} |" for row in lines))
    else:
        print_table(table, rows)


def print_table(table: ModelTable, rows: Sequence[Sequence[str]]) -> None:
    """Print rows on the terminal."""
    from rich.console import Console
    from rich.table import Table

    shown = Table(*table.headings(), caption=table.caption)
    for column in shown.columns[1:]:
        column.justify = "right"
    for row in rows:
        shown.add_row(*row)
    Console().print(shown)


COMMAND = Command(make_parser, run)
