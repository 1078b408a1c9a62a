"""The paper's first figure, computed: queries that linear attention cannot distinguish."""

from dataclasses import dataclass
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from ..engine.outputs import check_output_folder
from ..ops import apply_feature_map, attention_weights
from ..report import STYLES, Table, plot_style, rich_table, save_figure
from ..utils.atomic import atomic_write_json, make_output_dir
from ..utils.console import new_console

ATTENTIONS = ("softmax", "linear", "inline")
# Four keys and two sets of four queries of width 2, fitted to the scores in the paper, which does not publish its
# coordinates.
KEYS = (
    (0.6721750002330146, 1.7954591056065676),
    (0.9253878699963569, 1.005665618702611),
    (1.8540988182005727, 0.5442991421636876),
    (1.6006529890452297, 0.2941597059849602),
)
# One direction, different lengths.
COLLINEAR_QUERIES = (
    (0.4587937898545505, 0.6907652885523216),
    (0.7813900227932221, 1.1764699446733622),
    (1.0947441583808695, 1.6482595910783107),
    (1.2872433149660014, 1.9380885695541585),
)
# Different directions, which φ(x) = ReLU(A·x + b) maps to one.
OTHER_QUERIES = (
    (0.13865489990219657, 0.7230912242758033),
    (0.40087318303131403, 0.9613434638946706),
    (0.8159928811864561, 1.3385223417941592),
    (1.3576806179671925, 1.8307012811190615),
)
A = ((0.873091442450209, -0.11229697719741161), (-0.27227239978902623, 1.1670177814578846))
B = (0.8569882688232301, 0.11053969863158486)

# The darkest color.
HIGHEST_SCORE = 0.5
KEY_COLOR = "#000000"
QUERY_COLOR = "#D55E00"
MAPPED_COLOR = "#CC79A7"


@dataclass
class Case:
    """One half of the figure: queries, φ(queries) and keys as (4, 2), and each attention's (queries, keys) weights."""

    letter: str
    title: str
    queries: Tensor
    mapped: Tensor
    keys: Tensor
    scores: dict[str, Tensor]


def figure1_cases() -> list[Case]:
    """Compute both halves of the figure."""
    affine = torch.tensor(A, dtype=torch.float64), torch.tensor(B, dtype=torch.float64)
    title_b = "queries q that φ maps to one direction;\nφ = ReLU(A·x + b)"
    halves: list[tuple[str, str, Any, dict[str, Any]]] = [
        ("a", "queries q of one direction, keys k; φ = ReLU", COLLINEAR_QUERIES, {"feature_map": "relu"}),
        ("b", title_b, OTHER_QUERIES, {"feature_map": "relu_affine", "affine": affine}),
    ]
    cases = []
    for letter, title, queries, options in halves:
        # One image, one head.
        q, k = (torch.tensor(points, dtype=torch.float64)[None, None] for points in (queries, KEYS))
        scores = {"softmax": attention_weights(q, k, kind="softmax")[0, 0]}
        for kind in ATTENTIONS[1:]:
            scores[kind] = attention_weights(q, k, kind=kind, **options)[0, 0]
        mapped = apply_feature_map(q, options["feature_map"], options.get("affine"))[0, 0]
        cases.append(Case(letter, title, q[0, 0], mapped, k[0, 0], scores))
    return cases


@plot_style
def plot_figure1(cases: list[Case]) -> Figure:
    """Plot the plane with keys and queries, and the weights of the keys for each query, one row per case."""
    figure = Figure(figsize=(11.5, 3.5 * len(cases)))
    grid = figure.subplots(len(cases), 1 + len(ATTENTIONS), width_ratios=[1.25, 1, 1, 1], squeeze=False)
    for row, case in zip(grid, cases, strict=True):
        _plot_plane(row[0], case)
        for axes, (attention, scores) in zip(row[1:], case.scores.items(), strict=True):
            _plot_scores(axes, scores, STYLES[attention].name)
        row[1].set_ylabel("query")
    return figure


