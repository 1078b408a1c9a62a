"""Analyses of models as sections of a report: figures, tables, and a verdict in words."""

from collections.abc import Sequence

from ...report import Section, styles_of
from .common import Analysis
from .confusion import confusion_section
from .locality import locality_section
from .maps import maps_section
from .masking import masking_section

__all__ = ["Analysis", "analysis_sections"]


def analysis_sections(analyses: Sequence[Analysis]) -> list[Section]:
    """Return the sections confusion, locality, masking and maps, each with all models side by side."""
    # A model with several attentions has the style of the first.
    styles = styles_of({one.label: one.attention.partition("+")[0] for one in analyses})
    return [
        confusion_section(analyses, styles),
        locality_section(analyses, styles),
        masking_section(analyses, styles),
        maps_section(analyses),
    ]
