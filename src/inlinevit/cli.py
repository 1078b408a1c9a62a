"""The command line: `inlinevit COMMAND`."""

import fnmatch
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from . import __version__
from .models.catalog import CATALOG, HEADINGS, cells

try:
    from jsonargparse import ArgumentParser
    from rich.console import Console
    from rich.table import Table
except ImportError as error:
    raise SystemExit(f"{error}: the command line needs pip install 'inlinevit[cli]'") from error


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; this is what `inlinevit` on the command line calls."""
    parser = ArgumentParser(
        prog="inlinevit", description="Vision transformers with InLine attention.", version=__version__
    )
    commands = parser.add_subcommands(required=True)
    commands.add_subcommand("models", models_parser(), help="list all models with their size, cost and accuracy")
    settings = parser.parse_args(arguments).models
    show_models(settings.filter, settings.format)


def models_parser() -> ArgumentParser:
    """The arguments of `inlinevit models`."""
    parser = ArgumentParser(description="List all models with their size, cost and accuracy.")
    parser.add_argument("--filter", default="*", help="show the models whose name matches, such as '*swin*'")
    parser.add_argument("--json", dest="format", action="store_const", const="json", help="print JSON")
    parser.add_argument("--markdown", dest="format", action="store_const", const="markdown", help="print Markdown")
    return parser


def show_models(pattern: str, output: str | None) -> None:
    """Print the models whose name matches, as a table, as "json" or as "markdown"."""
    names = [name for name in CATALOG if fnmatch.fnmatch(name, pattern)]
    if not names:
        sys.exit(f"no model matches {pattern!r}: `inlinevit models` lists all of them")
    if output == "json":
        print(json.dumps([{"name": name, **asdict(CATALOG[name])} for name in names], indent=2))
    elif output == "markdown":
        rows = [HEADINGS, ["---"] * len(HEADINGS), *map(cells, names)]
        print("\n".join(f"| {' | '.join(row)} |" for row in rows))
    else:
        table = Table(*HEADINGS, caption="GMACs for one image; top-1 as published, on ImageNet-1K")
        for column in table.columns[1:]:
            column.justify = "right"
        for name in names:
            table.add_row(*cells(name))
        Console().print(table)
