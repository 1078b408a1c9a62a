"""The section on locality."""

from collections.abc import Sequence
from statistics import fmean

from ...report import Block, Picture, Section, Table, Text
from ..plots import Styles, adds_convolution, locality_figure
from .common import MISSING, Analysis, join_words, layers_table, to_json


def locality_section(analyses: Sequence[Analysis], styles: Styles) -> Section:
    """Report the weight of each query's neighbourhood."""
    found = {one.label: one.locality for one in analyses if one.locality}
    title = "Attention to the neighbourhood"
    left_out = [one.label for one in analyses if len(one.locality) < len(one.confusion.layers)]
    reason = "whose keys come from a reduced feature map are left out: such keys are in no query's neighbourhood."
    notes = [Text(f"Layers of {join_words(left_out)} {reason}")] if left_out else []
    if not found:
        return Section("locality", title, notes, {"verdict": None, "models": {}})
    verdict = locality_verdict(analyses)
    columns: dict[str, list[str]] = {}
    rows = []
    for name, layers in found.items():
        has_convolution = adds_convolution(layers)
        columns[name] = [f"{layer.attention:.3f}" for layer in layers]
        if has_convolution:
            columns[f"{name}, with its convolution"] = [f"{layer.total:.3f}" for layer in layers]
        rows.append(
            (
                name,
                f"{fmean(layer.uniform for layer in layers):.3f}",
                f"{fmean(layer.attention for layer in layers):.3f}",
                f"{fmean(layer.total for layer in layers):.3f}" if has_convolution else MISSING,
                f"{100 * fmean(layer.attention_share for layer in layers):.1f}",
                f"{100 * fmean(layer.total_share for layer in layers):.1f}" if has_convolution else MISSING,
            )
        )
    with_convolution = "with its convolution"
    headings = ("model", "uniform", "weight", with_convolution, "% of absolute weights", f"{with_convolution}, %")
    blocks: list[Block] = [
        Text(
            "Of the weights of a query, how much is on the 3×3 tokens around it, itself included? Uniform attention "
            "has 9 divided by the number of tokens there, less at the border. A convolution of the values that a layer "
            "adds, such as InLine's local residual, is also a weight of neighbours."
        ),
        Text(verdict, is_key=True),
        Picture(
            locality_figure(found, styles),
            "The weight of the 3×3 neighbourhood by layer and model, and its percentage of the absolute weights. The "
            "tables have the numbers.",
            "Left: the sum of the weights of the 3×3 neighbourhood, mean over queries, heads and images. Right: its "
            "percentage of the absolute weights of the row, because weights of InLine attention may be negative. Solid "
            "lines include the layer's convolution, dashed lines do not.",
        ),
        Table(headings, rows, "The 3×3 neighbourhood, mean over layers"),
        layers_table(columns, "The weight of the 3×3 neighbourhood by layer"),
        *notes,
        Text(
            "What to look for: softmax attention is above uniform attention, most of all in the first layers, and "
            "plain linear attention is nearer to it. InLine attention alone is similar to linear attention; its local "
            "residual adds the neighbourhood."
        ),
    ]
    return Section("locality", title, blocks, {"verdict": verdict, "models": to_json(found)})


def locality_verdict(analyses: Sequence[Analysis]) -> str:
    """Return the weight of the neighbourhood relative to uniform attention, and whether it is as in the paper."""
    measured = [one for one in analyses if one.locality]
    alone, total = (
        {one.label: fmean(vars(layer)[share] / layer.uniform for layer in one.locality) for one in measured}
        for share in ("attention_share", "total_share")
    )
    parts = [
        f"{one.label} {total[one.label]:.2f}"
        + f" ({alone[one.label]:.2f} without its convolution)" * adds_convolution(one.locality)
        for one in measured
    ]
    sentences = [
        "The neighbourhood's fraction of the absolute weights, relative to uniform attention, mean over layers: "
        f"{join_words(parts)}."
    ]
    softmax = [alone[one.label] for one in measured if one.attention == "softmax"]
    linear = [alone[one.label] for one in measured if one.attention == "linear"]
    if softmax and linear:
        sentences.append(
            "Softmax attention is more local than linear attention, as in the paper."
            if min(softmax) > max(linear)
            else "In the paper, softmax attention is more local than linear attention; here it is not."
        )
    inline = [one.label for one in measured if one.attention == "inline"]
    if inline:
        sentences.append(
            "InLine's local residual makes it more local."
            if all(total[name] > alone[name] for name in inline)
            else "InLine's local residual should make it more local; here it does not."
        )
    return " ".join(sentences)
