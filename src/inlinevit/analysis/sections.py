"""Analyses of models as sections of a report: figures, tables, and a verdict in words."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from itertools import zip_longest
from math import isfinite
from statistics import fmean
from typing import Any

from torch import Tensor

from ..report import Block, Picture, Section, Table, Text, styles_of
from .confusion import Confusion
from .locality import LayerLocality
from .map_plots import View, maps_figure, mean_over_heads
from .masking import Masking
from .plots import Styles, adds_convolution, confusion_figure, locality_figure, masking_figure

# Attentions that are injective in theory: different queries have different weights.
INJECTIVE = ("softmax", "inline")
# Headings of masking, after the side length of the neighbourhood.
HIDDEN = {"near": "hidden", "random": "random tokens hidden"}
# Significant digits of weights in JSON, as many as float32 has.
DIGITS = 7
MISSING = "–"


@dataclass
class Analysis:
    """The analysis of a model.

    Attributes:
        label: Name of the model in the report.
        attention: Name of its attention; several names are joined by +.
        confusion: See measure_confusion.
        locality: See measure_locality; empty if no layer's keys are the tokens of the feature map.
        views: Attention maps of some queries, which are the same for all models.
        masking: See measure_masking; None if it could not be measured.
        no_masking: The reason why it could not.
    """

    label: str
    attention: str
    confusion: Confusion
    locality: list[LayerLocality]
    views: list[View]
    masking: Masking | None = None
    no_masking: str = ""


def analysis_sections(analyses: Sequence[Analysis]) -> list[Section]:
    """Return the sections confusion, locality, masking and maps, each with all models side by side."""
    # A model with several attentions has the style of the first.
    styles = styles_of({one.label: one.attention.partition("+")[0] for one in analyses})
    return [
        confusion_section(analyses, styles),
        locality_section(analyses, styles),
        masking_section(analyses, styles),
        maps_section(analyses),
    ]


def make_section(
    key: str, title: str, intro: str, verdict: str, results: Sequence[Block], what_to_look_for: str, data: Any
) -> Section:
    """Return a section: what was measured, the verdict, figures and tables, and how to read them."""
    last = Text(f"What to look for: {what_to_look_for}")
    blocks = [Text(intro), Text(verdict, is_key=True), *results, last]
    return Section(key, title, blocks, {"verdict": verdict, "models": to_json(data)})


def empty_section(key: str, title: str, notes: Sequence[Text]) -> Section:
    """Return a section without results, and the reasons."""
    return Section(key, title, notes, {"verdict": None, "models": {}})


def confusion_section(analyses: Sequence[Analysis], styles: Styles) -> Section:
    """Report different queries with the same weights."""
    found = {one.label: one.confusion for one in analyses}
    epsilon, delta = analyses[0].confusion.epsilon, analyses[0].confusion.delta
    rows = [
        (
            name,
            str(len(one.per_image)),
            f"{one.pairs:,}",
            f"{one.confused:,}",
            short_percent(one.fraction),
            f"{sum(count > 0 for count in one.per_image)} of {len(one.per_image)}",
        )
        for name, one in found.items()
    ]
    columns = {name: [short_percent(layer.fraction) for layer in one.layers] for name, one in found.items()}
    return make_section(
        "confusion",
        "Different queries, the same attention",
        "Each query has a row of attention weights. Two queries of one image are confused if they differ (by more than "
        f"{delta:g} of the larger norm) but have the same row (up to {epsilon:g} of its norm): the difference between "
        "them is lost to the model.",
        confusion_verdict(analyses),
        [
            Picture(
                confusion_figure(found, styles),
                "On the left, one histogram per model: images by the number of their confused pairs. On the right, the "
                "percentage of confused pairs by layer. The tables have the numbers.",
                f"Pairs of queries of one head that differ by more than δ = {delta:g}, and whose rows differ by at "
                f"most ε = {epsilon:g}, both relative to the larger norm. Left: images by the number of such pairs, "
                "with a separate bar for zero. Right: their percentage by layer; models are shifted slightly.",
            ),
            Table(
                ("model", "images", "pairs of different queries", "confused", "confused %", "images with any"),
                rows,
                "Pairs of queries of the same image, layer, head and window",
            ),
            layers_table(columns, "Confused pairs by layer, % of the pairs of different queries"),
        ],
        "softmax and InLine attention are injective, so they should confuse almost no queries. Linear attention "
        "divides by the sum of its scores and so loses the length of a query: queries of one direction (after φ) have "
        "the same row. Rows that are nearly uniform count as the same, too, so a layer with nearly uniform attention "
        "confuses queries whatever its kind.",
        found,
    )


def confusion_verdict(analyses: Sequence[Analysis]) -> str:
    """Return how many pairs each model confuses, and whether theory predicts that."""
    listed = join_words(f"{one.label} {short_percent(one.confusion.fraction)} %" for one in analyses)
    verdict = f"Of all pairs of different queries, these percentages have the same row: {listed}."
    injective = [one.confusion.fraction for one in analyses if one.attention in INJECTIVE]
    linear = [one.confusion.fraction for one in analyses if one.attention == "linear"]
    if not injective or not linear:
        return verdict
    if min(linear) > max(injective):
        return f"{verdict} As theory predicts, linear attention confuses more pairs than injective attentions."
    return (
        f"{verdict} In theory, linear attention may confuse queries and injective ones may not: this is not visible "
        "here."
    )


def locality_section(analyses: Sequence[Analysis], styles: Styles) -> Section:
    """Report the weight of each query's neighbourhood."""
    found = {one.label: one.locality for one in analyses if one.locality}
    key, title = "locality", "Attention to the neighbourhood"
    left_out = [one.label for one in analyses if len(one.locality) < len(one.confusion.layers)]
    reason = "whose keys come from a reduced feature map are left out: such keys are in no query's neighbourhood."
    notes = [Text(f"Layers of {join_words(left_out)} {reason}")] if left_out else []
    if not found:
        return empty_section(key, title, notes)
    convolution = "with its convolution"
    headings = ("model", "uniform", "weight", convolution, "% of absolute weights", f"{convolution}, %")
    columns: dict[str, list[str]] = {}
    rows = []
    for name, layers in found.items():
        uniform, attention, total, attention_share, total_share = (
            fmean(vars(layer)[field] for layer in layers)
            for field in ("uniform", "attention", "total", "attention_share", "total_share")
        )
        columns[name] = [f"{layer.attention:.3f}" for layer in layers]
        cells = [f"{uniform:.3f}", f"{attention:.3f}", MISSING, f"{100 * attention_share:.1f}", MISSING]
        if adds_convolution(layers):
            columns[f"{name}, {convolution}"] = [f"{layer.total:.3f}" for layer in layers]
            cells[2], cells[4] = f"{total:.3f}", f"{100 * total_share:.1f}"
        rows.append((name, *cells))
    return make_section(
        key,
        title,
        "Of the weights of a query, how much is on the 3×3 tokens around it, itself included? Uniform attention has 9 "
        "divided by the number of tokens there, less at the border. A convolution of the values that a layer adds, "
        "such as InLine's local residual, is also a weight of neighbours.",
        locality_verdict(analyses),
        [
            Picture(
                locality_figure(found, styles),
                "The weight of the 3×3 neighbourhood by layer and model, and its percentage of the absolute weights. "
                "The tables have the numbers.",
                "Left: the sum of the weights of the 3×3 neighbourhood, mean over queries, heads and images. Right: "
                "its percentage of the absolute weights of the row, because weights of InLine attention may be "
                "negative. Solid lines include the layer's convolution, dashed lines do not.",
            ),
            Table(headings, rows, "The 3×3 neighbourhood, mean over layers"),
            layers_table(columns, "The weight of the 3×3 neighbourhood by layer"),
            *notes,
        ],
        "softmax attention is above uniform attention, most of all in the first layers, and plain linear attention is "
        "nearer to it. InLine attention alone is similar to linear attention; its local residual adds the "
        "neighbourhood.",
        found,
    )


