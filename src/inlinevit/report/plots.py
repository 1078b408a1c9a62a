"""Line, box and dot plots of reports."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogLocator, MaxNLocator, NullFormatter
from numpy.typing import NDArray

from .style import OTHER_COLOR, STYLES, WIDTH, Style, add_legend, plot_style

# Lines with more points than this have no markers.
MAX_MARKED = 15
# Logarithmic axes with at most this many values have a tick at each of them.
MAX_TICKS = 8
# Font size of the names of points, their distance from these, and how far they may be moved up or down, in 1/72 inch.
NAME_SIZE, NAME_GAP = 8, 10
NAME_SHIFTS = range(-120, 121, 3)


@dataclass(frozen=True)
class Line:
    """A line of a plot, with a band from `low` to `high` and texts beside the points, unless they are empty."""

    style: Style
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    notes: Sequence[str] = ()

    def plot(self, axes: Axes) -> Artist:
        """Plot the line and return its legend handle."""
        look = self.style.line
        if len(self.x) > MAX_MARKED:
            look["marker"] = None
        if self.low:
            axes.fill_between(self.x, self.low, self.high, color=self.style.color, alpha=0.15, linewidth=0)
        (handle,) = axes.plot(self.x, self.y, **look)
        for x, y, note in zip(self.x, self.y, self.notes, strict=False):
            color = self.style.color
            axes.annotate(note, (x, y), textcoords="offset points", xytext=(6, -10), color=color, fontsize=9)
        return handle


@dataclass(frozen=True)
class Panel:
    """One pair of axes with its lines; labels include the units."""

    x_label: str
    y_label: str
    lines: Sequence[Line]
    title: str = ""


@plot_style
def lines_figure(panels: Sequence[Panel], *, log_x: bool = False, log_y: bool = False, share_y: bool = False) -> Figure:
    """Plot panels in rows of two, with one legend for all of them.

    X axes are logarithmic or start at 0. With share_y, the panels of a row show the same quantity and share its scale.
    """
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(WIDTH if columns > 1 else 0.75 * WIDTH, 3.2 * rows + 0.4))
    grid = figure.subplots(rows, columns, squeeze=False, sharey="row" if share_y else False)
    handles: dict[str, Artist] = {}
    for axes, panel in zip(grid.flat, panels, strict=False):
        for line in panel.lines:
            handles[line.style.name] = line.plot(axes)
        axes.set(xlabel=panel.x_label, ylabel=panel.y_label, title=panel.title)
        axes.margins(x=0.06, y=0.1)
        if log_x:
            values = sorted({value for line in panel.lines for value in line.x})
            is_few = len(values) <= MAX_TICKS and not any(line.notes for line in panel.lines)
            log_axis(axes.xaxis, values if is_few else None)
            axes.tick_params(axis="x", labelrotation=30 if is_few and len(values) > 5 else 0)
        else:
            axes.set_xlim(left=0)
        if log_y:
            log_axis(axes.yaxis)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    add_legend(figure, list(handles.values()))
    return figure


def log_axis(axis: Axis, values: Sequence[float] | None = None) -> None:
    """Make an axis with its data logarithmic, with plain numbers (224, not 2.24·10²).

    The ticks are at `values`, or else at 1, 2, 5, 10, …, or 1, 10, 100, … over many decades.
    """
    axis._set_axes_scale("log")  # type: ignore[attr-defined]
    low, high = axis.get_data_interval()
    steps = LogLocator(subs=(1, 2, 5) if high < 3000 * low else (1,))
    axis.set_major_locator(steps if values is None else FixedLocator(list(values)))
    axis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}")
    axis.set_minor_formatter(NullFormatter())
    axis.minorticks_off()


@plot_style
def spread_figure(samples: Mapping[str, Sequence[float]], label: str) -> Figure:
    """Plot one box per attention: median, quartiles, and whiskers to the 5th and 95th percentile."""
    figure = Figure(figsize=(WIDTH, 0.6 + 0.5 * len(samples)))
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
    return figure


@plot_style
def dots_figure(values: Mapping[str, Sequence[float | None]], names: Sequence[str], label: str) -> Figure:
    """Plot one row per name, with one dot per attention that has a value for it; `label` says what the values are."""
    figure = Figure(figsize=(WIDTH, 1.0 + 0.3 * len(names)))
    axes = figure.subplots()
    for attention, dots in values.items():
        rows = [row for row, value in enumerate(dots) if value is not None]
        found = [value for value in dots if value is not None]
        axes.plot(found, rows, **{**STYLES[attention].line, "linestyle": ""}, alpha=0.85)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel(label)
    add_legend(figure, axes.lines)
    return figure


@plot_style
def reliability_figure(bins: Sequence[Sequence[float]], outcome: str) -> Figure:
    """Plot how often predictions come true against their probability, and below it how many there are.

    Args:
        bins: For each of some equal ranges of probabilities from 0 to 1: the number of predictions, the sum of their
            probabilities, and how many came true.
        outcome: What it is if the prediction comes true, such as "right".
    """
    figure = Figure(figsize=(0.55 * WIDTH, 0.6 * WIDTH))
    curve, histogram = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    width = 1 / len(bins)
    look = {"width": 0.92 * width, "color": STYLES["softmax"].color}
    points = [(total / count, true / count) for count, total, true in bins if count]
    bars = [((place + 0.5) * width, true / count) for place, (count, _, true) in enumerate(bins) if count]
    curve.plot([0, 1], [0, 1], color=OTHER_COLOR, linestyle="--", label="perfectly calibrated")
    curve.bar(*zip(*bars, strict=True), alpha=0.3, **look)
    curve.plot(*zip(*points, strict=True), color=look["color"], marker="o", label="model")
    curve.set(ylabel=f"share that is {outcome}", xlim=(0, 1), ylim=(0, 1))
    curve.legend(loc="upper left")
    histogram.bar([(place + 0.5) * width for place in range(len(bins))], [count for count, _, _ in bins], **look)
    histogram.set(xlabel="predicted probability", ylabel="count")
    return figure


@dataclass(frozen=True)
class Interval:
    """A row of intervals_figure().

    Attributes:
        name: Of the row.
        style: Color and marker.
        values: Single values.
        center: Their mean; None = there is none.
        error: Half of the length of the interval around it; 0 = no interval.
        note: A text in the row.
    """

    name: str
    style: Style
    values: Sequence[float]
    center: float | None
    error: float = 0.0
    note: str = ""


@plot_style
def intervals_figure(rows: Sequence[Interval], label: str) -> Figure:
    """Plot values, their mean and an interval around it, one row per name; `label` says what the values are."""
    figure = Figure(figsize=(WIDTH, 1.0 + 0.36 * len(rows)))
    axes = figure.subplots()
    for place, row in enumerate(rows):
        color = row.style.color
        # Below the interval, which would hide them.
        axes.plot(row.values, [place + 0.22] * len(row.values), ".", color=color, alpha=0.6)
        if row.center is not None:
            look = {**row.style.line, "markersize": 8, "linestyle": ""}
            axes.errorbar(row.center, place, xerr=row.error or None, capsize=4, capthick=1.5, **look)
        # At the left edge.
        axes.text(0.01, place, row.note, transform=axes.get_yaxis_transform(), va="center", fontsize=9, color=color)
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlabel(label)
    axes.margins(x=0.06)
    return figure


@dataclass(frozen=True)
class Point:
    """A point of points_figure(): a name beside it, and the half length of its error bar; 0 = none."""

    name: str
    style: Style
    x: float
    y: float
    error: float = 0.0


@plot_style
def points_figure(panels: Mapping[str, Sequence[Point]], x_label: str, y_label: str, *, log_x: bool = False) -> Figure:
    """Plot named points, one panel per title, side by side with a common y axis."""
    figure = Figure(figsize=(WIDTH if len(panels) > 1 else 0.75 * WIDTH, 4.2))
    (grid,) = figure.subplots(1, len(panels), sharey=True, squeeze=False)
    for axes, (title, points) in zip(grid, panels.items(), strict=True):
        for point in points:
            look = {**point.style.line, "linestyle": "", "label": point.name}
            thin = {"capsize": 2, "capthick": 0.8, "elinewidth": 1}
            bars = axes.errorbar(point.x, point.y, yerr=point.error or None, **thin, **look)
            for part in (*bars[1], *bars[2]):
                part.set(alpha=0.4, zorder=1)
        axes.set(xlabel=x_label, title=title)
        axes.margins(x=0.2, y=0.1)
        if log_x:
            log_axis(axes.xaxis)
        else:
            axes.xaxis.set_major_locator(MaxNLocator(4))
            axes.xaxis.set_major_formatter("{x:,.0f}")
    grid[0].set_ylabel(y_label)
    # Places are known when all axes have their sizes.
    figure.draw_without_rendering()
    for axes, points in zip(grid, panels.values(), strict=True):
        name_points(axes, points)
    return figure


def name_points(axes: Axes, points: Sequence[Point]) -> None:
    """Write the names of points beside them, where they cover as little as possible of names, markers and bars."""
    scale = 72 / axes.figure.dpi
    panel = scale * np.array(axes.get_window_extent().extents)
    # In 1/72 inch, like all boxes below.
    centers = {point: scale * axes.transData.transform((point.x, point.y)) for point in points}
    ends = [
        scale * axes.transData.transform([(point.x, point.y - point.error), (point.x, point.y + point.error)])
        for point in points
    ]
    markers = [box_around(center, 9, 9) for center in centers.values()]
    bars = [np.concatenate([low - 1, high + 1]) for low, high in ends]
    names: list[NDArray[np.float64]] = []
    for point in sorted(points, key=lambda point: -point.y):
        width, height = 0.6 * NAME_SIZE * len(point.name), 1.2 * NAME_SIZE
        best = (inf, 1, 0, markers[0])
        for side, shift in product((1, -1), NAME_SHIFTS):
            box = box_around(centers[point] + np.array([side * (NAME_GAP + width / 2), shift]), width, height)
            # Areas, in which a name is worse than a marker, and that is worse than a bar; then, the nearer the better.
            covered = 4 * overlap(box, names) + 3 * overlap(box, markers) + 0.3 * overlap(box, bars)
            outside = width * height - overlap(box, [panel])
            cost = covered + 4 * outside + abs(shift) + (NAME_SIZE if side < 0 else 0)
            if cost < best[0]:
                best = (cost, side, shift, box)
        _, side, shift, box = best
        names.append(box)
        start = (0 if side > 0 else 1, 0.5)
        line = {"arrowstyle": "-", "color": point.style.color, "linewidth": 0.5, "shrinkB": 3, "relpos": start}
        axes.annotate(
            point.name,
            (point.x, point.y),
            xytext=(side * NAME_GAP, shift),
            textcoords="offset points",
            fontsize=NAME_SIZE,
            color=point.style.color,
            horizontalalignment="left" if side > 0 else "right",
            verticalalignment="center",
            arrowprops=line if abs(shift) > NAME_SIZE / 2 else None,
        )


def box_around(center: NDArray[np.float64], width: float, height: float) -> NDArray[np.float64]:
    """Return a box (left, bottom, right, top) by its center and size."""
    half = np.array([width, height]) / 2
    return np.concatenate([center - half, center + half])


def overlap(box: NDArray[np.float64], others: Sequence[NDArray[np.float64]]) -> float:
    """Return the area that a box has in common with others, in sum."""
    if not others:
        return 0.0
    many = np.stack(others)
    sides = np.minimum(box[2:], many[:, 2:]) - np.maximum(box[:2], many[:, :2])
    return float(sides.clip(min=0).prod(axis=1).sum())
