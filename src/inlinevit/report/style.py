"""The look of all plots: one style per attention, matplotlib settings, legends, PNG and SVG files."""

import io
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.container import Container
from matplotlib.figure import Figure, FigureBase
from matplotlib.font_manager import FontProperties
from matplotlib.gridspec import SubplotSpec
from matplotlib.lines import Line2D
from matplotlib.textpath import TextPath
from matplotlib.transforms import Affine2D

from ..utils.atomic import atomic_write_bytes

# Inches: of figures, and of figures for phones.
WIDTH, NARROW_WIDTH = 9.6, 4.4
# Of a line in a legend.
LEGEND_LINE = 0.2
LEGEND_COLUMNS = 5
PNG_DPI = 200

# A decorator for functions that make a figure, and a context for code that does. Names of classes and runs come from
# users: they are never interpreted as formulas.
plot_style = matplotlib.rc_context(
    {
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.alpha": 0.25,
        "legend.frameon": False,
        "lines.linewidth": 1.5,
        "lines.markersize": 5,
        "figure.constrained_layout.use": True,
        "text.parse_math": False,
        "text.usetex": False,
    }
)

# A matplotlib line style, or an offset and the lengths of strokes and gaps.
Dash = str | tuple[int, tuple[float, ...]]


@dataclass(frozen=True)
class Style:
    """The name and the look of a line. Lines differ in color, and also in marker and dash for readers without color."""

    name: str
    color: str
    marker: str
    dash: Dash
    hollow: bool = False

    @property
    def line(self) -> dict[str, Any]:
        """Keyword arguments for Line2D and Axes.plot."""
        face = "white" if self.hollow else self.color
        look = {"color": self.color, "markerfacecolor": face, "linestyle": self.dash, "label": self.name}
        return {**look, **marker_look(self.marker)}


@cache
def marker_look(marker: str) -> dict[str, Any]:
    """Return the keyword arguments of a marker: one of matplotlib's, or a letter between dollar signs.

    Where formulas are switched off, matplotlib would draw the dollar signs, too.
    """
    if not marker.startswith("$"):
        return {"marker": marker}
    letter = TextPath((0, 0), marker.strip("$"), size=10, prop=FontProperties(weight="bold"))
    box = letter.get_extents()
    shape = letter.transformed(Affine2D().translate(-(box.x0 + box.x1) / 2, -(box.y0 + box.y1) / 2))
    return {"marker": shape, "markersize": 7, "markeredgewidth": 0}


# Colors of Okabe and Ito, which color-blind readers can distinguish; from the eighth on Tol's, with letters as markers
# from the ninth on, since there are few other ones.
STYLES = {
    "softmax": Style("softmax", "#0072B2", "s", "--"),
    "linear": Style("linear", "#E69F00", "^", ":"),
    "inline": Style("InLine", "#009E73", "o", "-"),
    "hydra": Style("Hydra", "#D55E00", "v", "-."),
    "efficient": Style("efficient", "#56B4E9", "D", (0, (8, 2))),
    "angular": Style("angular", "#CC79A7", "P", (0, (3, 1, 1, 1, 1, 1))),
    "enhanced": Style("enhanced", "#000000", "X", (0, (1, 2))),
    "focused": Style("focused", "#882255", "*", (0, (5, 1, 1, 1))),
    "mala": Style("MALA", "#117733", "$M$", (0, (7, 1, 2, 1))),
    "rala": Style("RALA", "#999933", "$R$", (0, (4, 1))),
    "polaformer": Style("PolaFormer", "#332288", "$P$", (0, (1, 1, 4, 1))),
    "agent": Style("agent", "#661100", "$A$", (0, (6, 1))),
    "vit3": Style("ViT³", "#6699CC", "$3$", (0, (4, 1, 1, 1, 1, 1, 1, 1))),
    "mhla": Style("MHLA", "#AA4499", "$H$", (0, (2, 2))),
    "circulant": Style("circulant", "#44AA99", "$C$", (0, (9, 1, 2, 1))),
}
# For models with none of these attentions, or with several.
OTHER_COLOR = "#777777"
# For the second and further models of an attention.
SPARE_MARKERS = ("<", ">", "h", "p", "d", "8")
SPARE_DASHES: tuple[Dash, ...] = ((0, (6, 2, 2, 2)), (0, (3, 3)), (0, (10, 3)), (0, (2, 1)))
# The gray level that is mixed into the color, and its proportion.
SPARE_SHADES = ((0.0, 0.45), (1.0, 0.45), (0.0, 0.7), (1.0, 0.65))


