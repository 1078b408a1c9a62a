"""The tables of benchmarks."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..report import Table
from .results import Measurement, Results, is_inline
from .studies import published_top1

ALL_MEASUREMENTS = (
    "All measurements; MB is the peak beyond weights and input; × time is relative to the best mode of the first in "
    "the same precision"
)
# Side length of a DeiT's patches in pixels.
PATCH = 16
MISSING = "–"
# Benchmarks in which InLine is not compared with the best of all others.
WITHOUT_BASELINE = ("layer", "revision", "window")
# Columns of candidates in a table of ratios; of more, each has a row, because lines would be too long for a terminal.
MOST_COLUMNS = 8


def summary_tables(results: Results) -> list[Table]:
    """Return the main results of a benchmark."""
    if results.what == "accuracy":
        return [accuracy_table(results)]
    if results.what == "detection":
        return [detection_table(results)]
    if results.what == "step":
        return [step_table(results)]
    if results.what == "scaling":
        return [ratio_table(results), exponents_table(results)]
    names = {one.name for one in results.measurements}
    if results.what in WITHOUT_BASELINE or len({is_inline(name) for name in names}) == 1:
        return [ratio_table(results)]
    return [best_table(results), *([ratio_table(results)] if len(names) > 2 else [])]


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
            "MB": megabytes(one),
            "cosine": MISSING if one.cosine is None else f"{one.cosine:.4f}",
            "× time": times(one, results),
        }
        if not any(one.cosine is not None for one in results.measurements):
            del cells["cosine"]
        if is_layer:
            del cells["images/s"]
        rows.append(cells)
    return Table(tuple(rows[0]), [tuple(cells.values()) for cells in rows], ALL_MEASUREMENTS)


def times(one: Measurement, results: Results) -> str:
    """Return the time relative to the first candidate's best mode in the same precision."""
    return f"{one.seconds.median / results.first[one.comparison, one.precision].seconds.median:.2f}"


def megabytes(one: Measurement) -> str:
    """Return the peak memory in MB, where it is known."""
    return MISSING if one.memory is None else three_digits(one.memory / 1e6)


def best_of(results: Iterable[Measurement]) -> Measurement | None:
    """Return the fastest of some measurements, if there are any."""
    return min(results, key=lambda one: one.seconds.median, default=None)


def best_table(results: Results) -> Table:
    """Return the fastest InLine beside the fastest of the others, in each comparison and precision."""
    rows = []
    for comparison, precision in results.first:
        found = [one for one in results.best if (one.comparison, one.precision) == (comparison, precision)]
        inline = best_of(one for one in found if is_inline(one.name))
        other = best_of(one for one in found if not is_inline(one.name))
        cells = [
            MISSING if one is None else f"{three_digits(1000 * one.seconds.median)} ({one.mode})"
            for one in (inline, other)
        ]
        ratio = f"{other.seconds.median / inline.seconds.median:.2f}" if inline and other else MISSING
        rows.append((f"{found[0].size}²", str(found[0].batch), precision, *cells, ratio))
    names = {one.name for one in results.measurements}
    labels = []
    for kind, label in ((True, "InLine"), (False, "others")):
        own = [name for name in names if is_inline(name) == kind]
        labels.append(own[0] if len(own) == 1 else label)
    headings = ("size", "batch", "precision", *(f"{label}, ms" for label in labels), "speed-up")
    caption = "The best mode of InLine and the best of its baseline, in the same precision; speed-up is their ratio"
    return Table(headings, rows, caption)


