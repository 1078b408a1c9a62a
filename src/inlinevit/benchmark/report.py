"""Results as tables, drawings, reports and Markdown. All of them are made from what the JSON file holds."""

import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from math import log
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from ..report import Block, Picture, Report, Section, Table, Text
from ..report.plots import svg_bytes
from ..utils.atomic import atomic_write_bytes
from .machine import GEMM_SIDE
from .measure import Measurement, Results, best_modes, from_json
from .options import BENCHES, FAMILIES
from .plots import Line, LinesPanel, attention_line, bars_figure, lines_figure, modes_figure, style_of
from .studies import published_top1

ALL_MEASUREMENTS = (
    "All measurements; MB at the peak, beyond weights and input; × time: as a multiple of the first's best mode"
)
# Pixels along a side of a DeiT's patches.
PATCH = 16


def blocks(results: Results) -> list[Block]:
    """What is to be read, in order."""
    figure, alt = draw(results)
    return [
        Text(conditions_sentence(results)),
        *summary_tables(results),
        Picture(figure, alt, alt),
        full_table(results),
        *(Text(f"{note}.") for note in results.notes),
    ]


def conditions_sentence(results: Results) -> str:
    """How it was measured, in a few words."""
    settings, machine = results.settings, results.machine
    what = "Forward and backward" if settings["backward"] else "Forward"
    threads = f"{settings['threads']} thread{'s' if settings['threads'] > 1 else ''}"
    where = f"{machine['gpu']}" if "gpu" in machine else f"{threads} of {machine['processor']}"
    rounds = sorted({one.rounds for one in results.measurements})
    span = f"{rounds[0]}" if len(rounds) == 1 else f"{rounds[0]} to {rounds[-1]}" if rounds else "no"
    return (
        f"{what}, float32, {where} ({machine['cores']} cores, {machine['memory'] / 2**30:.0f} GiB, load "
        f"{machine['load']:g} before), {span} rounds in turns. A {GEMM_SIDE}³ matrix product between the others "
        f"reached {machine['gemm_rate'] / 1e9:.0f} GFLOP/s."
    )


def full_table(results: Results) -> Table:
    """A row for each measurement."""
    is_layer = results.what == "layer"
    first_of, best = firsts(results), best_modes(results.measurements)
    fastest = {(one.turn, one.name): one.seconds.median for one in best}
    rows = [
        (
            one.name,
            f"{one.size:,}" if is_layer else size_in_pixels(one),
            str(one.batch),
            one.mode,
            three_digits(1000 * one.seconds.median),
            f"{three_digits(1000 * one.seconds.low)} – {three_digits(1000 * one.seconds.high)}",
            *(() if is_layer else (three_digits(one.images_per_second),)),
            f"{one.rate / 1e9:.0f}",
            f"{100 * one.share_of_peak:.0f}",
            three_digits(one.memory / 1e6),
            f"{one.seconds.median / fastest[one.turn, first_of[one.turn]]:.2f}",
        )
        for one in results.measurements
    ]
    headings = (
        "layer" if is_layer else "model",
        "tokens" if is_layer else "size",
        "batch",
        "mode",
        "ms",
        "quartiles",
        *(() if is_layer else ("images/s",)),
        "GFLOP/s",
        "% of GEMM",
        "MB",
        "× time",
    )
    return Table(headings, rows, ALL_MEASUREMENTS)


def firsts(results: Results) -> dict[str, str]:
    """The name of the first candidate of each turn."""
    names: dict[str, str] = {}
    for one in results.measurements:
        names.setdefault(one.turn, one.name)
    return names


def summary_tables(results: Results) -> list[Table]:
    """What the benchmark is for, in small tables."""
    if results.what == "accuracy":
        return [accuracy_table(results)]
    if results.what == "detection":
        return [detection_table(results)]
    tables = [ratio_table(results)]
    return [*tables, exponents_table(results)] if results.what == "scaling" else tables


def ratio_table(results: Results) -> Table:
    """Best modes against the first's best mode: a row for each turn, or for each candidate if none has two turns."""
    best = best_modes(results.measurements)
    found = {(one.turn, one.name): one for one in best}
    first_of = firsts(results)
    names = list(dict.fromkeys(one.name for one in best))

    def cell(turn: str, name: str) -> str:
        if (turn, name) not in found:
            return "–"
        one, first = found[turn, name], found[turn, first_of[turn]]
        return f"{one.seconds.median / first.seconds.median:.2f} ({one.mode})"

    caption = "Time of the best mode, as a multiple of the first's best mode"
    if len(names) == len(best):
        return Table(("model", "× time"), [(one.name, cell(one.turn, one.name)) for one in best], caption)
    return Table(("", *names), [(turn, *(cell(turn, name) for name in names)) for turn in first_of], caption)


