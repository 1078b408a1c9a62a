"""The choice of a learning rate: short runs on a part of the training images, evaluated on the rest of them."""

from pathlib import Path

from .design import Cell, Run
from .outcomes import Outcome, read_outcome
from .studies import rates_of


def tried_rates(output: Path, cell: Cell) -> dict[float, Outcome]:
    """Return the outcomes of the rates that were tried for a cell, in rising order."""
    outcomes = {rate: read_outcome(output / Run(cell, 0, rate).name) for rate in sorted(rates_of(cell))}
    return {rate: outcome for rate, outcome in outcomes.items() if outcome is not None}


def chosen_rate(output: Path, cell: Cell) -> float | None:
    """Return the rate that is best on held-out images, the smallest of several; None = not all are tried."""
    tried = tried_rates(output, cell)
    if len(tried) < len(rates_of(cell)):
        return None
    # A run that diverged is the worst.
    return max(tried, key=lambda rate: -1.0 if tried[rate].top1 is None else tried[rate].top1 or 0.0)
