"""The tables of benchmarks."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..report import Table
from .results import Measurement, Results
from .studies import published_top1

ALL_MEASUREMENTS = (
    "All measurements; MB is the peak beyond weights and input; × time is relative to the best mode of the first"
)
# Side length of a DeiT's patches in pixels.
PATCH = 16
MISSING = "–"


def summary_tables(results: Results) -> list[Table]:
    """Return the main results of a benchmark."""
    if results.what == "accuracy":
        return [accuracy_table(results)]
    if results.what == "detection":
        return [detection_table(results)]
    if results.what == "scaling":
        return [ratio_table(results), exponents_table(results)]
    return [ratio_table(results)]


def full_table(results: Results) -> Table:
    """Return one row per measurement."""
    is_layer = results.what == "layer"
    rows = []
    for one in results.measurements:
        low, median, high = (three_digits(1000 * seconds) for seconds in one.seconds)
        pixels = f"{one.size}²" if one.width is None else f"{one.size}×{one.width}"
        cells = {
            "layer" if is_layer else "model": one.name,
            "tokens" if is_layer else "size": f"{one.size:,}" if is_layer else pixels,
            "batch": str(one.batch),
            "mode": one.mode,
            "ms": median,
            "quartiles": f"{low} – {high}",
            "images/s": three_digits(one.images_per_second),
            "GFLOP/s": f"{one.rate / 1e9:.0f}",
            "% of GEMM": f"{100 * one.rate / one.gemm_rate:.0f}",
            "MB": three_digits(one.memory / 1e6),
            "× time": times(one, results),
        }
        if is_layer:
            del cells["images/s"]
        rows.append(cells)
    return Table(tuple(rows[0]), [tuple(cells.values()) for cells in rows], ALL_MEASUREMENTS)


def times(one: Measurement, results: Results) -> str:
    """Return the time relative to the first candidate's best mode."""
    return f"{one.seconds.median / results.first[one.comparison].seconds.median:.2f}"


def ratio_table(results: Results) -> Table:
    """Return times relative to the first: one row per comparison, or per candidate if each is in one comparison."""
    best = results.best
    cells = {(one.comparison, one.name): f"{times(one, results)} ({one.mode})" for one in best}
    names = list(dict.fromkeys(one.name for one in best))
    caption = "Time of the best mode, relative to the best mode of the first"
    if len(names) == len(best):
        return Table(("model", "× time"), [(name, cell) for (_, name), cell in cells.items()], caption)
    rows = [(title, *(cells.get((title, name), MISSING) for name in names)) for title in results.first]
    return Table(("", *names), rows, caption)


def accuracy_table(results: Results) -> Table:
    """Return accuracy and time of the best mode, InLine beside softmax."""
    rows = []
    for one in results.best:
        shown = (f"{one.size}²", str(one.batch), f"{published_top1(one.name):.1f}", one.mode)
        rows.append((one.name, *shown, three_digits(1000 / one.images_per_second), times(one, results)))
    headings = ("model", "size", "batch", "top-1 %", "best mode", "ms per image", "time ÷ InLine's")
    return Table(headings, rows, "Published accuracy and measured time of the best mode")


def detection_table(results: Results) -> Table:
    """Return cost, time and memory of each detector."""
    rows = [
        (
            one.comparison,
            one.name,
            f"{one.flops / 2e9:.0f}",
            f"{one.seconds.median:.2f}",
            times(one, results),
            three_digits(one.memory / 1e6),
            f"{one.memory / results.first[one.comparison].memory:.3f}",
        )
        for one in results.best
    ]
    headings = ("detector", "backbone", "GMACs", "s", "× time", "MB", "× memory")
    return Table(headings, rows, "Whole detectors; MB is the peak beyond weights and input; × is relative to the first")


def exponents_table(results: Results) -> Table:
    """Return the exponents of time and memory in the number of tokens."""
    rows = []
    for name, points in results.by_name().items():
        tokens = [tokens_of(one) for one in points]
        half = len(points) // 2
        cells: list[float | None] = []
        for values in ([one.seconds.median for one in points], [one.memory for one in points]):
            cells += [exponent(tokens, values), exponent(tokens[half:], values[half:])]
        sizes = f"{points[0].size}² … {points[-1].size}²"
        rows.append((name, sizes, *(MISSING if cell is None else f"{cell:.2f}" for cell in cells)))
    headings = ("model", "sizes", "time", "time, upper half", "memory", "memory, upper half")
    caption = "Exponents of the number of tokens, fitted by least squares: over all sizes and over the larger half"
    return Table(headings, rows, caption)


def exponent(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Return the slope of log y over log x by least squares; None for fewer than two points."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0]) if len(x) > 1 else None


def tokens_of(one: Measurement) -> int:
    """Return the number of a DeiT's patch tokens."""
    return (one.size // PATCH) ** 2


def machine_table(records: Mapping[str, tuple[Results, dict[str, Any]]]) -> Table:
    """Return where and with which versions records, values of read_results() by name, were made."""
    rows = []
    for name, (results, facts) in records.items():
        machine, versions = results.machine, facts["versions"]
        rows.append(
            (
                name,
                facts["created"][:10],
                f"{machine.get('gpu', machine['processor'])}, {machine['cores']} cores",
                f"{machine['memory'] / 2**30:.0f}",
                str(results.settings["threads"]),
                f"{machine['load']:g}",
                f"{machine['gemm_rate'] / 1e9:.0f}",
                f"torch {versions['torch']}, timm {versions['timm']}, Python {versions['python']}",
            )
        )
    headings = ("record", "date", "machine", "GiB", "threads", "load before", "GEMM GFLOP/s", "versions")
    return Table(headings, rows, "Machines")


def three_digits(value: float) -> str:
    """Format as 0.123, 1.23, 12.3, 123, 1,234."""
    for limit, digits in ((1, 3), (10, 2), (100, 1)):
        if value < limit:
            return f"{value:.{digits}f}"
    return f"{value:,.0f}"
