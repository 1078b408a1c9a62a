"""The benchmarks of `inlinevit bench`: layers, models, the three studies of the paper, scaling, detectors."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch

from ..models.catalog import CATALOG
from ..utils.validation import MOST_PIXELS, Range, check_value, require
from .candidates import check_names, layer_comparisons, model_candidate, model_comparisons
from .detectors import detector_comparisons
from .measure import Conditions, measure
from .options import ALL_MODES, BENCHES, FAMILIES, INLINE_DEIT, INLINE_SWIN, SOFTMAX_DEIT, SOFTMAX_SWIN
from .results import Results
from .runtimes import refusal
from .workload import Comparison

# Published ImageNet-1K top-1 of timm's models; the catalog has that of the models of this package.
PUBLISHED_TOP1 = {
    SOFTMAX_DEIT: 72.2,
    SOFTMAX_SWIN: 81.3,
    "swin_small_patch4_window7_224": 83.0,
    "swin_base_patch4_window7_224": 83.5,
}


def published_top1(model: str) -> float:
    """Return the published ImageNet-1K accuracy of a model in FAMILIES, in percent."""
    top1 = CATALOG[model].top1 if model in CATALOG else PUBLISHED_TOP1[model]
    assert top1 is not None
    return top1


def accuracy_comparisons(families: Sequence[str], batches: Sequence[int]) -> list[Comparison]:
    """Return comparisons of InLine models with their softmax counterparts, at the input size of their accuracy."""
    check_names("family", families, FAMILIES)

    comparisons = []
    for batch, family in product(batches, families):
        for model, softmax in FAMILIES[family].items():
            sizes = {name: CATALOG[name].input_size if name in CATALOG else 224 for name in (model, softmax) if name}
            candidates = [model_candidate(name, size, batch) for name, size in sizes.items()]
            comparisons.append(Comparison(f"{model}, batch {batch}", batch, candidates))
    return comparisons


def window_comparisons(windows: Sequence[int], batches: Sequence[int]) -> list[Comparison]:
    """Return a comparison of Swin-T at 224² with windows of several sizes, InLine and softmax."""
    for window in windows:
        check_value("window", window, int, Range(1, MOST_PIXELS))
    models = [f"{model}:window_size={window}" for model in (INLINE_SWIN, SOFTMAX_SWIN) for window in windows]
    return model_comparisons(models, [224], batches)


# From the options of a benchmark to what is measured.
COMPARISONS: dict[str, Callable[..., list[Comparison]]] = {
    "layer": layer_comparisons,
    "model": model_comparisons,
    "accuracy": accuracy_comparisons,
    "window": window_comparisons,
    "resolution": partial(model_comparisons, [INLINE_DEIT, SOFTMAX_DEIT]),
    "attentions": model_comparisons,
    "scaling": partial(model_comparisons, [INLINE_DEIT, f"{INLINE_DEIT}:attention=linear", SOFTMAX_DEIT]),
    "detection": detector_comparisons,
}


def run_bench(
    what: str,
    *,
    threads: int | None = None,
    rounds: int | None = None,
    patience: float | None = None,
    device: str = "cpu",
    backward: bool = False,
    quick: bool = False,
    **options: Any,
) -> Results:
    """Measure one of BENCHES.

    Args:
        what: Its name.
        threads: Threads of torch; None = torch's default.
        rounds: Timed calls of each candidate, at most; None = 50, or 10 if quick.
        patience: Seconds after which no further round of a comparison begins; None = 30, or 4 if quick.
        device: "cpu" or "cuda".
        backward: Measure forward and backward instead of forward alone.
        quick: Take smaller defaults, for results within a minute.
        **options: Options of the benchmark; None = default.
    """
    bench = BENCHES[what]
    chosen = {name: value for name, value in options.items() if value is not None}
    chosen = {**bench.options, **(bench.quick if quick else {}), **chosen}
    conditions = Conditions(
        threads=torch.get_num_threads() if threads is None else threads,
        rounds=(10 if quick else 50) if rounds is None else rounds,
        patience=(4.0 if quick else 30.0) if patience is None else patience,
        longest_call=bench.longest_call / (30 if quick else 1),
        device=device,
        backward=backward,
    )
    modes = chosen.pop("modes")
    check_names("mode", modes, ALL_MODES)
    asked = options.get("modes") or ()
    for mode in asked:
        remedy = f"choose among {', '.join(bench.modes)}"
        require(mode in bench.modes, f"mode {mode} is for classifiers, not for {what}: {remedy}")
    reasons = {mode: refusal(mode, device=device, backward=backward) for mode in modes if mode not in asked}
    # Of modes that nobody asked for, only missing packages are worth a note.
    notes = [reason for mode, reason in reasons.items() if "pip install" in reason]
    modes = [mode for mode in modes if not reasons.get(mode)]
    return measure(what, COMPARISONS[what](**chosen), modes, conditions, notes=notes, **chosen, quick=quick)
