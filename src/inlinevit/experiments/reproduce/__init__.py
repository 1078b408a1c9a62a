"""`inlinevit reproduce`: the paper's ablations on real data, at a size that a few cores can do."""

import os
from collections.abc import Sequence

from ...engine.config import MOST_STEPS, MOST_WORKERS
from ...utils.validation import Range, check_value, did_you_mean, require
from .studies import STEPS, STUDIES, cells_of, plan

__all__ = ["describe_studies", "reproduce"]

# Nobody trains a cell more often.
MOST_SEEDS = 1000


def reproduce(
    studies: Sequence[str] = (),
    data: str | None = None,
    output: str = "runs/reproduce",
    jobs: int | None = None,
    seeds: int | None = None,
    steps: int = STEPS,
) -> int:
    """Train what is missing of some studies, print their tables, and write all results to OUTPUT/results.json.

    Runs that are finished are not trained again, and one that was interrupted goes on where it was. A run that diverges
    is a result, too. Several commands may share a folder: none trains what another is training.

    Args:
        studies: Names of studies; none = all.
        data: Folder of CIFAR-10's train.tar and test.tar, or of the folders train and test; null = show what there is
            and train nothing.
        output: Folder of the results, with a folder for each run.
        jobs: Runs at a time, each in a process with one thread; null = as many as there are cores.
        seeds: How often each cell is trained; null = as each study says.
        steps: Training steps of each run.

    Returns:
        0, or 1 if a run failed for another reason than that it diverged.
    """
    check_studies(studies)
    check_value("jobs", jobs, int | None, Range(1, MOST_WORKERS))
    check_value("seeds", seeds, int | None, Range(1, MOST_SEEDS))
    check_value("steps", steps, int, Range(1, MOST_STEPS))
    require(jobs is None or data is not None, "jobs is given, but nothing is trained without data: name --data, too")
    for option, text in (("data", data), ("output", output)):
        require(text is None or bool(text.strip()), f"{option} is empty: name a folder, or leave it out")
    world = os.environ.get("WORLD_SIZE", "1")
    require(world == "1", "reproduce starts its own processes: start it without a launcher, with --jobs")
    # Imported here, so that mistakes are told at once: what follows takes seconds to load.
    from .command import run_studies

    chosen = [name for name in STUDIES if name in studies or not studies]
    return run_studies(chosen, data=data, output=output, jobs=jobs or os.cpu_count() or 1, seeds=seeds, steps=steps)


def check_studies(studies: Sequence[str]) -> None:
    """Refuse names that no study has."""
    for name in studies:
        hint = did_you_mean(name, STUDIES) or f"choose among {', '.join(STUDIES)}"
        require(name in STUDIES, f"there is no study called {name!r}: {hint}")


def describe_studies(studies: Sequence[str] = ()) -> str:
    """What can be asked for, in lines.

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