def locality_verdict(analyses: Sequence[Analysis]) -> str:
    """Return the weight of the neighbourhood relative to uniform attention, and whether it is as in the paper."""
    alone: dict[str, list[float]] = {}
    parts, inline_gains = [], []
    for one in (one for one in analyses if one.locality):
        attention = fmean(layer.attention_share / layer.uniform for layer in one.locality)
        total = fmean(layer.total_share / layer.uniform for layer in one.locality)
        without = f" ({attention:.2f} without its convolution)" if adds_convolution(one.locality) else ""
        parts.append(f"{one.label} {total:.2f}{without}")
        alone.setdefault(one.attention, []).append(attention)
        if one.attention == "inline":
            inline_gains.append(total - attention)
    sentences = [
        "The neighbourhood's fraction of the absolute weights, relative to uniform attention, mean over layers: "
        f"{join_words(parts)}."
    ]
    if "softmax" in alone and "linear" in alone:
        sentences.append(
            "Softmax attention is more local than linear attention, as in the paper."
            if min(alone["softmax"]) > max(alone["linear"])
            else "In the paper, softmax attention is more local than linear attention; here it is not."
        )
    if inline_gains:
        sentences.append(
            "InLine's local residual makes it more local."
            if min(inline_gains) > 0
            else "InLine's local residual should make it more local; here it does not."
        )
    return " ".join(sentences)


