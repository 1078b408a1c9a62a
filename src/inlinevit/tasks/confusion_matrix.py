"""Pictures of confusion matrices."""

import io
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from torch import Tensor

from ..report import Block, Picture, Section, Table, Text
from ..utils.atomic import atomic_write_bytes

# Up to so many classes, each has its name at the matrix; up to fewer, each cell its number.
MOST_NAMED = 50
MOST_NUMBERED = 20
PAIRS_SHOWN = 20
# Of more classes, a page shows only those of the most frequent mistakes, so many of them.
MOST_ON_PAGE = 30
CONFUSED_ON_PAGE = 20
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


def confusion_matrix_section(confusion: Tensor, classes: Sequence[str], *, unit: str = "images") -> Section:
    """Return the section of evaluation.html: the matrix, of many classes only the most confused, and the mistakes."""
    pairs = most_confused(confusion, PAIRS_SHOWN)
    if not pairs:
        return Section("confusion", "Confusion", [Text("No class was taken for another one.")])
    shown, caption = list(range(len(classes))), "Each row is a true class, and adds up to 100 %."
    if len(classes) > MOST_ON_PAGE:
        shown = confused_classes(confusion, CONFUSED_ON_PAGE)
        caption = (
            f"The {len(shown)} of {len(classes):,} classes with the most frequent mistakes, in % of the true class."
        )
    figure = confusion_matrix_figure(confusion, classes, unit=unit, shown=shown)
    totals = confusion.sum(dim=1).tolist()
    rows = [
        [classes[true], classes[guess], f"{count:,}", f"{100 * count / totals[true]:.1f}"]
        for true, guess, count in pairs
    ]
    blocks: list[Block] = [
        Picture(figure, "Confusion matrix: share of each true class that is predicted as each class.", caption),
        Table(["true class", "predicted", unit, "% of the true class"], rows, "The most frequent mistakes"),
    ]
    return Section("confusion", "Confusion", blocks)


def confused_classes(confusion: Tensor, count: int) -> list[int]:
    """Return the classes of the most frequent mistakes, at most so many, in their order."""
    chosen: set[int] = set()
    for true, guess, _ in most_confused(confusion, count**2):
        if len(chosen | {true, guess}) <= count:
            chosen |= {true, guess}
    return sorted(chosen)


def draw_confusion_matrix(confusion: Tensor, classes: Sequence[str], file: str | Path, *, unit: str = "images") -> None:
    """A picture of a confusion matrix; see confusion_matrix_figure.

    Args:
        confusion: (classes, classes) images, or whatever is counted, by true and by predicted class.
        classes: Their names.
        file: Where it goes; its ending tells the format.
        unit: What is counted.
    """
    content = io.BytesIO()
    figure = confusion_matrix_figure(confusion, classes, unit=unit)
    # LaTeX must not be started now, either.
    with matplotlib.rc_context({"text.usetex": False}):
        figure.savefig(content, format=Path(file).suffix.removeprefix("."))
    atomic_write_bytes(Path(file), content.getvalue())


# The names of classes come from data, and LaTeX would interpret them: matplotlib must not start it, whatever a
# matplotlibrc in the current folder says.
@matplotlib.rc_context({"text.usetex": False})
def confusion_matrix_figure(
    confusion: Tensor, classes: Sequence[str], *, unit: str = "images", shown: Sequence[int] | None = None
) -> Figure:
    """A picture of a confusion matrix; with many classes, the most frequent mistakes are listed beside it.

    Args:
        confusion: (classes, classes) images, or whatever is counted, by true and by predicted class.
        classes: Their names.
        unit: What is counted.
        shown: The classes that the picture has; None = all.
    """
    matrix = confusion.cpu().numpy().astype(float)
    images = matrix.sum(axis=1, keepdims=True)
    # In percent of the true class; a class without images has none.
    shares = 100 * np.divide(matrix, images, out=np.zeros_like(matrix), where=images > 0)
    if shown is not None:
        matrix, shares = matrix[np.ix_(shown, shown)], shares[np.ix_(shown, shown)]
        classes = [classes[index] for index in shown]
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
    return figure
