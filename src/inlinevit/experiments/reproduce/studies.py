"""All studies, their runs in order, and the config of each run."""

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from ...engine.config import config_from_dict
from ...recipes import load_recipe, merge
from ...tasks.classification.config import ClassificationConfig
from ...utils.validation import did_you_mean, require
from .ablations import ABLATIONS
from .comparison import COMPARISONS
from .design import Cell, Run, Study

DATA, OUTPUT = "path/to/cifar10", "runs/reproduce"
# In place of a folder of CIFAR-10: train the cells whose images are drawn when they are read.
GENERATED = "generated"
# Learning rates to choose from, relative to that of the recipe.
RATES = (0.5, 1.0, 2.0)
# A run that chooses among them has so much fewer steps than one that counts. Diagnostics are learned after a plateau:
# runs that end on it tell nothing.
RATE_STEPS, GENERATED_RATE_STEPS = 8, 2
# Share of the training images that it does not see, and is evaluated on.
HELD_OUT = 0.1
STUDIES: dict[str, Study] = {**ABLATIONS, **COMPARISONS}


def cells_of(studies: Iterable[Study]) -> list[Cell]:
    """Return the cells of some studies, each once."""
    return list({cell.key: cell for study in studies for cell in study.cells}.values())


def choose_studies(names: Sequence[str]) -> dict[str, Study]:
    """Return the studies that names stand for, with the chosen cells and the claims about these.

    Args:
        names: Each is a study, or some of its cells as STUDY/CELL, where * stands for any letters; none = all studies.

    Raises:
        ValueError: There is no such study or cell.
    """
    chosen: dict[str, set[str]] = {}
    for name in names:
        study, slash, pattern = name.partition("/")
        hint = did_you_mean(study, STUDIES) or f"choose among {', '.join(STUDIES)}"
        require(study in STUDIES, f"there is no study called {study!r}: {hint}")
        keys = [cell.key for cell in STUDIES[study].cells]
        found = [key for key in keys if not slash or fnmatchcase(key, pattern)]
        hint = did_you_mean(pattern, keys) or f"choose among {', '.join(keys)}"
        require(bool(found), f"study {study} has no cell called {pattern!r}: {hint}")
        chosen.setdefault(study, set()).update(found)
    return {
        name: replace(
            study,
            cells=tuple(cell for cell in study.cells if cell.key in chosen[name]),
            claims=tuple(one for one in study.claims if {one.better.key, one.worse.key} <= chosen[name]),
        )
        for name, study in STUDIES.items()
        if name in chosen
    } or STUDIES


def seeds_by_cell(studies: Mapping[str, Study], seeds: int | None = None) -> dict[str, int]:
    """Return the number of runs of each cell of some studies, by key: the most that one of them asks for.

    Args:
        studies: The studies, by name, or parts of them.
        seeds: Runs of every cell; None = as each study says.
    """
    counts: dict[str, int] = {}
    for name, study in studies.items():
        for cell in study.cells:
            # A part of a study may lack the claim that a cell is about.
            count = STUDIES[name].seeds_of(cell, seeds)
            counts[cell.key] = max(count, counts.get(cell.key, 0))
    return counts


def plan(studies: Mapping[str, Study], seeds: int | None = None) -> list[Run]:
    """Return the runs of studies, each once: the first seed of all cells, the second, …; arguments as above."""
    counts = seeds_by_cell(studies, seeds)
    cells = cells_of(studies.values())
    return [
        Run(cell, seed) for seed in range(max(counts.values(), default=0)) for cell in cells if seed < counts[cell.key]
    ]


def rate_runs(cells: Iterable[Cell]) -> list[Run]:
    """Return the runs that choose the learning rates of cells."""
    return [Run(cell, 0, rate) for cell in cells for rate in rates_of(cell)]


def found_runs(output: Path, cell: Cell) -> list[Run]:
    """Return the runs of a cell that have a folder, without those that choose its learning rate."""
    seeds = [folder.name.removeprefix(Run(cell, 0).name[:-1]) for folder in output.glob(f"{cell.key}-seed*")]
    return [Run(cell, seed) for seed in sorted(int(text) for text in seeds if text.isdecimal())]


def rates_of(cell: Cell) -> list[float]:
    """Return the learning rates to choose from."""
    return [factor * recipe_of(cell)["optimizer"]["lr"] for factor in RATES]


def recipe_of(cell: Cell) -> dict[str, Any]:
    """Return the recipe of a cell with its changes."""
    return merge(deepcopy(base_recipe(cell.recipe)), merge(cell.changes, {"model": {"kwargs": cell.kwargs}}))


@cache
def base_recipe(name: str) -> dict[str, Any]:
    """Return a recipe for classification; reading it takes milliseconds, and there are hundreds of runs."""
    return load_recipe(name, "classification")


def steps_of(run: Run, steps: int | None = None) -> int:
    """Return the training steps of a run; `steps` replaces those of the recipe."""
    full = steps or recipe_of(run.cell)["schedule"]["steps"]
    if run.rate is None:
        return full
    return max(1, full // (GENERATED_RATE_STEPS if run.cell.is_generated else RATE_STEPS))


def run_config(
    run: Run,
    *,
    data: str = DATA,
    output: str = OUTPUT,
    steps: int | None = None,
    lr: float | None = None,
    device: str | None = None,
) -> ClassificationConfig:
    """Return the config of a run; cells of one recipe differ in the arguments of the model only.

    Args:
        run: A cell and a seed, which is that of initial weights, data order and augmentation.
        data: Folder of CIFAR-10's train.tar and test.tar, or of the folders train and test.
        output: Folder of all runs, with one folder per run.
        steps: Training steps of a run that counts; None = as in the recipe.
        lr: Learning rate; None = that of the recipe, or the one that the run tries.
        device: Where to compute; None = the best device there is.
    """
    recipe, length = recipe_of(run.cell), steps_of(run, steps)
    rate = run.rate or lr or recipe["optimizer"]["lr"]
    scale = rate / recipe["optimizer"]["lr"]
    changes = {
        "data": data_of(run, data),
        "optimizer": {"lr": rate},
        "schedule": {
            "steps": length,
            "warmup": length // 10,
            **({name: scale * recipe["schedule"][name] for name in ("min_lr", "warmup_lr")} if scale != 1 else {}),
        },
        "run": {
            "output": f"{output}/{run.name}",
            "seed": run.seed,
            "device": device,
            "eval_every": length,
            "log_every": max(1, length // 10),
            **({} if has_compiler() else {"compile": False}),
        },
    }
    return config_from_dict(ClassificationConfig, merge(recipe, changes))


@cache
def has_compiler() -> bool:
    """Whether there is the C++ compiler that torch.compile needs on CPUs."""
    return shutil.which(os.environ.get("CXX", "g++")) is not None


def data_of(run: Run, data: str) -> dict[str, Any]:
    """Return where the images of a run come from: runs that choose a learning rate never see test images."""
    if run.cell.is_generated:
        return {"eval_split": "test" if run.rate is None else "val"}
    if run.rate is None:
        return {"path": data}
    # As a data set without splits, a part of its training images is held out.
    folder = Path(data)
    return {
        "path": str(folder / "train.tar" if (folder / "train.tar").is_file() else folder / "train"),
        "eval_share": HELD_OUT,
    }
