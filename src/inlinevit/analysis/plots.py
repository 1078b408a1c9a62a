"""Drawings of what was measured inside models. Pure functions: from data to figures."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, isfinite, log10
from typing import Any, cast

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import SymLogNorm
from matplotlib.figure import Figure, FigureBase
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator
from numpy.typing import NDArray
from torch import Tensor

from ..report import Style
from ..report.plots import LEGEND_COLUMNS, WIDTH, Dash, tidy
from .confusion import Confusion
from .locality import LayerLocality
from .maps import AttentionMap
from .masking import Masking

# How models are drawn, by what they are called; report.styles_of() makes them.
Styles = Mapping[str, Style]

# Values of which the largest is more than this many times the smallest are drawn on a logarithmic scale.
WIDE_RANGE = 50
# Bins of a histogram for each power of ten.
BINS_PER_DECADE = 3
# Room between the bin of zero and the others, in bins.
ZERO_GAP = 1
# Panels side by side.
PANELS = 4
# Layers whose maps are shown, of a model that has more.
LAYERS_SHOWN = 4
# Letters of a line beside a row of maps.
LONGEST_LINE = 18
# Red and blue on white, which the colour-blind tell apart too.
DIVERGING = "RdBu_r"
# Where the window of a query does not reach.
UNSEEN = "#BBBBBB"
QUERY_MARK = "#E69F00"
UNIFORM = Style("attention that is the same everywhere", "#777777", "", (0, (1, 1)))


@dataclass
class View:
    """What a query of one image sees through a model.

    Attributes:
        pixels: The image as the model sees it, (H, W, 3), from 0 to 1.
        query: Where the query is, as shares of the image's height and width.
        maps: The rows of the query in every layer, from the first to the last.
    """

    pixels: NDArray[np.float32]
    query: tuple[float, float]
    maps: list[AttentionMap]


def confusion_figure(found: Mapping[str, Confusion], styles: Styles) -> Figure:
    """On the left how many images have how many confused pairs, a row a model; on the right the share by layer.

    Args:
        found: What was found, by model.
        styles: How the models are drawn.
    """
    figure = Figure(figsize=(WIDTH, max(3.4, 0.6 + 0.95 * len(found))), layout="constrained")
    left, right = figure.subfigures(1, 2, squeeze=False, width_ratios=[1.15, 1])[0]
    grid = left.subplots(len(found), 1, squeeze=False, sharex=True, sharey=True)[:, 0]
    top = max((count for one in found.values() for count in one.per_image), default=0)
    edges = log_edges(top)
    for axes, (name, one) in zip(grid, found.items(), strict=True):
        heights = histogram(one.per_image, edges)
        # Zero has a bin of its own, apart from the logarithmic ones.
        axes.bar([0, *(place + ZERO_GAP for place in range(1, len(heights)))], heights, 0.92, color=styles[name].color)
        axes.set_title(name, loc="left", fontsize=10, pad=3, parse_math=False)
        axes.yaxis.set_major_locator(MaxNLocator(3, integer=True))
        tidy(axes)
        axes.grid(axis="y", alpha=0.25)
    powers = range(len(edges) // BINS_PER_DECADE + 1)
    ticks = [0, *(0.5 + ZERO_GAP + BINS_PER_DECADE * power for power in powers)]
    grid[-1].set_xticks(ticks, ["0", *(power_of_ten(power) for power in powers)])
    grid[-1].set_xlabel("confused pairs of an image, all layers and heads")
    left.supylabel("images", fontsize=10)
    axes = right.subplots()
    shares = {name: [100 * layer.share for layer in one.layers] for name, one in found.items()}
    for number, (name, values) in enumerate(shares.items()):
        # Side by side, because many of them are 0.
        aside = 0.5 * (number + 0.5) / len(shares) - 0.25
        draw_line(axes, [layer + 1 + aside for layer in range(len(values))], values, styles[name])
    show_percent(axes, [value for values in shares.values() for value in values])
    axes.set_ylabel("confused pairs of queries, %")
    label_layers(axes)
    add_legend(right, [line_of(styles[name]) for name in found], 0.45 * WIDTH)
    return figure


def log_edges(top: int) -> list[float]:
    """Lower edges of bins for whole numbers from 1 up to `top`, evenly spaced in their logarithm."""
    decades = max(1, ceil(log10(top + 1))) if top > 0 else 1
    return [10 ** (place / BINS_PER_DECADE) for place in range(BINS_PER_DECADE * decades)]


def histogram(counts: Sequence[int], edges: Sequence[float]) -> list[int]:
    """How many of the counts are 0, and how many are in each of the bins that begin at the edges."""
    # Powers of ten that are computed may be a little more than what they stand for.
    bins = np.searchsorted(np.asarray(edges) * (1 - 1e-9), counts, side="right")
    return np.bincount(bins, minlength=len(edges) + 1).tolist()


def locality_figure(found: Mapping[str, list[LayerLocality]], styles: Styles) -> Figure:
    """The weight of a query's neighbourhood by layer: the sum of its weights, and its share of the absolute weights.

    Args:
        found: What was found, by model.
        styles: How the models are drawn.
    """
    figure = Figure(figsize=(WIDTH, 4), layout="constrained")
    handles: list[Line2D] = []
    for axes, (alone, together, label) in zip(
        figure.subplots(1, 2),
        [
            ("attention", "total", "weight of the 3×3 neighbourhood"),
            ("attention_share", "total_share", "its share of absolute weights, %"),
        ],
        strict=True,
    ):
        scale = 1 if alone == "attention" else 100
        handles = []
        for name, layers in found.items():
            has_convolution = adds_convolution(layers)
            values = [scale * vars(layer)[together] for layer in layers]
            draw_layers(axes, values, styles[name], dash="-")
            handles.append(line_of(styles[name], dash="-", label=name + ", with its convolution" * has_convolution))
            if has_convolution:
                values = [scale * vars(layer)[alone] for layer in layers]
                draw_layers(axes, values, styles[name], dash="--", is_hollow=True)
                handles.append(line_of(styles[name], dash="--", is_hollow=True, label=f"{name}, attention alone"))
        # The same for all models, unless their maps differ.
        uniforms = dict.fromkeys(tuple(layer.uniform for layer in layers) for layers in found.values())
        for uniform in uniforms:
            draw_layers(axes, [scale * value for value in uniform], UNIFORM)
        handles.append(line_of(UNIFORM))
        axes.axhline(0, color="black", linewidth=0.6)
        axes.set_ylabel(label)
        label_layers(axes)
    names = [str(handle.get_label()) for handle in handles]
    figure.set_figheight(3.6 + 0.2 * -(-len(names) // legend_columns(names, WIDTH)))
    add_legend(figure, handles)
    return figure


def adds_convolution(layers: Sequence[LayerLocality]) -> bool:
    """Whether the layers add a convolution to their attention."""
    return any(layer.total != layer.attention or layer.total_share != layer.attention_share for layer in layers)


def masking_figure(found: Mapping[str, Masking], styles: Styles) -> Figure:
    """Accuracy with more and more hidden, a panel a model: the neighbourhood, or as many tokens at random.

    Args:
        found: What was found, by model.
        styles: How the models are drawn.
    """
    columns = min(PANELS, len(found))
    rows = -(-len(found) // columns)
    figure = Figure(figsize=(WIDTH if columns > 2 else 3.6 * columns + 1.2, 2.9 * rows + 0.6), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharey=True, sharex=True)
    for axes, (name, one) in zip(grid.flat, found.items(), strict=False):
        for hidden in ("near", "random"):
            some = [masked for masked in one.masked if masked.hidden == hidden]
            # Nothing hidden is where both begin.
            sides, values = [1, *(masked.side for masked in some)], [one.top1, *(masked.top1 for masked in some)]
            draw_line(axes, sides, values, styles[name], dash=dash_of(hidden), is_hollow=hidden == "random")
        axes.set_xticks(sides, ["none", *(f"{side}×{side}" for side in sides[1:])])
        axes.set_title(name, fontsize=10, parse_math=False)
        axes.margins(x=0.08)
        tidy(axes)
        axes.grid(alpha=0.25)
    for axes in grid[:, 0]:
        axes.set_ylabel("images right, %")
    bottom = min(axes.get_ylim()[0] for axes in grid.flat)
    grid[0, 0].set_ylim(bottom=max(0, bottom))
    for axes in grid.flat[len(found) :]:
        axes.set_visible(False)
        # Nothing is below the panel above, so it has its own numbers.
        above = grid.flat[list(grid.flat).index(axes) - columns] if rows > 1 else axes
        above.tick_params(labelbottom=True)
    figure.supxlabel("tokens hidden from each query, in all layers", fontsize=10)
    grey = Style("", "#333333", "o", "-")
    handles = [
        line_of(grey, dash=dash_of("near"), label="its neighbourhood"),
        line_of(grey, dash=dash_of("random"), is_hollow=True, label="as many at random"),
    ]
    add_legend(figure, handles, figure.get_figwidth())
    return figure


def dash_of(hidden: str) -> str:
    """How lines are drawn for what is hidden."""
    return "-" if hidden == "near" else "--"


def maps_figure(views: Mapping[str, View]) -> Figure:
    """A row a model: the image with its query, then what the query gives to each place, in some layers.

    A model that adds a convolution has two rows, with it and without. Weights are the mean over heads. All maps have
    one scale: blue is negative, red positive, and weights beyond the usual ones are shown by their powers of ten.

    Args:
        views: The same image and query seen through each model.
    """
    rows = map_rows(views)
    columns = max(len(row.maps) for row in rows)
    figure = Figure(figsize=(1.0 + 1.75 * (columns + 1), 0.5 + 1.6 * len(rows)), layout="constrained")
    grid = figure.subplots(len(rows), columns + 1, squeeze=False)
    norm = shared_scale([weights for row in rows for weights in row.maps])
    colors = colormaps[DIVERGING].with_extremes(bad=UNSEEN)
    titles: list[str] = []
    for axes, row in zip(grid, rows, strict=True):
        view = row.view
        height, width = view.pixels.shape[:2]
        axes[0].imshow(view.pixels, interpolation="nearest")
        mark = {"marker": "s", "markersize": 9, "markerfacecolor": "none", "markeredgewidth": 2.2, "linestyle": ""}
        axes[0].plot(view.query[1] * width - 0.5, view.query[0] * height - 0.5, markeredgecolor=QUERY_MARK, **mark)
        axes[0].set_ylabel(broken(row.name), fontsize=10, parse_math=False)
        for place, weights in enumerate(row.maps, start=1):
            shown = axes[place].imshow(weights, norm=norm, cmap=colors, interpolation="nearest")
            (y, x), (down, right) = row.places[place - 1], weights.shape
            # A frame around the token itself.
            axes[place].plot(
                [x - 0.5, x + 0.5, x + 0.5, x - 0.5, x - 0.5],
                [y - 0.5, y - 0.5, y + 0.5, y + 0.5, y - 0.5],
                color="black",
                linewidth=1.2,
            )
            axes[place].set(xlim=(-0.5, right - 0.5), ylim=(down - 0.5, -0.5))
            axes[place].set_anchor("C")
        new_titles = ["the query", *(f"layer {layer + 1} of {row.depth}" for layer in row.layers)]
        if new_titles != titles:
            titles = new_titles
            for place, title in enumerate(titles):
                axes[place].set_title(title, fontsize=9)
        for place in range(columns + 1):
            axes[place].set(xticks=[], yticks=[])
            if place > len(row.maps):
                axes[place].set_visible(False)
    bar = figure.colorbar(shown, ax=grid, fraction=0.03, aspect=30, label="weight, mean over heads")
    ticks = scale_ticks(norm)
    bar.ax.yaxis.set_major_locator(FixedLocator(ticks))
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:+.2g}" if value else "0"))
    bar.ax.yaxis.minorticks_off()
    return figure


def broken(name: str) -> str:
    """A long name in lines, broken after what joins its words."""
    lines = [""]
    for word in re.findall(r"[^ ,_/:=.-]+[ ,_/:=.-]*|[ ,_/:=.-]+", name):
        if len(lines[-1] + word.rstrip()) > LONGEST_LINE and lines[-1]:
            lines.append("")
        lines[-1] += word
    return "\n".join(line.rstrip(" ") for line in lines)


@dataclass
class MapRow:
    """One row of a drawing of maps.

    Attributes:
        name: What stands before it.
        view: The image and the query.
        depth: Layers of the model.
        layers: Numbers of those that are shown.
        maps: Their weights, (H, W) each.
        places: Where the query is in each, (row, column).
    """

    name: str
    view: View
    depth: int
    layers: list[int]
    maps: list[NDArray[np.float32]]
    places: list[tuple[int, int]]


def map_rows(views: Mapping[str, View]) -> list[MapRow]:
    """What is drawn of each model."""
    rows = []
    for name, view in views.items():
        layers = chosen_layers(len(view.maps))
        shown = [view.maps[layer] for layer in layers]
        kinds = {name: [one.total for one in shown]}
        if any(not torch.equal(one.total.nan_to_num(), one.weights.nan_to_num()) for one in shown):
            kinds[f"{name}, attention alone"] = [one.weights for one in shown]
        for label, weights in kinds.items():
            maps = [mean_over_heads(one).numpy() for one in weights]
            rows.append(MapRow(label, view, len(view.maps), layers, maps, [one.query for one in shown]))
    return rows


def mean_over_heads(weights: Tensor) -> Tensor:
    """(heads, H, W) to (H, W), on the CPU; NaN where the window of no head reaches."""
    return weights.float().nanmean(dim=0).cpu()


def chosen_layers(depth: int) -> list[int]:
    """The numbers of some layers, the first and the last among them, evenly spaced."""
    count = min(depth, LAYERS_SHOWN)
    return [round(place * (depth - 1) / max(count - 1, 1)) for place in range(count)]


def shared_scale(maps: Sequence[NDArray[np.float32]]) -> SymLogNorm:
    """One scale for maps of very different weights: even around 0, logarithmic beyond, the same for both signs."""
    weights = np.concatenate([np.abs(one[np.isfinite(one)]) for one in maps])
    limit = max(float(weights.max(initial=0.0)), 1e-6)
    typical = float(np.median(weights)) if len(weights) else limit
    # Two decades show what there is; below, differences are no larger than the eye can see.
    threshold = min(max(typical, limit / 100), limit / 2)
    return SymLogNorm(linthresh=threshold, linscale=0.7, vmin=-limit, vmax=limit, base=10)


def scale_ticks(norm: SymLogNorm) -> list[float]:
    """Where a colour bar has numbers: 0, where it ceases to be even, the ends, and powers of ten between."""
    limit, threshold = float(norm.vmax or 1.0), float(norm.linthresh)
    powers = [10.0**power for power in range(ceil(log10(threshold)), floor(log10(limit)) + 1)]
    # Not so near to others that they would be printed over them.
    inner = [threshold, *(power for power in powers if 1.6 * threshold < power < 0.6 * limit)]
    return [-limit, *(-value for value in reversed(inner)), 0.0, *inner, limit]


def draw_layers(
    axes: Axes,
    values: Sequence[float],
    style: Style,
    *,
    dash: Dash | None = None,
    is_hollow: bool = False,
) -> None:
    """A value for each layer, from the first to the last."""
    draw_line(axes, range(1, len(values) + 1), values, style, dash=dash, is_hollow=is_hollow)


def draw_line(
    axes: Axes,
    x: Sequence[float],
    y: Sequence[float],
    style: Style,
    *,
    dash: Dash | None = None,
    is_hollow: bool = False,
) -> None:
    """A line in a style, or with another dash than its own."""
    line = line_of(style, dash=dash, is_hollow=is_hollow)
    line.set_data(list(x), list(y))
    # Marks at the frame are drawn whole.
    line.set_clip_on(False)
    axes.add_line(line)
    axes.autoscale_view()


def line_of(
    style: Style,
    *,
    dash: Dash | None = None,
    is_hollow: bool = False,
    label: str | None = None,
) -> Line2D:
    """What stands for a line in a legend."""
    return Line2D(
        [],
        [],
        color=style.color,
        marker=style.marker,
        linestyle=cast(Any, style.dash if dash is None else dash),
        markersize=5,
        linewidth=1.5,
        markerfacecolor="white" if is_hollow else style.color,
        label=style.name if label is None else label,
    )


def add_legend(figure: FigureBase, handles: Sequence[Line2D], width: float = WIDTH) -> None:
    """Names above a drawing that is so wide, in inches."""
    columns = legend_columns([str(handle.get_label()) for handle in handles], width)
    legend = figure.legend(
        handles=list(handles), loc="outside upper center", ncols=columns, frameon=False, fontsize=9, handlelength=3
    )
    for text in legend.get_texts():
        # The name of a run's folder may have dollar signs.
        text.set_parse_math(False)


def legend_columns(names: Sequence[str], width: float) -> int:
    """How many names stand side by side in a legend, with the lines before them."""
    longest = max(len(name) for name in names)
    return max(1, min(len(names), LEGEND_COLUMNS, int(width / (0.65 + 0.085 * longest))))


def label_layers(axes: Axes) -> None:
    """An axis of layers, which are counted from 1."""
    axes.set_xlabel("layer")
    axes.xaxis.set_major_locator(MaxNLocator(12, integer=True, min_n_ticks=1))
    axes.set_xlim(0.5, max(axes.get_xlim()[1], 1.5))
    tidy(axes)
    axes.grid(alpha=0.25)


def show_percent(axes: Axes, values: Sequence[float]) -> None:
    """An axis from 0 for shares in percent; beyond the smallest of them logarithmic, if they are of many sizes."""
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


def power_of_ten(power: int) -> str:
    """1, 10, 100, then 10³."""
    return str(10**power) if power < 3 else f"$10^{{{power}}}$"