def masking_section(analyses: Sequence[Analysis], styles: Styles) -> Section:
    """Report the accuracy when each query's neighbourhood is hidden."""
    found = {one.label: one.masking for one in analyses if one.masking is not None}
    key, title = "masking", "Accuracy without the neighbourhood"
    notes = [Text(f"{one.label} is left out: {one.no_masking}.") for one in analyses if one.masking is None]
    if not found:
        return empty_section(key, title, notes)
    sides = sorted({masked.side for one in found.values() for masked in one.masked})
    headings = {(side, hidden): f"{side}×{side} {words}" for side in sides for hidden, words in HIDDEN.items()}
    rows = []
    for name, one in found.items():
        cells: dict[tuple[int, str], str] = {
            (masked.side, masked.hidden): f"{masked.top1:.1f}" for masked in one.masked
        }
        rows.append((name, str(one.images), f"{one.top1:.1f}", *(cells.get(way, MISSING) for way in headings)))
    return make_section(
        key,
        title,
        "The trained models are evaluated again, with tokens hidden from each query in every layer: its neighbourhood, "
        "or as many random tokens. Hidden tokens are removed from the attention and from the layer's convolution. The "
        "models were not trained for that.",
        masking_verdict(analyses),
        [
            Picture(
                masking_figure(found, styles),
                "For each model, accuracy over the side length of the hidden neighbourhood, and with as many random "
                "tokens hidden. The table has the numbers.",
                "Top-1 accuracy with nothing hidden, and with more and more tokens hidden from each query in all "
                "layers. Solid: its neighbourhood. Dashed: as many random tokens.",
            ),
            Table(("model", "images", "nothing hidden", *headings.values()), rows, "Top-1 accuracy, %"),
            *notes,
        ],
        "where the solid line is below the dashed one, the model needs near tokens more than others. This is the case "
        "for softmax attention, and for InLine attention due to its local residual.",
        found,
    )


def masking_verdict(analyses: Sequence[Analysis]) -> str:
    """Return what each model loses in both ways, and whether the neighbourhood matters more than random tokens."""
    sentences = []
    for one in analyses:
        if one.masking is None or not one.masking.masked:
            continue
        side = min(masked.side for masked in one.masking.masked)
        losses = {masked.hidden: one.masking.top1 - masked.top1 for masked in one.masking.masked if masked.side == side}
        near, random = losses["near"], losses["random"]
        # Two standard errors, as if both accuracies were of different images, which is a safe overestimate.
        correct = max(one.masking.top1 - (near + random) / 2, 0) / 100
        error = 200 * (2 * correct * (1 - correct) / one.masking.images) ** 0.5
        if abs(near - random) <= error:
            outcome = f"a difference within chance in the choice of images (±{error:.1f})"
        else:
            outcome = f"the neighbourhood matters {'more' if near > random else 'less'}"
        change = [f"{'loses' if loss >= 0 else 'gains'} {abs(loss):.1f} points" for loss in (near, random)]
        sentences.append(
            f"{one.label} {change[0]} without the {side}×{side} neighbourhood and {change[1]} without as many random "
            f"tokens: {outcome}."
        )
    return " ".join(sentences)


