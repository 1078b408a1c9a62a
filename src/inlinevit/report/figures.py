"""Drawings for reports: curves, spreads, dots. Each attention has one style, the same everywhere."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

WIDTH = 9.6
# Lines with more points than this are drawn without marks.
MOST_MARKED = 15


@dataclass(frozen=True)
class Style:
    """How an attention is called and drawn: told apart by colour, and by shape without it."""

    name: str
    color: str
    marker: str
    dash: str


# Colours by Okabe and Ito, which the colour-blind tell apart too.
STYLES = {
    "softmax": Style("softmax", "#0072B2", "s", "--"),
    "linear": Style("linear", "#E69F00", "^", ":"),
    "inline": Style("InLine", "#009E73", "o", "-"),
}


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
        _tidy(axes)
        axes.grid(alpha=0.25)
    figure.legend(
        *grid.flat[0].get_legend_handles_labels(), loc="outside upper center", ncols=len(STYLES), frameon=False
    )
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
    _tidy(axes)
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
    _tidy(axes)
    axes.grid(alpha=0.25)
    figure.legend(loc="outside upper center", ncols=len(values), frameon=False)
    return figure


def _tidy(axes: Axes) -> None:
    """Without the frame's upper and right side."""
    axes.spines[["top", "right"]].set_visible(False)
