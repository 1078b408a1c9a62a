"""Plots of confusion, locality and masking. Functions from data to figures."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil, floor, isfinite, log10

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

from ..report import WIDTH, Style, add_legend, plot_style
from ..report.style import OTHER_COLOR, legend_columns
from .confusion import Confusion
from .locality import LayerLocality
from .masking import Masking

# Styles by model; report.styles_of() makes them.
Styles = Mapping[str, Style]

# Percentages whose largest is more than this many times the smallest have a logarithmic scale.
WIDE_RANGE = 50
# Histogram bins per power of ten, and the gap between the bin of zero and the others, in bins.
BINS_PER_DECADE = 3
ZERO_GAP = 1
# Panels in a row.
PANELS = 4
UNIFORM = Style("uniform attention", OTHER_COLOR, "", (0, (1, 1)))
SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


@plot_style
def confusion_figure(found: Mapping[str, Confusion], styles: Styles) -> Figure:
    """Plot one histogram of images over confused pairs per model (left), and the fraction by layer (right)."""
    figure = Figure(figsize=(WIDTH, max(3.4, 0.6 + 0.95 * len(found))))
    left, right = figure.subfigures(1, 2, squeeze=False, width_ratios=[1.15, 1])[0]
    grid = left.subplots(len(found), 1, squeeze=False, sharex=True, sharey=True)[:, 0]
    edges = log_edges(max((count for one in found.values() for count in one.per_image), default=0))
    for axes, (name, one) in zip(grid, found.items(), strict=True):
        heights = histogram(one.per_image, edges)
        # Zero has its own bin, apart from the logarithmic ones.
        places = [0, *(place + ZERO_GAP for place in range(1, len(heights)))]
        axes.bar(places, heights, 0.92, color=styles[name].color)
        axes.set_title(name, loc="left", fontsize=10, pad=3)
        axes.yaxis.set_major_locator(MaxNLocator(3, integer=True))
    powers = range(len(edges) // BINS_PER_DECADE + 1)
    ticks = [0, *(0.5 + ZERO_GAP + BINS_PER_DECADE * power for power in powers)]
    names = [str(10**power) if power < 3 else f"10{str(power).translate(SUPERSCRIPTS)}" for power in powers]
    grid[-1].set_xticks(ticks, ["0", *names])
    grid[-1].set_xlabel("confused pairs per image, all layers and heads")
    left.supylabel("images", fontsize=10)
    axes = right.subplots()
    for number, (name, one) in enumerate(found.items()):
        # Shifted, because many values are 0.
        shifted = np.arange(1, len(one.layers) + 1) + 0.5 * (number + 0.5) / len(found) - 0.25
        values = [100 * layer.fraction for layer in one.layers]
        axes.plot(shifted, values, **styles[name].line, clip_on=False)
    percent_axis(axes, [100 * layer.fraction for one in found.values() for layer in one.layers])
    axes.set_ylabel("confused pairs of queries, %")
    layer_axis(axes)
    add_legend(right, axes.lines, 0.45 * WIDTH)
    return figure


def log_edges(top: int) -> list[float]:
    """Return lower edges of bins for integers from 1 to `top`, evenly spaced in their logarithm."""
    digits = len(str(top))
    return [10 ** (place / BINS_PER_DECADE) for place in range(BINS_PER_DECADE * digits)]


def histogram(counts: Sequence[int], edges: Sequence[float]) -> list[int]:
    """Return how many counts are 0, and how many are in each bin that begins at one of the edges."""
    # Computed powers of ten may be slightly too large.
    bins = np.searchsorted(np.asarray(edges) * (1 - 1e-9), counts, side="right")
    return np.bincount(bins, minlength=len(edges) + 1).tolist()


@plot_style
def locality_figure(found: Mapping[str, list[LayerLocality]], styles: Styles) -> Figure:
    """Plot the weight of the neighbourhood by layer (left), and its fraction of the absolute weights (right)."""
    figure = Figure(figsize=(WIDTH, 4))
    left, right = figure.subplots(1, 2)
    left.set_ylabel("weight of the 3×3 neighbourhood")
    right.set_ylabel("its fraction of absolute weights, %")

    def plot(style: Style, weights: Sequence[float], fractions: Sequence[float]) -> None:
        layers = range(1, len(weights) + 1)
        left.plot(layers, weights, **style.line, clip_on=False)
        right.plot(layers, [100 * fraction for fraction in fractions], **style.line, clip_on=False)

    for name, layers in found.items():
        style = replace(styles[name], dash="-")
        total = [layer.total for layer in layers], [layer.total_share for layer in layers]
        if not adds_convolution(layers):
            plot(style, *total)
            continue
        plot(replace(style, name=f"{name}, with its convolution"), *total)
        alone = [layer.attention for layer in layers], [layer.attention_share for layer in layers]
        plot(replace(style, name=f"{name}, attention alone", dash="--", hollow=True), *alone)
    # The same for all models, unless their feature maps differ.
    for uniform in dict.fromkeys(tuple(layer.uniform for layer in layers) for layers in found.values()):
        plot(UNIFORM, uniform, uniform)
    handles = {str(line.get_label()): line for line in left.lines}
    for axes in (left, right):
        axes.axhline(0, color="black", linewidth=0.6)
        layer_axis(axes)
    figure.set_figheight(3.6 + 0.2 * -(-len(handles) // legend_columns(list(handles), WIDTH)))
    add_legend(figure, list(handles.values()))
    return figure


def adds_convolution(layers: Sequence[LayerLocality]) -> bool:
    """Return whether the layers add a convolution to their attention."""
    return any(layer.total != layer.attention or layer.total_share != layer.attention_share for layer in layers)


@plot_style
def masking_figure(found: Mapping[str, Masking], styles: Styles) -> Figure:
    """Plot accuracy with more and more tokens hidden, one panel per model: the neighbourhood, or random tokens."""
    columns = min(PANELS, len(found))
    rows = -(-len(found) // columns)
    figure = Figure(figsize=(WIDTH if columns > 2 else 3.6 * columns + 1.2, 2.9 * rows + 0.6))
    grid = figure.subplots(rows, columns, squeeze=False, sharey=True, sharex=True)
    looks = {
        "near": Style("its neighbourhood", "#333333", "o", "-"),
        "random": Style("as many random tokens", "#333333", "o", "--", hollow=True),
    }
    for axes, (name, one) in zip(grid.flat, found.items(), strict=False):
        for hidden, look in looks.items():
            some = [masked for masked in one.masked if masked.hidden == hidden]
            # Both lines begin with nothing hidden.
            sides, values = [1, *(masked.side for masked in some)], [one.top1, *(masked.top1 for masked in some)]
            style = replace(styles[name], dash=look.dash, hollow=look.hollow)
            axes.plot(sides, values, **style.line, clip_on=False)
        axes.set_xticks(sides, ["none", *(f"{side}×{side}" for side in sides[1:])])
        axes.set_title(name, fontsize=10)
        axes.margins(x=0.08)
    for axes in grid[:, 0]:
        axes.set_ylabel("top-1, %")
    bottom = min(axes.get_ylim()[0] for axes in grid.flat)
    grid[0, 0].set_ylim(bottom=max(0, bottom))
    for axes in grid.flat[len(found) - columns : len(found)]:
        # There is no other panel below it.
        axes.tick_params(labelbottom=True)
    for axes in grid.flat[len(found) :]:
        axes.set_visible(False)
    figure.supxlabel("tokens hidden from each query, in all layers", fontsize=10)
    add_legend(figure, [Line2D([], [], **look.line) for look in looks.values()], figure.get_figwidth())
    return figure


def layer_axis(axes: Axes) -> None:
    """Format an x axis of layers, which are counted from 1."""
    axes.set_xlabel("layer")
    axes.xaxis.set_major_locator(MaxNLocator(12, integer=True, min_n_ticks=1))
    axes.set_xlim(0.5, max(axes.get_xlim()[1], 1.5))


def percent_axis(axes: Axes, values: Sequence[float]) -> None:
    """Format a y axis of percentages from 0; above the smallest it is logarithmic if they span a wide range."""
    positive = [value for value in values if value > 0 and isfinite(value)]
    if positive and max(positive) > WIDE_RANGE * min(positive):
        threshold = 10.0 ** floor(log10(min(positive)))
        axes.set_yscale("symlog", linthresh=threshold, linscale=0.5)
        powers = range(round(log10(threshold)), ceil(log10(max(positive))) + 1)
        step = -(-len(powers) // 7)
        axes.yaxis.set_major_locator(FixedLocator([0, *(10.0**power for power in powers[::step])]))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.minorticks_off()
        axes.set_ylim(0, 2 * max(positive))
    else:
        axes.set_ylim(0, 1.1 * max(positive, default=0.9))
