"""The content of a section: text, tables, figures, images."""

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure
from PIL import Image

from .style import narrow_svg_bytes, svg_bytes

# Everything that is inserted into a template is escaped.
TEMPLATES = Environment(
    loader=PackageLoader(__package__, "."),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def data_uri(content: bytes, kind: str) -> str:
    """Return the content of a file as a data URI, so that a page needs no other file."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def image_uri(content: bytes) -> str:
    """Return a PNG or JPEG file as a data URI."""
    return data_uri(content, "image/png" if content.startswith(b"\x89PNG") else "image/jpeg")


TEMPLATES.filters |= {"data_uri": data_uri, "image_uri": image_uri}


class Block:
    """Base class of content. A subclass is a dataclass with a template, in which the object is called `block`."""

    template: ClassVar[str]

    def html(self) -> Markup:
        """Return the block as HTML."""
        return Markup(TEMPLATES.from_string(self.template).render(block=self))


@dataclass
class Text(Block):
    """A paragraph of plain text, highlighted if it is the main result (`is_key`)."""

    template = '<p{% if block.is_key %} class="key"{% endif %}>{{ block.text }}</p>'

    text: str
    is_key: bool = False


@dataclass
class Table(Block):
    """A table of formatted numbers, or of text (`is_prose`). Its first column has the names of the rows."""

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
    """A matplotlib figure, with a description for screen readers (`alt`) and a caption below it.

    Phones get a narrow version, or, of a figure that has none, the same one to scroll.
    """

    template = """
<figure>
{% if block.narrow_svg is not none %}
<picture><source media="(max-width: 36rem)" srcset="{{ block.narrow_svg | data_uri('image/svg+xml') }}">
<img class="figure" src="{{ block.svg | data_uri('image/svg+xml') }}" alt="{{ block.alt }}"></picture>
{% else %}
<div class="scroll" role="region" aria-label="{{ block.caption }}" tabindex="0">
<img class="figure wide" src="{{ block.svg | data_uri('image/svg+xml') }}" alt="{{ block.alt }}"></div>
{% endif %}
<figcaption>{{ block.caption }}</figcaption></figure>
"""

    figure: Figure
    alt: str
    caption: str

    @cached_property
    def svg(self) -> bytes:
        """The figure as SVG."""
        return svg_bytes(self.figure)

    @cached_property
    def narrow_svg(self) -> bytes | None:
        """The figure as SVG for narrow screens, if it has such a version."""
        return narrow_svg_bytes(self.figure)


@dataclass
class Tile:
    """A small image, with a description for screen readers (`alt`) and short lines below it."""

    image: Image.Image
    alt: str
    lines: Sequence[str] = ()

    @property
    def png(self) -> bytes:
        """The image as PNG."""
        buffer = io.BytesIO()
        self.image.save(buffer, format="PNG")
        return buffer.getvalue()


@dataclass
class ImageGrid(Block):
    """Small images side by side, with a caption above them."""

    template = """
<figure class="grid"><figcaption>{{ block.caption }}</figcaption>
<ul>
{% for tile in block.tiles %}
<li><img src="{{ tile.png | data_uri('image/png') }}" alt="{{ tile.alt }}">
{% for line in tile.lines %}<span>{{ line }}</span>{% endfor %}</li>
{% endfor %}
</ul></figure>
"""

    tiles: Sequence[Tile]
    caption: str


@dataclass
class Case:
    """An image that is shown with others of it side by side, such as truth and prediction, and lines below them.

    Attributes:
        pictures: PNG or JPEG files by what they show; one without a name has no caption.
        lines: The first is highlighted.
    """

    pictures: Mapping[str, bytes]
    lines: Sequence[str] = ()


@dataclass
class CaseList(Block):
    """Images that are to be looked at one by one, with a caption above them."""

    template = """
<figure class="cases{% if block.is_wide %} wide{% endif %}"><figcaption>{{ block.caption }}</figcaption>
<ol>
{% for case in block.cases %}
<li><div>
{% for name, content in case.pictures.items() %}
<figure>{% if name %}<figcaption>{{ name }}</figcaption>{% endif %}

<img src="{{ content | image_uri }}" alt="{{ name or 'image' }}, {{ case.lines | join(', ') }}"></figure>
{% endfor %}
</div>
{% for line in case.lines %}<span>{{ line }}</span>{% endfor %}</li>
{% endfor %}
</ol></figure>
"""

    cases: Sequence[Case]
    caption: str

    @property
    def is_wide(self) -> bool:
        """Whether cases have several pictures each."""
        return any(len(case.pictures) > 1 for case in self.cases)
