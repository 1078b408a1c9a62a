"""What `inlinevit bench` can measure: layer, models, the three studies of the paper, how cost grows, detectors."""

from collections.abc import Callable, Sequence
from typing import Any

from ..models.catalog import CATALOG
from ..utils.validation import MOST_PIXELS, Range, check_value, did_you_mean, require
from .candidates import layer_rounds, model_candidate, model_rounds
from .detectors import detector_rounds
from .measure import MODES, Candidate, Conditions, Results, Round, measure
from .options import BENCHES, FAMILIES, INLINE_DEIT, INLINE_SWIN, SOFTMAX_DEIT, SOFTMAX_SWIN, WITHOUT_OPTIMIZED

# Published ImageNet-1K top-1 of timm's models; that of ours is in the catalog.
PUBLISHED_TOP1 = {
    SOFTMAX_DEIT: 72.2,
    SOFTMAX_SWIN: 81.3,
    "swin_small_patch4_window7_224": 83.0,
    "swin_base_patch4_window7_224": 83.5,
}


def published_top1(model: str) -> float:
    """Published ImageNet-1K accuracy of a model in FAMILIES, in percent."""
    top1 = CATALOG[model].top1 if model in CATALOG else PUBLISHED_TOP1[model]
    assert top1 is not None
    return top1


def accuracy_rounds(families: Sequence[str], batches: Sequence[int]) -> list[Round]:
    """Each InLine model and its softmax counterpart, at the input size that their accuracy was published for."""
    for family in families:
        remedy = did_you_mean(family, FAMILIES) or f"choose among {', '.join(FAMILIES)}"
        require(family in FAMILIES, f"there is no family {family!r}: {remedy}")

    def candidates(pair: tuple[str, str | None], batch: int) -> list[Candidate]:
        sizes = {model: CATALOG[model].input_size if model in CATALOG else 224 for model in pair if model}
        return [model_candidate(model, size, batch) for model, size in sizes.items()]

    return [
        Round(f"{pair[0]}, batch {batch}", batch, candidates(pair, batch))
        for batch in batches
        for family in families
        for pair in FAMILIES[family]
    ]


def window_rounds(windows: Sequence[int], batches: Sequence[int]) -> list[Round]:
    """Swin-T at 224² with windows of several sizes, InLine and softmax, all in one turn."""
    for window in windows:
        check_value("window", window, int, Range(1, MOST_PIXELS))
    models = [f"{model}:window_size={window}" for model in (INLINE_SWIN, SOFTMAX_SWIN) for window in windows]
    return model_rounds(models, [224], batches)


def resolution_rounds(sizes: Sequence[int], batches: Sequence[int]) -> list[Round]:
    """DeiT-T, InLine and softmax."""
    return model_rounds([INLINE_DEIT, SOFTMAX_DEIT], sizes, batches)


def scaling_rounds(sizes: Sequence[int], batches: Sequence[int]) -> list[Round]:
    """DeiT-T: InLine, linear and softmax attention."""
    return model_rounds([INLINE_DEIT, f"{INLINE_DEIT}:attention=linear", SOFTMAX_DEIT], sizes, batches)


# From the values of the options of a bench to what is measured.
ROUNDS: dict[str, Callable[..., list[Round]]] = {
    "layer": layer_rounds,
    "model": model_rounds,
    "accuracy": accuracy_rounds,
    "window": window_rounds,
    "resolution": resolution_rounds,
    "scaling": scaling_rounds,
    "detection": detector_rounds,
}


def run_bench(
    what: str,
    *,
    threads: int | None = None,
    rounds: int | None = None,
    device: str = "cpu",
    backward: bool = False,
    quick: bool = False,
    **options: Any,
) -> Results:
    """Measure one of BENCHES.

    Args:
        what: Its name.
        threads: Threads of torch; None = as many as it takes by itself.
        rounds: How often each candidate has its turn, at most; None = 50, or 10 if quick.
        device: "cpu" or "cuda".
        backward: Measure forward and backward instead of forward alone.
        quick: Fewer of all, in a minute.
        **options: Those of the bench; None = its default.
    """
    bench = BENCHES[what]
    chosen = {name: value for name, value in options.items() if value is not None}
    chosen = {**bench.options, **(bench.quick if quick else {}), **chosen}
    haste: dict[str, Any] = {"rounds": 10, "patience": 4.0} if quick else {}
    haste |= {} if rounds is None else {"rounds": rounds}
    haste |= {} if threads is None else {"threads": threads}
    longest_call = bench.longest_call / (30 if quick else 1)
    conditions = Conditions(device=device, backward=backward, longest_call=longest_call, **haste)
    modes = chosen.pop("modes")
    for mode in modes:
        remedy = did_you_mean(mode, MODES) or f"choose among {', '.join(MODES)}"
        require(mode in MODES, f"there is no mode {mode!r}: {remedy}")
    asked = options.get("modes") or ()
    require(
        "optimized" not in asked or (what not in WITHOUT_OPTIMIZED and not backward),
        f"mode optimized is for inference with classifiers, not for {'--backward' if backward else what}: leave it out",
    )
    return measure(what, ROUNDS[what](**chosen), modes, conditions, **chosen, quick=quick)
