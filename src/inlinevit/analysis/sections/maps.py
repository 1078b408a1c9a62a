"""The section on attention maps."""

from collections.abc import Sequence
from math import isfinite
from typing import Any

from ...report import Block, Picture, Section, Table, Text
from ..map_plots import maps_figure, mean_over_heads
from .common import Analysis, join_words, percent, to_json


def maps_section(analyses: Sequence[Analysis]) -> Section:
    """Show the weights of single queries."""
    shown = [one for one in analyses if any(view.maps for view in one.views)]
    title = "Attention maps of single queries"
    if not shown:
        reason = "No model has a layer whose keys are the tokens of the feature map, so there are no maps to show."
        return Section("maps", title, [Text(reason)], {"verdict": None, "models": {}})
    shares = join_words(f"{one.label} {percent(negative_share(one))} %" for one in shown)
    verdict = f"Of the absolute weight in the maps of all layers, this percentage is negative: {shares}."
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
    rows = []
    for one in shown:
        weights = all_weights(one)
        rows.append((one.label, f"{min(weights):+.3g}", f"{max(weights):+.3g}", percent(negative_share(one))))
    blocks: list[Block] = [
        Text(
            "The weights of one query as an image: how much each position counts for it, layer by layer. Weights of "
            "softmax attention are not negative, nor are those of linear attention with ReLU. Those of InLine "
            "attention may be."
        ),
        Text(verdict, is_key=True),
        *pictures,
        Table(
            ("model", "lowest weight", "highest weight", "negative, % of absolute weight"),
            rows,
            "Weights of these queries in all layers, mean over heads, with the layers' convolutions",
        ),
        Text(
            "What to look for: two queries of one image with the same map are confused. A map without structure is "
            "nearly uniform attention. InLine's 3×3 residual is visible around its query."
        ),
    ]
    data = {"verdict": verdict, "models": {one.label: maps_data(one) for one in shown}}
    return Section("maps", title, blocks, data)


def negative_share(analysis: Analysis) -> float:
    """Return the fraction of negative weights in the absolute weights of all maps, mean over heads."""
    weights = all_weights(analysis)
    total = sum(abs(weight) for weight in weights)
    return -sum(weight for weight in weights if weight < 0) / total if total > 0 else 0.0


def all_weights(analysis: Analysis) -> list[float]:
    """Return the weights of all maps, mean over heads, within the query's window."""
    maps = [mean_over_heads(one.total).flatten() for view in analysis.views for one in view.maps]
    return [weight for weights in maps for weight in weights.tolist() if isfinite(weight)]


def maps_data(analysis: Analysis) -> list[dict[str, Any]]:
    """Return the numbers of the figures: the weights in the layers that are shown, mean over heads."""
    found = []
    for view in analysis.views:
        maps = [
            {
                "layer": one.layer,
                "query": list(one.query),
                "weights": to_json(mean_over_heads(one.weights)),
                "total": to_json(mean_over_heads(one.total)),
            }
            for one in (view.maps[layer] for layer in view.shown)
        ]
        found.append({"query": list(view.query), "maps": maps})
    return found
