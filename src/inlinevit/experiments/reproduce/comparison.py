"""All attentions on one skeleton: on CIFAR-10, and on the two diagnostics."""

from typing import Any

from .design import Cell, Claim, Study

# Everything that surrounds an attention is off; what an attention cannot be without stays.
NOTHING = {"gate": False, "lepe": 0, "rope": False, "cpe": False, "mlp_conv": False}
COMMON = {**NOTHING, "gate": True, "lepe": 3}
SETS = {"plain": NOTHING, "common": COMMON}
SET_LABELS = {"plain": "plain", "common": "LePE 3 × 3 and gate"}

# Every attention by name: its label, and its own options in both sets, which switch off its own convolution. Angular
# attention and ViT³ cannot be without theirs. Enhanced attention is linear attention with a
# convolution in the MLP, which is no part of the core: it is a row of the study "baselines".
CORES: dict[str, tuple[str, dict[str, Any]]] = {
    "softmax": ("softmax", {}),
    "linear": ("linear", {}),
    "inline": ("InLine", {"local_residual": False}),
    "hydra": ("hydra", {}),
    "efficient": ("efficient", {}),
    "angular": ("angular", {}),
    "focused": ("focused", {"value_conv": False}),
    "mala": ("MALA", {}),
    "rala": ("RALA", {}),
    "polaformer": ("PolaFormer", {"value_conv": False}),
    "agent": ("Agent", {}),
    "vit3": ("ViT³", {}),
    "mhla": ("MHLA", {}),
    "circulant": ("Circulant", {}),
}
# Their steps take less processor time compiled: many operators on large tensors become few. Compilation takes up to a
# minute once per model, and later runs find it in a cache. The other attentions gain little or nothing:
# python tools/training_step.py comparison --attentions softmax rala mhla --modes eager compiled
COMPILED = ("hydra", "efficient", "angular", "focused", "mala", "rala", "polaformer", "vit3")
# Those that the diagnostics also have with fewer pairs, other head widths, more tokens or other surroundings.
MAIN_CORES = ("softmax", "linear", "inline", "mala")


def core_cells(
    prefix: str,
    recipe: str,
    surroundings: str,
    group: str,
    *,
    cores: tuple[str, ...] = tuple(CORES),
    model: dict[str, Any] | None = None,
    changes: dict[str, Any] | None = None,
    is_generated: bool = False,
) -> dict[str, Cell]:
    """Return one cell per core.

    Args:
        prefix: Of the keys.
        recipe: Of the runs.
        surroundings: One of SETS.
        group: The rows of the table that they are compared with.
        cores: Names in CORES.
        model: Further arguments of the model.
        changes: See Cell.
        is_generated: See Cell.
    """
    cells = {}
    for name in cores:
        label, own = CORES[name]
        kwargs = {"attention": name, "attn_kwargs": {**SETS[surroundings], **own}, **(model or {})}
        own_changes = {**(changes or {}), **({"run": {"compile": True}} if name in COMPILED else {})}
        cells[name] = Cell(f"{prefix}-{name}", label, kwargs, recipe, own_changes, is_generated, group)
    return cells


def claims_about(cells: dict[str, Cell], better: str, others: tuple[str, ...]) -> tuple[Claim, ...]:
    """Return the claims that one core is above each of the others."""
    group = cells[better].group
    return tuple(
        Claim(f"{group}: {CORES[better][0]} above {CORES[name][0]}", cells[better], cells[name]) for name in others
    )


COMPARED = {word: core_cells(f"c16-{word}", "comparison", word, SET_LABELS[word]) for word in SETS}
# With these InLine is compared with several seeds: its two relatives, and the most recent kinds of other constructions.
OTHERS = ("softmax", "linear", "mala", "agent")


def recall_cells(pairs: int, word: str, *, grid: int = 8, heads: int = 2, cores: tuple[str, ...]) -> dict[str, Cell]:
    """Return cells of associative recall."""
    width = 64 // heads
    group = f"{pairs} pairs, {grid**2} tokens, {width} channels per head, {SET_LABELS[word]}"
    return core_cells(
        f"recall-n{pairs}-t{grid**2}-d{width}-{word}",
        "recall",
        word,
        group,
        cores=cores,
        model={"num_heads": heads},
        changes={"data": {"path": f"recall:grid={grid},pairs={pairs}"}, "model": {"img_size": 2 * grid}},
        is_generated=True,
    )


def connectivity_cells(grid: int, word: str, *, cores: tuple[str, ...]) -> dict[str, Cell]:
    """Return cells of path connectivity, with more pairs of marks on larger grids.

    The larger grid has smaller batches, whose softmax weights fit into memory.
    """
    batch, pairs = (32, 8) if grid <= 16 else (8, 16)
    return core_cells(
        f"connectivity-t{grid**2}-{word}",
        "connectivity",
        word,
        f"{grid} × {grid} tokens, {SET_LABELS[word]}",
        cores=cores,
        changes={
            "data": {"path": f"connectivity:grid={grid},pairs={pairs},near=1,far=2", "batch_size": batch},
            "model": {"img_size": 2 * grid},
        },
        is_generated=True,
    )


ALL_CORES = tuple(CORES)
RECALL = [
    recall_cells(8, "plain", cores=MAIN_CORES),
    recall_cells(32, "plain", cores=ALL_CORES),
    recall_cells(32, "common", cores=ALL_CORES),
    recall_cells(32, "plain", heads=4, cores=MAIN_CORES),
    recall_cells(32, "plain", grid=16, cores=MAIN_CORES),
]
CONNECTIVITY = [
    connectivity_cells(16, "common", cores=ALL_CORES),
    connectivity_cells(32, "common", cores=MAIN_CORES),
    # Without a convolution, it is not learned within this length; these rows show that.
    connectivity_cells(16, "plain", cores=MAIN_CORES),
]


def all_of(groups: list[dict[str, Cell]]) -> tuple[Cell, ...]:
    """Return the cells of some groups."""
    return tuple(cell for group in groups for cell in group.values())


COMPARISONS = {
    "comparison": Study(
        "Every attention with the same surroundings",
        "All attentions in one transformer of 16 × 16 tokens: the cores alone, and the cores with one common set of "
        "surroundings, LePE 3 × 3 and an output gate.",
        all_of(list(COMPARED.values())),
        tuple(claim for cells in COMPARED.values() for claim in claims_about(cells, "inline", OTHERS)),
        expectation="expectation",
    ),
    "recall": Study(
        "Associative recall on a grid",
        "An image holds pairs of a key and a value, and a query: which value is paired with it? Accuracy over the "
        "number of pairs, the width of heads and the number of tokens, and with the common surroundings.",
        all_of(RECALL),
        tuple(
            claim
            for cells in RECALL
            for claim in (*claims_about(cells, "inline", ("linear",)), *claims_about(cells, "softmax", ("inline",)))
        ),
        other_seeds=3,
        expectation="expectation",
    ),
    "connectivity": Study(
        "Path connectivity",
        "Are marked cells of a maze joined, pair by pair? With the common surroundings on 16 × 16 and 32 × 32 tokens, "
        "and the cores alone.",
        all_of(CONNECTIVITY),
        tuple(
            claim
            for cells in CONNECTIVITY
            for claim in (*claims_about(cells, "inline", ("linear",)), *claims_about(cells, "softmax", ("inline",)))
        ),
        other_seeds=3,
        expectation="expectation",
    ),
}
