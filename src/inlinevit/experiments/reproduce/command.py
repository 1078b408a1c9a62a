"""What `inlinevit reproduce` does: find what is missing, train it, show and write what came out."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table as RichTable

from ...engine.config import check_unchanged, read_plain, to_plain
from ...report import Table
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
        """Write down what there is by now."""
        gathered = gather(folder, seeds=counts, steps=steps, jobs=jobs)
        gathered.write(folder / RECORD)
        return gathered

    with Board(runs, outcomes) as board:

        def tell(place: int, ended: Ended | None) -> None:
            run = missing[place]
            finished = ended is not None and ended.how == "finished"
            board.tell(run, ended, read_outcome(folder / run.name) if finished else None)
            if finished:
                record()

        if data is not None:
            Workers([configs[run.name] for run in missing], jobs, tell).run()
    final = record()
    show(studies, final)
    return board.conclude(final, folder / RECORD)


def check_folder(folder: Path, configs: Mapping[str, ClassificationConfig], steps: int) -> None:
    """Refuse a folder whose runs have other settings than those that are asked for."""
    found = [run for cell in cells_of(STUDIES.values()) for run in found_runs(folder, cell)]
    for run in found:
        file = folder / run.name / "config.yaml"
        if not file.exists():
            # It had not begun to train.
            continue
        config = configs.get(run.name) or cell_config(run.cell, seed=run.seed, output=str(folder), steps=steps)
        try:
            check_unchanged(read_plain(file), to_plain(config))
        except ValueError as error:
            # What is wrong is said there; the remedy is another one here.
            problem = str(error).rpartition(": ")[0]
            raise ValueError(f"{problem}: name another folder with --output, or remove {folder / run.name}") from error


def check_data(data: str | None, config: ClassificationConfig) -> None:
    """Refuse data that cannot be used, before anything is written."""
    problem = "there is nothing yet to show, and no data to train on" if data is None else f"there is no folder {data}"
    what = "the folder of CIFAR-10's train.tar and test.tar, or of its folders train and test"
    require(data is not None and Path(data).is_dir(), f"{problem}: name {what}, with --data")
    Classification(config)


class Board:
    """How far all runs are: a table that fills on a terminal, and a line for each run elsewhere.

    Args:
        runs: All of them.
        outcomes: What came out of each, by name; None = not finished.
    """

    def __init__(self, runs: Sequence[Run], outcomes: Mapping[str, Outcome | None]) -> None:
        self.runs = runs
        self.words = {name: outcome.words if outcome else "" for name, outcome in outcomes.items()}
        self.finished = {name for name, outcome in outcomes.items() if outcome}
        self.failed: dict[str, str] = {}
        self.elsewhere: list[str] = []
        self.console = Console(stderr=True, highlight=False, soft_wrap=True)
        self.live = Live(console=self.console, auto_refresh=False, get_renderable=self.table, transient=True)

    def __enter__(self) -> "Board":
        self.console.print(f"{len(self.finished)} of {len(self.runs)} runs are there")
        if self.console.is_terminal and len(self.finished) < len(self.runs):
            self.live.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.live.stop()

    def tell(self, run: Run, ended: Ended | None, outcome: Outcome | None) -> None:
        """A run has begun (None), or ended with an outcome or without."""
        if ended is None:
            self.words[run.name] = "training"
        elif outcome is not None:
            self.finished.add(run.name)
            self.words[run.name] = outcome.words
            accuracy = "top-1 " if outcome.top1 is not None else ""
            minutes = "" if outcome.seconds is None else f", {outcome.seconds / 60:.1f} minutes"
            self.say(f"{len(self.finished)} of {len(self.runs)}  {run.name}: {accuracy}{outcome.words}{minutes}")
        elif ended.how == "failed":
            self.failed[run.name] = ended.error
            self.words[run.name] = "failed"
            self.say(f"{run.name} failed: {ended.error}")
        else:
            self.elsewhere.append(run.name)
            self.words[run.name] = "elsewhere"
        if self.live.is_started:
            self.live.refresh()

    def say(self, line: str) -> None:
        """A line, where there is no table; or one about what the table has no room for."""
        if not self.live.is_started or "failed" in line:
            self.console.print(line, markup=False)

    def table(self) -> RichTable:
        """A row for each cell, a column for each seed."""
        seeds = sorted({run.seed for run in self.runs})
        at_work = sum(word == "training" for word in self.words.values())
        table = RichTable(
            "",
            *(f"seed {seed}" for seed in seeds),
            box=box.SIMPLE_HEAD,
            caption=f"top-1 %; {len(self.finished)} of {len(self.runs)} runs finished, {at_work} at work",
        )
        for cell in dict.fromkeys(run.cell for run in self.runs):
            table.add_row(cell.label, *(self.words.get(Run(cell, seed).name, "") for seed in seeds))
        return table

    def conclude(self, record: Record, file: Path) -> int:
        """Say what is there and what is not; returns the exit code.

        Args:
            record: What is there, with what other processes have trained meanwhile.
            file: Where it is written.
        """
        missing = [run.name for run in self.runs if run.seed not in record.cells[run.cell.key].runs]
        self.console.print(f"{len(self.runs) - len(missing)} of {len(self.runs)} runs are finished: {file}")
        elsewhere = [name for name in missing if name in self.elsewhere]
        untried = [name for name in missing if name not in self.elsewhere and name not in self.failed]
        if untried:
            self.console.print(f"{len(untried)} are not trained without --data")
        if elsewhere:
            self.console.print(f"{len(elsewhere)} are in the hands of another process: {', '.join(elsewhere)}")
        if self.failed:
            self.console.print(f"{len(self.failed)} failed: {', '.join(self.failed)}")
        return 1 if self.failed else 0


def show(studies: Sequence[str], record: Record) -> None:
    """Print the tables of studies; what is no terminal has room for all columns."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=200)
    for name in studies:
        study = STUDIES[name]
        console.print(rich_table(cells_table(name, record)))
        if study.claims:
            console.print(rich_table(claims_table(study, record)))


def rich_table(table: Table) -> RichTable:
    """A table for a terminal."""
    shown = RichTable(*table.headings, title=table.caption, box=box.SIMPLE_HEAD)
    for row in table.rows:
        shown.add_row(*row)
    return shown
