"""Reports: one self-contained HTML page, and the same numbers as JSON.

A report is a list of sections, and a section is a list of blocks. A new kind of content is a subclass of `Block` with
its own template.
"""

from .blocks import Block, Case, CaseList, ImageGrid, Picture, Table, Text, Tile
from .document import Report, Section, environment
from .plots import (
    Interval,
    Line,
    Panel,
    Point,
    dots_figure,
    intervals_figure,
    lines_figure,
    log_axis,
    points_figure,
    reliability_figure,
    spread_figure,
)
from .style import STYLES, WIDTH, Style, add_legend, plot_style, save_figure, styles_of, svg_bytes
from .tables import markdown_table, replace_between, rich_table, wide_console

__all__ = [
    "STYLES",
    "WIDTH",
    "Block",
    "Case",
    "CaseList",
    "ImageGrid",
    "Interval",
    "Line",
    "Panel",
    "Picture",
    "Point",
    "Report",
    "Section",
    "Style",
    "Table",
    "Text",
    "Tile",
    "add_legend",
    "dots_figure",
    "environment",
    "intervals_figure",
    "lines_figure",
    "log_axis",
    "markdown_table",
    "plot_style",
    "points_figure",
    "reliability_figure",
    "replace_between",
    "rich_table",
    "save_figure",
    "spread_figure",
    "styles_of",
    "svg_bytes",
    "wide_console",
]
