"""Recall and connectivity: determinism, balance, labels by independent solvers, and statistics that must not help."""

from collections import Counter, deque
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from inlinevit.cli.train import parse_config
from inlinevit.data.batch_plan import BatchPlan
from inlinevit.tasks.classification.config import DIAGNOSTIC_PREFIXES
from inlinevit.tasks.classification.diagnostics import (
    KINDS,
    SAMPLES,
    ConnectivitySource,
    DiagnosticSource,
    RecallSource,
    cut_tree,
    hues,
    key_colors,
    open_diagnostic,
)
from inlinevit.tasks.classification.splits import SplitRequest
from inlinevit.tasks.classification.task import Classification

PATHS = (
    "recall:",
    "recall:grid=5,pairs=24,values=5,keys=30,cell=3",
    "recall:pairs=3,queries=1",
    "recall:pairs=12",
    "connectivity:grid=12",
    "connectivity:grid=7,cell=1,near=1,far=4",
    "connectivity:grid=16,pairs=8,near=1,far=2",
    "connectivity:grid=32,cell=1,pairs=16",
)


def opened(path: str, name: str | None = None, training: bool = True) -> Any:
    return open_diagnostic(path, SplitRequest(name, training))


def cells_of(source: DiagnosticSource, index: int) -> tuple[np.ndarray, int]:
    """Return an image (grid, grid, cell, cell, 3), and its label."""
    image, label = source.read(index)
    assert image.size == (source.grid * source.cell,) * 2
    pixels = np.array(image).reshape(source.grid, source.cell, source.grid, source.cell, 3)
    return pixels.swapaxes(1, 2), label


def solve_recall(source: RecallSource, cells: np.ndarray) -> str:
    """Read pairs and query from the corners of the cells, and return the name of the value."""
    pairs, query = {}, []
    for cell in cells.reshape(-1, source.cell, source.cell, 3):
        half = source.cell // 2
        upper, lower, right = (tuple(int(part) for part in cell[place]) for place in ((0, 0), (-1, 0), (0, -1)))
        assert (cell[:half, :half] == upper).all()
        assert (cell[half:, :half] == lower).all()
        assert (cell[:, half:] == right).all()
        left = (upper, lower)
        if right == (255, 255, 255):
            query.append(left)
        elif right != (0, 0, 0):
            assert left not in pairs
            pairs[left] = right
    assert len(pairs) == source.pairs
    assert len(query) == (source.queries or source.grid**2 - source.pairs)
    (asked,) = set(query)
    names = {
        tuple(int(part) for part in color): name
        for color, name in zip(hues(source.values), source.classes, strict=True)
    }
    return names[pairs[asked]]


def marks_of(source: ConnectivitySource, colors: np.ndarray) -> list[list[tuple[int, int]]]:
    """Return the two marks of each pair in the colours of all cells (grid, grid, 3)."""
    pairs = [
        [(int(row), int(column)) for row, column in np.argwhere((colors == hue).all(-1))] for hue in hues(source.pairs)
    ]
    assert [len(pair) for pair in pairs] == [2] * source.pairs
    return pairs


def solve_connectivity(source: ConnectivitySource, cells: np.ndarray) -> str:
    """Flood the path cells from one mark of each pair."""
    colors = cells[:, :, 0, 0]
    drawn = colors.any(-1)
    answers = set()
    for first, second in marks_of(source, colors):
        reached, pending = {first}, deque([first])
        while pending:
            row, column = pending.popleft()
            for place in ((row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1)):
                if min(place) >= 0 and max(place) < len(drawn) and drawn[place] and place not in reached:
                    reached.add(place)
                    pending.append(place)
        answers.add("joined" if second in reached else "apart")
    (answer,) = answers
    return answer


@pytest.mark.parametrize("path", PATHS)
def test_labels_are_those_of_a_solver(path: str) -> None:
    source = opened(path)
    for index in range(60):
        cells, label = cells_of(source, index)
        solved = solve_recall(source, cells) if isinstance(source, RecallSource) else solve_connectivity(source, cells)
        assert solved == source.classes[label]


@pytest.mark.parametrize("path", PATHS)
def test_a_sample_is_a_function_of_its_number(path: str) -> None:
    first, again = opened(path), opened(path)
    forward = [first.read(index) for index in range(5)]
    backward = [again.read(index) for index in reversed(range(5))][::-1]
    for (image, label), (same, same_label) in zip(forward, backward, strict=True):
        assert label == same_label
        assert image.tobytes() == same.tobytes()
    contents = {image.tobytes() for image, _ in forward}
    others = [
        opened(path, "val", False),
        opened(path, "test", False),
        opened(f"{path}{'' if path.endswith(':') else ','}seed=1"),
    ]
    assert len(contents | {other.read(0)[0].tobytes() for other in others}) == 8


