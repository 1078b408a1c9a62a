"""Run studies: find missing runs, train them, print and write the results."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table

from ...engine.config import check_unchanged, read_plain
from ...report import rich_table, wide_console
from ...tasks.classification.config import ClassificationConfig
from ...tasks.classification.task import Classification
from ...utils.atomic import make_output_dir
from ...utils.validation import require
from .cells import Ended, Outcome, read_outcome
from .record import Record, found_runs, gather
from .studies import STUDIES, Run, cell_config, cells_of, plan
from .tables import cells_table, claims_table
from .workers import Workers

RECORD = "results.json"


def run_studies(
    studies: Sequence[str], *, data: str | None, output: str, jobs: int, seeds: int | None, steps: int
) -> int:
    """See reproduce()."""
    folder = Path(output)
    counts = {name: seeds if seeds and name in studies else study.seeds for name, study in STUDIES.items()}
    runs = plan({name: counts[name] for name in studies})
    places = {"output": output} if data is None else {"output": output, "data": data}
    configs = {run.name: cell_config(run.cell, seed=run.seed, steps=steps, **places) for run in runs}
    check_folder(folder, configs, steps)
    outcomes = {run.name: read_outcome(folder / run.name) for run in runs}
    missing = [run for run in runs if outcomes[run.name] is None]
    if missing and (data is not None or len(missing) == len(runs)):
        check_data(data, configs[missing[0].name])
    make_output_dir(folder)

    def record() -> Record:
        """Write the present results."""
        gathered = gather(folder, seeds=counts, steps=steps, jobs=jobs)
        gathered.write(folder / RECORD)
        return gathered

    with ProgressTable(runs, outcomes) as progress:

        def update(place: int, ended: Ended | None) -> None:
            run = missing[place]
            finished = ended is not None and ended.how == "finished"
            progress.update(run, ended, read_outcome(folder / run.name) if finished else None)
            if finished:
                record()

        if data is not None:
            Workers([configs[run.name] for run in missing], jobs, update).run()
    final = record()
    show(studies, final)
    return progress.conclude(final, folder / RECORD)


def check_folder(folder: Path, configs: Mapping[str, ClassificationConfig], steps: int) -> None:
    """Raise a ValueError if runs in a folder have other settings."""
    found = [run for cell in cells_of(STUDIES.values()) for run in found_runs(folder, cell)]
    for run in found:
        file = folder / run.name / "config.yaml"
        if not file.exists():
            # Its training had not started.
            continue
        config = configs.get(run.name) or cell_config(run.cell, seed=run.seed, output=str(folder), steps=steps)
        try:
            check_unchanged(read_plain(file), config)
        except ValueError as error:
            # The same problem, but another remedy.
            problem = str(error).rpartition(": ")[0]
            raise ValueError(f"{problem}: name another folder with --output, or remove {folder / run.name}") from error


def check_data(data: str | None, config: ClassificationConfig) -> None:
    """Raise an error for unusable data, before anything is written."""
    problem = "there are no results yet, and no data to train on" if data is None else f"there is no folder {data}"
    what = "the folder of CIFAR-10's train.tar and test.tar, or of its folders train and test"
    require(data is not None and Path(data).is_dir(), f"{problem}: name {what}, with --data")
    Classification(config)


class ProgressTable:
    """The progress of all runs: a live table on a terminal, or one line per run elsewhere.

    Args:
        runs: All runs.
        outcomes: Outcomes by name; None = not finished.
    """

    def __init__(self, runs: Sequence[Run], outcomes: Mapping[str, Outcome | None]) -> None:
        self.runs = runs
        self.words = {name: outcome.words if outcome else "" for name, outcome in outcomes.items()}
        self.finished = {name for name, outcome in outcomes.items() if outcome}
        self.failed: dict[str, str] = {}
        self.elsewhere: list[str] = []
        self.console = Console(stderr=True, highlight=False, soft_wrap=True)
        self.live = Live(console=self.console, auto_refresh=False, get_renderable=self.table, transient=True)

    def __enter__(self) -> "ProgressTable":
        self.console.print(f"{len(self.finished)} of {len(self.runs)} runs are finished")
        if self.console.is_terminal and len(self.finished) < len(self.runs):
            self.live.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.live.stop()

    def update(self, run: Run, ended: Ended | None, outcome: Outcome | None) -> None:
        """Show that a run has started (None), or has ended with an outcome or without."""
        if ended is None:
            self.words[run.name] = "training"
        elif outcome is not None:
            self.finished.add(run.name)
            self.words[run.name] = outcome.words
            accuracy = "top-1 " if outcome.top1 is not None else ""
            minutes = "" if outcome.seconds is None else f", {outcome.seconds / 60:.1f} minutes"
            self.print(f"{len(self.finished)} of {len(self.runs)}  {run.name}: {accuracy}{outcome.words}{minutes}")
        elif ended.how == "failed":
            self.failed[run.name] = ended.error
            self.words[run.name] = "failed"
            self.print(f"{run.name} failed: {ended.error}")
        else:
            self.elsewhere.append(run.name)
            self.words[run.name] = "elsewhere"
        if self.live.is_started:
            self.live.refresh()

    def print(self, line: str) -> None:
        """Print a line where there is no live table, or if it reports a failure."""
        if not self.live.is_started or "failed" in line:
            self.console.print(line, markup=False)

    def table(self) -> Table:
        """Return one row per cell and one column per seed."""
        seeds = sorted({run.seed for run in self.runs})
        running = sum(word == "training" for word in self.words.values())
        table = Table(
            "",
            *(f"seed {seed}" for seed in seeds),
            box=box.SIMPLE_HEAD,
            caption=f"top-1 %; {len(self.finished)} of {len(self.runs)} runs finished, {running} running",
        )
        for cell in dict.fromkeys(run.cell for run in self.runs):
            table.add_row(cell.label, *(self.words.get(Run(cell, seed).name, "") for seed in seeds))
        return table

    def conclude(self, record: Record, file: Path) -> int:
        """Print what is finished and what is missing, and return the exit code.

        Args:
            record: The results, with those of other processes.
            file: The file of the results.
        """
        missing = [run.name for run in self.runs if run.seed not in record.cells[run.cell.key].runs]
        self.console.print(f"{len(self.runs) - len(missing)} of {len(self.runs)} runs are finished: {file}")
        elsewhere = [name for name in missing if name in self.elsewhere]
        untried = [name for name in missing if name not in self.elsewhere and name not in self.failed]
        if untried:
            self.console.print(f"{len(untried)} are not trained without --data")
        if elsewhere:
            self.console.print(f"{len(elsewhere)} are being trained by another process: {', '.join(elsewhere)}")
        if self.failed:
            self.console.print(f"{len(self.failed)} failed: {', '.join(self.failed)}")
        return 1 if self.failed else 0


def show(studies: Sequence[str], record: Record) -> None:
    """Print the tables of studies."""
    console = wide_console(Console())
    for name in studies:
        study = STUDIES[name]
        console.print(rich_table(cells_table(name, record)))
        if study.claims:
            console.print(rich_table(claims_table(study, record)))
