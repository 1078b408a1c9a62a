"""What was found inside models, to be read: sections of a report with drawings, tables and what the numbers say."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from math import isfinite
from statistics import fmean
from typing import Any

from torch import Tensor

from ..report import Block, Picture, Section, Style, Table, Text, styles_of
from .confusion import Confusion
from .locality import LayerLocality
from .masking import Masking
from .plots import (
    View,
    adds_convolution,
    chosen_layers,
    confusion_figure,
    locality_figure,
    maps_figure,
    masking_figure,
    mean_over_heads,
)

# Attentions that are injective in theory: queries that differ get rows that differ.
INJECTIVE = ("softmax", "inline")
# Digits of weights in JSON: as many as float32 has.
DIGITS = 7
NOTHING = "–"


@dataclass
class Analysis:
    """What was found inside a model.

    Attributes:
        label: What the model is called.
        attention: The word for its attention; several words, joined by +, if it has several.
        confusion: See measure_confusion.
        locality: See measure_locality; empty if no layer's keys are the tokens of the map.
        views: What some queries see; the same queries for all models.
        masking: See measure_masking; None if it could not be measured.
        no_masking: Why it could not.
    """

    label: str
    attention: str
    confusion: Confusion
    locality: list[LayerLocality]
    views: list[View]
    masking: Masking | None = None
    no_masking: str = ""


def analysis_sections(analyses: Sequence[Analysis]) -> list[Section]:
    """Confusion, locality, masking and maps, each with all models side by side."""
    # A model of several attentions is drawn as its first.
    styles = styles_of({one.label: one.attention.partition("+")[0] for one in analyses})
    return [
        confusion_section(analyses, styles),
        locality_section(analyses, styles),
        masking_section(analyses, styles),
        maps_section(analyses),
    ]


def confusion_section(analyses: Sequence[Analysis], styles: Mapping[str, Style]) -> Section:
    """Queries that differ, and yet get the same row."""
    found = {one.label: one.confusion for one in analyses}
    first = analyses[0].confusion
    sentences = confusion_verdict(analyses)
    rows = [
        (
            name,
            str(len(one.per_image)),
            f"{_pairs(one):,}",
            f"{_confused(one):,}",
            percent(_share(one)),
            f"{sum(count > 0 for count in one.per_image)} of {len(one.per_image)}",
        )
        for name, one in found.items()
    ]
    by_layer = layers_table(
        {name: [percent(layer.share) for layer in one.layers] for name, one in found.items()},
        "Confused pairs by layer, % of the pairs of different queries",
    )
    blocks: list[Block] = [
        Text(
            "A query asks what to look at, and its row of attention weights is the answer. Two queries of one image "
            f"are confused if they differ (by more than {first.delta:g} of the longer one's length) and yet get the "
            f"same row (up to {first.epsilon:g} of its length): whatever sets them apart is lost to the model."
        ),
        Text(sentences, is_key=True),
        Picture(
            confusion_figure(found, styles),
            "On the left, a histogram for each model: images by the number of their confused pairs. On the right, the "
            "share of confused pairs by layer. The tables have the numbers.",
            f"Pairs of queries of one head that differ by more than δ = {first.delta:g}, and whose rows differ by at "
            f"most ε = {first.epsilon:g}, both relative to the longer of the two. Left: images by the number of such "
            "pairs, with a bar of its own for none. Right: their share by layer; models stand a little aside of each "
            "other.",
        ),
        Table(
            ("model", "images", "pairs of different queries", "confused", "confused %", "images with any"),
            rows,
            "Pairs of queries of the same image, layer, head and window",
        ),
        by_layer,
        Text(
            "What to look for: softmax and InLine attention are injective, so they should have next to none. Linear "
            "attention divides by the sum of its scores, and with that loses how long a query is: queries of one "
            "direction (after φ) get one row. Rows that are almost the same everywhere count as the same, too, so a "
            "layer that spreads its attention evenly confuses queries whatever its kind."
        ),
    ]
    data = {"verdict": sentences, "models": {name: plain(one) for name, one in found.items()}}
    return Section("confusion", "Different queries, the same attention", blocks, data)


def confusion_verdict(analyses: Sequence[Analysis]) -> str:
    """How many pairs each model confuses, and whether that is as theory has it."""
    shares = {one.label: _share(one.confusion) for one in analyses}
    listed = listing(f"{name} {percent(share)} %" for name, share in shares.items())
    sentences = [f"Of all pairs of different queries, these shares get the same row: {listed}."]
    injective = [one for one in analyses if one.attention in INJECTIVE]
    linear = [one for one in analyses if one.attention == "linear"]
    if injective and linear:
        most, least = (max(shares[one.label] for one in injective), min(shares[one.label] for one in linear))
        sentences.append(
            "That is as theory has it: linear attention confuses more of them than the injective ones do."
            if least > most
            else "In theory, linear attention may confuse queries and injective ones may not: here, that does not show."
        )
    return " ".join(sentences)


def _pairs(confusion: Confusion) -> int:
    return sum(sum(layer.pairs) for layer in confusion.layers)


def _confused(confusion: Confusion) -> int:
    return sum(confusion.per_image)


def _share(confusion: Confusion) -> float:
    return _confused(confusion) / max(_pairs(confusion), 1)


def locality_section(analyses: Sequence[Analysis], styles: Mapping[str, Style]) -> Section:
    """The attention that a query gives its own neighbourhood."""
    found = {one.label: one.locality for one in analyses if one.locality}
    title = "How much a query looks around itself"
    left_out = [one.label for one in analyses if len(one.locality) < len(one.confusion.layers)]
    reason = (
        "whose keys come from a reduced map are left out, and not counted: such keys are in no query's neighbourhood."
    )
    notes = [Text(f"Layers of {listing(left_out)} {reason}")] if left_out else []
    if not found:
        return Section("locality", title, notes, {"verdict": None, "models": {}})
    sentences = locality_verdict(analyses)
    columns: dict[str, list[str]] = {}
    for name, layers in found.items():
        columns[name] = [f"{layer.attention:.3f}" for layer in layers]
        if adds_convolution(layers):
            columns[f"{name}, with its convolution"] = [f"{layer.total:.3f}" for layer in layers]
    rows = [
        (
            name,
            f"{fmean(layer.uniform for layer in layers):.3f}",
            f"{fmean(layer.attention for layer in layers):.3f}",
            f"{fmean(layer.total for layer in layers):.3f}" if adds_convolution(layers) else NOTHING,
            f"{100 * fmean(layer.attention_share for layer in layers):.1f}",
            f"{100 * fmean(layer.total_share for layer in layers):.1f}" if adds_convolution(layers) else NOTHING,
        )
        for name, layers in found.items()
    ]
    blocks: list[Block] = [
        Text(
            "Of the weights that a query gives, how much goes to the 3×3 tokens around it, itself included? Attention "
            "that is the same everywhere gives them 9 divided by the number of tokens, less at the border. What a "
            "layer adds by a convolution of the values, as InLine's local residual, is a weight of neighbours, too."
        ),
        Text(sentences, is_key=True),
        Picture(
            locality_figure(found, styles),
            "The weight of the 3×3 neighbourhood by layer and model, and its share of the absolute weights. The tables "
            "have the numbers.",
            "Left: the weights of the 3×3 neighbourhood, summed, mean over queries, heads and images. Right: its "
            "share of the absolute weights of the row, because weights of InLine attention may be negative. Solid "
            "lines count all that a layer does, dashed ones leave out its convolution.",
        ),
        Table(
            (
                "model",
                "uniform",
                "weight",
                "with its convolution",
                "share of absolute weights %",
                "with its convolution %",
            ),
            rows,
            "The 3×3 neighbourhood, mean over layers",
        ),
        layers_table(columns, "The weight of the 3×3 neighbourhood by layer"),
        *notes,
        Text(
            "What to look for: softmax attention lies above uniform, most of all in the first layers, and plain "
            "linear attention nearer to it. InLine attention alone is like linear attention here; its local residual "
            "brings the neighbourhood back."
        ),
    ]
    data = {
        "verdict": sentences,
        "models": {name: [plain(layer) for layer in layers] for name, layers in found.items()},
    }
    return Section("locality", title, blocks, data)


def locality_verdict(analyses: Sequence[Analysis]) -> str:
    """How many times what uniform attention gives the neighbourhood gets, and whether that is as the paper has it."""
    alone, together, parts = {}, {}, []
    for one in analyses:
        if not one.locality:
            continue
        alone[one.label] = fmean(layer.attention_share / layer.uniform for layer in one.locality)
        together[one.label] = fmean(layer.total_share / layer.uniform for layer in one.locality)
        part = f"{one.label} {together[one.label]:.2f}"
        parts.append(part + f" ({alone[one.label]:.2f} without its convolution)" * adds_convolution(one.locality))
    sentences = [
        "The neighbourhood's share of the absolute weights, as a multiple of what uniform attention gives, mean over "
        f"layers: {listing(parts)}."
    ]
    softmax = [alone[one.label] for one in analyses if one.attention == "softmax" and one.locality]
    linear = [alone[one.label] for one in analyses if one.attention == "linear" and one.locality]
    if softmax and linear:
        is_expected = min(softmax) > max(linear)
        sentences.append(
            "Softmax attention is more local than linear attention, as the paper found."
            if is_expected
            else "The paper found softmax attention more local than linear attention; here it is not."
        )
    inline = [one.label for one in analyses if one.attention == "inline" and one.locality]
    if inline:
        is_expected = all(together[name] > alone[name] for name in inline)
        sentences.append(
            "InLine's local residual makes it more local."
            if is_expected
            else "InLine's local residual should make it more local; here it does not."
        )
    return " ".join(sentences)


def masking_section(analyses: Sequence[Analysis], styles: Mapping[str, Style]) -> Section:
    """What is lost when queries may not see their neighbourhood."""
    found = {one.label: one.masking for one in analyses if one.masking is not None}
    title = "What is lost without the neighbourhood"
    notes = [Text(f"{one.label} is left out: {one.no_masking}.") for one in analyses if one.masking is None]
    if not found:
        return Section("masking", title, notes, {"verdict": None, "models": {}})
    sentences = masking_verdict(analyses)
    sides = sorted({masked.side for one in found.values() for masked in one.masked})
    ways = [(side, hidden) for side in sides for hidden in ("near", "random")]
    rows = []
    for name, one in found.items():
        top1 = {(masked.side, str(masked.hidden)): f"{masked.top1:.1f}" for masked in one.masked}
        rows.append((name, str(one.images), f"{one.top1:.1f}", *(top1.get(way, NOTHING) for way in ways)))
    words = {"near": "hidden", "random": "as many at random"}
    blocks: list[Block] = [
        Text(
            "The trained models are evaluated once more, with something hidden from each query in every layer: the "
            "tokens around it, or as many tokens drawn at random. What is hidden leaves the sums of the attention, "
            "and a layer's convolution does not see it, either. The models were not trained for that."
        ),
        Text(sentences, is_key=True),
        Picture(
            masking_figure(found, styles),
            "For each model, the share of images told right against the side of what is hidden, for the neighbourhood "
            "and for as many tokens at random. The table has the numbers.",
            "Images told right with nothing hidden, and with more and more hidden from each query in all layers. "
            "Solid: its neighbourhood. Dashed: as many tokens at random.",
        ),
        Table(
            ("model", "images", "nothing hidden", *(f"{side}×{side} {words[hidden]}" for side, hidden in ways)),
            rows,
            "Images told right, %",
        ),
        *notes,
        Text(
            "What to look for: where the solid line falls below the dashed one, the model needs what is near more "
            "than what is anywhere. That is what softmax attention does, and what InLine attention gets from its "
            "local residual."
        ),
    ]
    return Section("masking", title, blocks, {"verdict": sentences, "models": {k: plain(v) for k, v in found.items()}})


def masking_verdict(analyses: Sequence[Analysis]) -> str:
    """What each model loses in both ways, and whether the neighbourhood matters more than chance."""
    sentences = []
    for one in analyses:
        if one.masking is None or not one.masking.masked:
            continue
        side = min(masked.side for masked in one.masking.masked)
        losses = {masked.hidden: one.masking.top1 - masked.top1 for masked in one.masking.masked if masked.side == side}
        near, random = losses["near"], losses["random"]
        # Two shares of the same images; as if they were of different ones, to be on the safe side.
        share = max(one.masking.top1 - (near + random) / 2, 0) / 100
        doubt = 200 * (2 * share * (1 - share) / one.masking.images) ** 0.5
        if abs(near - random) <= doubt:
            outcome = f"no more of a difference than chance in the choice of images (±{doubt:.1f})"
        else:
            outcome = "the neighbourhood matters more" if near > random else "the neighbourhood matters less"
        sentences.append(
            f"{one.label} {change(near)} without the {side}×{side} neighbourhood and {change(random)} without as many "
            f"tokens at random: {outcome}."
        )
    return " ".join(sentences)


def change(loss: float) -> str:
    """How accuracy changes, in words."""
    return f"{'loses' if loss >= 0 else 'gains'} {abs(loss):.1f} points"


def maps_section(analyses: Sequence[Analysis]) -> Section:
    """What single queries see."""
    shown = [one for one in analyses if any(view.maps for view in one.views)]
    title = "What a query sees"
    if not shown:
        reason = "No model has a layer whose keys are the tokens of the map, so there are no maps to show."
        return Section("maps", title, [Text(reason)], {"verdict": None, "models": {}})
    sentences = maps_verdict(shown)
    pictures = [
        Picture(
            maps_figure({one.label: one.views[number] for one in shown}),
            f"Attention maps of query {number + 1} through each model, in some layers.",
            f"Query {number + 1}, marked by a frame. Each map shows what the places of the image count for it, mean "
            "over heads. Red is positive, blue negative, white 0; around 0 the scale is even, beyond it goes by "
            "powers of ten, and it is the same for all maps of a drawing. Grey is outside of the query's window.",
        )
        for number in range(len(shown[0].views))
    ]
    rows = []
    for one in shown:
        weights = [value for view in one.views for each in view.maps for value in _values(each.total)]
        rows.append((one.label, f"{min(weights):+.3g}", f"{max(weights):+.3g}", percent(negative_share(one))))
    blocks: list[Block] = [
        Text(
            "The row of one query, laid out as a picture: how much each place of the image counts for it, layer by "
            "layer. Weights of softmax attention are not negative, nor are those of linear attention with ReLU. Those "
            "of InLine attention may be."
        ),
        Text(sentences, is_key=True),
        *pictures,
        Table(
            ("model", "lowest weight", "highest weight", "negative, % of absolute weight"),
            rows,
            "Weights of the queries shown, all layers, mean over heads, with the layers' convolutions",
        ),
        Text(
            "What to look for: two queries of one image that get the same map are confused. A map that has no shape is "
            "attention that is the same everywhere. InLine's 3×3 residual stands out around its query."
        ),
    ]
    return Section(
        "maps", title, blocks, {"verdict": sentences, "models": {one.label: _maps_data(one) for one in shown}}
    )


def maps_verdict(analyses: Sequence[Analysis]) -> str:
    """How much of the weight is negative."""
    listed = listing(f"{one.label} {percent(negative_share(one))} %" for one in analyses)
    return f"Of the absolute weight in these maps and in those of the layers between, this much is negative: {listed}."


def negative_share(analysis: Analysis) -> float:
    """The share of negative weights in the absolute weights of all maps, mean over heads."""
    values = [value for view in analysis.views for one in view.maps for value in _values(one.total)]
    total = sum(abs(value) for value in values)
    return -sum(value for value in values if value < 0) / total if total > 0 else 0.0


def _values(weights: Tensor) -> list[float]:
    """The weights of a map, mean over heads, without the places that the query does not see."""
    return [value for value in mean_over_heads(weights).flatten().tolist() if isfinite(value)]


def _maps_data(analysis: Analysis) -> list[dict[str, Any]]:
    """What the drawings show, in numbers: the layers that are drawn, mean over heads."""
    found = []
    for view in analysis.views:
        layers = [view.maps[layer] for layer in chosen_layers(len(view.maps))]
        maps = [
            {
                "layer": one.layer,
                "query": list(one.query),
                "weights": plain(mean_over_heads(one.weights)),
                "total": plain(mean_over_heads(one.total)),
            }
            for one in layers
        ]
        found.append({"query": list(view.query), "maps": maps})
    return found


def layers_table(columns: Mapping[str, Sequence[str]], caption: str) -> Table:
    """A row a layer, a column a model; models may have more or fewer layers than others."""
    depth = max(len(cells) for cells in columns.values())
    rows = [
        (str(layer + 1), *(cells[layer] if layer < len(cells) else NOTHING for cells in columns.values()))
        for layer in range(depth)
    ]
    return Table(("layer", *columns), rows, caption)


def percent(share: float) -> str:
    """A share in percent, with as many digits as it takes to see that it is not 0; without the sign."""
    if share == 0:
        return "0"
    return f"{100 * share:.1f}" if share >= 0.001 else f"{100 * share:.1g}"


def listing(items: Iterable[str]) -> str:
    """One, two and three; there is at least one."""
    words = list(items)
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def plain(value: Any) -> Any:
    """Dataclasses, tensors and numbers as json can write them; None for what it has no word for."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Tensor):
        return plain(value.tolist())
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if isfinite(value) else None
    return value
