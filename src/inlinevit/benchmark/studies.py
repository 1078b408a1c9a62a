"""The benchmarks of `inlinevit bench`: layers, models, the three studies of the paper, scaling, detectors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..models.catalog import CATALOG
from ..utils.validation import MOST_PIXELS, Range, check_value, did_you_mean, require
from .candidates import layer_comparisons, model_candidate, model_comparisons
from .detectors import detector_comparisons
from .measure import MODES, Conditions, measure
from .results import Results
from .workload import Candidate, Comparison

INLINE_DEIT, SOFTMAX_DEIT = "inline_deit_tiny", "deit_tiny_patch16_224"
INLINE_SWIN, SOFTMAX_SWIN = "inline_swin_tiny", "swin_tiny_patch4_window7_224"

# InLine models and their softmax counterparts, by family.
FAMILIES: dict[str, list[tuple[str, str | None]]] = {
    "deit": [(INLINE_DEIT, SOFTMAX_DEIT), ("inline_deit_small", None), ("inline_deit_base", None)],
    "pvt": [
        ("inline_pvt_tiny", "pvt_tiny"),
        ("inline_pvt_small", "pvt_small"),
        ("inline_pvt_medium", None),
        ("inline_pvt_large", None),
    ],
    "swin": [
        (INLINE_SWIN, SOFTMAX_SWIN),
        ("inline_swin_small", "swin_small_patch4_window7_224"),
        ("inline_swin_base", "swin_base_patch4_window7_224"),
    ],
    "cswin": [
        ("inline_cswin_tiny", "cswin_tiny"),
        ("inline_cswin_small", "cswin_small"),
        ("inline_cswin_base", "cswin_base"),
    ],
}
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
    for family in families:
        remedy = did_you_mean(family, FAMILIES) or f"choose among {', '.join(FAMILIES)}"
        require(family in FAMILIES, f"there is no family {family!r}: {remedy}")

    def candidates(pair: tuple[str, str | None], batch: int) -> list[Candidate]:
        sizes = {model: CATALOG[model].input_size if model in CATALOG else 224 for model in pair if model}
        return [model_candidate(model, size, batch) for model, size in sizes.items()]

    return [
        Comparison(f"{pair[0]}, batch {batch}", batch, candidates(pair, batch))
        for batch in batches
        for family in families
        for pair in FAMILIES[family]
    ]


def window_comparisons(windows: Sequence[int], batches: Sequence[int]) -> list[Comparison]:
    """Return a comparison of Swin-T at 224² with windows of several sizes, InLine and softmax."""
    for window in windows:
        check_value("window", window, int, Range(1, MOST_PIXELS))
    models = [f"{model}:window_size={window}" for model in (INLINE_SWIN, SOFTMAX_SWIN) for window in windows]
    return model_comparisons(models, [224], batches)


def resolution_comparisons(sizes: Sequence[int], batches: Sequence[int]) -> list[Comparison]:
    """Return comparisons of DeiT-T with InLine and softmax attention."""
    return model_comparisons([INLINE_DEIT, SOFTMAX_DEIT], sizes, batches)


def scaling_comparisons(sizes: Sequence[int], batches: Sequence[int]) -> list[Comparison]:
    """Return comparisons of DeiT-T with InLine, linear and softmax attention."""
    return model_comparisons([INLINE_DEIT, f"{INLINE_DEIT}:attention=linear", SOFTMAX_DEIT], sizes, batches)


@dataclass(frozen=True)
class Bench:
    """A benchmark.

    Attributes:
        help: What it measures.
        make_comparisons: From the values of its options to what is measured.
        options: Its own options with their defaults; lists take several values.
        quick: Defaults that differ with --quick.
        longest_call: Candidates that would take more seconds per call are left out; a thirtieth of it with --quick.
    """

    help: str
    make_comparisons: Callable[..., list[Comparison]]
    options: dict[str, Any]
    quick: dict[str, Any] = field(default_factory=dict)
    longest_call: float = 30.0


ALL_MODES = list(MODES)
# Benchmarks of modules that optimize_for_inference does not take.
WITHOUT_OPTIMIZED = ("layer", "detection")
BENCHES = {
    "layer": Bench(
        "an attention layer: InLine on each of its paths, linear, softmax, and the projections alone",
        layer_comparisons,
        {
            "tokens": [49, 196, 576, 1600, 4096, 16384],
            "dim": 192,
            "heads": 6,
            "batch": 1,
            "modes": ["eager", "compiled"],
        },
        {"tokens": [196, 1600, 4096], "modes": ["eager"]},
    ),
    "model": Bench(
        "any models of timm, side by side",
        model_comparisons,
        {"models": [INLINE_DEIT, SOFTMAX_DEIT], "sizes": [224, 384], "batches": [1, 8], "modes": ALL_MODES},
        {"sizes": [224], "batches": [1, 8], "modes": ["eager"]},
    ),
    "accuracy": Bench(
        "published accuracy and measured time of all families",
        accuracy_comparisons,
        {"families": list(FAMILIES), "batches": [1], "modes": ALL_MODES},
        {"families": ["deit", "pvt"], "modes": ["eager"]},
    ),
    "window": Bench(
        "Swin-T at 224² with windows of several sizes",
        window_comparisons,
        {"windows": [56, 28, 14, 7], "batches": [1], "modes": ALL_MODES},
        {"windows": [56, 7], "modes": ["eager"]},
    ),
    "resolution": Bench(
        "DeiT-T at several resolutions",
        resolution_comparisons,
        {"sizes": [224, 384, 640, 1024], "batches": [1, 8], "modes": ALL_MODES},
        {"sizes": [224, 384, 640], "batches": [1], "modes": ["eager"]},
    ),
    "scaling": Bench(
        "how time and memory of DeiT-T grow with the number of tokens",
        scaling_comparisons,
        {
            "sizes": [224, 320, 448, 640, 1024, 1440, 2048],
            "batches": [1],
            "modes": ["eager", "optimized"],
        },
        {"sizes": [224, 320, 448, 640], "modes": ["eager"]},
    ),
    # 1333×800, the usual input size of detectors, padded to multiples of 32. Without reduction, the first stage of a
    # softmax PVT has 67,200 tokens, which takes minutes.
    "detection": Bench(
        "whole detectors on one image, from pixels to objects",
        detector_comparisons,
        {
            "backbones": ["inline_pvt_tiny", "pvt_tiny", "pvt_tiny:sr_ratios=[1,1,1,1]"],
            "detectors": ["mask_rcnn"],
            "height": 800,
            "width": 1344,
            "modes": ["eager"],
        },
        {"height": 256, "width": 416},
        longest_call=600.0,
    ),
}
# Help texts of the options.
OPTIONS_HELP = {
    "tokens": "numbers of tokens, which are squares",
    "dim": "channels",
    "heads": "heads",
    "batch": "feature maps per call",
    "backbones": "names in timm, with options as in 'pvt_tiny:sr_ratios=[1,1,1,1]'; others are compared with the first",
    "detectors": "mask_rcnn, cascade_mask_rcnn or both",
    "height": "height of the image in pixels",
    "width": "width of the image in pixels",
    "models": "names in timm, with options as in 'inline_swin_tiny:window_size=14'; others are compared with the first",
    "sizes": "side lengths of the images in pixels",
    "batches": "images per call",
    "families": f"some of {', '.join(FAMILIES)}",
    "windows": "side lengths of the windows in tokens; all are compared with InLine at the first",
    "modes": f"some of {', '.join(MODES)}; optimized is for models of this package",
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
        threads: Threads of torch; None = torch's default.
        rounds: Timed calls of each candidate, at most; None = 50, or 10 if quick.
        device: "cpu" or "cuda".
        backward: Measure forward and backward instead of forward alone.
        quick: Take smaller defaults, for results within a minute.
        **options: Options of the benchmark; None = default.
    """
    bench = BENCHES[what]
    chosen = {name: value for name, value in options.items() if value is not None}
    chosen = {**bench.options, **(bench.quick if quick else {}), **chosen}
    limits: dict[str, Any] = {"rounds": 10, "patience": 4.0} if quick else {}
    limits |= {} if rounds is None else {"rounds": rounds}
    limits |= {} if threads is None else {"threads": threads}
    longest_call = bench.longest_call / (30 if quick else 1)
    conditions = Conditions(device=device, backward=backward, longest_call=longest_call, **limits)
    modes = chosen.pop("modes")
    for mode in modes:
        remedy = did_you_mean(mode, MODES) or f"choose among {', '.join(MODES)}"
        require(mode in MODES, f"there is no mode {mode!r}: {remedy}")
    asked = options.get("modes") or ()
    require(
        "optimized" not in asked or (what not in WITHOUT_OPTIMIZED and not backward),
        f"mode optimized is for inference with classifiers, not for {'--backward' if backward else what}: leave it out",
    )
    return measure(what, bench.make_comparisons(**chosen), modes, conditions, **chosen, quick=quick)
