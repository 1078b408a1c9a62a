"""Pictures of confusion matrices."""

import io
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from torch import Tensor

from ..utils.atomic import atomic_write_bytes

# Up to so many classes, each has its name at the matrix; up to fewer, each cell its number.
MOST_NAMED = 50
MOST_NUMBERED = 20
PAIRS_SHOWN = 20
LONGEST_NAME = 28
# One hue, from light to dark: the same to colour-blind eyes.
COLORS = "Blues"


def most_confused(confusion: Tensor, count: int) -> list[tuple[int, int, int]]:
    """The most frequent mistakes as (true class, predicted class, images), the most frequent first.

    Args:
        confusion: (classes, classes) images by true and by predicted class.
        count: How many to give; fewer if there are not so many.
    """
    mistakes = confusion.clone().fill_diagonal_(0).flatten()
    # Stable: among equals, the order of the classes decides.
    order = mistakes.argsort(descending=True, stable=True)[:count].tolist()
    classes = len(confusion)
    return [(*divmod(place, classes), int(mistakes[place])) for place in order if mistakes[place] > 0]


# The names of classes come from data, and LaTeX would interpret them: matplotlib must not start it, whatever a
# matplotlibrc in the current folder says.
@matplotlib.rc_context({"text.usetex": False})
def draw_confusion(confusion: Tensor, classes: Sequence[str], file: str | Path, *, unit: str = "images") -> None:
    """A picture of a confusion matrix; with many classes, the most frequent mistakes are listed beside it.

    Args:
        confusion: (classes, classes) images, or whatever is counted, by true and by predicted class.
        classes: Their names.
        file: Where it goes; its ending tells the format.
        unit: What is counted.
    """
    matrix = confusion.cpu().numpy().astype(float)
    images = matrix.sum(axis=1, keepdims=True)
    # In percent of the true class; a class without images has none.
    shares = 100 * np.divide(matrix, images, out=np.zeros_like(matrix), where=images > 0)
    names = [name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…" for name in classes]
    is_named = len(names) <= MOST_NAMED
    side = max(6.0, 0.28 * len(names)) if is_named else 12.0
    figure = Figure(figsize=(side + 2, side) if is_named else (side + 7, side), dpi=150, layout="constrained")
    axes = figure.subplots(1, 1 if is_named else 2, width_ratios=None if is_named else [5, 1], squeeze=False)[0]

    # Mistakes are rare beside what is right: the root makes them visible, a higher one where a cell is but a dot.
    norm = PowerNorm(0.4 if is_named else 0.2, 0, 100)
    image = axes[0].imshow(shares, cmap=COLORS, norm=norm, interpolation="nearest")
    ticks = [0, 1, 5, 20, 50, 100]
    figure.colorbar(image, ax=axes[0], label="% of the true class", fraction=0.046, pad=0.02, ticks=ticks)
    axes[0].set(xlabel="predicted class", ylabel="true class")
    if is_named:
        axes[0].set_xticks(range(len(names)), names, rotation=90, parse_math=False)
        axes[0].set_yticks(range(len(names)), names, parse_math=False)
    if len(names) <= MOST_NUMBERED:
        for row, column in np.argwhere(matrix > 0):
            share = shares[row, column]
            color = "white" if image.norm(share) > 0.6 else "black"
            axes[0].text(column, row, f"{share:.0f}", ha="center", va="center", color=color, fontsize=7)
    if not is_named:
        pairs = most_confused(confusion, PAIRS_SHOWN)
        axes[1].barh(range(len(pairs)), [count for _, _, count in pairs], color=image.cmap(0.7))
        labels = [f"{names[true]}\n→ {names[guess]}" for true, guess, _ in pairs]
        axes[1].set_yticks(range(len(pairs)), labels, fontsize=9, parse_math=False)
        axes[1].margins(y=0.01)
        axes[1].invert_yaxis()
        axes[1].xaxis.get_major_locator().set_params(integer=True)
        axes[1].set(xlabel=unit, title="most frequent mistakes")
    content = io.BytesIO()
    figure.savefig(content, format=Path(file).suffix.removeprefix("."))
    atomic_write_bytes(Path(file), content.getvalue())
