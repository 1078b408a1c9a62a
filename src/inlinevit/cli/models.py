"""`inlinevit models`: all models with their size, cost and accuracy, from stored tables."""

import fnmatch
import json
from importlib.resources import files
from typing import Any, NamedTuple

from jsonargparse import ArgumentParser, Namespace

from ..utils.modules import IMPORTED
from ..utils.validation import require
from .parsing import add_import, new_parser


class ModelTable(NamedTuple):
    """What `inlinevit models` lists for a task.

    Attributes:
        file: The stored table, a JSON file in this package; tools/model_tables.py writes it.
        caption: What the numbers are.
        name: Heading of the first column.
        columns: (heading, format) of the other columns, by field of the stored table. Values are in millions if the
            heading ends with M.
    """

    file: str
    caption: str
    name: str
    columns: dict[str, tuple[str, str]]

    def read(self) -> dict[str, dict[str, Any]]:
        """Return the facts of each model, by name."""
        return json.loads((files("inlinevit") / self.file).read_text(encoding="utf-8"))

    def headings(self) -> list[str]:
        """Return the headings of all columns."""
        return [self.name, *(heading for heading, _ in self.columns.values())]

    def row(self, name: str, facts: dict[str, Any]) -> list[str]:
        """Return the cells of a model, with a dash for values that are not known."""
        cells = [name]
        for field, (heading, form) in self.columns.items():
            value = facts[field]
            if value is not None and heading.endswith(" M"):
                value /= 1e6
            cells.append("–" if value is None else form.format(value))
        return cells


def cost_columns(architectures: dict[str, str]) -> dict[str, tuple[str, str]]:
    """Return the columns of architectures, which are given by the prefix of their fields."""
    columns = {}
    for prefix, heading in architectures.items():
        columns[f"{prefix}parameters"] = (f"{heading} M", "{:.2f}")
        columns[f"{prefix}gmacs"] = ("GMACs", "{:.1f}")
    return columns


TABLES = {
    "classification": ModelTable(
        "models/catalog.json",
        "GMACs for one image; top-1 as published, on ImageNet-1K",
        "model",
        {
            "input_size": ("input", "{}²"),
            "parameters": ("parameters", "{:,}"),
            "gmacs": ("GMACs", "{:.2f}"),
            "top1": ("top-1 %", "{:.1f}"),
        },
    ),
    "detection": ModelTable(
        "tasks/detection/catalog.json",
        "Millions of parameters and GMACs of whole detectors: 80 categories, one image of 1280×800",
        "backbone",
        cost_columns({"": "Mask R-CNN", "cascade_": "Cascade"}),
    ),
    "segmentation": ModelTable(
        "tasks/segmentation/catalog.json",
        "Millions of parameters and GMACs of whole models: 150 classes, one image of 2048×512",
        "backbone",
        cost_columns({"": "SemanticFPN", "upernet_": "UperNet"}),
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
    about = "list the attentions that models take, also those of installed packages and of --import"
    parser.add_argument("--attentions", action="store_true", help=about)
    add_import(parser)
    formats = parser.add_mutually_exclusive_group()
    formats.add_argument("--json", dest="format", action="store_const", const="json", help="print JSON")
    formats.add_argument("--markdown", dest="format", action="store_const", const="markdown", help="print Markdown")
    return parser


def run(settings: Namespace) -> None:
    """Print the models whose name matches, or all attentions, as a table, as "json" or as "markdown"."""
    if settings.attentions:
        require(
            settings.task == "classification" and settings.filter == "*",
            "--attentions lists all attentions, whatever the model: leave out --task and --filter",
        )
        show_table(["attention", "class"], attention_rows(), "what models take as attention", settings.format, "left")
        return
    require(not IMPORTED, "--import adds no models to this table: use it with --attentions")
    table = TABLES[settings.task]
    models = {name: facts for name, facts in table.read().items() if fnmatch.fnmatch(name, settings.filter)}
    if not models:
        words = "inlinevit models" if settings.task == "classification" else f"inlinevit models --task {settings.task}"
        raise ValueError(f"no model matches {settings.filter!r}: `{words}` lists all of them")
    headings, rows = table.headings(), [table.row(name, facts) for name, facts in models.items()]
    if settings.format == "json":
        print(json.dumps([{"name": name, **facts} for name, facts in models.items()], indent=2))
    else:
        show_table(headings, rows, table.caption, settings.format, "right")


def attention_rows() -> list[list[str]]:
    """Return the name and the class of each attention."""
    # Here, because the list of models needs no torch.
    from ..layers import find_attention, list_attentions

    kinds = {name: find_attention(name) for name in list_attentions()}
    return [[name, f"{kind.__module__}.{kind.__qualname__}"] for name, kind in kinds.items()]


def show_table(headings: list[str], rows: list[list[str]], caption: str, format: str | None, justify: Any) -> None:
    """Print a table as "json", as "markdown" or, with None, for a terminal: its columns but the first justified so."""
    if format == "json":
        print(json.dumps([dict(zip(headings, row, strict=True)) for row in rows], indent=2))
    elif format == "markdown":
        print("\n".join(f"| {' | '.join(row)} |" for row in [headings, ["---"] * len(headings), *rows]))
    else:
        from rich.table import Table

        from ..utils.console import new_console

        shown = Table(*headings, caption=caption)
        for column in shown.columns[1:]:
            column.justify = justify
        for row in rows:
            shown.add_row(*row)
        new_console().print(shown)
