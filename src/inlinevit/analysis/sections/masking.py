"""The section on masking."""

from collections.abc import Sequence

from ...report import Block, Picture, Section, Table, Text
from ..plots import Styles, masking_figure
from .common import MISSING, Analysis, to_json


def masking_section(analyses: Sequence[Analysis], styles: Styles) -> Section:
    """Report the accuracy when each query's neighbourhood is hidden."""
    found = {one.label: one.masking for one in analyses if one.masking is not None}
    title = "Accuracy without the neighbourhood"
    notes = [Text(f"{one.label} is left out: {one.no_masking}.") for one in analyses if one.masking is None]
    if not found:
        return Section("masking", title, notes, {"verdict": None, "models": {}})
    verdict = masking_verdict(analyses)
    sides = sorted({masked.side for one in found.values() for masked in one.masked})
    ways: dict[tuple[int, str], str] = {(side, hidden): MISSING for side in sides for hidden in ("near", "random")}
    rows = []
    for name, one in found.items():
        cells = dict(ways)
        for masked in one.masked:
            cells[masked.side, masked.hidden] = f"{masked.top1:.1f}"
        rows.append((name, str(one.images), f"{one.top1:.1f}", *cells.values()))
    words = {"near": "hidden", "random": "random tokens hidden"}
    headings = ("model", "images", "nothing hidden", *(f"{side}×{side} {words[hidden]}" for side, hidden in ways))
    blocks: list[Block] = [
        Text(
            "The trained models are evaluated again, with tokens hidden from each query in every layer: its "
            "neighbourhood, or as many random tokens. Hidden tokens are removed from the attention and from the "
            "layer's convolution. The models were not trained for that."
        ),
        Text(verdict, is_key=True),
        Picture(
            masking_figure(found, styles),
            "For each model, accuracy over the side length of the hidden neighbourhood, and with as many random tokens "
            "hidden. The table has the numbers.",
            "Top-1 accuracy with nothing hidden, and with more and more tokens hidden from each query in all layers. "
            "Solid: its neighbourhood. Dashed: as many random tokens.",
        ),
        Table(headings, rows, "Top-1 accuracy, %"),
        *notes,
        Text(
            "What to look for: where the solid line is below the dashed one, the model needs near tokens more than "
            "others. This is the case for softmax attention, and for InLine attention due to its local residual."
        ),
    ]
    return Section("masking", title, blocks, {"verdict": verdict, "models": to_json(found)})


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
        share = max(one.masking.top1 - (near + random) / 2, 0) / 100
        error = 200 * (2 * share * (1 - share) / one.masking.images) ** 0.5
        if abs(near - random) <= error:
            outcome = f"a difference within chance in the choice of images (±{error:.1f})"
        else:
            outcome = "the neighbourhood matters more" if near > random else "the neighbourhood matters less"
        sentences.append(
            f"{one.label} {describe_loss(near)} without the {side}×{side} neighbourhood and {describe_loss(random)} "
            f"without as many random tokens: {outcome}."
        )
    return " ".join(sentences)


def describe_loss(loss: float) -> str:
    """Return how accuracy changes, in words."""
    return f"{'loses' if loss >= 0 else 'gains'} {abs(loss):.1f} points"
