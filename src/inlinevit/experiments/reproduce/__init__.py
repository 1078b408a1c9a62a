"""`inlinevit reproduce`: the paper's ablations, all attentions compared, and diagnostics, for a few CPU cores."""

import os
from collections.abc import Sequence
from pathlib import Path

from ...engine.config import MOST_STEPS, MOST_WORKERS
from ...utils.validation import Range, check_value, require
from .estimate import run_hours
from .studies import GENERATED, cells_of, choose_studies, plan, rate_runs, seeds_by_cell, steps_of

__all__ = ["describe_studies", "reproduce"]

MAX_SEEDS = 1000


def reproduce(
    studies: Sequence[str] = (),
    data: str | None = None,
    output: str = "runs/reproduce",
    jobs: int | None = None,
    seeds: int | None = None,
    steps: int | None = None,
    select: bool = True,
    device: str | None = None,
    record: str | None = None,
) -> int:
    """Train the missing runs of some studies, print their tables, and write all results.

    OUTPUT/results.json has all runs of the folder, OUTPUT/report.html their plots and tables.

    Finished runs are not trained again, and interrupted ones resume. A run that diverges is a result, too. Several
    commands may share a folder: each run is trained by one of them.

    Args:
        studies: Names of studies, or STUDY/CELL for some of their cells, where * stands for any letters; none = all.
        data: Folder of CIFAR-10's train.tar and test.tar, or of the folders train and test; "generated" = train only
            what needs no files (recall, connectivity); null = show the present results and train nothing.
        output: Folder of the results, with one folder per run.
        jobs: Parallel runs, each in a process with one thread; null = number of cores.
        seeds: Runs per cell, which is one row of a table; null = 3 for those that a claim is about and in the
            diagnostics, 1 for others.
        steps: Training steps of each run; null = as in the recipes: 3,905 on CIFAR-10 (5 epochs), 2,000 in the
            diagnostics.
        select: Choose the learning rate of each cell from three, by short runs that are evaluated on held-out training
            images; without, that of the recipe is used.
        device: Where to compute, such as cpu or cuda; null = the best device there is.
        record: The results.json of another folder of runs: they count as finished in this one, if their recipe is the
            same; those that this folder has already stay.

    Returns:
        0, or 1 if a run failed for another reason than divergence.
    """
    chosen = choose_studies(studies)
    check_counts(seeds, steps)
    check_value("jobs", jobs, int | None, Range(1, MOST_WORKERS))
    for option in ("jobs", "device"):
        is_used = data is not None or {"jobs": jobs, "device": device}[option] is None
        require(is_used, f"{option} has no effect without data: give --data, too")
    for option, text in (("data", data), ("output", output), ("record", record)):
        require(text is None or bool(text.strip()), f"{option} is empty: name one, or leave it out")
    is_any_generated = any(cell.is_generated for cell in cells_of(chosen.values()))
    require(
        data != GENERATED or is_any_generated,
        f"{' and '.join(chosen)} cannot be trained on generated images: name the folder of CIFAR-10 "
        "(train.tar and test.tar) with --data",
    )
    world = os.environ.get("WORLD_SIZE", "1")
    require(world == "1", "reproduce starts its own processes: start it without a launcher, with --jobs")
    # Imported here, because it takes seconds, and mistakes are reported at once.
    from .command import run_studies

    jobs = jobs or os.cpu_count() or 1
    return run_studies(
        chosen,
        data=data,
        output=output,
        jobs=jobs,
        seeds=seeds,
        steps=steps,
        select=select,
        device=device,
        record=record,
    )


def check_counts(seeds: int | None, steps: int | None) -> None:
    """Refuse numbers of runs and steps that are out of range."""
    check_value("seeds", seeds, int | None, Range(1, MAX_SEEDS))
    check_value("steps", steps, int | None, Range(1, MOST_STEPS))


def describe_studies(
    studies: Sequence[str] = (),
    output: str = "runs/reproduce",
    seeds: int | None = None,
    steps: int | None = None,
    select: bool = True,
) -> str:
    """Return a list of studies and their cells, with estimates of the processor time of their runs.

    Args:
        studies: As for reproduce().
        output: Folder of the results: the time of finished runs is taken from there.
        seeds: As for reproduce().
        steps: As for reproduce().
        select: As for reproduce().

    Raises:
        ValueError: There is no such study or cell, or a number is out of range.
    """
    chosen = choose_studies(studies)
    check_counts(seeds, steps)
    counts = seeds_by_cell(chosen, seeds)
    folder = Path(output)

    cells, runs = cells_of(chosen.values()), plan(chosen, seeds)
    choosing = rate_runs(cells) if select else []
    hours = dict.fromkeys(counts, 0.0)
    for run in [*runs, *choosing]:
        hours[run.cell.key] += run_hours(run, folder, steps)
    lines = []
    for name, study in chosen.items():
        own = sum(hours[cell.key] for cell in study.cells)
        lines += [f"{name}: {study.title}, {own:.1f} core-hours", f"  {study.question}"]
        for cell in study.cells:
            label = f"{cell.label}, {cell.group}" if cell.group else cell.label
            count = counts[cell.key]
            seeds_words = f"{count} seed{'' if count == 1 else 's'}"
            lines.append(f"  {name}/{cell.key}, {seeds_words}, {hours[cell.key]:.2f} core-hours: {label}")
    lengths = sorted({steps_of(run, steps) for run in runs})
    words = " or ".join(f"{length:,}" for length in lengths)
    rates = f", and {len(choosing)} shorter ones that choose learning rates" if select else ""
    total = sum(hours.values())
    lines.append(
        f"all: {len(cells)} different cells, {len(runs)} runs of {words} steps{rates}; about {total:.1f} core-hours, "
        "with cells of several studies counted once"
    )
    return "\n".join(lines)