def accuracy_table(results: Results) -> Table:
    """Accuracy and time of the best mode, InLine beside softmax."""
    rows = []
    best = best_modes(results.measurements)
    first_of = {one.turn: one for one in reversed(best)}
    for one in best:
        ratio = one.seconds.median / first_of[one.turn].seconds.median
        shown = (f"{one.size}²", str(one.batch), f"{published_top1(one.name):.1f}", one.mode)
        rows.append((one.name, *shown, three_digits(1000 / one.images_per_second), f"{ratio:.2f}"))
    headings = ("model", "size", "batch", "top-1 %", "best mode", "ms per image", "time ÷ InLine's")
    return Table(headings, rows, "Published accuracy and measured time of the best mode")


def detection_table(results: Results) -> Table:
    """Cost, time and memory of each detector."""
    best = best_modes(results.measurements)
    first_of = {one.turn: one for one in reversed(best)}
    rows = [
        (
            one.turn,
            one.name,
            f"{one.flops / 2e9:.0f}",
            f"{one.seconds.median:.2f}",
            f"{one.seconds.median / first_of[one.turn].seconds.median:.2f}",
            three_digits(one.memory / 1e6),
            f"{one.memory / first_of[one.turn].memory:.3f}",
        )
        for one in best
    ]
    headings = ("detector", "backbone", "GMACs", "s", "× time", "MB", "× memory")
    return Table(
        headings, rows, "Whole detectors; MB at the peak, beyond weights and input; × as multiples of the first"
    )


def exponents_table(results: Results) -> Table:
    """The exponents of time and memory in the number of tokens."""
    rows = []
    for name, points in by_name(results).items():
        tokens = [float(tokens_of(one)) for one in points]
        half = len(points) // 2
        cells = []
        for values in ([one.seconds.median for one in points], [float(one.memory) for one in points]):
            cells += [exponent(tokens, values), exponent(tokens[half:], values[half:])]
        sizes = f"{points[0].size}² … {points[-1].size}²"
        rows.append((name, sizes, *("–" if cell is None else f"{cell:.2f}" for cell in cells)))
    headings = ("model", "sizes", "time", "time, upper half", "memory", "memory, upper half")
    caption = (
        "Exponents of the number of tokens, fitted by least squares: over all sizes and over the larger half of them"
    )
    return Table(headings, rows, caption)


def exponent(x: Sequence[float], y: Sequence[float]) -> float | None:
    """The slope of log y over log x by least squares; None for fewer than two points."""
    if len(x) < 2:
        return None
    a, b = [log(value) for value in x], [log(value) for value in y]
    mean_a, mean_b = sum(a) / len(a), sum(b) / len(b)
    products = sum((p - mean_a) * (q - mean_b) for p, q in zip(a, b, strict=True))
    return products / sum((p - mean_a) ** 2 for p in a)


