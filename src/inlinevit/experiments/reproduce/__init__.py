"""`inlinevit reproduce`: the paper's ablations on CIFAR-10, small enough for a few CPU cores."""

import os
from collections.abc import Sequence

from ...engine.config import MOST_STEPS, MOST_WORKERS
from ...utils.validation import Range, check_value, require
from .studies import STEPS, cells_of, choose_studies, plan

__all__ = ["describe_studies", "reproduce"]

MAX_SEEDS = 1000


def reproduce(
    studies: Sequence[str] = (),
    data: str | None = None,
    output: str = "runs/reproduce",
    jobs: int | None = None,
    seeds: int | None = None,
    steps: int = STEPS,
    device: str | None = None,
) -> int:
    """Train the missing runs of some studies, print their tables, and write all results.

    OUTPUT/results.json has all runs of the folder, OUTPUT/report.html their plots and tables.

    Finished runs are not trained again, and interrupted ones resume. A run that diverges is a result, too. Several
    commands may share a folder: each run is trained by one of them.

    Args:
        studies: Names of studies, or STUDY/CELL for some of their cells; none = all.
        data: Folder of CIFAR-10's train.tar and test.tar, or of the folders train and test; null = show the present
            results and train nothing.
        output: Folder of the results, with one folder per run.
        jobs: Parallel runs, each in a process with one thread; null = number of cores.
        seeds: Runs per cell; null = the default of each study.
        steps: Training steps of each run.
        device: Where to compute, such as cpu or cuda; null = the best device there is.

    Returns:
        0, or 1 if a run failed for another reason than divergence.
    """
    chosen = choose_studies(studies)
    check_value("jobs", jobs, int | None, Range(1, MOST_WORKERS))
    check_value("seeds", seeds, int | None, Range(1, MAX_SEEDS))
    check_value("steps", steps, int, Range(1, MOST_STEPS))
    for option in ("jobs", "device"):
        is_used = data is not None or {"jobs": jobs, "device": device}[option] is None
        require(is_used, f"{option} has no effect without data: give --data, too")
    for option, text in (("data", data), ("output", output)):
        require(text is None or bool(text.strip()), f"{option} is empty: name a folder, or leave it out")
    world = os.environ.get("WORLD_SIZE", "1")
    require(world == "1", "reproduce starts its own processes: start it without a launcher, with --jobs")
    # Imported here, because it takes seconds, and mistakes are reported at once.
    from .command import run_studies

    jobs = jobs or os.cpu_count() or 1
    return run_studies(chosen, data=data, output=output, jobs=jobs, seeds=seeds, steps=steps, device=device)


def describe_studies(studies: Sequence[str] = ()) -> str:
    """Return a list of studies and their cells.

    Args:
        studies: Names of studies, or STUDY/CELL for some of their cells; none = all.

    Raises:
        ValueError: There is no such study or cell.
    """
    chosen = choose_studies(studies)
    lines = []
    for name, study in chosen.items():
        lines += [f"{name}: {study.title}", f"  {study.question}"]
        lines += [f"  {name}/{cell.key}, {study.seeds} seeds: {cell.label}" for cell in study.cells]
    runs = len(plan({name: study.seeds for name, study in chosen.items()}, chosen))
    distinct = len(cells_of(chosen.values()))
    return "\n".join([*lines, f"all: {distinct} different cells, {runs} runs of {STEPS} steps"])
