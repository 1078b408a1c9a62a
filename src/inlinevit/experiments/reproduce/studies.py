"""The paper's ablations: the models of each study, and what the paper expects of them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ...engine.config import config_from_dict
from ...recipes import load_recipe, merge
from ...tasks.classification.config import ClassificationConfig
from ...utils.validation import did_you_mean, require

# Training steps of 64 images.
STEPS = 1000
DATA, OUTPUT = "path/to/cifar10", "runs/reproduce"


@dataclass(frozen=True)
class Cell:
    """One model of a study.

    Attributes:
        key: Its name in folders; equal cells of several studies have the same key.
        label: Its name in tables.
        kwargs: Arguments of the model that replace those of the recipe.
        recipe: "reproduce", with 8 × 8 tokens, or "reproduce_16x16", with 16 × 16 tokens of fewer channels.
    """

    key: str
    label: str
    kwargs: dict[str, Any] = field(hash=False)
    recipe: str = "reproduce"


class Claim(NamedTuple):
    """An expectation of the paper: one cell has a higher accuracy than another."""

    text: str
    better: Cell
    worse: Cell


@dataclass(frozen=True)
class Study:
    """An ablation: cells, what the paper expects of them, and the number of runs per cell."""

    title: str
    question: str
    cells: tuple[Cell, ...]
    claims: tuple[Claim, ...] = ()
    seeds: int = 3


def attention_cell(key: str, label: str, attention: str, **attn_kwargs: Any) -> Cell:
    """Return a cell with an attention and its options."""
    return Cell(key, label, {"attention": attention, **({"attn_kwargs": attn_kwargs} if attn_kwargs else {})})


MAPS = {"relu": "ReLU", "relu_affine": "ReLU(A·+b)", "leaky_relu": "LeakyReLU", "identity": "identity", "exp": "exp"}
LINEAR = {phi: attention_cell(f"linear-{phi}", f"linear, {MAPS[phi]}", "linear", feature_map=phi) for phi in MAPS}
PLAIN_INLINE = {
    phi: attention_cell(
        f"inline-{phi}-plain", f"InLine, {MAPS[phi]}, no residual", "inline", feature_map=phi, local_residual=False
    )
    for phi in MAPS
}
INLINE = {phi: attention_cell(f"inline-{phi}", f"InLine, {MAPS[phi]}", "inline", feature_map=phi) for phi in MAPS}
SOFTMAX = attention_cell("softmax", "softmax", "softmax")
UNIT_SOFTMAX = attention_cell("softmax-unit", "softmax, queries of unit length", "softmax", unit_queries=True)
BASELINES = [attention_cell(word, word, word) for word in ("hydra", "efficient", "angular", "enhanced", "focused")]
WINDOWS = (2, 4, 8, 16)
WINDOWED = {
    (width, residual): Cell(
        f"window-{width}" if residual else f"window-{width}-plain",
        f"window {width} × {width}, {'with' if residual else 'without'} residual",
        {"attention": "inline", "attn_kwargs": {"local_residual": residual}, "window_size": width},
        "reproduce_16x16",
    )
    for residual in (False, True)
    for width in WINDOWS
}
ABLATED_MAPS = ("relu", "relu_affine", "leaky_relu", "identity")
OTHERS = (SOFTMAX, LINEAR["relu"], *BASELINES)

STUDIES = {
    "injectivity": Study(
        "Injectivity: division or subtraction",
        "Linear and InLine attention differ in one thing here: weights are normalised by division, which loses the "
        "length of a query, or by subtraction, which keeps it.",
        (*(LINEAR[phi] for phi in ABLATED_MAPS), *(PLAIN_INLINE[phi] for phi in ABLATED_MAPS)),
        tuple(Claim(f"InLine above linear with {MAPS[phi]}", PLAIN_INLINE[phi], LINEAR[phi]) for phi in ABLATED_MAPS),
    ),
    "softmax": Study(
        "Injectivity: softmax with unit-length queries",
        "If injectivity matters, softmax should be worse with queries that pass a map that is not injective.",
        (SOFTMAX, UNIT_SOFTMAX),
        (Claim("plain softmax above softmax of unit queries", SOFTMAX, UNIT_SOFTMAX),),
    ),
    "locality": Study(
        "Locality: window size and the local residual",
        "InLine attention within windows from 2 × 2 tokens to the whole feature map of 16 × 16, shifted in every "
        "second block, with and without the local residual.",
        tuple(WINDOWED.values()),
        (
            *(
                Claim(f"with residual above without at window {width}", WINDOWED[width, True], WINDOWED[width, False])
                for width in WINDOWS
            ),
            Claim("with residual, the whole map above the smallest window", WINDOWED[16, True], WINDOWED[2, True]),
        ),
        seeds=2,
    ),
    "maps": Study(
        "Feature maps of InLine attention",
        "InLine attention with the local residual under four maps φ of queries and keys.",
        tuple(INLINE[phi] for phi in ("identity", "relu", "leaky_relu", "exp")),
        seeds=2,
    ),
    "baselines": Study(
        "All attentions with the same budget",
        "Every attention that this library has, in the same transformer.",
        (*OTHERS, INLINE["identity"]),
        tuple(Claim(f"InLine above {cell.label}", INLINE["identity"], cell) for cell in OTHERS),
    ),
}


class Run(NamedTuple):
    """A cell with a seed."""

    cell: Cell
    seed: int

    @property
    def name(self) -> str:
        """The name of its folder."""
        return f"{self.cell.key}-seed{self.seed}"


def cells_of(studies: Iterable[Study]) -> list[Cell]:
    """Return the cells of some studies, each once."""
    return list({cell.key: cell for study in studies for cell in study.cells}.values())


def choose_studies(names: Sequence[str]) -> dict[str, Study]:
    """Return the studies that names stand for, with the chosen cells and the claims about these.

    Args:
        names: Each is a study, or one of its cells as STUDY/CELL; none = all studies.

    Raises:
        ValueError: There is no such study or cell.
    """
    chosen: dict[str, set[str]] = {}
    for name in names:
        study, slash, key = name.partition("/")
        hint = did_you_mean(study, STUDIES) or f"choose among {', '.join(STUDIES)}"
        require(study in STUDIES, f"there is no study called {study!r}: {hint}")
        keys = [cell.key for cell in STUDIES[study].cells]
        hint = did_you_mean(key, keys) or f"choose among {', '.join(keys)}"
        require(not slash or key in keys, f"study {study} has no cell called {key!r}: {hint}")
        chosen.setdefault(study, set()).update([key] if slash else keys)
    return {
        name: replace(
            study,
            cells=tuple(cell for cell in study.cells if cell.key in chosen[name]),
            claims=tuple(one for one in study.claims if {one.better.key, one.worse.key} <= chosen[name]),
        )
        for name, study in STUDIES.items()
        if name in chosen
    } or STUDIES


def plan(seeds: Mapping[str, int], studies: Mapping[str, Study] = STUDIES) -> list[Run]:
    """Return the runs of studies, given their runs per cell, each once: the first seed of all cells, the second, …."""
    runs = (
        Run(cell, seed)
        for seed in range(max(seeds.values(), default=0))
        for name, count in seeds.items()
        for cell in studies[name].cells
        if seed < count
    )
    return list({run.name: run for run in runs}.values())


def cell_config(
    cell: Cell,
    *,
    seed: int = 0,
    data: str = DATA,
    output: str = OUTPUT,
    steps: int = STEPS,
    device: str | None = None,
) -> ClassificationConfig:
    """Return the recipe of a cell; cells of one recipe differ in the arguments of the model only.

    Args:
        cell: The cell.
        seed: Seed of initial weights, data order and augmentation.
        data: Folder of CIFAR-10's train.tar and test.tar, or of the folders train and test.
        output: Folder of all runs, with one folder per run.
        steps: Training steps.
        device: Where to compute; None = the best device there is.
    """
    changes = {
        "data": {"path": data},
        "model": {"kwargs": cell.kwargs},
        "schedule": {"steps": steps, "warmup": steps // 10},
        "run": {
            "output": f"{output}/{Run(cell, seed).name}",
            "seed": seed,
            "device": device,
            "eval_every": steps,
            "log_every": max(1, steps // 10),
        },
    }
    return config_from_dict(ClassificationConfig, merge(load_recipe(cell.recipe, "classification"), changes))
