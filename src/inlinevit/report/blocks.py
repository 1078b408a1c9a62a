"""The content of a section: text, tables, figures, images."""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure
from PIL import Image

from .style import svg_bytes

# Everything that is inserted into a template is escaped.
TEMPLATES = Environment(
    loader=PackageLoader(__package__, "."),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


class Block:
    """Base class of content. A subclass is a dataclass with a template, in which the object is called `block`."""

    template: ClassVar[str]

    def html(self) -> Markup:
        """Return the block as HTML."""
        return Markup(TEMPLATES.from_string(self.template).render(block=self))


@dataclass
class Text(Block):
    """A paragraph.

    Attributes:
        text: Plain text.
        is_key: Whether it is highlighted as the main result.
    """

    template = '<p{% if block.is_key %} class="key"{% endif %}>{{ block.text }}</p>'

    text: str
    is_key: bool = False


@dataclass
class Table(Block):
    """A table whose first column has the names of the rows.

    Attributes:
        headings: One for each column.
        rows: Cells, formatted.
        caption: What the table shows.
        is_prose: Whether the cells are text rather than numbers.
    """

    template = """
<figure><figcaption>{{ block.caption }}</figcaption>
<div class="scroll" role="region" aria-label="{{ block.caption }}" tabindex="0">
<table{% if block.is_prose %} class="prose"{% endif %}>
<thead><tr>{% for heading in block.headings %}<th scope="col">{{ heading }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in block.rows %}
<tr><th scope="row">{{ row[0] }}</th>{% for cell in row[1:] %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</tbody>
</table>
</div></figure>
"""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str
    is_prose: bool = False

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.headings):
                raise ValueError(f"a row has {len(row)} cells under {len(self.headings)} headings: {list(row)}")


@dataclass
class Picture(Block):
    """A matplotlib figure.

    Attributes:
        figure: The figure.
        alt: A description for screen readers.
        caption: The text below it.
    """

    template = """
<figure><div class="scroll" tabindex="0"><img class="figure" src="{{ block.uri }}" alt="{{ block.alt }}"></div>
<figcaption>{{ block.caption }}</figcaption></figure>
"""

    figure: Figure
    alt: str
    caption: str

    @cached_property
    def svg(self) -> bytes:
        """The figure as SVG."""
        return svg_bytes(self.figure)

    @property
    def uri(self) -> str:
        """The figure as a data URI."""
        return data_uri("image/svg+xml", self.svg)


@dataclass
class Tile:
    """A small image.

    Attributes:
        image: The image.
        alt: A description for screen readers.
        lines: Short lines below it.
    """

    image: Image.Image
    alt: str
    lines: Sequence[str] = ()

    @property
    def uri(self) -> str:
        """The image as a data URI."""
        buffer = io.BytesIO()
        self.image.save(buffer, format="PNG")
        return data_uri("image/png", buffer.getvalue())


@dataclass
class ImageGrid(Block):
    """Small images side by side.

    Attributes:
        tiles: The images.
        caption: The text above them.
    """

    template = """
<figure class="grid"><figcaption>{{ block.caption }}</figcaption>
<ul>
{% for tile in block.tiles %}
<li><img src="{{ tile.uri }}" alt="{{ tile.alt }}">{% for line in tile.lines %}<span>{{ line }}</span>{% endfor %}</li>
{% endfor %}
</ul></figure>
"""

    tiles: Sequence[Tile]
    caption: str


def data_uri(kind: str, content: bytes) -> str:
    """Return the content of a file as a data URI, so that a page needs no other file."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"
