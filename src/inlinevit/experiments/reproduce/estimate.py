"""How much processor time a run takes: by finished runs of its cell, or else by what its recipe took once."""

from pathlib import Path
from statistics import mean

from .design import Cell, Run
from .outcomes import read_outcome
from .studies import found_runs, recipe_of, steps_of

# Seconds of one core for a step of 64 images on an AMD EPYC with AVX-512, about: attentions and windows differ by a
# factor of two, and finished runs of a cell are the better source.
SECONDS_PER_STEP = {
    "reproduce": 0.045,
    "reproduce_16x16": 0.055,
    "comparison": 0.07,
    "recall": 0.04,
    "connectivity": 0.08,
}
OTHER_SECONDS = 0.1
# An evaluation of all test images takes about as long as so many steps.
EVALUATION_STEPS = 60


def run_hours(run: Run, output: Path, steps: int | None = None) -> float:
    """Return the expected core-hours of a run.

    Args:
        run: The run.
        output: Folder of the results.
        steps: As for run_config().
    """
    length = steps_of(run, steps)
    own = measured_seconds(run.cell, output, steps)
    if own is None:
        recipe = recipe_of(run.cell)
        # Larger grids of a diagnostic have proportionally more tokens.
        tokens = recipe["model"]["img_size"] ** 2 / base_size(run.cell) ** 2
        own = SECONDS_PER_STEP.get(run.cell.recipe, OTHER_SECONDS) * recipe["data"]["batch_size"] / 64 * tokens
    return own * (length + EVALUATION_STEPS) / 3600


def base_size(cell: Cell) -> int:
    """Return the side of the images of a cell's recipe."""
    return recipe_of(Cell("", "", {}, cell.recipe))["model"]["img_size"]


def measured_seconds(cell: Cell, output: Path, steps: int | None = None) -> float | None:
    """Return the mean processor time of a step in the finished runs of a cell; None if there are none."""
    length = steps_of(Run(cell, 0), steps)
    outcomes = [read_outcome(output / run.name) for run in found_runs(output, cell)]
    # Those that diverged ended early.
    times = [one.cpu_seconds for one in outcomes if one and one.top1 is not None and one.cpu_seconds is not None]
    return mean(times) / (length + EVALUATION_STEPS) if times else None
