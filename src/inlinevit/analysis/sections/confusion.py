"""The section on confusion."""

from collections.abc import Sequence

from ...report import Block, Picture, Section, Table, Text
from ..plots import Styles, confusion_figure
from .common import Analysis, join_words, layers_table, percent, to_json

# Attentions that are injective in theory: different queries have different weights.
INJECTIVE = ("softmax", "inline")


def confusion_section(analyses: Sequence[Analysis], styles: Styles) -> Section:
    """Report different queries with the same weights."""
    found = {one.label: one.confusion for one in analyses}
    first = analyses[0].confusion
    verdict = confusion_verdict(analyses)
    rows = [
        (
            name,
            str(len(one.per_image)),
            f"{one.pairs:,}",
            f"{one.confused:,}",
            percent(one.share),
            f"{sum(count > 0 for count in one.per_image)} of {len(one.per_image)}",
        )
        for name, one in found.items()
    ]
    shares = {name: [percent(layer.share) for layer in one.layers] for name, one in found.items()}
    blocks: list[Block] = [
        Text(
            "Each query has a row of attention weights. Two queries of one image are confused if they differ (by more "
            f"than {first.delta:g} of the larger norm) but have the same row (up to {first.epsilon:g} of its norm): "
            "the difference between them is lost to the model."
        ),
        Text(verdict, is_key=True),
        Picture(
            confusion_figure(found, styles),
            "On the left, one histogram per model: images by the number of their confused pairs. On the right, the "
            "percentage of confused pairs by layer. The tables have the numbers.",
            f"Pairs of queries of one head that differ by more than δ = {first.delta:g}, and whose rows differ by at "
            f"most ε = {first.epsilon:g}, both relative to the larger norm. Left: images by the number of such pairs, "
            "with a separate bar for zero. Right: their percentage by layer; models are shifted slightly.",
        ),
        Table(
            ("model", "images", "pairs of different queries", "confused", "confused %", "images with any"),
            rows,
            "Pairs of queries of the same image, layer, head and window",
        ),
        layers_table(shares, "Confused pairs by layer, % of the pairs of different queries"),
        Text(
            "What to look for: softmax and InLine attention are injective, so they should confuse almost no queries. "
            "Linear attention divides by the sum of its scores and so loses the length of a query: queries of one "
            "direction (after φ) have the same row. Rows that are nearly uniform count as the same, too, so a layer "
            "with nearly uniform attention confuses queries whatever its kind."
        ),
    ]
    data = {"verdict": verdict, "models": to_json(found)}
    return Section("confusion", "Different queries, the same attention", blocks, data)


def confusion_verdict(analyses: Sequence[Analysis]) -> str:
    """Return how many pairs each model confuses, and whether theory predicts that."""
    shares = {one.label: one.confusion.share for one in analyses}
    listed = join_words(f"{name} {percent(share)} %" for name, share in shares.items())
    sentences = [f"Of all pairs of different queries, these percentages have the same row: {listed}."]
    injective = [shares[one.label] for one in analyses if one.attention in INJECTIVE]
    linear = [shares[one.label] for one in analyses if one.attention == "linear"]
    if injective and linear:
        sentences.append(
            "As theory predicts, linear attention confuses more pairs than injective attentions."
            if min(linear) > max(injective)
            else "In theory, linear attention may confuse queries and injective ones may not: this is not visible here."
        )
    return " ".join(sentences)
