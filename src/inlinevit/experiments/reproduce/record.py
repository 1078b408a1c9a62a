"""The record of all runs of a folder."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from ...benchmark.machine import pinned_threads
from ...models.catalog import count_parameters
from ...report import environment
from ...tasks.classification.model import build_model
from ...utils.atomic import atomic_write_json, make_output_dir
from .design import Cell, Run
from .outcomes import RECORDED, Outcome, read_json, read_outcome
from .rates import chosen_rate, tried_rates
from .studies import STUDIES, cells_of, found_runs, rates_of, recipe_of, run_config, seeds_by_cell, steps_of


@dataclass
class CellRecord:
    """The runs of a cell.

    Attributes:
        options: Arguments of its model.
        parameters: Number of parameters; None before the first run.
        runs: Outcomes of finished runs by seed, in the order of the seeds.
        lr: Learning rate of the runs; None if it is not chosen yet, or not known.
        rates: Accuracies on held-out training images by learning rate, for the choice; None = it diverged.
        steps: Training steps of a run; None if not known.
        batch_size: Images of a step; None if not known.
        recipe: A digest of the recipe with its changes; None if not known.
        rate_seconds: Processor time of the choice.
    """

    options: dict[str, Any]
    parameters: int | None = None
    runs: dict[int, Outcome] = field(default_factory=dict)
    lr: float | None = None
    rates: dict[float, float | None] = field(default_factory=dict)
    steps: int | None = None
    batch_size: int | None = None
    recipe: str | None = None
    rate_seconds: float = 0.0

    @property
    def top1(self) -> list[float]:
        """Accuracies of the runs that did not diverge, by seed."""
        return [run.top1 for run in self.runs.values() if run.top1 is not None]

    @property
    def diverged(self) -> list[int]:
        """The steps in which runs diverged, by seed."""
        return [run.diverged_step for run in self.runs.values() if run.diverged_step is not None]

    def cpu_minutes(self, processor: str | None) -> float | None:
        """Return the mean processor time of the runs on a processor that did not diverge; None if there are none."""
        times = [
            run.cpu_seconds
            for run in self.runs.values()
            if run.top1 is not None and run.cpu_seconds is not None and run.processor == processor
        ]
        return mean(times) / 60 if times else None


@dataclass
class Record:
    """The results of studies.

    Attributes:
        settings: Planned runs by cell, parallel runs, whether learning rates are chosen.
        cells: By key; each once, although several studies may have it.
        facts: See report.environment().
    """

    settings: dict[str, Any]
    cells: dict[str, CellRecord]
    facts: dict[str, Any] = field(default_factory=environment)

    def processors(self, keys: Iterable[str] | None = None) -> list[str]:
        """Return the processors on which runs were trained, as far as they are known; that of most runs first.

        Args:
            keys: The cells of these runs; None = all.
        """
        cells = self.cells.values() if keys is None else [self.cells[key] for key in keys if key in self.cells]
        runs = [run for cell in cells for run in cell.runs.values() if run.top1 is not None]
        return [name for name, _ in Counter(run.processor for run in runs if run.processor).most_common()]

    @property
    def core_hours(self) -> float:
        """Processor time of all runs for which it is known, with those that choose learning rates."""
        runs = sum(run.cpu_seconds or 0.0 for cell in self.cells.values() for run in cell.runs.values())
        return (runs + sum(cell.rate_seconds for cell in self.cells.values())) / 3600

    def write(self, path: Path) -> None:
        """Write it as JSON."""
        cells = {key: asdict(cell) for key, cell in self.cells.items()}
        for cell in cells.values():
            for seed, run in cell["runs"].items():
                cell["runs"][seed] = {name: value for name, value in run.items() if value is not None}
        studies = {name: [cell.key for cell in study.cells] for name, study in STUDIES.items()}
        atomic_write_json(path, {**self.facts, "settings": self.settings, "studies": studies, "cells": cells})


def read_record(path: Path) -> Record:
    """Read a file of Record.write()."""
    content = json.loads(path.read_text())
    cells = {}
    for key, cell in content.pop("cells").items():
        runs = {int(seed): Outcome(**run) for seed, run in cell.pop("runs").items()}
        # Records of before learning rates were chosen have none.
        rates = {float(rate): top1 for rate, top1 in cell.pop("rates", {}).items()}
        cells[key] = CellRecord(**cell, runs=runs, rates=rates)
    del content["studies"]
    return Record(content.pop("settings"), cells, content)


def empty_record() -> Record:
    """Return the record of a folder without runs, with the default settings."""
    cells = {cell.key: CellRecord(recipe_of(cell)["model"]["kwargs"]) for cell in cells_of(STUDIES.values())}
    with pinned_threads(1):
        return Record({"jobs": 1, "select": True, "seeds": seeds_by_cell(STUDIES)}, cells)


def completed(record: Record) -> Record:
    """Return a record with the cells, without runs, that studies have got since it was written."""
    empty = empty_record()
    settings = {**record.settings, "seeds": {**empty.settings["seeds"], **record.settings["seeds"]}}
    return Record(settings, {**empty.cells, **record.cells}, record.facts)


def gather(
    output: Path, *, seeds: Mapping[str, int], jobs: int, steps: int | None = None, select: bool = True
) -> Record:
    """Return the record of all runs in a folder; the other arguments are those of the command.

    Args:
        output: The folder.
        seeds: Planned runs of each cell, by key.
        jobs: Parallel runs.
        steps: Training steps of each run; None = as in its recipe.
        select: Whether learning rates are chosen.
    """
    cells = {}
    for cell in cells_of(STUDIES.values()):
        recipe = recipe_of(cell)
        record = cells[cell.key] = CellRecord(recipe["model"]["kwargs"])
        record.steps, record.batch_size = steps_of(Run(cell, 0), steps), recipe["data"]["batch_size"]
        record.recipe = recipe_digest(cell, steps)
        for run in found_runs(output, cell):
            if (outcome := read_outcome(output / run.name)) is not None:
                record.runs[run.seed] = outcome
                record.parameters = run_parameters(output, run)
        if select:
            tried = tried_rates(output, cell)
            record.rates = {rate: outcome.top1 for rate, outcome in tried.items()}
            record.rate_seconds = sum(outcome.cpu_seconds or 0.0 for outcome in tried.values())
        record.lr = chosen_rate(output, cell) if select else recipe["optimizer"]["lr"]
    settings = {"jobs": jobs, "select": select, "seeds": dict(seeds)}
    with pinned_threads(1):
        return Record(settings, cells)


def restore(record: Record, output: Path, *, steps: int | None = None, select: bool = True) -> list[str]:
    """Take the runs of a record over into a folder, where they count as finished; those it has already stay.

    Args:
        record: Of a folder that may not exist any more.
        output: The folder.
        steps: Training steps of each run; None = as in its recipe.
        select: Whether learning rates are chosen; if so, the choice is taken over, too.

    Returns:
        The cells that are left out, because they were trained by another recipe, or with another learning rate.
    """
    others = []
    for cell in cells_of(STUDIES.values()):
        found = record.cells.get(cell.key)
        if found is None or not (found.runs or found.rates):
            continue
        is_chosen = set(found.rates) == set(rates_of(cell)) if found.runs else True
        is_usual = found.lr == recipe_of(cell)["optimizer"]["lr"]
        if found.recipe != recipe_digest(cell, steps) or not (is_chosen if select else is_usual):
            others.append(cell.key)
            continue
        runs = {Run(cell, seed): outcome for seed, outcome in found.runs.items()}
        if select:
            seconds = found.rate_seconds / max(1, len(found.rates))
            runs |= {Run(cell, 0, rate): Outcome(top1, cpu_seconds=seconds) for rate, top1 in found.rates.items()}
        for run, outcome in runs.items():
            folder = output / run.name
            if not folder.exists():
                make_output_dir(folder)
                content = {"outcome": asdict(outcome), "parameters": found.parameters}
                atomic_write_json(folder / RECORDED, content)
    return others


def recipe_digest(cell: Cell, steps: int | None = None) -> str:
    """Return a digest of what a cell's runs depend on besides the data, the learning rate and the seed."""
    recipe = recipe_of(cell)
    recipe["schedule"]["steps"] = steps_of(Run(cell, 0), steps)
    parts = {name: part for name, part in recipe.items() if name != "run"}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def run_parameters(output: Path, run: Run) -> int | None:
    """Return the number of parameters of a finished run's model."""
    folder = output / run.name
    if (folder / RECORDED).exists():
        return read_json(folder / RECORDED)["parameters"]
    return parameters_of(run.cell, len(json.loads((folder / "classes.json").read_text())))


@cache
def parameters_of(cell: Cell, classes: int) -> int:
    """Return the number of parameters of a cell's model."""
    with torch.device("meta"):
        return count_parameters(build_model(run_config(Run(cell, 0)).model, classes))
