"""Draw the figures of docs/concepts/: python tools/concept_figures.py."""

from pathlib import Path

import matplotlib
import numpy as np
import torch
from matplotlib.figure import Figure

from inlinevit import ops

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "concepts"
# Colours that people with colour blindness tell apart.
COLORS = {"softmax": "#0072B2", "linear": "#D55E00", "inline": "#009E73"}
NAMES = {"softmax": "softmax", "linear": "linear", "inline": "InLine"}
SIDE, CENTRE = 9, 4


def injectivity() -> Figure:
    """The weights of a query and of twice the query, for three attentions."""
    generator = torch.Generator().manual_seed(3)
    q = torch.rand(1, 1, 1, 8, generator=generator)
    k = 2 * torch.rand(1, 1, 6, 8, generator=generator)
    figure = Figure(figsize=(8, 2.6), layout="constrained")
    for axes, (kind, color) in zip(figure.subplots(1, 3), COLORS.items(), strict=True):
        weights = ops.attention_weights(torch.cat([q, 3 * q], dim=2), k, kind=kind)[0, 0].numpy()
        places = np.arange(6)
        axes.bar(places - 0.2, weights[0], 0.38, color=color, label="query")
        axes.bar(places + 0.2, weights[1], 0.38, color="white", edgecolor=color, hatch="////", label="3 × query")
        axes.axhline(0, color="black", linewidth=0.8)
        axes.set(title=NAMES[kind], xlabel="key", xticks=places, xticklabels=places + 1)
        axes.legend(fontsize=7, frameon=False)
    figure.axes[0].set_ylabel("attention weight")
    return figure


def locality() -> Figure:
    """The weights of the query in the middle of a map: attention, kernel, both."""
    generator = torch.Generator().manual_seed(1)
    rows, columns = (grid.float() for grid in torch.meshgrid(*[torch.arange(SIDE)] * 2, indexing="ij"))
    places = torch.stack([torch.sin(rows / 3), torch.cos(rows / 3), torch.sin(columns / 3), torch.cos(columns / 3)], -1)
    tokens = places.view(1, 1, SIDE * SIDE, 4) + 0.3 * torch.randn(1, 1, SIDE * SIDE, 4, generator=generator)
    weights = ops.inline_weights(tokens, tokens, scale=4.0)[0, 0, CENTRE * SIDE + CENTRE].view(SIDE, SIDE).numpy()
    kernel = np.zeros((SIDE, SIDE))
    kernel[CENTRE - 1 : CENTRE + 2, CENTRE - 1 : CENTRE + 2] = [
        [0.04, 0.08, 0.04],
        [0.08, 0.2, 0.08],
        [0.04, 0.08, 0.04],
    ]
    panels = {"attention": weights, "local residual": kernel, "both": weights + kernel}
    most = max(np.abs(panel).max() for panel in panels.values())
    figure = Figure(figsize=(8, 2.8), layout="constrained")
    grid = figure.subplots(1, 3)
    for axes, (name, panel) in zip(grid, panels.items(), strict=True):
        image = axes.imshow(panel, cmap="PuOr_r", vmin=-most, vmax=most)
        axes.plot(CENTRE, CENTRE, "o", markerfacecolor="none", markeredgecolor="black", markersize=7)
        axes.set(title=name, xticks=[], yticks=[])
    figure.colorbar(image, ax=list(grid), label="weight of the key", shrink=0.8)
    return figure


def covariance() -> Figure:
    """Multiply-adds of both forms for one head of 32 channels."""
    channels = 32
    tokens = np.array([4**power for power in range(2, 9)])
    figure = Figure(figsize=(6, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.loglog(tokens, 2 * tokens**2 * channels, "s-", color=COLORS["softmax"], label="N × N form, 2·N²·d")
    axes.loglog(tokens, 2 * tokens * channels**2, "o-", color=COLORS["inline"], label="covariance form, 2·N·d²")
    axes.set(xlabel="tokens N", ylabel="multiply-adds of a head, d = 32")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return figure


def main() -> None:
    """Write all figures; the same each time."""
    matplotlib.rcParams.update({"svg.hashsalt": "inlinevit", "svg.fonttype": "path", "font.size": 9})
    FOLDER.mkdir(parents=True, exist_ok=True)
    for draw in (injectivity, locality, covariance):
        draw().savefig(FOLDER / f"{draw.__name__}.svg", metadata={"Date": None})
        print(f"wrote {FOLDER / draw.__name__}.svg")


if __name__ == "__main__":
    main()