def maps_section(analyses: Sequence[Analysis]) -> Section:
    """Show the weights of single queries."""
    shown = [one for one in analyses if any(view.maps for view in one.views)]
    key, title = "maps", "Attention maps of single queries"
    if not shown:
        reason = "No model has a layer whose keys are the tokens of the feature map, so there are no maps to show."
        return empty_section(key, title, [Text(reason)])
    negative, rows = {}, []
    for one in shown:
        weights = all_weights(one)
        negative[one.label] = short_percent(negative_fraction(weights))
        rows.append((one.label, f"{min(weights):+.3g}", f"{max(weights):+.3g}", negative[one.label]))
    listed = join_words(f"{name} {value} %" for name, value in negative.items())
    pictures = [
        Picture(
            maps_figure({one.label: one.views[number] for one in shown}),
            f"Attention maps of query {number + 1} in some layers of each model.",
            f"Query {number + 1}, marked by a frame. Each map shows the query's weights, mean over heads. Red is "
            "positive, blue is negative, white is 0. The color scale is linear around 0 and logarithmic beyond, and "
            "the same for all maps of a figure. Gray is outside of the query's window.",
        )
        for number in range(len(shown[0].views))
    ]
    table = Table(
        ("model", "lowest weight", "highest weight", "negative, % of absolute weight"),
        rows,
        "Weights of these queries in all layers, mean over heads, with the layers' convolutions",
    )
    return make_section(
        key,
        title,
        "The weights of one query as an image: how much each position counts for it, layer by layer. Weights of "
        "softmax attention are not negative, nor are those of linear attention with ReLU. Those of InLine attention "
        "may be.",
        f"Of the absolute weight in the maps of all layers, this percentage is negative: {listed}.",
        [*pictures, table],
        "two queries of one image with the same map are confused. A map without structure is nearly uniform attention. "
        "InLine's 3×3 residual is visible around its query.",
        {one.label: [view_data(view) for view in one.views] for one in shown},
    )


def all_weights(analysis: Analysis) -> list[float]:
    """Return the weights of all maps, mean over heads, within the query's window."""
    maps = [mean_over_heads(one.total).flatten() for view in analysis.views for one in view.maps]
    return [weight for weights in maps for weight in weights.tolist() if isfinite(weight)]


def negative_fraction(weights: Sequence[float]) -> float:
    """Return the fraction of negative weights in the absolute weights."""
    total = sum(abs(weight) for weight in weights)
    return -sum(weight for weight in weights if weight < 0) / total if total > 0 else 0.0


def view_data(view: View) -> dict[str, Any]:
    """Return the numbers of a row of the figure: the weights in the layers that are shown, mean over heads."""
    maps = [
        {
            "layer": one.layer,
            "query": one.query,
            "weights": mean_over_heads(one.weights),
            "total": mean_over_heads(one.total),
        }
        for one in view.maps_shown
    ]
    return {"query": view.query, "maps": maps}


def layers_table(columns: Mapping[str, Sequence[str]], caption: str) -> Table:
    """Return one row per layer and one column per model; models may have different numbers of layers."""
    cells = zip_longest(*columns.values(), fillvalue=MISSING)
    rows = [(str(layer), *row) for layer, row in enumerate(cells, start=1)]
    return Table(("layer", *columns), rows, caption)


def short_percent(fraction: float) -> str:
    """Format a fraction in percent, without the sign; small fractions have a significant digit."""
    if fraction == 0:
        return "0"
    return f"{100 * fraction:.1f}" if fraction >= 0.001 else f"{100 * fraction:.1g}"


def join_words(items: Iterable[str]) -> str:
    """Return "one, two and three"; there is at least one item."""
    *first, last = items
    return f"{', '.join(first)} and {last}" if first else last


def to_json(value: Any) -> Any:
    """Return dataclasses, tensors and numbers as JSON values; NaN and Inf become None."""
    if is_dataclass(value) and not isinstance(value, type):
        return to_json(asdict(value))
    if isinstance(value, Tensor):
        return to_json(value.tolist())
    if isinstance(value, dict):
        return {name: to_json(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(part) for part in value]
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if isfinite(value) else None
    return value
