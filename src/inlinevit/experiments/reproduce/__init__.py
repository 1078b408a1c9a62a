"""`inlinevit reproduce`: the paper's ablations on CIFAR-10, small enough for a few CPU cores."""

import os
from collections.abc import Sequence

from ...engine.config import MOST_STEPS, MOST_WORKERS
from ...utils.validation import Range, check_value, did_you_mean, require
from .studies import STEPS, STUDIES, cells_of, plan

__all__ = ["describe_studies", "reproduce"]

MAX_SEEDS = 1000


def reproduce(
    studies: Sequence[str] = (),
    data: str | None = None,
    output: str = "runs/reproduce",
    jobs: int | None = None,
    seeds: int | None = None,
    steps: int = STEPS,
) -> int:
    """Train the missing runs of some studies, print their tables, and write all results to OUTPUT/results.json.

    Finished runs are not trained again, and interrupted ones resume. A run that diverges is a result, too. Several
    commands may share a folder: each run is trained by one of them.

    Args:
        studies: Names of studies; none = all.
        data: Folder of CIFAR-10's train.tar and test.tar, or of the folders train and test; null = show the present
            results and train nothing.
        output: Folder of the results, with one folder per run.
        jobs: Parallel runs, each in a process with one thread; null = number of cores.
        seeds: Runs per cell; null = the default of each study.
        steps: Training steps of each run.

    Returns:
        0, or 1 if a run failed for another reason than divergence.
    """
    check_studies(studies)
    check_value("jobs", jobs, int | None, Range(1, MOST_WORKERS))
    check_value("seeds", seeds, int | None, Range(1, MAX_SEEDS))
    check_value("steps", steps, int, Range(1, MOST_STEPS))
    require(jobs is None or data is not None, "jobs has no effect without data: give --data, too")
    for option, text in (("data", data), ("output", output)):
        require(text is None or bool(text.strip()), f"{option} is empty: name a folder, or leave it out")
    world = os.environ.get("WORLD_SIZE", "1")
    require(world == "1", "reproduce starts its own processes: start it without a launcher, with --jobs")
    # Imported here, because it takes seconds, and mistakes are reported at once.
    from .command import run_studies

    chosen = [name for name in STUDIES if name in studies or not studies]
    return run_studies(chosen, data=data, output=output, jobs=jobs or os.cpu_count() or 1, seeds=seeds, steps=steps)


def check_studies(studies: Sequence[str]) -> None:
    """Raise a ValueError for unknown names of studies."""
    for name in studies:
        hint = did_you_mean(name, STUDIES) or f"choose among {', '.join(STUDIES)}"
        require(name in STUDIES, f"there is no study called {name!r}: {hint}")


def describe_studies(studies: Sequence[str] = ()) -> str:
    """Return a list of studies and their cells.

    Args:
        studies: Names of studies; none = all.
    """
    check_studies(studies)
    chosen = {name: study for name, study in STUDIES.items() if name in studies or not studies}
    lines = []
    for name, study in chosen.items():
        lines += [f"{name}: {study.title}", f"  {study.question}"]
        lines += [f"  {cell.key}, {study.seeds} seeds: {cell.label}" for cell in study.cells]
    distinct, runs = len(cells_of(chosen.values())), len(plan({name: study.seeds for name, study in chosen.items()}))
    return "\n".join([*lines, f"all: {distinct} different cells, {runs} runs of {STEPS} steps"])
