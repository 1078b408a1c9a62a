"""Confidence intervals over seeds, and verdicts on claims."""

import math
from collections.abc import Mapping, Sequence
from functools import cache
from statistics import mean, stdev, variance
from typing import NamedTuple

from .design import Claim
from .record import CellRecord

# Of the intervals.
CONFIDENCE = 0.95


@cache
def t_quantile(freedom: float) -> float:
    """Return the half width of the interval of CONFIDENCE around 0 of Student's t distribution."""
    log_scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - 0.5 * math.log(freedom * math.pi)

    # With t = √f · tan(x), its probability from 0 to t is an integral of a power of the cosine.
    def probability(angle: float, parts: int = 400) -> float:
        width = angle / parts
        powers = [math.cos(width * place) ** (freedom - 1) for place in range(parts + 1)]
        total = powers[0] + powers[-1] + 4 * sum(powers[1:-1:2]) + 2 * sum(powers[2:-1:2])
        return math.exp(log_scale) * math.sqrt(freedom) * total * width / 3

    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if probability(middle) < CONFIDENCE / 2 else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def mean_interval(values: Sequence[float]) -> float | None:
    """Return the half width of the confidence interval of a mean; None for fewer than two values."""
    if len(values) < 2:
        return None
    return t_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))


def welch_interval(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Return the half width of the interval of a difference of means of independent values (Welch)."""
    if min(len(first), len(second)) < 2:
        return None
    shares = [variance(values) / len(values) for values in (first, second)]
    if sum(shares) == 0:
        return 0.0
    freedom = sum(shares) ** 2 / sum(
        share**2 / (len(values) - 1) for share, values in zip(shares, (first, second), strict=True)
    )
    return t_quantile(freedom) * math.sqrt(sum(shares))


class Verdict(NamedTuple):
    """Whether a claim holds.

    Attributes:
        word: "holds", "does not hold", "within noise", "both diverged" or "unknown".
        difference: Mean accuracy of the cell that should be better minus that of the other; None if unknown.
        noise: Half width of its confidence interval; None without several seeds.
        reason: Why the word does not follow from the difference; "" if it does.
        is_paired: Whether the interval is that of the differences by seed.
    """

    word: str
    difference: float | None = None
    noise: float | None = None
    reason: str = ""
    is_paired: bool = False


def judge(claim: Claim, cells: Mapping[str, CellRecord]) -> Verdict:
    """Return whether a claim holds.

    Runs of one seed have the same order and augmentation of images. They are paired if the models also have equally
    many parameters: then they start from the same weights.
    """
    better, worse = cells[claim.better.key], cells[claim.worse.key]
    if not better.runs or not worse.runs:
        return Verdict("unknown", reason="runs are missing")
    if better.diverged or worse.diverged:
        shares = [len(cell.diverged) / len(cell.runs) for cell in (better, worse)]
        reason = " and ".join(
            f"{cell.label} diverged in {len(found.diverged)} of {len(found.runs)}"
            for cell, found in ((claim.better, better), (claim.worse, worse))
            if found.diverged
        )
        is_same = shares[0] == shares[1]
        word = "both diverged" if is_same else "holds" if shares[0] < shares[1] else "does not hold"
        return Verdict(word, reason=reason)
    is_paired = better.parameters == worse.parameters and better.runs.keys() == worse.runs.keys()
    if is_paired:
        differences = [one - other for one, other in zip(better.top1, worse.top1, strict=True)]
        difference, noise = mean(differences), mean_interval(differences)
    else:
        difference, noise = mean(better.top1) - mean(worse.top1), welch_interval(better.top1, worse.top1)
    if noise is None:
        return Verdict("unknown", difference, reason="one seed has no spread")
    word = "holds" if difference > noise else "does not hold" if difference < -noise else "within noise"
    return Verdict(word, difference, noise, is_paired=is_paired)
