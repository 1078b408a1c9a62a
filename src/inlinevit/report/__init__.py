"""Reports: one HTML page that needs nothing else, and the same numbers as JSON.

A report is a list of sections, a section a list of blocks. What makes a new section is a `Section`; what makes a new
kind of content is a subclass of `Block` with its own piece of template.
"""

from .blocks import Block, ImageGrid, Picture, Table, Text, Tile
from .document import Report, Section, environment
from .plots import (
    STYLES,
    Panel,
    Series,
    Style,
    curves_figure,
    dots_figure,
    save_drawing,
    spread_figure,
    styles_of,
)

__all__ = [
    "STYLES",
    "Block",
    "ImageGrid",
    "Panel",
    "Picture",
    "Report",
    "Section",
    "Series",
    "Style",
    "Table",
    "Text",
    "Tile",
    "curves_figure",
    "dots_figure",
    "environment",
    "save_drawing",
    "spread_figure",
    "styles_of",
]