def styles_of(models: Mapping[str, str]) -> dict[str, Style]:
    """Return a distinct style for each model, from their names and attentions; unknown attentions are gray.

    The first model of an attention has the style of the attention. Further ones have shades of its color, and markers
    and dashes that no attention has.
    """
    seen: Counter[str] = Counter()
    styles: dict[str, Style] = {}
    spares = 0
    for name, attention in models.items():
        own = STYLES.get(attention)
        if own is not None and seen[attention] == 0:
            styles[name] = replace(own, name=name)
        else:
            color = _shade(own.color if own is not None else OTHER_COLOR, seen[attention])
            marker, dash = SPARE_MARKERS[spares % len(SPARE_MARKERS)], SPARE_DASHES[spares % len(SPARE_DASHES)]
            styles[name] = Style(name, color, marker, dash)
            spares += 1
        seen[attention] += 1
    return styles


def _shade(color: str, number: int) -> str:
    """Return the color itself (0), a darker one (1), a lighter one (2), and so on."""
    if number == 0:
        return color
    gray, proportion = SPARE_SHADES[(number - 1) % len(SPARE_SHADES)]
    red, green, blue = (proportion * gray + (1 - proportion) * part for part in to_rgb(color))
    return to_hex((red, green, blue))


def add_legend(figure: FigureBase, handles: Sequence[Artist | Container], width: float = WIDTH) -> None:
    """Add a legend above a figure that is `width` inches wide."""
    columns = legend_columns([str(handle.get_label()) for handle in handles], width)
    figure.legend(handles=list(handles), loc="outside upper center", ncols=columns, fontsize=9, handlelength=3)


def legend_columns(names: Sequence[str], width: float) -> int:
    """Return how many legend entries fit side by side into `width` inches."""
    longest = max(len(name) for name in names)
    return max(1, min(len(names), LEGEND_COLUMNS, int(width / (0.65 + 0.085 * longest))))


def svg_bytes(figure: Figure) -> bytes:
    """Return a figure as SVG. Equal figures give equal bytes: element ids have a fixed salt, and there is no date."""
    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "inlinevit", "text.usetex": False}):
        figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None})
    return buffer.getvalue()


@plot_style
def narrow_svg_bytes(figure: Figure) -> bytes | None:
    """Return a figure as SVG for a phone, with its panels below each other; None if it cannot be arranged so."""
    places = {axes: place for axes in figure.axes if (place := axes.get_subplotspec()) is not None}
    # Parts of subfigures, and color bars beside several panels, have places that depend on the others.
    if figure.subfigs or len(places) < len(figure.axes) or not places:
        return None
    with narrowed(figure, places):
        return svg_bytes(figure)


@contextmanager
def narrowed(figure: Figure, places: Mapping[Axes, SubplotSpec]) -> Iterator[None]:
    """Arrange the panels of a figure below each other within a context.

    Args:
        figure: The figure.
        places: Where its panels are.
    """
    width, height = figure.get_size_inches()
    labels = {
        axes: {
            "labelleft": axes.yaxis.get_tick_params()["labelleft"],
            "labelbottom": axes.xaxis.get_tick_params()["labelbottom"],
        }
        for axes in places
    }
    panels = [axes for axes in places if axes.get_visible()]
    rows = max(place.get_gridspec().nrows for place in places.values())
    needed = height / rows * len(panels)
    legends = list(figure.legends)
    try:
        for legend in legends:
            handles = [handle for handle in legend.legend_handles if isinstance(handle, Line2D)]
            # Others, such as those of error bars, cannot be used again, but have short names.
            if len(handles) == len(legend.get_texts()):
                figure.legends.remove(legend)
                add_legend(figure, handles, NARROW_WIDTH)
                columns = legend_columns([str(handle.get_label()) for handle in handles], NARROW_WIDTH)
                needed += LEGEND_LINE * (-(-len(handles) // columns) - 1)
        figure.set_size_inches(min(NARROW_WIDTH, width), needed)
        if len(panels) > rows:
            grid = figure.add_gridspec(len(panels), 1)
            for row, axes in enumerate(panels):
                axes.set_subplotspec(grid[row])
                # Panels of a row may share their labels.
                axes.tick_params(labelleft=True, labelbottom=True)
        yield
    finally:
        figure.set_size_inches(width, height)
        figure.legends[:] = legends
        for axes, place in places.items():
            axes.set_subplotspec(place)
            axes.tick_params(**labels[axes])


def save_figure(figure: Figure, folder: Path, name: str, svg: bytes | None = None) -> None:
    """Write a figure as NAME.svg and NAME.png; `svg` is svg_bytes(figure), if it is known."""
    atomic_write_bytes(folder / f"{name}.svg", svg_bytes(figure) if svg is None else svg)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=PNG_DPI, bbox_inches="tight")
    atomic_write_bytes(folder / f"{name}.png", buffer.getvalue())
