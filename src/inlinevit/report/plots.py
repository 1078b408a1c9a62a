"""Drawings for reports: curves, spreads, dots. Each attention has one style, the same everywhere."""

import io
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure

from ..utils.atomic import atomic_write_bytes

WIDTH = 9.6
# Lines with more points than this are drawn without marks.
MOST_MARKED = 15
# So many names stand side by side in a legend.
LEGEND_COLUMNS = 5
# For print.
DOTS_PER_INCH = 200

# matplotlib's word for how a line is dashed, or where it begins and the lengths of strokes and gaps.
Dash = str | tuple[int, tuple[float, ...]]


@dataclass(frozen=True)
class Style:
    """How an attention is called and drawn: told apart by colour, and by shape without it."""

    name: str
    color: str
    marker: str
    dash: Dash


# Colours by Okabe and Ito, which the colour-blind tell apart too; the last one is Tol's, for their yellow is too light.
STYLES = {
    "softmax": Style("softmax", "#0072B2", "s", "--"),
    "linear": Style("linear", "#E69F00", "^", ":"),
    "inline": Style("InLine", "#009E73", "o", "-"),
    "hydra": Style("Hydra", "#D55E00", "v", "-."),
    "efficient": Style("efficient", "#56B4E9", "D", (0, (8, 2))),
    "angular": Style("angular", "#CC79A7", "P", (0, (3, 1, 1, 1, 1, 1))),
    "enhanced": Style("enhanced", "#000000", "X", (0, (1, 2))),
    "focused": Style("focused", "#882255", "*", (0, (5, 1, 1, 1))),
}
# For what is of no attention of ours, or of several.
OTHER_COLOR = "#777777"
# For all but the first model of an attention.
SPARE_MARKERS = ("<", ">", "h", "p", "d", "8")
SPARE_DASHES: tuple[Dash, ...] = ((0, (6, 2, 2, 2)), (0, (3, 3)), (0, (10, 3)), (0, (2, 1)))
# How much of black, of white, ... is in their colours.
SPARE_SHADES = ((0.0, 0.45), (1.0, 0.45), (0.0, 0.7), (1.0, 0.65))


def styles_of(models: Mapping[str, str]) -> dict[str, Style]:
    """A style for each of several models, as few or as many as there are of an attention.

    The first model of an attention has the attention's own style; the others have shades of its colour, and marks and
    dashes that no attention has.

    Args:
        models: The words for their attentions, by what they are called. Other words are drawn grey.

    Returns:
        By what they are called, and under that name.
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
    """A colour (0), darker (1), lighter (2), and so on."""
    if number == 0:
        return color
    tone, share = SPARE_SHADES[(number - 1) % len(SPARE_SHADES)]
    red, green, blue = (share * tone + (1 - share) * part for part in to_rgb(color))
    return to_hex((red, green, blue))


def svg_bytes(figure: Figure) -> bytes:
    """A drawing as SVG; the same figure makes the same bytes, for they have a fixed salt and no date."""
    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "inlinevit"}):
        figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None})
    return buffer.getvalue()


def save_drawing(figure: Figure, folder: Path, name: str) -> None:
    """Write a drawing as NAME.png and NAME.svg."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DOTS_PER_INCH, bbox_inches="tight")
    atomic_write_bytes(folder / f"{name}.png", buffer.getvalue())
    atomic_write_bytes(folder / f"{name}.svg", svg_bytes(figure))


@dataclass
class Series:
    """A line of a drawing.

    Attributes:
        attention: Whose it is; decides name and style.
        x: Places.
        y: Values.
    """

    attention: str
    x: Sequence[float]
    y: Sequence[float]


@dataclass
class Panel:
    """One set of axes with its lines.

    Attributes:
        x_label: What goes to the right.
        y_label: What goes up.
        series: The lines.
    """

    x_label: str
    y_label: str
    series: Sequence[Series]


def curves_figure(panels: Sequence[Panel], columns: int = 2) -> Figure:
    """Lines in panels, row by row; panels of a row show the same quantity and share its scale."""
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(WIDTH, 3.1 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharey="row")
    for axes, panel in zip(grid.flat, panels, strict=True):
        for line in panel.series:
            style = STYLES[line.attention]
            axes.plot(
                line.x,
                line.y,
                label=style.name,
                color=style.color,
                marker=style.marker if len(line.x) <= MOST_MARKED else None,
                linestyle=style.dash,
                markersize=4,
            )
        axes.set_xlabel(panel.x_label)
        axes.set_ylabel(panel.y_label)
        axes.set_xlim(left=0)
        tidy(axes)
        axes.grid(alpha=0.25)
    handles, labels = grid.flat[0].get_legend_handles_labels()
    columns_of_names = min(len(labels), LEGEND_COLUMNS)
    figure.legend(handles, labels, loc="outside upper center", ncols=columns_of_names, frameon=False)
    return figure


def spread_figure(samples: Mapping[str, Sequence[float]], label: str) -> Figure:
    """A box for each attention: the median, the quartiles, and whiskers to the 5th and 95th percentile."""
    figure = Figure(figsize=(WIDTH, 0.6 + 0.5 * len(samples)), layout="constrained")
    axes = figure.subplots()
    boxes = axes.boxplot(
        list(samples.values()),
        orientation="horizontal",
        tick_labels=[STYLES[attention].name for attention in samples],
        whis=(5, 95),
        showfliers=False,
        patch_artist=True,
        widths=0.55,
        medianprops={"color": "black", "linewidth": 1.8},
    )
    for attention, box in zip(samples, boxes["boxes"], strict=True):
        box.set_facecolor(STYLES[attention].color)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel(label)
    tidy(axes)
    axes.grid(axis="x", alpha=0.25)
    return figure


def dots_figure(values: Mapping[str, Sequence[float | None]], names: Sequence[str], label: str) -> Figure:
    """A line for each name, on which each attention has a dot.

    Args:
        values: By attention, a value for each name; None = no dot.
        names: What the lines are called.
        label: What the values are.
    """
    figure = Figure(figsize=(WIDTH, 1.0 + 0.3 * len(names)), layout="constrained")
    axes = figure.subplots()
    for attention, dots in values.items():
        style = STYLES[attention]
        places = [place for place, value in enumerate(dots) if value is not None]
        axes.plot(
            [value for value in dots if value is not None],
            places,
            label=style.name,
            color=style.color,
            marker=style.marker,
            linestyle="",
            alpha=0.85,
        )
    axes.set_yticks(range(len(names)), names, parse_math=False)
    axes.invert_yaxis()
    axes.set_xlabel(label)
    tidy(axes)
    axes.grid(alpha=0.25)
    figure.legend(loc="outside upper center", ncols=min(len(values), LEGEND_COLUMNS), frameon=False)
    return figure


def tidy(axes: Axes) -> None:
    """Take away the frame's upper and right side."""
    axes.spines[["top", "right"]].set_visible(False)