def ratio_table(results: Results) -> Table:
    """Return times relative to the first.

    One row per comparison, or per candidate if each is in one comparison or there are more than MOST_COLUMNS.
    """
    best = results.best
    precisions = list(dict.fromkeys(one.precision for one in best))

    def title(text: str, precision: str) -> str:
        return text if len(precisions) == 1 else f"{text}, {precision}"

    cells = {(one.comparison, one.precision, one.name): f"{times(one, results)} ({one.mode})" for one in best}
    names = list(dict.fromkeys(one.name for one in best))
    caption = "Time of the best mode, relative to the best mode of the first"
    rows: list[tuple[str, ...]]
    if len(names) == len(best) or len(results.first) == len(precisions):
        rows = [(title(name, precision), cell) for (_, precision, name), cell in cells.items()]
        return Table(("model", "× time"), rows, caption)
    titles = {key: title(*key) for key in results.first}
    if len(names) > MOST_COLUMNS:
        rows = [(name, *(cells.get((*key, name), MISSING) for key in titles)) for name in names]
        return Table(("model", *titles.values()), rows, caption)
    rows = [(text, *(cells.get((*key, name), MISSING) for name in names)) for key, text in titles.items()]
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
            megabytes(one),
            f"{(one.memory or 0) / (results.first[one.comparison, one.precision].memory or 1):.3f}",
        )
        for one in results.best
    ]
    headings = ("detector", "backbone", "GMACs", "s", "× time", "MB", "× memory")
    return Table(headings, rows, "Whole detectors; MB is the peak beyond weights and input; × is relative to the first")


def step_table(results: Results) -> Table:
    """Return the processor time of training steps, and after how many of them compilation has paid."""
    eager = {one.name: one.seconds.median for one in results.measurements if one.mode == "eager"}
    softmax = {one.mode: one.seconds.median for one in results.measurements if one.name.endswith("attention=softmax")}
    rows = []
    for one in results.measurements:
        median, before = one.seconds.median, eager.get(one.name)
        steps = MISSING
        if one.first_seconds is not None and before is not None:
            # Compilation takes wall time; a step that is alone on its cores takes as much as its processor time.
            steps = f"{one.first_seconds / (before - median):,.0f}" if median < before else "never"
        rows.append(
            (
                one.name,
                one.mode,
                three_digits(1000 * median),
                MISSING if one.mode not in softmax else f"{median / softmax[one.mode]:.2f}",
                MISSING if one.first_seconds is None else f"{one.first_seconds:.0f}",
                steps,
            )
        )
    headings = ("model", "mode", "ms of processor time", "× softmax", "first step, s", "pays after steps")
    caption = (
        "Processor time of a training step: forward, loss, backward, clipping, update; × softmax is relative to softmax"
        " in the same mode"
    )
    return Table(headings, rows, caption)


def exponents_table(results: Results) -> Table:
    """Return the exponents of time and memory in the number of tokens."""
    rows = []
    for name, points in results.by_name().items():
        tokens = [tokens_of(one) for one in points]
        half = len(points) // 2
        cells: list[float | None] = []
        memory = [one.memory for one in points if one.memory is not None]
        for values in ([one.seconds.median for one in points], memory):
            cells += [exponent(tokens, values), exponent(tokens[half:], values[half:])]
        sizes = f"{points[0].size}² … {points[-1].size}²"
        rows.append((name, sizes, *(MISSING if cell is None else f"{cell:.2f}" for cell in cells)))
    headings = ("model", "sizes", "time", "time, upper half", "memory", "memory, upper half")
    caption = "Exponents of the number of tokens, fitted by least squares: over all sizes and over the larger half"
    return Table(headings, rows, caption)


def exponent(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Return the slope of log y over log x by least squares; None for fewer than two points, or an incomplete y."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0]) if len(x) == len(y) > 1 else None


def tokens_of(one: Measurement) -> int:
    """Return the number of a DeiT's patch tokens."""
    return (one.size // PATCH) ** 2


def machine_table(records: Mapping[str, tuple[Results, dict[str, Any]]]) -> Table:
    """Return where and with which versions records, values of read_results() by name, were made."""
    rows = []
    for name, (results, facts) in records.items():
        machine, versions = results.machine, facts["versions"]
        packages = {
            "torch": versions["torch"],
            "timm": versions["timm"],
            **machine.get("packages", {}),
            "Python": versions["python"],
        }
        rows.append(
            (
                name,
                facts["created"][:10],
                f"{machine.get('gpu', machine['processor'])}, {machine['cores']} cores",
                f"{machine['memory'] / 2**30:.0f}",
                str(results.settings["threads"]),
                f"{machine['load']:g}",
                f"{machine['gemm_rate'] / 1e9:.0f}",
                ", ".join(f"{package} {version}" for package, version in packages.items()),
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