def tokens_of(one: Measurement) -> int:
    """Tokens of a DeiT's map."""
    return (one.size // PATCH) ** 2


def by_name(results: Results, batch: int | None = None) -> dict[str, list[Measurement]]:
    """Best modes by candidate."""
    points: dict[str, list[Measurement]] = {}
    for one in best_modes(results.measurements):
        if batch is None or one.batch == batch:
            points.setdefault(one.name, []).append(one)
    return points


def draw(results: Results) -> tuple[Figure, str]:
    """The drawing, and what it shows in a sentence."""
    return DRAWINGS.get(results.what, draw_models)(results)


def draw_layer(results: Results) -> tuple[Figure, str]:
    """Time over tokens."""
    lines = [timed_line(name, points, [one.size for one in points]) for name, points in by_name(results).items()]
    panel = LinesPanel("tokens", "ms per call", lines)
    return lines_figure(
        [panel], log_x=True, log_y=True
    ), "Time of an attention layer over its tokens, in its best mode."


def draw_models(results: Results) -> tuple[Figure, str]:
    """Images per second of each model, a mark for each mode."""
    return modes_figure(results.measurements), "Images per second: medians, and bars from quartile to quartile."


def draw_window(results: Results) -> tuple[Figure, str]:
    """Time over the side of the windows."""
    panels = []
    for batch in batches(results):
        families: dict[str, list[Measurement]] = {}
        for name, (point,) in by_name(results, batch).items():
            families.setdefault(name.partition(":")[0], []).append(point)
        lines = [
            timed_line(name, points, [int(point.name.partition("window_size=")[2]) for point in points])
            for name, points in families.items()
        ]
        panels.append(LinesPanel("side of the windows, tokens", "ms per image", lines, f"batch {batch}"))
    return lines_figure(panels, log_x=True, log_y=True), "Time of Swin-T at 224² over the size of its windows."


def draw_resolution(results: Results) -> tuple[Figure, str]:
    """Time over the side of the images."""
    panels = [
        LinesPanel(
            "side of the image, pixels",
            "ms per image",
            [
                timed_line(name, points, [one.size for one in points])
                for name, points in by_name(results, batch).items()
            ],
            f"batch {batch}",
        )
        for batch in batches(results)
    ]
    return lines_figure(panels, log_x=True, log_y=True), "Time of DeiT-T over the resolution, in its best mode."


def draw_scaling(results: Results) -> tuple[Figure, str]:
    """Time and memory over tokens."""
    points_by_name = by_name(results, batches(results)[0])
    time_lines = [timed_line(name, points, [tokens_of(p) for p in points]) for name, points in points_by_name.items()]
    memory_lines = [
        attention_line(name, [tokens_of(p) for p in points], [p.memory / 1e6 for p in points])
        for name, points in points_by_name.items()
    ]
    panels = [LinesPanel("tokens", "ms per image", time_lines), LinesPanel("tokens", "MB at the peak", memory_lines)]
    figure = lines_figure(panels, log_x=True, log_y=True)
    return figure, "Time and peak memory of DeiT-T over the number of tokens, on logarithmic scales."


def draw_accuracy(results: Results) -> tuple[Figure, str]:
    """Published accuracy over measured time, a panel for each family."""
    points = by_name(results, batches(results)[0])
    panels = []
    for family, pairs in FAMILIES.items():
        lines = []
        for place in (0, 1):
            names = [name for pair in pairs if (name := pair[place]) is not None]
            measured = [points[name][0] for name in names if name in points]
            if measured:
                times = [1000 / one.images_per_second for one in measured]
                line = attention_line(measured[0].name, times, [published_top1(one.name) for one in measured])
                lines.append(line._replace(marks=[size_letter(one.name) for one in measured]))
        if lines:
            panels.append(LinesPanel("ms per image", "top-1, %", lines, family))
    figure = lines_figure(panels, log_x=True, log_y=False)
    return figure, "Published accuracy over measured time in the best mode; T, S, M, B, L are the sizes of the models."


def draw_detection(results: Results) -> tuple[Figure, str]:
    """Time and memory as bars."""
    best = best_modes(results.measurements)
    has_kinds = len({one.turn for one in best}) > 1
    names = [f"{one.name}, {one.turn}" if has_kinds else one.name for one in best]
    panels = {"s": [one.seconds.median for one in best], "MB at the peak": [one.memory / 1e6 for one in best]}
    styles = [style_of(one.name) for one in best]
    return bars_figure(names, styles, panels), "Time and peak memory of whole detectors on one image."


DRAWINGS: dict[str, Callable[[Results], tuple[Figure, str]]] = {
    "layer": draw_layer,
    "window": draw_window,
    "resolution": draw_resolution,
    "scaling": draw_scaling,
    "accuracy": draw_accuracy,
    "detection": draw_detection,
}


def timed_line(name: str, points: Sequence[Measurement], x: Sequence[float]) -> Line:
    """Milliseconds per image, with their quartiles."""
    low, median, high = ([1000 * one.seconds[i] / one.batch for one in points] for i in range(3))
    return attention_line(name, x, median)._replace(low=low, high=high)


def size_letter(model: str) -> str:
    """T for a model called tiny, …."""
    words = {"tiny": "T", "small": "S", "medium": "M", "base": "B", "large": "L"}
    return next(letter for word, letter in words.items() if word in model)


def batches(results: Results) -> list[int]:
    """Those that were measured."""
    return list(dict.fromkeys(one.batch for one in results.measurements))


def size_in_pixels(one: Measurement) -> str:
    """224², or 800×1344 (height and width) where images are no squares."""
    return f"{one.size}²" if one.width is None else f"{one.size}×{one.width}"


def three_digits(value: float) -> str:
    """0.123, 1.23, 12.3, 123, 1,234."""
    for limit, digits in ((1, 3), (10, 2), (100, 1)):
        if value < limit:
            return f"{value:.{digits}f}"
    return f"{value:,.0f}"


def print_results(results: Results, console: Console) -> None:
    """Tables for a terminal; what is no terminal has room for all columns."""
    if not console.is_terminal:
        console = Console(file=console.file, width=200)
    console.print(conditions_sentence(results), highlight=False)
    for table in (full_table(results), *summary_tables(results)):
        shown = RichTable(*table.headings, title=table.caption, box=box.SIMPLE_HEAD)
        for column in shown.columns:
            column.no_wrap = True
        for column in shown.columns[1:]:
            column.justify = "right"
        for row in table.rows:
            shown.add_row(*row)
        console.print(shown)
    for note in results.notes:
        console.print(f"{note}.", highlight=False)


def write_report(results: Results, folder: Path, name: str) -> Path:
    """Write NAME.json, NAME.html, NAME.png and NAME.svg; returns the path of the page."""
    is_bench = results.what in BENCHES
    title = f"inlinevit bench {results.what}" if is_bench else "Models as they are and as they were"
    measured = BENCHES[results.what].help if is_bench else f"the models against those of {results.settings['revision']}"
    report = Report(title, f"Measured: {measured}.")
    record = {field.name: vars(results)[field.name] for field in fields(Results)}
    record["measurements"] = [asdict(one) for one in results.measurements]
    report.add(Section("benchmark", name, blocks(results), record))
    page = report.write(folder, name)
    # Drawn anew: matplotlib moves things a little each time that it saves a figure.
    figure = draw(results)[0]
    write_svg(figure, folder / f"{name}.svg")
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=150, bbox_inches="tight")
    atomic_write_bytes(folder / f"{name}.png", content.getvalue())
    return page


