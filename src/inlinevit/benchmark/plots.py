"""The figures of benchmarks."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from matplotlib.figure import Figure

from ..report import STYLES, WIDTH, Line, Panel, Style, add_legend, lines_figure, log_axis, plot_style
from .options import FAMILIES
from .results import Measurement, Results
from .studies import published_top1
from .tables import tokens_of

# For the projections alone and for forced paths of InLine attention.
OTHER_STYLES = {
    "projections": Style("projections", "#000000", "x", "-."),
    "InLine, folded": Style("InLine, folded", "#CC79A7", "v", ":"),
    "InLine, covariance": Style("InLine, covariance", "#D55E00", "D", ":"),
    "InLine, explicit": Style("InLine, explicit", "#56B4E9", "P", ":"),
}
MODE_STYLES = {
    "eager": Style("eager", "#0072B2", "s", ""),
    "compiled": Style("compiled", "#E69F00", "^", ""),
    "optimized": Style("optimized", "#009E73", "o", ""),
    "optimized-int8": Style("optimized-int8", "#56B4E9", "D", ""),
    "openvino": Style("openvino", "#D55E00", "v", ""),
    "openvino-int8": Style("openvino-int8", "#CC79A7", "P", ""),
    "onnxruntime": Style("onnxruntime", "#000000", "x", ""),
    "onnxruntime-int8": Style("onnxruntime-int8", "#F0E442", "p", ""),
}
# Files for images of any size.
MODE_STYLES |= {
    f"exported-{name}": replace(MODE_STYLES[name], name=f"exported-{name}", hollow=True)
    for name in ("onnxruntime", "onnxruntime-int8", "openvino", "openvino-int8")
}
SIZE_LETTERS = {"tiny": "T", "small": "S", "medium": "M", "base": "B", "large": "L"}


def make_figure(results: Results) -> tuple[Figure, str]:
    """Return the figure of a benchmark and its caption."""
    return FIGURES.get(results.what, modes_figure)(results)


def style_of(name: str) -> Style:
    """Return the style of a layer or a model: that of its attention."""
    if name in OTHER_STYLES:
        return OTHER_STYLES[name]
    attention = name.partition("attention=")[2] or ("inline" if name.lower().startswith("inline") else name)
    return STYLES.get(attention, STYLES["softmax"])


def time_line(points: Sequence[Measurement], x: Sequence[float]) -> Line:
    """Return milliseconds per image, with their quartiles."""
    low, median, high = ([1000 * one.seconds[i] / one.batch for one in points] for i in range(3))
    style = style_of(points[0].name)
    if points[0].precision != "float32":
        style = replace(style, name=f"{style.name}, {points[0].precision}", dash=":", hollow=True)
    return Line(style, x, median, low, high)


def time_figure(
    results: Results, *, x_label: str, x_of: Callable[[Measurement], int], caption: str, y_label: str = "ms per image"
) -> tuple[Figure, str]:
    """Plot time over what x_of() returns, one panel per batch size."""
    panels = []
    for batch in results.batches:
        lines: dict[tuple[str, str], list[Measurement]] = {}
        for one in results.best:
            if one.batch == batch:
                # A model with windows of several sizes is one line.
                lines.setdefault((one.name.partition(":window_size=")[0], one.precision), []).append(one)
        found = [time_line(points, [x_of(one) for one in points]) for points in lines.values()]
        panels.append(Panel(x_label, y_label, found, "" if results.what == "layer" else f"batch {batch}"))
    return lines_figure(panels, log_x=True, log_y=True), caption


def scaling_figure(results: Results) -> tuple[Figure, str]:
    """Plot time and memory over tokens."""
    time_lines, memory_lines = [], []
    for name, points in results.by_name(results.batches[0]).items():
        tokens = [tokens_of(one) for one in points]
        time_lines.append(time_line(points, tokens))
        memory = [one.memory / 1e6 for one in points if one.memory is not None]
        if len(memory) == len(tokens):
            memory_lines.append(Line(style_of(name), tokens, memory))
    panels = [Panel("tokens", "ms per image", time_lines)]
    if memory_lines:
        panels.append(Panel("tokens", "peak MB", memory_lines))
    figure = lines_figure(panels, log_x=True, log_y=True)
    return figure, "Time and peak memory of DeiT-T over the number of tokens, on logarithmic scales."


def accuracy_figure(results: Results) -> tuple[Figure, str]:
    """Plot published accuracy over measured time, one panel per family."""
    found = results.by_name(results.batches[0])
    panels = []
    for family, models in FAMILIES.items():
        lines = []
        for names in (models.keys(), models.values()):
            points = [found[name][0] for name in names if name in found]
            if points:
                line = time_line(points, [1000 / one.images_per_second for one in points])
                letters = [letter for one in points for word, letter in SIZE_LETTERS.items() if word in one.name]
                top1 = [published_top1(one.name) for one in points]
                lines.append(replace(line, y=top1, low=(), high=(), notes=letters))
        if lines:
            panels.append(Panel("ms per image", "top-1, %", lines, family))
    caption = "Published accuracy over measured time in the best mode; T, S, M, B, L are the sizes of the models."
    return lines_figure(panels, log_x=True), caption


@plot_style
def modes_figure(results: Results) -> tuple[Figure, str]:
    """Plot one row per model and comparison, with one marker per mode at its images per second."""
    rows = list(dict.fromkeys((one.comparison, one.name) for one in results.measurements))
    figure = Figure(figsize=(WIDTH, 1.2 + 0.42 * len(rows)))
    axes = figure.subplots()
    handles = []
    modes = list(dict.fromkeys(one.mode for one in results.measurements))
    for number, mode in enumerate(modes):
        style = MODE_STYLES[mode]
        points = [one for one in results.measurements if one.mode == mode]
        rates = [one.images_per_second for one in points]
        errors = [
            [rate - one.batch / one.seconds.high for rate, one in zip(rates, points, strict=True)],
            [one.batch / one.seconds.low - rate for rate, one in zip(rates, points, strict=True)],
        ]
        # Modes are shifted, so that error bars do not overlap.
        shift = 0.66 * ((number + 0.5) / len(modes) - 0.5)
        places = [rows.index((one.comparison, one.name)) + shift for one in points]
        handles.append(axes.errorbar(rates, places, xerr=errors, **style.line, capsize=2))
    is_unique = len({name for _, name in rows}) == len(rows)
    axes.set_yticks(range(len(rows)), [name if is_unique else f"{name}, {comparison}" for comparison, name in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlabel("images per second")
    log_axis(axes.xaxis)
    add_legend(figure, handles)
    return figure, "Images per second: medians, and bars from quartile to quartile."


@plot_style
def detection_figure(results: Results) -> tuple[Figure, str]:
    """Plot time and memory of each detector as bars."""
    best = results.best
    has_kinds = len({one.comparison for one in best}) > 1
    names = [f"{one.name}, {one.comparison}" if has_kinds else one.name for one in best]
    panels = {"s": [one.seconds.median for one in best], "peak MB": [(one.memory or 0) / 1e6 for one in best]}
    figure = Figure(figsize=(WIDTH, 1.2 + 0.42 * len(names)))
    (grid,) = figure.subplots(1, len(panels), sharey=True, squeeze=False)
    for axes, (label, values) in zip(grid, panels.items(), strict=True):
        bars = axes.barh(range(len(names)), values, color=[style_of(one.name).color for one in best])
        axes.bar_label(bars, fmt="{:.3g}" if max(values) < 1000 else "{:,.0f}", padding=3, fontsize=9)
        axes.set_xlabel(label)
        axes.margins(x=0.18)
    grid[0].set_yticks(range(len(names)), names)
    grid[0].set_ylim(len(names) - 0.4, -0.6)
    return figure, "Time and peak memory of whole detectors on one image."


FIGURES: dict[str, Callable[[Results], tuple[Figure, str]]] = {
    "layer": partial(
        time_figure,
        x_label="tokens",
        x_of=lambda one: one.size,
        y_label="ms per call",
        caption="Time of an attention layer over its tokens, in its best mode.",
    ),
    "window": partial(
        time_figure,
        x_label="side length of the windows, tokens",
        x_of=lambda one: int(one.name.partition("window_size=")[2]),
        caption="Time of Swin-T at 224² over the size of its windows.",
    ),
    "resolution": partial(
        time_figure,
        x_label="side length of the images, pixels",
        x_of=lambda one: one.size,
        caption="Time of DeiT-T over the resolution, in its best mode.",
    ),
    "scaling": scaling_figure,
    "accuracy": accuracy_figure,
    "detection": detection_figure,
}