def _plot_plane(axes: Axes, case: Case) -> None:
    is_moved = not torch.equal(case.mapped, case.queries)
    axes.set_title(f"({case.letter}) {case.title}", loc="left", fontsize=10)
    # The ray on which linear attention cannot distinguish queries.
    far_x, far_y = (1.12 * case.mapped[-1]).tolist()
    axes.plot([0, far_x], [0, far_y], color=MAPPED_COLOR if is_moved else QUERY_COLOR, linewidth=0.8, linestyle=":")
    # Where there is space for the names: on the left, below, or on the right.
    left, below, right = ((-7, 1), "right"), ((0, -14), "center"), ((7, -4), "left")
    groups = [
        ("$k_{}$", case.keys, KEY_COLOR, "s", left if is_moved else below),
        ("$q_{}$", case.queries, QUERY_COLOR, "o", left),
    ]
    if is_moved:
        groups.append(("φ($q_{}$)", case.mapped, MAPPED_COLOR, "^", right))
    for name, points, color, marker, (offset, align) in groups:
        axes.plot(points[:, 0], points[:, 1], color=color, marker=marker, linestyle="", markersize=6)
        label: dict[str, Any] = {"textcoords": "offset points", "color": color, "fontsize": 10, "parse_math": True}
        for number, point in enumerate(points.tolist(), start=1):
            axes.annotate(name.format(number), point, offset, ha=align, **label)
    axes.set(xlim=(-0.15, 2.4), ylim=(-0.05, 2.3), aspect="equal", xlabel="first channel", ylabel="second channel")


def _plot_scores(axes: Axes, scores: Tensor, name: str) -> None:
    """Plot a table of numbers; higher ones have a darker background."""
    axes.grid(visible=False)
    axes.imshow(scores.numpy(), cmap="Blues", vmin=0, vmax=HIGHEST_SCORE)
    axes.set_title(name, fontsize=11)
    for i, row in enumerate(scores.tolist()):
        for j, score in enumerate(row):
            color = "white" if score > 0.68 * HIGHEST_SCORE else "black"
            axes.text(j, i, f"{score:.2f}", ha="center", va="center", color=color, fontsize=11)
    places = range(len(scores))
    axes.set_xticks(places, [f"$k_{place + 1}$" for place in places], parse_math=True)
    axes.set_yticks(places, [f"$q_{place + 1}$" for place in places], parse_math=True)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    # White lines between the rows, which are the weights of one query each.
    axes.set_yticks([place + 0.5 for place in places][:-1], minor=True)
    axes.grid(axis="y", which="minor", color="white", linewidth=4, alpha=1)
    axes.set_axisbelow(False)
    axes.tick_params(which="minor", length=0)
    # To two decimals, as they are shown.
    is_same = len(scores.round(decimals=2).unique(dim=0)) == 1
    axes.set_xlabel("all rows the same" if is_same else "all rows different")


def figure1(output: str = "runs/figure1") -> None:
    """Plot the paper's first figure from computed numbers.

    Args:
        output: Folder for figure1.png, figure1.svg and figure1.json.
    """
    folder = check_output_folder(output, ("figure1.png", "figure1.svg", "figure1.json"))
    make_output_dir(folder)
    cases = figure1_cases()
    rows = []
    for case in cases:
        for number in range(len(case.queries)):
            scores = [case.scores[attention][number].tolist() for attention in ATTENTIONS]
            cells = [" ".join(f"{score:.2f}" for score in weights) for weights in scores]
            rows.append((f"{case.letter} q{number + 1}", *cells))
    headings = ("query", *(STYLES[attention].name for attention in ATTENTIONS))
    new_console().print(rich_table(Table(headings, rows, "Weights of keys 1 to 4")))
    save_figure(plot_figure1(cases), folder, "figure1")
    content = {
        case.letter: {
            "title": " ".join(case.title.split()),
            **{name: vars(case)[name].tolist() for name in ("keys", "queries", "mapped")},
            "scores": {attention: scores.tolist() for attention, scores in case.scores.items()},
        }
        for case in cases
    }
    atomic_write_json(folder / "figure1.json", content)
    print(f"the figure is {folder / 'figure1.png'}")