def write_svg(figure: Figure, path: Path) -> None:
    """The same figure makes the same file."""
    atomic_write_bytes(path, svg_bytes(figure))


def read_results(path: Path) -> tuple[Results, dict[str, Any]]:
    """What write_report() has written as JSON: the results, and when and with which versions they were made."""
    content = json.loads(path.read_text())
    record = content["sections"]["benchmark"]
    record["measurements"] = [from_json(one) for one in record["measurements"]]
    return Results(**record), {"created": content["created"], "versions": content["versions"]}


def markdown(results: Results, picture: str) -> str:
    """Tables and drawing for a document.

    Args:
        results: What came out.
        picture: Path of the drawing, as the document knows it.
    """
    parts = []
    for block in blocks(results):
        if isinstance(block, Picture):
            parts.append(f"![{block.alt}]({picture})")
        elif isinstance(block, Table) and block.caption == ALL_MEASUREMENTS:
            parts.append(f"<details><summary>{block.caption}</summary>\n\n{markdown_table(block)}\n\n</details>")
        elif isinstance(block, Table):
            parts.append(f"{block.caption}:\n\n{markdown_table(block)}")
        elif isinstance(block, Text):
            parts.append(block.text)
    return "\n\n".join(parts) + "\n"


def markdown_table(table: Table) -> str:
    """A table for a document."""
    rows = [table.headings, ["---"] * len(table.headings), *table.rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def machine_markdown(records: Mapping[str, tuple[Results, dict[str, Any]]]) -> str:
    """Where and with what records were made, for a document.

    Args:
        records: What read_results() gives, by name.
    """
    if not records:
        return "Nothing is recorded yet.\n"
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
    return markdown_table(Table(headings, rows, "")) + "\n"


def put_between(page: str, name: str, content: str) -> str:
    """The page with other content between the marks of a name."""
    marks = re.compile(rf"(?<=<!-- {re.escape(name)} -->\n).*?(?=<!-- /{re.escape(name)} -->)", re.DOTALL)
    if len(marks.findall(page)) != 1:
        raise ValueError(f"the page should have <!-- {name} --> and, below it, <!-- /{name} -->, once each")
    return marks.sub(lambda _: f"\n{content}\n", page)
