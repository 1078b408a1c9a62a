"""Tables of reports in a terminal and in Markdown."""

import re

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from ..utils.console import new_console
from .blocks import Table

# Columns of a table that is written to a file or a pipe.
WIDE = 200


def rich_table(table: Table) -> RichTable:
    """Return a table for a terminal."""
    shown = RichTable(*table.headings, title=table.caption, box=box.SIMPLE_HEAD)
    for column in shown.columns:
        column.no_wrap = not table.is_prose
    for row in table.rows:
        shown.add_row(*row)
    return shown


def wide_console(console: Console) -> Console:
    """Return the console itself if it is a terminal, or else one that is wide enough for all columns."""
    return console if console.is_terminal else new_console(file=console.file, width=WIDE)


def markdown_table(table: Table) -> str:
    """Return a table in Markdown, without its caption."""
    rows = [table.headings, ["---"] * len(table.headings), *table.rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def replace_between(page: str, name: str, content: str) -> str:
    """Return the page with new content between `<!-- name -->` and `<!-- /name -->`."""
    marks = re.compile(rf"(?<=<!-- {re.escape(name)} -->\n).*?(?=<!-- /{re.escape(name)} -->)", re.DOTALL)
    if len(marks.findall(page)) != 1:
        raise ValueError(f"the page should have <!-- {name} --> and, below it, <!-- /{name} -->, once each")
    return marks.sub(lambda _: f"\n{content}\n", page)
