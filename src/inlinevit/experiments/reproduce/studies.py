"""The paper's ablations: the models of each study, and what the paper expects of them."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from ...engine.config import config_from_dict
from ...recipes import load_recipe, merge
from ...tasks.classification.config import ClassificationConfig

# Training steps of 64 images.
STEPS = 1000


@dataclass(frozen=True)
class Model:
    """The transformer that all cells of a study share.

    Attributes:
        patch_size: Side length of a patch; images have 32 × 32 pixels.
        embed_dim: Channels.
        depth: Blocks.
        num_heads: Heads.
    """

    patch_size: int
    embed_dim: int
    depth: int
    num_heads: int


# 8 × 8 tokens, and 16 × 16 tokens of fewer channels.
COARSE = Model(patch_size=4, embed_dim=48, depth=4, num_heads=3)
FINE = Model(patch_size=2, embed_dim=32, depth=4, num_heads=2)


@dataclass(frozen=True)
class Cell:
    """One model of a study.

    Attributes:
        key: Its name in folders; equal cells of several studies have the same key.
        label: Its name in tables.
        options: Its own arguments of the model.
        model: The transformer.
    """

    key: str
    label: str
    options: dict[str, Any] = field(hash=False)
    model: Model = COARSE


@dataclass(frozen=True)
class Claim:
    """An expectation of the paper: some cells have a higher accuracy than others.

    Attributes:
        text: In words.
        pairs: (key of the better, key of the worse).
    """

    text: str
    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Study:
    """An ablation.

    Attributes:
        title: Its heading.
        question: Its question.
        cells: Its rows.
        claims: What the paper expects.
        seeds: Runs per cell.
    """

    title: str
    question: str
    cells: tuple[Cell, ...]
    claims: tuple[Claim, ...]
    seeds: int = 3


def attention_cell(
    key: str, label: str, attention: str, *, model: Model = COARSE, window_size: int | None = None, **own: Any
) -> Cell:
    """Return a cell with an attention and its options."""
    options: dict[str, Any] = {"attention": attention}
    if own:
        options["attn_kwargs"] = own
    if window_size is not None:
        options["window_size"] = window_size
    return Cell(key, label, options, model)


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
BASELINES = {
    word: attention_cell(word, word, word) for word in ("hydra", "efficient", "angular", "enhanced", "focused")
}
WINDOWS = (2, 4, 8, 16)
WINDOWED = {
    (width, residual): attention_cell(
        f"window-{width}" if residual else f"window-{width}-plain",
        f"window {width} × {width}, {'with' if residual else 'without'} residual",
        "inline",
        model=FINE,
        window_size=width,
        local_residual=residual,
    )
    for residual in (False, True)
    for width in WINDOWS
}
ABLATED_MAPS = ("relu", "relu_affine", "leaky_relu", "identity")

STUDIES = {
    "injectivity": Study(
        "Injectivity: division or subtraction",
        "Linear and InLine attention differ in one thing here: weights are normalised by division, which loses the "
        "length of a query, or by subtraction, which keeps it.",
        (*(LINEAR[phi] for phi in ABLATED_MAPS), *(PLAIN_INLINE[phi] for phi in ABLATED_MAPS)),
        tuple(
            Claim(f"InLine above linear with {MAPS[phi]}", ((PLAIN_INLINE[phi].key, LINEAR[phi].key),))
            for phi in ABLATED_MAPS
        ),
    ),
    "softmax": Study(
        "Injectivity: softmax with unit-length queries",
        "If injectivity matters, softmax should be worse with queries that pass a map that is not injective.",
        (SOFTMAX, UNIT_SOFTMAX),
        (Claim("plain softmax above softmax of unit queries", ((SOFTMAX.key, UNIT_SOFTMAX.key),)),),
    ),
    "locality": Study(
        "Locality: window size and the local residual",
        "InLine attention within windows from 2 × 2 tokens to the whole feature map of 16 × 16, shifted in every "
        "second block, with and without the local residual.",
        tuple(WINDOWED.values()),
        (
            *(
                Claim(
                    f"with residual above without at window {width}",
                    ((WINDOWED[width, True].key, WINDOWED[width, False].key),),
                )
                for width in WINDOWS
            ),
            Claim(
                "with residual, the whole map above the smallest window",
                ((WINDOWED[16, True].key, WINDOWED[2, True].key),),
            ),
        ),
        seeds=2,
    ),
    "maps": Study(
        "Feature maps of InLine attention",
        "InLine attention with the local residual under four maps φ of queries and keys.",
        tuple(INLINE[phi] for phi in ("identity", "relu", "leaky_relu", "exp")),
        (),
        seeds=2,
    ),
    "baselines": Study(
        "All attentions with the same budget",
        "Every attention that this library has, in the same transformer.",
        (SOFTMAX, LINEAR["relu"], *BASELINES.values(), INLINE["identity"]),
        tuple(
            Claim(f"InLine above {cell.label}", ((INLINE["identity"].key, cell.key),))
            for cell in (SOFTMAX, LINEAR["relu"], *BASELINES.values())
        ),
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


def plan(seeds: Mapping[str, int]) -> list[Run]:
    """Return the runs of some studies, each once: the first seed of all cells, then the second, …

    Args:
        seeds: Runs per cell, by study.
    """
    studies = {name: STUDIES[name] for name in seeds}
    runs = (
        Run(cell, seed)
        for seed in range(max(seeds.values(), default=0))
        for name, study in studies.items()
        for cell in study.cells
        if seed < seeds[name]
    )
    return list({run.name: run for run in runs}.values())


def cell_config(
    cell: Cell, *, seed: int = 0, data: str = "path/to/cifar10", output: str = "runs/reproduce", steps: int = STEPS
) -> ClassificationConfig:
    """Return the recipe "reproduce" for one cell; cells of one model differ in the options of the model only.

    Args:
        cell: The cell.
        seed: Seed of initial weights, data order and augmentation.
        data: Folder of CIFAR-10's train.tar and test.tar, or of the folders train and test.
        output: Folder of all runs, with one folder per run.
        steps: Training steps.
    """
    changes = {
        "data": {"path": data},
        "model": {"kwargs": asdict(cell.model) | cell.options},
        "schedule": {"steps": steps, "warmup": steps // 10},
        "run": {
            "output": f"{output}/{Run(cell, seed).name}",
            "seed": seed,
            "eval_every": steps,
            "log_every": max(1, steps // 10),
        },
    }
    return config_from_dict(ClassificationConfig, merge(load_recipe("reproduce", "classification"), changes))
