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
from .style import save_figure


@dataclass
class Section:
    """A part of a report."""

    # Its name in the JSON file and in links: lower-case letters, digits and hyphens.
    key: str
    title: str
    blocks: Sequence[Block]
    # The numbers behind it for the JSON file.
    data: Any = None

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9-]*", self.key):
            raise ValueError(f"{self.key!r} is not a key of a section: use lower-case letters, digits and hyphens")


@dataclass
class Report:
    """A page and its numbers: a title, what was done in a sentence or two, and the results."""

    title: str
    intro: str
    sections: list[Section] = field(default_factory=list)

    def add(self, *sections: Section) -> None:
        """Append sections."""
        for section in sections:
            if any(section.key == other.key for other in self.sections):
                raise ValueError(f"there is a section {section.key!r} already: choose another key")
            self.sections.append(section)

    def write(self, folder: str | Path, name: str = "report") -> Path:
        """Write NAME.json and NAME.html, each completely or not at all, and return the path of the page."""
        facts = environment()
        content = {"title": self.title, **facts, "sections": {section.key: section.data for section in self.sections}}
        text = json.dumps(content, indent=2, allow_nan=False) + "\n"
        path = Path(folder) / f"{name}.html"
        atomic_write_bytes(path.with_name(f"{name}.json"), text.encode())
        self.write_page(path, facts)
        return path

    def write_page(self, path: Path, facts: dict[str, Any] | None = None) -> None:
        """Write the page alone; `facts` is environment(), if it is known."""
        page = TEMPLATES.get_template("page.html.jinja").render(report=self, facts=facts or environment())
        # Names of files and classes may have letters that UTF-8 cannot encode.
        atomic_write_bytes(path, page.encode(errors="backslashreplace"))

    def save_figures(self, folder: str | Path) -> None:
        """Write each figure as KEY.png and KEY.svg, numbered where a section has several."""
        for section in self.sections:
            pictures = [block for block in section.blocks if isinstance(block, Picture)]
            for number, picture in enumerate(pictures, start=1):
                name = section.key if len(pictures) == 1 else f"{section.key}-{number}"
                save_figure(picture.figure, Path(folder), name, picture.svg)


def environment() -> dict[str, Any]:
    """Return what numbers depend on besides the code: time, versions, machine."""
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
