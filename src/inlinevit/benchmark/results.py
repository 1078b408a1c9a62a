"""Measurements, and the JSON records that tables and figures are made from."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .timing import Quartiles


@dataclass(frozen=True)
class Measurement:
    """The result of a candidate in a mode.

    Attributes:
        comparison: Title of its comparison.
        name: Name of the candidate.
        mode: One of runtimes.MODES.
        size: Side length or height of its images, or its number of tokens.
        batch: Images per call.
        seconds: Seconds per call.
        rounds: Number of timed calls.
        flops: Floating-point operations per call on the reference path; backward counts twice as much as forward.
        memory: Peak bytes of a call beyond weights and input; None if another runtime than torch allocates them.
        gemm_rate: Floating-point operations per second of a large matrix product, timed in the same rounds.
        width: Width of its images if they are not square.
        runtime: What ran it.
        precision: "float32" or "int8".
        cosine: In int8, the cosine between its outputs and those in float32.
        first_seconds: Wall time of the first call, if it compiles the model; None if it was not measured.
    """

    comparison: str
    name: str
    mode: str
    size: int
    batch: int
    seconds: Quartiles
    rounds: int
    flops: float
    memory: int | None
    gemm_rate: float
    width: int | None = None
    runtime: str = "eager"
    precision: str = "float32"
    cosine: float | None = None
    first_seconds: float | None = None

    @property
    def images_per_second(self) -> float:
        """By the median time."""
        return self.batch / self.seconds.median

    @property
    def rate(self) -> float:
        """Floating-point operations per second, by the median time."""
        return self.flops / self.seconds.median


@dataclass
class Results:
    """The results of a benchmark.

    Attributes:
        what: Its name.
        settings: Its options.
        machine: See describe_machine(), with the median rate of the matrix products.
        measurements: In order.
        notes: What was left out, and why.
    """

    what: str
    settings: dict[str, Any]
    machine: dict[str, Any]
    measurements: list[Measurement]
    notes: list[str]

    @property
    def best(self) -> list[Measurement]:
        """The fastest mode of each candidate in each comparison and precision, in order."""
        best: dict[tuple[str, str, str], Measurement] = {}
        for one in self.measurements:
            key = one.comparison, one.name, one.precision
            if one.seconds.median < best.setdefault(key, one).seconds.median:
                best[key] = one
        return list(best.values())

    @property
    def first(self) -> dict[tuple[str, str], Measurement]:
        """The fastest mode of the first candidate, by comparison and precision."""
        found: dict[tuple[str, str], Measurement] = {}
        for one in self.best:
            found.setdefault((one.comparison, one.precision), one)
        return found

    @property
    def batches(self) -> list[int]:
        """The batch sizes, in order."""
        return list(dict.fromkeys(one.batch for one in self.measurements))

    def by_name(self, batch: int | None = None) -> dict[str, list[Measurement]]:
        """Return the fastest modes in the first precision by candidate, of one batch size or of all."""
        precision = self.measurements[0].precision
        found: dict[str, list[Measurement]] = {}
        for one in self.best:
            if one.precision == precision and (batch is None or one.batch == batch):
                found.setdefault(one.name, []).append(one)
        return found


def is_inline(name: str) -> bool:
    """Return whether a candidate has InLine attention, by its name, such as inline_deit_tiny:attention=softmax."""
    attention = name.partition("attention=")[2].partition(",")[0]
    return attention == "inline" if attention else name.lower().startswith("inline")


def read_results(path: Path) -> tuple[Results, dict[str, Any]]:
    """Read a JSON file of report.write_report: the results, and the date and versions."""
    content = json.loads(path.read_text())
    record = content["sections"]["benchmark"]
    record["measurements"] = [
        Measurement(**{**one, "seconds": Quartiles(*one["seconds"])}) for one in record["measurements"]
    ]
    return Results(**record), {"created": content["created"], "versions": content["versions"]}
