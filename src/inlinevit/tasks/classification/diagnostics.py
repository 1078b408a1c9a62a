"""Diagnostics: images that are drawn when they are read, for tasks in which the attention decides.

A sample is a function of its number, its split and `seed` alone. One cell of an image is meant to be one token, so the
patches of a model should have the side length `cell`.

- `recall:` is associative recall. Cells hold pairs of a key (two colours, one above the other, in the left half) and a
  value (a colour, in the right half); the others hold a query (a key, and white), or are black. The class is the value
  that the query's key is paired with.
- `connectivity:` has a maze that falls into two parts, and pairs of marked cells. The class is whether the cells of a
  pair are joined: all pairs are, or none.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from math import isqrt
from typing import Any, ClassVar

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from PIL import Image

from ...utils.validation import Range, check_fields, did_you_mean, require
from .splits import SPELLINGS, SplitRequest

# Images of a split. An epoch of training images is longer than any run that is meant here, so none of them comes twice.
SAMPLES = {"train": 1_000_000, "val": 2_000, "test": 10_000}
MOST_CELLS = 256
BLACK, WHITE = (0, 0, 0), (255, 255, 255)
# The smallest part of a maze, as a share of its nodes. A tree whose nodes have at most four neighbours can always be
# cut like this.
SMALLEST_PART = 0.25

# Two nodes of a maze, each by its row and column.
Pair = tuple[tuple[int, int], tuple[int, int]]


@dataclass(frozen=True)
class DiagnosticSource:
    """Images of one split.

    Attributes:
        split: "train", "val" or "test".
        grid: Cells along a side.
        cell: Pixels along a side of a cell.
        seed: Another seed gives other images.
    """

    kind: ClassVar[str]
    least_grid: ClassVar[int] = 2
    least_cell: ClassVar[int] = 1

    split: str
    grid: int
    cell: int
    seed: int = 0

    @property
    def classes(self) -> list[str]:
        """Names of the classes, by label."""
        raise NotImplementedError

    def draw(self, label: int, rng: Generator) -> NDArray[np.uint8]:
        """Return an image of a class, (height, width, 3)."""
        raise NotImplementedError

    def check(self) -> None:
        """Refuse options that are out of range."""
        ranges = {"grid": Range(self.least_grid, MOST_CELLS), "cell": Range(self.least_cell, 64)}
        check_fields(self, self.kind, seed=Range(0, 2**32 - 1), **ranges)

    def __len__(self) -> int:
        return SAMPLES[self.split]

    def label(self, index: int) -> int:
        """Return the class of an image: any successive ones, as many as there are classes, have one of each."""
        count = len(self.classes)
        block, place = divmod(index, count)
        return int(self._rng(1, block).permutation(count)[place])

    def read(self, index: int) -> tuple[Image.Image, int]:
        """Return an image and its label."""
        label = self.label(index)
        return Image.fromarray(self.draw(label, self._rng(0, index))), label

    def name(self, index: int) -> str:
        return f"image {index} of {self.kind}: ({self.split})"

    def _rng(self, use: int, number: int) -> Generator:
        return np.random.default_rng((self.seed, list(SAMPLES).index(self.split), use, number))


@dataclass(frozen=True)
class RecallSource(DiagnosticSource):
    """Associative recall on a grid.

    Values come equally often in an image, or some of them once more than the others, and the query is one of the pairs
    at random. So guessing a most frequent value is right in ⌈pairs / values⌉ of `pairs` cases, and not in more.

    Attributes:
        pairs: Pairs in an image, with different keys.
        values: Colours of values, which are the classes.
        queries: Cells that hold the query, the same in all of them; 0 = all cells without a pair. Models that average
            their tokens hardly see a single one, and learn much later.
        keys: Different keys. Each is two of ⌈√keys⌉ hues, so that keys differ in direction rather than in length.
    """

    kind: ClassVar[str] = "recall"
    least_cell: ClassVar[int] = 2

    grid: int = 8
    cell: int = 2
    pairs: int = 8
    values: int = 8
    queries: int = 0
    keys: int = 64

    def check(self) -> None:
        super().check()
        cells = Range(1, MOST_CELLS**2)
        limits = {"pairs": cells, "queries": Range(0, cells.most), "values": Range(2, 32), "keys": Range(1, 4096)}
        check_fields(self, self.kind, **limits)
        least = max(1, self.queries)
        require(
            self.pairs + least <= self.grid**2,
            f"recall has {self.pairs} pairs and {least} of the query, but a grid of {self.grid} has {self.grid**2} "
            "cells: choose fewer of them, or a larger grid",
        )
        require(
            self.pairs <= self.keys,
            f"recall has {self.pairs} pairs with different keys, but {self.keys} keys: choose fewer pairs or more keys",
        )

    @property
    def classes(self) -> list[str]:
        return [f"hue {360 * value // self.values}" for value in range(self.values)]

    def draw(self, label: int, rng: Generator) -> NDArray[np.uint8]:
        keys = rng.permutation(self.keys)[: self.pairs]
        rounds, rest = divmod(self.pairs, self.values)
        others = rng.permutation([value for value in range(self.values) if value != label])
        # As if the query were chosen among all pairs: values that come once more are as much more likely.
        is_among_rest = rng.random() < (rounds + 1) * rest / self.pairs
        extra = np.concatenate([[label], others] if is_among_rest else [others, [label]])[:rest]
        values = np.concatenate([np.tile(np.arange(self.values), rounds), extra]).astype(np.int64)
        query = keys[rng.choice(np.flatnonzero(values == label))]
        places = rng.permutation(self.grid**2)
        pairs, queries = places[: self.pairs], places[self.pairs :][: self.queries or None]
        # The quarters of each cell, by row and column.
        quarters = np.full((self.grid**2, 2, 2, 3), BLACK, np.uint8)
        quarters[pairs, :, 0] = key_colors(self.keys)[keys]
        quarters[pairs, :, 1] = hues(self.values)[values, None]
        quarters[queries, :, 0] = key_colors(self.keys)[query]
        quarters[queries, :, 1] = WHITE
        first = self.cell // 2
        parts = [first, self.cell - first] * self.grid
        image = quarters.reshape(self.grid, self.grid, 2, 2, 3).swapaxes(1, 2).reshape(2 * self.grid, 2 * self.grid, 3)
        return image.repeat(parts, axis=0).repeat(parts, axis=1)


@dataclass(frozen=True)
class ConnectivitySource(DiagnosticSource):
    """Path connectivity: pairs of marked cells of a maze with two parts, which are all joined or all apart.

    The maze is a random tree without one edge, drawn on every second cell (its nodes) and between them (its edges). The
    maze, and two nodes with their images under rotations and reflections of the grid, are drawn before the class is
    looked at, such that some of these pairs are joined and others are not; the class decides between them. Since the
    maze has no preferred direction, neither the maze nor the places of the marks depend on the class: not the number of
    path cells, not the sizes of the parts, not the distance of the marks, not where they are.

    Attributes:
        near: The least distance of the marks of a pair, in nodes along the axes.
        far: The greatest one.
        pairs: Pairs of marks, each in a colour of its own. Models that average their tokens hardly see a single one,
            and learn much later.
    """

    kind: ClassVar[str] = "connectivity"
    least_grid: ClassVar[int] = 4

    grid: int = 16
    cell: int = 2
    near: int = 2
    far: int = 4
    pairs: int = 1

    def check(self) -> None:
        super().check()
        distance = Range(1, MOST_CELLS)
        # More would hardly ever have room for another pair.
        most = max(1, min(self.grid // 2, self.grid**2 // 32))
        check_fields(self, self.kind, near=distance, far=distance, pairs=Range(1, most))
        require(self.near <= self.far, f"connectivity has near {self.near} and far {self.far}: near may not be larger")
        # In a small maze with two parts, no two nodes at a great distance need to be in the same part.
        side = (self.grid + 1) // 2
        require(
            self.far <= side,
            f"connectivity has far {self.far}, but a grid of {self.grid} has {side} nodes along a side: choose at most "
            "as many, or a larger grid",
        )

    @property
    def classes(self) -> list[str]:
        return ["apart", "joined"]

    def draw(self, label: int, rng: Generator) -> NDArray[np.uint8]:
        side = (self.grid + 1) // 2
        marks = None
        while marks is None:
            parents, parts = cut_tree(side, rng)
            marks = self._marks(parts.reshape(side, side), rng)
        colors = np.full((self.grid, self.grid, 3), BLACK, np.uint8)
        colors[::2, ::2] = WHITE
        nodes = np.arange(side**2)
        rows, columns = nodes // side, nodes % side
        inner = nodes[parents >= 0]
        # The cell between two nodes is at the mean of their places.
        colors[rows[inner] + rows[parents[inner]], columns[inner] + columns[parents[inner]]] = WHITE
        for pair, color in zip(marks[label], hues(self.pairs), strict=True):
            for row, column in pair:
                colors[2 * row, 2 * column] = color
        return colors.repeat(self.cell, axis=0).repeat(self.cell, axis=1)

    def _marks(self, parts: NDArray[np.int64], rng: Generator) -> list[list[Pair]] | None:
        """Return pairs of nodes for each class, no node twice; None if they are not found in some tries.

        Args:
            parts: The part of each node, (side, side).
            rng: Random numbers.
        """
        side, tries = len(parts), 8 * self.pairs
        distance = rng.integers(self.near, self.far + 1, tries)
        down = rng.integers(np.maximum(0, distance - side + 1), np.minimum(distance, side - 1) + 1)
        steps = np.stack([down, distance - down], axis=-1)
        first = rng.integers(side - steps)
        # (8 images, tries, 2 nodes of a pair, row and column)
        images = symmetric_images(np.stack([first, first + steps], axis=1), side)
        own = parts[images[..., 0], images[..., 1]]
        is_same = own[..., 0] == own[..., 1]
        # Of each pair, an image in two parts and one in one: (2, tries, 2 nodes of a pair, row and column).
        counts, columns = is_same.sum(axis=0), np.arange(tries)
        chances = rng.random(tries)
        chosen = np.stack(
            [
                images[
                    np.argsort(is_other, axis=0, kind="stable")[(chances * count).astype(np.int64), columns],
                    columns,
                ]
                for is_other, count in ((is_same, 8 - counts), (~is_same, counts))
            ]
        )
        found: list[list[Pair]] = [[], []]
        taken: list[set[tuple[int, int]]] = [set(), set()]
        for pairs in chosen[:, (counts > 0) & (counts < 8)].swapaxes(0, 1).tolist():
            nodes = [(tuple(first), tuple(second)) for first, second in pairs]
            # Whatever the class is, both have to be free.
            if any(not old.isdisjoint(new) for old, new in zip(taken, nodes, strict=True)):
                continue
            for old, marks, new in zip(taken, found, nodes, strict=True):
                old.update(new)
                marks.append(new)
            if len(found[0]) == self.pairs:
                return found
        return None


def symmetric_images(nodes: NDArray[np.int64], side: int) -> NDArray[np.int64]:
    """Return nodes (…, 2) of a square under its eight rotations and reflections, (8, …, 2)."""
    flipped = [
        np.abs(nodes - np.array(corner)) for corner in ((0, 0), (0, side - 1), (side - 1, 0), (side - 1, side - 1))
    ]
    return np.stack([*flipped, *(one[..., ::-1] for one in flipped)])


def cut_tree(side: int, rng: Generator) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return a random spanning tree of a square lattice without one of its edges.

    Args:
        side: Nodes along a side.
        rng: Random numbers.

    Returns:
        The parent of each node, (side²,), -1 for the two roots; and its part, (side²,), 0 or 1.
    """
    count, neighbors = side**2, lattice(side)
    parents = [-2] * count
    order = [int(rng.integers(count))]
    parents[order[0]] = -1
    growing = order.copy()
    # Each node is added once and removed once; drawing all numbers at once takes less time.
    for where, which in rng.random((2 * count - 1, 2)).tolist():
        place = int(where * len(growing))
        node = growing[place]
        free = [other for other in neighbors[node] if parents[other] == -2]
        if free:
            new = free[int(which * len(free))]
            parents[new] = node
            order.append(new)
            growing.append(new)
        else:
            growing[place] = growing[-1]
            growing.pop()
    sizes = [1] * count
    for node in reversed(order[1:]):
        sizes[parents[node]] += sizes[node]
    least = SMALLEST_PART * (count - 1)
    cuts = [node for node in order[1:] if least <= sizes[node] <= count - least]
    cut = cuts[int(rng.integers(len(cuts)))]
    parents[cut] = -1
    parts = [0] * count
    for node in order[1:]:
        parts[node] = 1 if node == cut else parts[parents[node]]
    return np.array(parents), np.array(parts)


