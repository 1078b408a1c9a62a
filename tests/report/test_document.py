"""Reports are complete and self-contained, and escape all text."""

import base64
import io
import json
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

import pytest
import timm
import torch
from matplotlib.figure import Figure
from PIL import Image

import inlinevit
from inlinevit.layers import ATTENTIONS
from inlinevit.report import (
    STYLES,
    Block,
    ImageGrid,
    Line,
    Panel,
    Picture,
    Report,
    Section,
    Table,
    Text,
    Tile,
    dots_figure,
    lines_figure,
    spread_figure,
    styles_of,
    svg_bytes,
)

HOSTILE = "<script>alert('&\"1')</script>"
VOID = {"meta", "link", "img", "br", "source"}


class Page(HTMLParser):
    """Tags with their attributes, the text, and whether tags are closed in the order in which they were opened."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def example_figure() -> Figure:
    lines = [Line(style, [1, 2], [3, 4]) for style in STYLES.values()]
    return lines_figure([Panel("images", "loss", lines), Panel("seconds", "loss", lines)])


def full_report() -> Report:
    """Every kind of block, with hostile text wherever there can be text."""
    report = Report(HOSTILE, HOSTILE)
    tile = Tile(Image.new("L", (4, 5), 77), HOSTILE, [HOSTILE, "trouser"])
    blocks = [
        Text(HOSTILE),
        Text("the key", is_key=True),
        Table((HOSTILE, "b"), [(HOSTILE, "1"), ("row", HOSTILE)], HOSTILE),
        Picture(example_figure(), HOSTILE, HOSTILE),
        ImageGrid([tile, tile], HOSTILE),
    ]
    report.add(Section("first", HOSTILE, blocks, {"numbers": [1, 2.5], "text": HOSTILE}))
    report.add(Section("second-2", "Second", [Text("ü ✓")]))
    return report


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report") / "new" / "folder"
    assert full_report().write(folder) == folder / "report.html"
    return folder


@pytest.fixture(scope="module")
def page(folder: Path) -> Page:
    return Page((folder / "report.html").read_text(encoding="utf-8"))


def test_nothing_else_is_left_in_the_folder(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == ["report.html", "report.json"]


def test_page_needs_no_other_file(page: Page) -> None:
    assert page.all("script") == page.all("iframe") == page.all("object") == []
    attributes = [pair for _, pairs in page.tags for pair in pairs.items()]
    addresses = [value or "" for name, value in attributes if name in {"src", "href", "srcset", "data"}]
    assert len(addresses) >= 5
    assert all(address.startswith(("data:", "#")) for address in addresses)
    assert "default-src 'none'" in str(page.all("meta"))


def test_style_fetches_nothing(folder: Path) -> None:
    text = (folder / "report.html").read_text()
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style


def test_text_is_escaped_and_all_of_it_is_there(page: Page) -> None:
    # Title, heading, intro, link, section, paragraph, table (caption, 3 cells), 2 captions of pictures, 2 lines.
    assert page.text.count(HOSTILE) == 14
    # The label of the table and the alternative texts of three images.
    values = [value for _, attributes in page.tags for value in attributes.values()]
    assert values.count(HOSTILE) == 4
    assert "ü ✓" in page.text


def test_page_works_with_screen_readers(page: Page) -> None:
    assert page.all("html") == [{"lang": "en"}]
    assert all(image.get("alt") for image in page.all("img"))
    assert [heading["scope"] for heading in page.all("th")] == ["col", "col", "row", "row"]
    identities = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(identities) == len(set(identities))
    assert {link["href"] for link in page.all("a")} == {"#first", "#second-2"}
    assert {"first", "second-2"} <= set(identities)


def test_captions_of_tables_do_not_scroll_away(folder: Path) -> None:
    """On a narrow screen, a table is wider than the page; its caption must not be."""
    text = (folder / "report.html").read_text()
    assert "<caption" not in text
    assert 0 < text.index("<figcaption>") < text.index('role="region"') < text.index("<table")


def test_pictures_can_be_decoded(page: Page) -> None:
    drawn, *tiles = [str(image["src"]).split(",", 1) for image in page.all("img")]
    assert drawn[0] == "data:image/svg+xml;base64"
    assert ET.fromstring(base64.b64decode(drawn[1])).tag.endswith("svg")
    assert len(tiles) == 2
    for kind, content in tiles:
        assert kind == "data:image/png;base64"
        image = Image.open(io.BytesIO(base64.b64decode(content)))
        assert (image.size, image.getpixel((0, 0))) == ((4, 5), 77)


def test_json_is_complete(folder: Path) -> None:
    content = json.loads((folder / "report.json").read_text())
    assert content["title"] == HOSTILE
    assert content["sections"] == {"first": {"numbers": [1, 2.5], "text": HOSTILE}, "second-2": None}
    assert content["versions"]["inlinevit"] == inlinevit.__version__
    assert content["versions"]["torch"] == torch.__version__
    assert content["versions"]["timm"] == timm.__version__
    assert content["machine"]["threads"] == torch.get_num_threads()
    assert content["machine"]["cores"] >= 1
    assert content["created"].endswith("+00:00")


def test_other_name(tmp_path: Path) -> None:
    Report("a", "b").write(tmp_path, name="analysis")
    assert {path.name for path in tmp_path.iterdir()} == {"analysis.html", "analysis.json"}


def test_figures_are_saved_under_the_names_of_their_sections(tmp_path: Path) -> None:
    def picture() -> Picture:
        figure = Figure(figsize=(1, 0.5))
        figure.subplots().plot([1, 2], [3, 4])
        return Picture(figure, "", "")

    sections = [Section("one", "", [Text(""), picture()]), Section("two", "", [picture(), picture()])]
    Report("a", "b", [*sections, Section("none", "", [])]).save_figures(tmp_path / "figures")
    names = [f"{name}.{ending}" for name in ("one", "two-1", "two-2") for ending in ("png", "svg")]
    assert sorted(path.name for path in (tmp_path / "figures").iterdir()) == names
    assert Image.open(tmp_path / "figures" / "one.png").info["dpi"] == pytest.approx((200, 200), rel=0.01)
    assert ET.parse(tmp_path / "figures" / "two-1.svg").getroot().tag.endswith("svg")


def test_new_kind_of_block(tmp_path: Path) -> None:
    @dataclass
    class Quote(Block):
        template = "<blockquote>{{ block.words }}</blockquote>"
        words: str

    report = Report("a", "b", [Section("quote", "Quote", [Quote("a < b")])])
    assert "<blockquote>a &lt; b</blockquote>" in report.write(tmp_path).read_text()


def test_phones_get_narrow_figures() -> None:
    def make() -> Figure:
        lines = [Line(STYLES[attention], [1, 2, 3], [3, 2, 1]) for attention in ("softmax", "linear", "inline")]
        return lines_figure([Panel("images", "loss", lines), Panel("seconds", "loss", lines)], share_y=True)

    figure = make()
    picture = Picture(figure, "alt", "caption")
    assert picture.narrow_svg is not None
    wide, narrow = ET.fromstring(picture.svg).attrib, ET.fromstring(picture.narrow_svg).attrib
    # Points, which are about the pixels that a phone has.
    assert float(narrow["width"][:-2]) < 350 < float(wide["width"][:-2])
    # Panels are below each other.
    assert float(narrow["height"][:-2]) > 1.5 * float(wide["height"][:-2])
    assert picture.html().count("<source media") == 1
    # The figure itself is as it was.
    assert svg_bytes(figure) == svg_bytes(make())


def test_figures_that_cannot_be_narrow_are_to_scroll() -> None:
    figure = Figure(figsize=(9, 2))
    for part in figure.subfigures(1, 2):
        part.subplots()
    picture = Picture(figure, "alt", "caption")
    assert picture.narrow_svg is None
    assert 'class="figure wide"' in picture.html()


def test_same_figure_makes_same_file() -> None:
    assert svg_bytes(example_figure()) == svg_bytes(example_figure())


def test_failed_write_keeps_the_old_report(tmp_path: Path) -> None:
    path = Report("old", "").write(tmp_path)
    with pytest.raises(ValueError, match="JSON"):
        Report("new", "", [Section("nan", "NaN", [], float("nan"))]).write(tmp_path)
    assert "old" in path.read_text()
    assert len(list(tmp_path.iterdir())) == 2


def test_mistakes_are_refused() -> None:
    report = Report("a", "b", [Section("one", "One", [])])
    with pytest.raises(ValueError, match="another key"):
        report.add(Section("one", "Two", []))
    with pytest.raises(ValueError, match="lower-case letters"):
        Section("One section", "One", [])
    with pytest.raises(ValueError, match="1 cells under 2 headings"):
        Table(("a", "b"), [("c",)], "d")


def test_each_attention_has_a_style_of_its_own() -> None:
    assert set(STYLES) == set(ATTENTIONS)
    for field in ("name", "color", "marker", "dash"):
        assert len({vars(style)[field] for style in STYLES.values()}) == len(STYLES)


def test_models_of_one_attention_have_different_styles() -> None:
    words = {
        **{word: word for word in STYLES},
        "b": "inline",
        "c": "inline",
        "d": "softmax",
        "e": "mixed",
        "f": "mixed",
    }
    styles = styles_of(words)
    assert [style.name for style in styles.values()] == list(words)
    assert all(styles[word].color == own.color and styles[word].dash == own.dash for word, own in STYLES.items())
    for field in ("color", "marker"):
        assert len({vars(style)[field] for style in styles.values()}) == len(words)
    assert len({(style.color, style.dash) for style in styles.values()}) == len(words)


def test_an_attention_has_the_same_colour_in_every_example_figure() -> None:
    curves = {line.get_label(): line.get_color() for line in example_figure().axes[0].lines}
    figure = dots_figure({attention: [1.0, None] for attention in STYLES}, ["a", "b"], "")
    dots = {line.get_label(): line.get_color() for line in figure.axes[0].lines}
    expected = {style.name: style.color for style in STYLES.values()}
    assert curves == dots == expected
    boxes = spread_figure({attention: [1.0, 2.0] for attention in STYLES}, "ms").axes[0].patches
    assert [box.get_facecolor() for box in boxes] == [
        (*(int(style.color[i : i + 2], 16) / 255 for i in (1, 3, 5)), 1.0) for style in STYLES.values()
    ]
