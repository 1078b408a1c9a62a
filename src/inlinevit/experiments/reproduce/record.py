"""The record of all runs of a folder: means, spreads, verdicts on claims."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import torch

from ...benchmark.machine import pinned_threads
from ...models.catalog import count_parameters
from ...recipes import load_recipe, merge
from ...report import environment
from ...tasks.classification.model import build_model
from ...utils.atomic import atomic_write_json
from .cells import Outcome, read_outcome
from .studies import STUDIES, Cell, Claim, Run, cell_config, cells_of

# Differences beyond this many standard errors are significant.
STANDARD_ERRORS = 2


@dataclass
class CellRecord:
    """The runs of a cell.

    Attributes:
        options: Arguments of its model.
        parameters: Number of parameters; None before the first run.
        runs: Outcomes of finished runs by seed, in the order of the seeds.
    """

    options: dict[str, Any]
    parameters: int | None = None
    runs: dict[int, Outcome] = field(default_factory=dict)

    @property
    def top1(self) -> list[float]:
        """Accuracies of the runs that did not diverge, by seed."""
        return [run.top1 for run in self.runs.values() if run.top1 is not None]

    @property
    def diverged(self) -> list[int]:
        """The steps in which runs diverged, by seed."""
        return [run.diverged_step for run in self.runs.values() if run.diverged_step is not None]

    @property
    def standard_error(self) -> float:
        """The standard error of the mean accuracy."""
        return stdev(self.top1) / math.sqrt(len(self.top1))

    @property
    def minutes(self) -> float | None:
        """Mean wall time of the runs that did not diverge."""
        seconds = [run.seconds for run in self.runs.values() if run.top1 is not None and run.seconds is not None]
        return mean(seconds) / 60 if seconds else None


@dataclass
class Record:
    """The results of studies.

    Attributes:
        settings: Steps and batch size of a run, runs per cell by study, parallel runs.
        cells: By key; each once, although several studies may have it.
        facts: See report.environment().
    """

    settings: dict[str, Any]
    cells: dict[str, CellRecord]
    facts: dict[str, Any] = field(default_factory=environment)

    @property
    def core_hours(self) -> float:
        """Processor time of all runs for which it is known."""
        return sum(run.cpu_seconds or 0.0 for cell in self.cells.values() for run in cell.runs.values()) / 3600

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
        runs = {int(seed): Outcome(**run) for seed, run in cell["runs"].items()}
        cells[key] = CellRecord(cell["options"], cell["parameters"], runs)
    del content["studies"]
    return Record(content.pop("settings"), cells, content)


def gather(output: Path, *, seeds: Mapping[str, int], steps: int, jobs: int) -> Record:
    """Return the record of all runs in a folder; the other arguments are settings."""
    cells = {}
    for cell in cells_of(STUDIES.values()):
        recipe = load_recipe(cell.recipe, "classification")
        record = cells[cell.key] = CellRecord(merge(recipe["model"]["kwargs"], cell.kwargs))
        for run in found_runs(output, cell):
            if (outcome := read_outcome(output / run.name)) is not None:
                record.runs[run.seed] = outcome
                classes = len(json.loads((output / run.name / "classes.json").read_text()))
        if record.runs:
            with torch.device("meta"):
                model = build_model(cell_config(cell).model, classes)
            record.parameters = count_parameters(model)
    settings = {"steps": steps, "batch_size": recipe["data"]["batch_size"], "jobs": jobs, "seeds": dict(seeds)}
    with pinned_threads(1):
        return Record(settings, cells)


def found_runs(output: Path, cell: Cell) -> list[Run]:
    """Return the runs of a cell that have a folder."""
    seeds = [folder.name.removeprefix(Run(cell, 0).name[:-1]) for folder in output.glob(f"{cell.key}-seed*")]
    return [Run(cell, seed) for seed in sorted(int(text) for text in seeds if text.isdecimal())]


class Verdict(NamedTuple):
    """Whether a claim holds.

    Attributes:
        word: "holds", "does not hold", "within noise", "both diverged" or "unknown".
        difference: Mean accuracy of the cell that should be better minus that of the other; None if unknown.
        noise: STANDARD_ERRORS of that difference; None without several seeds.
        reason: Why the word does not follow from the difference; "" if it does.
    """

    word: str
    difference: float | None = None
    noise: float | None = None
    reason: str = ""


def judge(claim: Claim, cells: Mapping[str, CellRecord]) -> Verdict:
    """Return whether a claim holds."""
    better, worse = cells[claim.better.key], cells[claim.worse.key]
    if not better.runs or not worse.runs:
        return Verdict("unknown", reason="runs are missing")
    if better.diverged or worse.diverged:
        shares = [len(cell.diverged) / len(cell.runs) for cell in (better, worse)]
        reason = " and ".join(
            f"{cell.label} diverged in {len(found.diverged)} of {len(found.runs)}"
            for cell, found in ((claim.better, better), (claim.worse, worse))
            if found.diverged
        )
        is_same = shares[0] == shares[1]
        word = "both diverged" if is_same else "holds" if shares[0] < shares[1] else "does not hold"
        return Verdict(word, reason=reason)
    difference = mean(better.top1) - mean(worse.top1)
    if min(len(better.top1), len(worse.top1)) < 2:
        return Verdict("unknown", difference, reason="one seed has no spread")
    noise = STANDARD_ERRORS * math.hypot(better.standard_error, worse.standard_error)
    word = "holds" if difference > noise else "does not hold" if difference < -noise else "within noise"
    return Verdict(word, difference, noise)
