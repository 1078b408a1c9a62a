"""Plots of attention maps."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.colors import SymLogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator, FuncFormatter
from numpy.typing import NDArray
from torch import Tensor

from ..report import plot_style
from .maps import AttentionMap

# Layers whose maps are shown, at most.
LAYERS_SHOWN = 4
# Characters per line of a row's label.
LINE_LENGTH = 18
# Red and blue on white, which color-blind readers can distinguish.
DIVERGING = "RdBu_r"
# Outside of the query's window.
UNSEEN = "#BBBBBB"
QUERY_COLOR = "#E69F00"


@dataclass
class View:
    """The attention of one query of an image in a model.

    Attributes:
        pixels: The model's input as (H, W, 3), from 0 to 1.
        query: Position of the query, as fractions of the image's height and width.
        maps: The query's weights in every layer.
    """

    pixels: NDArray[np.float32]
    query: tuple[float, float]
    maps: list[AttentionMap]

    @property
    def shown(self) -> list[int]:
        """Indices of the layers that are shown: the first, the last, and some between, evenly spaced."""
        depth = len(self.maps)
        return np.linspace(0, depth - 1, min(depth, LAYERS_SHOWN)).round().astype(int).tolist()

    @property
    def maps_shown(self) -> list[AttentionMap]:
        """The maps of these layers."""
        return [self.maps[layer] for layer in self.shown]


@plot_style
def maps_figure(views: Mapping[str, View]) -> Figure:
    """Plot one row per model: the image with the query, then the query's weights in some layers, mean over heads.

    The image and the query are the same in each model. A model that adds a convolution has two rows, with it and
    without it. All maps have one color scale: blue is negative, red is positive, large weights are on a logarithmic
    scale.
    """
    rows: list[tuple[str, View, list[NDArray[np.float32]]]] = []
    for name, view in views.items():
        shown = view.maps_shown
        rows.append((name, view, [mean_over_heads(one.total).numpy() for one in shown]))
        if any(not torch.equal(one.total.nan_to_num(), one.weights.nan_to_num()) for one in shown):
            rows.append((f"{name}, attention alone", view, [mean_over_heads(one.weights).numpy() for one in shown]))
    columns = max(len(maps) for _, _, maps in rows)
    figure = Figure(figsize=(1.0 + 1.75 * (columns + 1), 0.5 + 1.6 * len(rows)))
    grid = figure.subplots(len(rows), columns + 1, squeeze=False)
    norm = shared_scale([weights for _, _, maps in rows for weights in maps])
    colors = colormaps[DIVERGING].with_extremes(bad=UNSEEN)
    titles: list[str] = []
    for axes, (label, view, maps) in zip(grid, rows, strict=True):
        height, width = view.pixels.shape[:2]
        axes[0].imshow(view.pixels, interpolation="nearest")
        mark = {"marker": "s", "markersize": 9, "markerfacecolor": "none", "markeredgewidth": 2.2, "linestyle": ""}
        axes[0].plot(view.query[1] * width - 0.5, view.query[0] * height - 0.5, markeredgecolor=QUERY_COLOR, **mark)
        axes[0].set_ylabel(break_lines(label), fontsize=10)
        for panel, one, weights in zip(axes[1:], view.maps_shown, maps, strict=False):
            image = panel.imshow(weights, norm=norm, cmap=colors, interpolation="nearest")
            y, x = one.query
            panel.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, linewidth=1.2, clip_on=False))
        new_titles = ["the query", *(f"layer {layer + 1} of {len(view.maps)}" for layer in view.shown)]
        if new_titles != titles:
            titles = new_titles
            for panel, title in zip(axes, titles, strict=False):
                panel.set_title(title, fontsize=9)
        for place, panel in enumerate(axes):
            panel.set(xticks=[], yticks=[])
            panel.spines[:].set_visible(True)
            panel.set_visible(place <= len(maps))
    bar = figure.colorbar(image, ax=grid, fraction=0.03, aspect=30, label="weight, mean over heads")
    bar.ax.yaxis.set_major_locator(FixedLocator(scale_ticks(norm)))
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:+.2g}" if value else "0"))
    bar.ax.yaxis.minorticks_off()
    return figure


def mean_over_heads(weights: Tensor) -> Tensor:
    """Return the mean of weights (heads, H, W) as (H, W) on the CPU; NaN outside of all heads' windows."""
    return weights.float().nanmean(dim=0).cpu()


def break_lines(name: str) -> str:
    """Break a long name into lines, after its separators."""
    lines = [""]
    for word in re.findall(r"[^ ,_/:=.-]+[ ,_/:=.-]*|[ ,_/:=.-]+", name):
        if len(lines[-1] + word.rstrip()) > LINE_LENGTH and lines[-1]:
            lines.append("")
        lines[-1] += word
    return "\n".join(line.rstrip(" ") for line in lines)


def shared_scale(maps: Sequence[NDArray[np.float32]]) -> SymLogNorm:
    """Return one color scale for all maps: linear around 0, logarithmic beyond, symmetric."""
    weights = np.concatenate([np.abs(one[np.isfinite(one)]) for one in maps])
    limit = max(float(weights.max(initial=0.0)), 1e-6)
    typical = float(np.median(weights)) if len(weights) else limit
    # Two decades are enough: smaller differences are invisible.
    threshold = min(max(typical, limit / 100), limit / 2)
    return SymLogNorm(linthresh=threshold, linscale=0.7, vmin=-limit, vmax=limit, base=10)


def scale_ticks(norm: SymLogNorm) -> list[float]:
    """Return the ticks of a color bar: 0, the ends of the linear part, the limits, and powers of ten between."""
    limit, threshold = float(norm.vmax or 1.0), float(norm.linthresh)
    powers = [10.0**power for power in range(ceil(log10(threshold)), floor(log10(limit)) + 1)]
    # Not so near to others that labels would overlap.
    inner = [threshold, *(power for power in powers if 1.6 * threshold < power < 0.6 * limit)]
    return [-limit, *(-value for value in reversed(inner)), 0.0, *inner, limit]