@pytest.mark.parametrize("path", PATHS)
def test_classes_are_balanced(path: str) -> None:
    source = opened(path)
    count = len(source.classes)
    labels = [source.label(index) for index in range(40 * count)]
    assert set(Counter(labels).values()) == {40}
    # Evenly spaced images, as with data.max_train_samples, are not of one class.
    assert len(set(labels[::count])) == count


def test_prefixes_are_those_of_all_kinds() -> None:
    assert [f"{kind}:" for kind in KINDS] == list(DIAGNOSTIC_PREFIXES)


def test_splits_and_lengths() -> None:
    assert len(opened("recall:")) == SAMPLES["train"]
    assert opened("recall:", None, False).split == "val"
    assert opened("recall:", "validation", False).split == "val"
    assert len(opened("connectivity:", "test", False)) == SAMPLES["test"]
    assert opened("recall:").name(7) == "image 7 of recall: (train)"


def test_colors_differ() -> None:
    for count in (2, 6, 8, 32):
        colors = {tuple(color) for color in hues(count).tolist()}
        assert len(colors) == count
        assert not colors & {(0, 0, 0), (255, 255, 255)}
    assert hues(6).tolist()[:3] == [[255, 0, 0], [255, 255, 0], [0, 255, 0]]
    for count in (1, 8, 9, 64, 1000):
        assert len({tuple(color) for color in key_colors(count).reshape(count, 6).tolist()}) == count


