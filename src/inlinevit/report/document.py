"""A report: sections of blocks, written as one HTML page and as JSON."""

import json
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import timm
import torch

from .. import __version__
from ..utils.atomic import atomic_write_bytes
from .blocks import TEMPLATES, Block, Picture
from .plots import save_drawing


@dataclass
class Section:
    """A part of a report.

    Attributes:
        key: Its name in the JSON file and in links: small letters, digits and hyphens.
        title: Its heading.
        blocks: What is to be read.
        data: The numbers behind it, for the JSON file: whatever json can write.
    """

    key: str
    title: str
    blocks: Sequence[Block]
    data: Any = None

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9-]*", self.key):
            raise ValueError(f"{self.key!r} is no key of a section: use small letters, digits and hyphens")


@dataclass
class Report:
    """A page and its numbers.

    Attributes:
        title: The heading of the page.
        intro: What was done, in a sentence or two.
        sections: What came out, in order.
    """

    title: str
    intro: str
    sections: list[Section] = field(default_factory=list)

    def add(self, section: Section) -> None:
        """Append a section."""
        if any(section.key == other.key for other in self.sections):
            raise ValueError(f"there is a section {section.key!r} already: choose another key")
        self.sections.append(section)

    def write(self, folder: str | Path, name: str = "report") -> Path:
        """Write NAME.json and NAME.html, each whole or not at all; returns the path of the page."""
        facts = environment()
        content = {"title": self.title, **facts, "sections": {section.key: section.data for section in self.sections}}
        page = TEMPLATES.get_template("page.html.jinja").render(report=self, facts=facts)
        path = Path(folder) / f"{name}.html"
        atomic_write_bytes(
            path.with_name(f"{name}.json"), (json.dumps(content, indent=2, allow_nan=False) + "\n").encode()
        )
        atomic_write_bytes(path, page.encode())
        return path

    def save_drawings(self, folder: str | Path) -> None:
        """Write each drawing as KEY.png and KEY.svg, numbered where a section has several."""
        for section in self.sections:
            figures = [block.figure for block in section.blocks if isinstance(block, Picture)]
            for number, figure in enumerate(figures, start=1):
                save_drawing(figure, Path(folder), section.key if len(figures) == 1 else f"{section.key}-{number}")


def environment() -> dict[str, Any]:
    """What numbers depend on beside the code that made them: time, versions, machine."""
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {
            "inlinevit": __version__,
            "torch": torch.__version__,
            "timm": timm.__version__,
            "python": platform.python_version(),
        },
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
        },
    }
