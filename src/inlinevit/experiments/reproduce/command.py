"""Run studies: find missing runs, train them, print and write the results."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.live import Live
from rich.table import Table

from ...engine.config import check_unchanged, read_plain
from ...engine.results import shorten_list
from ...engine.setup import resolve_device
from ...report import rich_table, wide_console
from ...tasks.classification.config import ClassificationConfig
from ...tasks.classification.task import Classification
from ...utils.atomic import make_output_dir
from ...utils.console import new_console
from ...utils.validation import require
from .cells import Ended
from .design import Run, Study
from .outcomes import Outcome, read_outcome
from .page import write_page
from .rates import chosen_rate
from .record import Record, gather, read_record, restore
from .studies import GENERATED, STUDIES, cells_of, found_runs, plan, rate_runs, run_config, seeds_by_cell
from .tables import cells_tables, claims_table
from .workers import Workers

RECORD = "results.json"


def run_studies(
    studies: Mapping[str, Study],
    *,
    data: str | None,
    output: str,
    jobs: int,
    seeds: int | None,
    steps: int | None,
    select: bool,
    device: str | None,
    record: str | None,
) -> int:
    """Train and show some studies, by name; the other arguments are those of reproduce()."""
    if device is not None:
        resolve_device(device)
    folder = Path(output)
    counts = {**seeds_by_cell(STUDIES), **seeds_by_cell(studies, seeds)}
    settings: dict[str, Any] = {"output": output, "steps": steps, "device": device}
    if data not in (None, GENERATED):
        settings["data"] = data
    runs = plan(studies, seeds)
    choosing = rate_runs(cells_of(studies.values())) if select else []

    def config_of(run: Run) -> ClassificationConfig:
        rate = chosen_rate(folder, run.cell) if select and run.rate is None else None
        return run_config(run, lr=rate, **settings)

    check_folder(folder, config_of, select)
    if record is not None:
        take_over(Path(record), folder, steps, select)
    outcomes = {run.name: read_outcome(folder / run.name) for run in [*choosing, *runs]}
    missing = [run for run in [*choosing, *runs] if outcomes[run.name] is None]
    trained = [run for run in missing if data is not None and (run.cell.is_generated or data != GENERATED)]
    if missing and (data is not None or not any(outcomes.values())):
        check_data(data, [config_of(run) for run in trained if not run.cell.is_generated][:1])
    make_output_dir(folder)

    def write_record() -> Record:
        """Write the present results."""
        gathered = gather(folder, seeds=counts, jobs=jobs, steps=steps, select=select)
        gathered.write(folder / RECORD)
        return gathered

    def train(group: Sequence[Run]) -> ProgressTable:
        """Train what is missing of some runs."""
        with ProgressTable(group, {run.name: read_outcome(folder / run.name) for run in group}) as progress:

            def update(name: str, ended: Ended | None) -> None:
                outcome = read_outcome(folder / name) if ended and ended.how == "finished" else None
                progress.update(name, ended, outcome)
                if outcome is not None:
                    write_record()

            # Without its learning rate, a run has to wait for the command that is choosing it.
            ready = [
                run for run in trained if run in group and (run.rate or not select or chosen_rate(folder, run.cell))
            ]
            if ready:
                Workers({run.name: config_of(run) for run in ready}, jobs, update).run()
        return progress

    code = 0
    waiting = "are not trained without --data" if data in (None, GENERATED) else "wait for their learning rates"
    if any(run in choosing for run in trained):
        code = train(choosing).conclude(folder, "runs that choose learning rates", waiting)
    progress = train(runs)
    final = write_record()
    console = wide_console(new_console())
    for study in studies.values():
        for table in cells_tables(study, final):
            console.print(rich_table(table))
        if study.claims:
            console.print(rich_table(claims_table(study, final)))
    page = write_page(folder, final)
    if page is not None:
        progress.console.print(f"the plots are in {page}", markup=False)
    return max(code, progress.conclude(folder, "runs", waiting, f": {folder / RECORD}"))


def check_folder(folder: Path, config_of: Callable[[Run], ClassificationConfig], select: bool) -> None:
    """Raise a ValueError if runs in a folder have other settings."""
    cells = cells_of(STUDIES.values())
    for run in [run for cell in cells for run in found_runs(folder, cell)] + (rate_runs(cells) if select else []):
        file = folder / run.name / "config.yaml"
        if not file.exists():
            # Its training had not started.
            continue
        try:
            check_unchanged(read_plain(file), config_of(run))
        except ValueError as error:
            # The same problem, but another remedy.
            problem = str(error).rpartition(": ")[0]
            raise ValueError(f"{problem}: name another folder with --output, or remove {folder / run.name}") from error


def take_over(file: Path, folder: Path, steps: int | None, select: bool) -> None:
    """Let the runs of a record count as finished in a folder, and warn about those of other recipes."""
    require(file.is_file(), f"there is no record {file}: name the results.json of a folder of runs, with --record")
    try:
        found = read_record(file)
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{file} is not a record of runs: name the results.json of a folder of runs") from error
    others = restore(found, folder, steps=steps, select=select)
    if others:
        warnings.warn(
            f"{file} has runs of other recipes, lengths or learning rates, which are not taken over: "
            f"{shorten_list(others)}",
            stacklevel=2,
        )


def check_data(data: str | None, configs: Sequence[ClassificationConfig]) -> None:
    """Raise an error for unusable data, before anything is written; `configs` are of runs that need them."""
    if data == GENERATED:
        return
    problem = "there are no results yet, and no data to train on" if data is None else f"there is no folder {data}"
    what = "the folder of CIFAR-10's train.tar and test.tar, or of its folders train and test"
    require(data is not None and Path(data).is_dir(), f"{problem}: name {what}, with --data")
    for config in configs:
        Classification(config)


class ProgressTable:
    """The progress of all runs: a live table on a terminal, or one line per run elsewhere."""

    def __init__(self, runs: Sequence[Run], outcomes: Mapping[str, Outcome | None]) -> None:
        self.runs = runs
        # What the table shows of each run.
        self.words = {name: outcome.words if outcome else "" for name, outcome in outcomes.items()}
        self.finished = sum(outcome is not None for outcome in outcomes.values())
        self.console = new_console(stderr=True, highlight=False, soft_wrap=True)
        self.live = Live(console=self.console, auto_refresh=False, get_renderable=self.table, transient=True)

    def __enter__(self) -> "ProgressTable":
        self.console.print(f"{self.finished} of {len(self.runs)} runs are finished")
        if self.console.is_terminal and self.finished < len(self.runs):
            self.live.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.live.stop()

    def update(self, name: str, ended: Ended | None, outcome: Outcome | None) -> None:
        """Show that a run has started (None), or has ended with an outcome or without."""
        if outcome is not None:
            self.finished += 1
            self.words[name] = outcome.words
            accuracy = "top-1 " if outcome.top1 is not None else ""
            minutes = "" if outcome.seconds is None else f", {outcome.seconds / 60:.1f} minutes"
            if not self.live.is_started:
                line = f"{self.finished} of {len(self.runs)}  {name}: {accuracy}{outcome.words}{minutes}"
                self.console.print(line, markup=False)
        else:
            self.words[name] = "training" if ended is None else ended.how
            if ended is not None and ended.how == "failed":
                self.console.print(f"{name} failed: {ended.error}", markup=False)
        if self.live.is_started:
            self.live.refresh()

    def table(self) -> Table:
        """Return one row per cell and one column per seed, or per learning rate that is tried."""
        columns: dict[str, dict[str, str]] = {}
        for run in self.runs:
            place = f"seed {run.seed}" if run.rate is None else f"rate {run.rate:g}"
            columns.setdefault(place, {})[run.cell.key] = self.words[run.name]
        running = list(self.words.values()).count("training")
        table = Table(
            "",
            *columns,
            box=box.SIMPLE_HEAD,
            caption=f"top-1 %; {self.finished} of {len(self.runs)} runs finished, {running} running",
        )
        for cell in dict.fromkeys(run.cell for run in self.runs):
            label = f"{cell.label}, {cell.group}" if cell.group else cell.label
            table.add_row(label, *(words.get(cell.key, "") for words in columns.values()))
        return table

    def conclude(self, folder: Path, kind: str, waiting: str, where: str = "") -> int:
        """Print what is finished in a folder and what is missing, and return the exit code.

        Args:
            folder: Of the runs.
            kind: What they are called.
            waiting: Why runs were not tried.
            where: Where their results are.
        """
        missing = [run.name for run in self.runs if read_outcome(folder / run.name) is None]
        self.console.print(f"{len(self.runs) - len(missing)} of {len(self.runs)} {kind} are finished{where}")
        failed = [name for name, word in self.words.items() if word == "failed"]
        elsewhere = [name for name in missing if self.words[name] == "elsewhere"]
        untried = [name for name in missing if not self.words[name]]
        if untried:
            self.console.print(f"{len(untried)} {waiting}")
        if elsewhere:
            self.console.print(f"{len(elsewhere)} are being trained by another process: {', '.join(elsewhere)}")
        if failed:
            self.console.print(f"{len(failed)} failed: {', '.join(failed)}")
        return 1 if failed else 0