@pytest.mark.parametrize(("pairs", "values"), [(8, 8), (32, 8), (3, 8), (12, 8)])
def test_the_most_frequent_value_does_not_help(pairs: int, values: int) -> None:
    """The best guess from counts of values alone is right as often as the documentation says."""
    source = RecallSource("train", pairs=pairs, values=values)
    colors = [tuple(color) for color in hues(values).tolist()]
    right = 0
    for index in range(1000):
        cells, label = cells_of(source, index)
        seen = Counter(tuple(color) for color in cells[:, :, 0, -1].reshape(-1, 3).tolist())
        counts = [seen[color] for color in colors]
        assert max(counts) == -(-pairs // values)
        frequent = [value for value in range(values) if counts[value] == max(counts)]
        right += frequent[index % len(frequent)] == label
    expected = -(-pairs // values) / pairs
    assert abs(right / 1000 - expected) < 4 * (expected * (1 - expected) / 1000) ** 0.5


def statistics_of(source: ConnectivitySource, index: int) -> tuple[list[float], int]:
    """Return what a model could count in the maze, and where the marks are, without looking at both together."""
    cells, label = cells_of(source, index)
    drawn = cells[:, :, 0, 0].any(-1)
    (((top, left), (bottom, right)),) = marks_of(source, cells[:, :, 0, 0])
    distance, slope = bottom - top + abs(right - left), abs(bottom - top - abs(right - left))
    middle = abs((top + bottom) / 2 - len(drawn) / 2) + abs((left + right) / 2 - len(drawn) / 2)
    # Ends of paths and crossings.
    padded = np.pad(drawn, 1)
    around = padded[:-2, 1:-1].astype(int) + padded[2:, 1:-1] + padded[1:-1, :-2] + padded[1:-1, 2:]
    maze = [
        drawn.sum(),
        *((drawn & (around == count)).sum() for count in (1, 3, 4)),
        drawn[:8].sum(),
        drawn[:, :8].sum(),
    ]
    return [float(value) for value in (*maze, distance, slope, middle)], label


def test_trivial_statistics_do_not_tell_joined_from_apart() -> None:
    """A linear classifier on counts and places, with squares and products, stays near chance on new images."""
    source = ConnectivitySource("train", grid=16, cell=1)
    features, labels = zip(*(statistics_of(source, index) for index in range(2000)), strict=True)
    x = torch.tensor(features, dtype=torch.float64)
    x = (x - x.mean(0)) / x.std(0).clamp(min=1e-6)
    pairs = torch.triu_indices(x.shape[1], x.shape[1])
    x = torch.cat([x, x[:, pairs[0]] * x[:, pairs[1]], torch.ones(len(x), 1, dtype=torch.float64)], dim=1)
    y = torch.tensor(labels, dtype=torch.float64) * 2 - 1
    train, test = slice(0, 1200), slice(1200, 2000)
    ridge = x[train].T @ x[train] + 10 * torch.eye(x.shape[1], dtype=torch.float64)
    weights = torch.linalg.solve(ridge, x[train].T @ y[train])
    accuracy = ((x[test] @ weights).sign() == y[test]).double().mean()
    # Four standard deviations of a coin.
    assert accuracy < 0.5 + 4 * 0.5 / 800**0.5


@pytest.mark.parametrize(
    ("options", "least", "most"),
    [
        ({"grid": 16}, 0.55, 0.66),
        ({"grid": 16, "pairs": 8, "near": 1, "far": 2}, 0.95, 0.99),
        ({"grid": 32, "pairs": 16, "near": 1, "far": 2}, 0.96, 1.0),
    ],
)
def test_density_between_the_marks_is_a_part_of_the_answer(options: dict[str, int], least: float, most: float) -> None:
    """docs/studies.md states how much it tells: little of one pair, and most of several whose marks are close."""
    source = ConnectivitySource("train", cell=1, **options)
    found = []
    for index in range(800 if source.pairs == 1 else 300):
        cells, label = cells_of(source, index)
        drawn = cells[:, :, 0, 0].any(-1)
        boxes = [
            drawn[top : bottom + 1, min(left, right) : max(left, right) + 1]
            for (top, left), (bottom, right) in marks_of(source, cells[:, :, 0, 0])
        ]
        found.append((np.mean([box.mean() for box in boxes]), label))
    density, labels = np.array(found).T
    best = max(((density > threshold) == labels).mean() for threshold in np.unique(density))
    assert least < best <= most


@pytest.mark.parametrize("pairs", [1, 4])
def test_maze_and_distances_are_the_same_for_both_classes(pairs: int) -> None:
    """The class only decides which of the images of each pair under rotations and reflections is marked."""
    source = ConnectivitySource("train", grid=12, cell=1, pairs=pairs)
    for index in range(40):
        found: list[Any] = []
        for label in (0, 1):
            image = source.draw(label, np.random.default_rng(index))
            marks = np.array(marks_of(source, image))
            away = [sorted(np.abs(first - second).tolist()) for first, second in marks]
            border = [sorted(pair.sum(1).tolist()) for pair in np.minimum(marks, 10 - marks)]
            found.append((image.any(-1).tobytes(), away, border, marks.tolist()))
        assert found[0][:3] == found[1][:3]
        assert found[0][3] != found[1][3]


@pytest.mark.parametrize("side", [2, 3, 8])
def test_cut_trees_have_two_parts(side: int) -> None:
    for seed in range(20):
        parents, parts = cut_tree(side, np.random.default_rng(seed))
        nodes = np.arange(side**2)
        inner = parents >= 0
        assert inner.sum() == side**2 - 2
        away = np.abs(nodes // side - parents // side) + np.abs(nodes % side - parents % side)
        assert (away[inner] == 1).all()
        assert (parts[inner] == parts[parents[inner]]).all()
        assert set(parts.tolist()) == {0, 1}
        assert min(parts.sum(), (1 - parts).sum()) >= 0.25 * (side**2 - 1)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("recall:pair=8", "recall: has no option 'pair': did you mean pairs?"),
        ("recall:zzz=8", "choose among grid, cell"),
        ("recall:pairs", "pairs in recall:pairs should be followed by a whole number"),
        ("recall:pairs=-1", "should be followed by a whole number"),
        ("recall:pairs=8,pairs=9", "has pairs twice"),
        ("recall:pairs=64", "64 pairs and 1 of the query, but a grid of 8 has 64 cells"),
        ("recall:grid=16,pairs=65", "65 pairs with different keys, but 64 keys"),
        ("recall:cell=1", r"recall.cell is 1: it should be at least 2"),
        ("recall:grid=100000", r"recall.grid is 100000: it should be at most 256"),
        ("connectivity:near=5", "near 5 and far 4"),
        ("connectivity:grid=32,pairs=17", r"connectivity.pairs is 17: it should be at most 16"),
        ("connectivity:grid=4,far=3", "far 3, but a grid of 4 has 2 nodes"),
    ],
)
def test_mistakes_get_a_sentence(path: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        opened(path)


def test_unknown_split_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"has no split called 'dev': choose with --data\.eval_split among train, val, test"
    ):
        opened("recall:", "dev", False)


@pytest.mark.parametrize("recipe", ["recall", "connectivity"])
def test_recipes_have_one_token_per_cell_and_batches_of_a_seed(recipe: str, tmp_path: Any) -> None:
    config = parse_config(["--config", recipe, "--run.output", str(tmp_path / "run")])
    task = Classification(config)
    source: Any = task.train_source
    assert config.model.kwargs["patch_size"] == source.cell
    assert config.model.img_size == source.grid * source.cell
    # A run that resumes within an epoch gets the same images.
    plan = BatchPlan.initial(8)
    whole = list(islice(task.train_loader(plan).batches(0, 0), 3))
    rest = next(iter(task.train_loader(plan).batches(0, 2)))
    assert torch.equal(whole[2][0], rest[0])
    assert torch.equal(whole[2][1], rest[1])
    assert whole[0][0].shape == (8, 3, config.model.img_size, config.model.img_size)
