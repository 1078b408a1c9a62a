"""Run studies: find missing runs, train them, print and write the results."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich import box
from rich.live import Live
from rich.table import Table

from ...engine.config import check_unchanged, read_plain
from ...engine.setup import resolve_device
from ...report import rich_table, wide_console
from ...tasks.classification.config import ClassificationConfig
from ...tasks.classification.task import Classification
from ...utils.atomic import make_output_dir
from ...utils.console import new_console
from ...utils.validation import require
from .cells import Ended, Outcome, read_outcome
from .page import write_page
from .record import Record, found_runs, gather
from .studies import STUDIES, Run, Study, cell_config, cells_of, plan
from .tables import cells_table, claims_table
from .workers import Workers

RECORD = "results.json"


def run_studies(
    studies: Mapping[str, Study],
    *,
    data: str | None,
    output: str,
    jobs: int,
    seeds: int | None,
    steps: int,
    device: str | None,
) -> int:
    """Train and show some studies, by name; the other arguments are those of reproduce()."""
    if device is not None:
        resolve_device(device)
    folder = Path(output)
    counts = {name: seeds if seeds and name in studies else study.seeds for name, study in STUDIES.items()}
    runs = plan({name: counts[name] for name in studies}, studies)
    places = {"output": output} if data is None else {"output": output, "data": data}
    configs = {run.name: cell_config(run.cell, seed=run.seed, steps=steps, device=device, **places) for run in runs}
    check_folder(folder, configs, steps)
    outcomes = {run.name: read_outcome(folder / run.name) for run in runs}
    missing = {name: configs[name] for name, outcome in outcomes.items() if outcome is None}
    if missing and (data is not None or len(missing) == len(runs)):
        check_data(data, next(iter(missing.values())))
    make_output_dir(folder)

    def record() -> Record:
        """Write the present results."""
        gathered = gather(folder, seeds=counts, steps=steps, jobs=jobs)
        gathered.write(folder / RECORD)
        return gathered

    with ProgressTable(runs, outcomes) as progress:

        def update(name: str, ended: Ended | None) -> None:
            outcome = read_outcome(folder / name) if ended and ended.how == "finished" else None
            progress.update(name, ended, outcome)
            if outcome is not None:
                record()

        if data is not None:
            Workers(missing, jobs, update).run()
    final = record()
    console = wide_console(new_console())
    for name, study in studies.items():
        console.print(rich_table(cells_table(name, final, study)))
        if study.claims:
            console.print(rich_table(claims_table(study, final)))
    page = write_page(folder, final)
    if page is not None:
        progress.console.print(f"the plots are in {page}", markup=False)
    return progress.conclude(final, folder / RECORD)


def check_folder(folder: Path, configs: Mapping[str, ClassificationConfig], steps: int) -> None:
    """Raise a ValueError if runs in a folder have other settings."""
    for run in [run for cell in cells_of(STUDIES.values()) for run in found_runs(folder, cell)]:
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
        """Return one row per cell and one column per seed."""
        seeds = sorted({run.seed for run in self.runs})
        running = list(self.words.values()).count("training")
        table = Table(
            "",
            *(f"seed {seed}" for seed in seeds),
            box=box.SIMPLE_HEAD,
            caption=f"top-1 %; {self.finished} of {len(self.runs)} runs finished, {running} running",
        )
        for cell in dict.fromkeys(run.cell for run in self.runs):
            table.add_row(cell.label, *(self.words.get(Run(cell, seed).name, "") for seed in seeds))
        return table

    def conclude(self, record: Record, file: Path) -> int:
        """Print what is finished in a record and what is missing, and return the exit code."""
        missing = [run.name for run in self.runs if run.seed not in record.cells[run.cell.key].runs]
        self.console.print(f"{len(self.runs) - len(missing)} of {len(self.runs)} runs are finished: {file}")
        failed = [name for name, word in self.words.items() if word == "failed"]
        elsewhere = [name for name in missing if self.words[name] == "elsewhere"]
        untried = [name for name in missing if not self.words[name]]
        if untried:
            self.console.print(f"{len(untried)} are not trained without --data")
        if elsewhere:
            self.console.print(f"{len(elsewhere)} are being trained by another process: {', '.join(elsewhere)}")
        if failed:
            self.console.print(f"{len(failed)} failed: {', '.join(failed)}")
        return 1 if failed else 0
