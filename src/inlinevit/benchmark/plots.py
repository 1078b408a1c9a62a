"""Drawings of measurements: lines over sizes, marks for modes, and bars."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogLocator, NullFormatter

from ..report import STYLES, Style
from .measure import Measurement

WIDTH = 9.6
# Axes with no more places than this have a number at each of them.
MOST_PLACES = 8
# Like STYLES, for the projections alone and for paths that were forced.
OTHER_STYLES = {
    "projections": Style("projections", "#000000", "x", "-."),
    "InLine, folded": Style("InLine, folded", "#CC79A7", "v", ":"),
    "InLine, covariance": Style("InLine, covariance", "#D55E00", "D", ":"),
    "InLine, explicit": Style("InLine, explicit", "#56B4E9", "P", ":"),
}
MODE_STYLES = {
    "eager": Style("eager", "#0072B2", "s", ""),
    "compiled": Style("compiled", "#E69F00", "^", ""),
    "optimized": Style("optimized", "#009E73", "o", ""),
}


class Line(NamedTuple):
    """A line of a drawing.

    Attributes:
        label: What it is called.
        style: How it is drawn.
        x: Places.
        y: Values.
        low: Lower quartiles; none if empty.
        high: Upper quartiles.
        marks: Texts beside the points; none if empty.
    """

    label: str
    style: Style
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    marks: Sequence[str] = ()


@dataclass(frozen=True)
class LinesPanel:
    """One set of axes.

    Attributes:
        x_label: What goes to the right, with its unit.
        y_label: What goes up, with its unit.
        lines: The lines.
        title: What the panel is of.
    """

    x_label: str
    y_label: str
    lines: Sequence[Line]
    title: str = ""


def style_of(name: str) -> Style:
    """How a layer or a model is drawn: as its attention."""
    if name in OTHER_STYLES:
        return OTHER_STYLES[name]
    attention = name.partition("attention=")[2] or ("inline" if name.lower().startswith("inline") else name)
    return STYLES.get(attention, STYLES["softmax"])


def attention_line(name: str, x: Sequence[float], y: Sequence[float]) -> Line:
    """A line in the style of an attention."""
    style = style_of(name)
    return Line(name if name.startswith("InLine, ") else style.name, style, x, y)


def lines_figure(panels: Sequence[LinesPanel], *, log_x: bool, log_y: bool) -> Figure:
    """Panels side by side, two in a row, with one legend for all of them."""
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(WIDTH if columns > 1 else 0.75 * WIDTH, 3.4 * rows + 0.6), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    handles = {}
    for axes, panel in zip(grid.flat, panels, strict=False):
        for line in panel.lines:
            handles[line.label] = draw_line(axes, line)
        axes.set(xlabel=panel.x_label, ylabel=panel.y_label, title=panel.title)
        axes.margins(x=0.06, y=0.1)
        places = sorted({value for line in panel.lines for value in line.x})
        is_measured = any(line.marks for line in panel.lines)
        if log_x:
            axes.set_xscale("log")
            show_plain_numbers(axes.xaxis, places if len(places) <= MOST_PLACES and not is_measured else None)
            axes.tick_params(axis="x", labelrotation=30 if len(places) > 5 and not is_measured else 0)
        if log_y:
            axes.set_yscale("log")
            show_plain_numbers(axes.yaxis)
        tidy(axes)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    figure.legend(
        handles.values(), handles.keys(), loc="outside upper center", ncols=min(4, len(handles)), frameon=False
    )
    return figure


def draw_line(axes: Axes, line: Line) -> Artist:
    """Draw a line with its quartiles and marks; returns what stands for it in the legend."""
    style = line.style
    if line.low:
        axes.fill_between(line.x, line.low, line.high, color=style.color, alpha=0.15, linewidth=0)
    (drawn,) = axes.plot(
        line.x, line.y, color=style.color, marker=style.marker, linestyle=style.dash, markersize=5, linewidth=1.5
    )
    for x, y, mark in zip(line.x, line.y, line.marks, strict=False):
        axes.annotate(mark, (x, y), textcoords="offset points", xytext=(6, -10), color=style.color, fontsize=9)
    return drawn


def show_plain_numbers(axis: Axis, places: Sequence[float] | None = None) -> None:
    """224, not 2.24·10², on a logarithmic axis: at these places, or at 1, 2, 5, 10, …, or at 1, 10, … if it is long."""
    low, high = axis.get_data_interval()
    steps = LogLocator(subs=(1, 2, 5) if high < 3000 * low else (1,))
    axis.set_major_locator(steps if places is None else FixedLocator(list(places)))
    axis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}")
    axis.set_minor_formatter(NullFormatter())
    axis.minorticks_off()


def modes_figure(measurements: Sequence[Measurement]) -> Figure:
    """A row for each model in each turn, with a mark for each mode at its images per second."""
    rows = list(dict.fromkeys((one.turn, one.name) for one in measurements))
    figure = Figure(figsize=(WIDTH, 1.2 + 0.42 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for row, (mode, style) in enumerate(MODE_STYLES.items()):
        points = [one for one in measurements if one.mode == mode]
        if not points:
            continue
        rate = [one.images_per_second for one in points]
        error = [
            [now - one.batch / one.seconds.high for now, one in zip(rate, points, strict=True)],
            [one.batch / one.seconds.low - now for now, one in zip(rate, points, strict=True)],
        ]
        # Modes one below the other, so that bars do not hide each other.
        places = [rows.index((one.turn, one.name)) + 0.22 * (row - 1) for one in points]
        axes.errorbar(
            rate, places, xerr=error, label=mode, color=style.color, marker=style.marker, linestyle="", capsize=2
        )
    is_plain = len({name for _, name in rows}) == len(rows)
    labels = [name if is_plain else f"{name}, {turn}" for turn, name in rows]
    axes.set_yticks(range(len(rows)), labels, parse_math=False)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xscale("log")
    axes.set_xlabel("images per second")
    show_plain_numbers(axes.xaxis)
    tidy(axes)
    figure.legend(loc="outside upper center", ncols=len(MODE_STYLES), frameon=False)
    return figure


def bars_figure(names: Sequence[str], styles: Sequence[Style], panels: Mapping[str, Sequence[float]]) -> Figure:
    """A bar for each name in each panel, side by side.

    Args:
        names: What is compared.
        styles: How each is drawn.
        panels: Values of each, by what they are.
    """
    figure = Figure(figsize=(WIDTH, 1.2 + 0.42 * len(names)), layout="constrained")
    (grid,) = figure.subplots(1, len(panels), sharey=True, squeeze=False)
    for axes, (label, values) in zip(grid, panels.items(), strict=True):
        bars = axes.barh(range(len(names)), values, color=[style.color for style in styles])
        axes.bar_label(bars, fmt="{:.3g}" if max(values) < 1000 else "{:,.0f}", padding=3, fontsize=9)
        axes.set_xlabel(label)
        axes.margins(x=0.18)
        tidy(axes)
    grid[0].set_yticks(range(len(names)), names, parse_math=False)
    grid[0].set_ylim(len(names) - 0.4, -0.6)
    return figure


def tidy(axes: Axes) -> None:
    """A light grid, and no frame above and to the right."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