@cache
def lattice(side: int) -> list[list[int]]:
    """Return the neighbours of each node of a square lattice."""
    nodes = np.arange(side**2).reshape(side, side)
    padded = np.pad(nodes, 1, constant_values=-1)
    around = np.stack([padded[:-2, 1:-1], padded[2:, 1:-1], padded[1:-1, :-2], padded[1:-1, 2:]], axis=-1)
    return [[other for other in four if other >= 0] for four in around.reshape(-1, 4).tolist()]


@cache
def key_colors(count: int) -> NDArray[np.uint8]:
    """Return the two colours of each key, (count, 2, 3): all pairs of some hues."""
    colors = hues(max(2, isqrt(count - 1) + 1))
    number = np.arange(count)
    return np.stack([colors[number // len(colors)], colors[number % len(colors)]], axis=1)


@cache
def hues(count: int) -> NDArray[np.uint8]:
    """Return colours, (count, 3): hues at equal distances, neither black nor white."""
    places = 6 * np.arange(count)[:, None] / count
    # The distance of a hue from red, green and blue on the circle.
    away = np.abs((places - np.array([0, 2, 4]) + 3) % 6 - 3)
    return (255 * np.clip(2 - away, 0, 1)).round().astype(np.uint8)


KINDS: dict[str, Callable[..., DiagnosticSource]] = {"recall": RecallSource, "connectivity": ConnectivitySource}


def open_diagnostic(path: str, request: SplitRequest) -> DiagnosticSource:
    """Return the images of a path such as recall:grid=8,pairs=32; what it leaves out has its default.

    Raises:
        ValueError: There is no such option or split, or a value is out of range.
    """
    kind, _, text = path.partition(":")
    make: Any = KINDS[kind]
    known = [field.name for field in fields(make) if field.name != "split"]
    options: dict[str, int] = {}
    for part in text.split(",") if text else ():
        name, _, value = part.partition("=")
        hint = did_you_mean(name, known) or f"choose among {', '.join(known)}"
        require(name in known, f"{kind}: has no option {name!r}: {hint}, as in {kind}:{known[0]}=8")
        require(name not in options, f"{path} has {name} twice: leave out one")
        is_number = re.fullmatch(r"[0-9]{1,12}", value) is not None
        require(is_number, f"{name} in {path} should be followed by a whole number, as in {name}=8")
        options[name] = int(value)
    source: DiagnosticSource = make(split=split_of(request, path), **options)
    source.check()
    return source


def split_of(request: SplitRequest, path: str) -> str:
    """Return the split that is wanted: train, val or test, or val if it is for evaluation and not given."""
    if request.name is None:
        return "train" if request.training else "val"
    found = [names[0] for names in SPELLINGS if request.name in names]
    if not found:
        raise ValueError(request.missing(path, list(SAMPLES)))
    return found[0]
