"""What `inlinevit bench` can measure: layer, models, the three studies of the paper, how cost grows, detectors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..models.catalog import CATALOG
from ..utils.validation import MOST_PIXELS, Range, check_value, did_you_mean, require
from .candidates import layer_rounds, model_candidate, model_rounds
from .detectors import detector_rounds
from .measure import MODES, Candidate, Conditions, Results, Round, measure

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


@dataclass(frozen=True)
class Bench:
    """What `inlinevit bench NAME` measures.

    Attributes:
        help: In a sentence.
        make_turns: From the values of its options to what is measured.
        options: The options of its own, with their defaults; lists take several values.
        quick: The defaults that are others with --quick.
        longest_call: Contenders that would take more seconds a call are left out; with --quick, a thirtieth of it.
    """

    help: str
    make_turns: Callable[..., list[Round]]
    options: dict[str, Any]
    quick: dict[str, Any] = field(default_factory=dict)
    longest_call: float = 30.0


ALL_MODES = list(MODES)
# Benches of what optimize_for_inference does not take.
WITHOUT_OPTIMIZED = ("layer", "detection")
BENCHES = {
    "layer": Bench(
        "an attention layer: InLine by each of its paths, linear, softmax, against the projections alone",
        layer_rounds,
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
        "any of timm's models against each other",
        model_rounds,
        {"models": [INLINE_DEIT, SOFTMAX_DEIT], "sizes": [224, 384], "batches": [1, 8], "modes": ALL_MODES},
        {"sizes": [224], "batches": [1, 8], "modes": ["eager"]},
    ),
    "accuracy": Bench(
        "published accuracy against measured time, for all families",
        accuracy_rounds,
        {"families": list(FAMILIES), "batches": [1], "modes": ALL_MODES},
        {"families": ["deit", "pvt"], "modes": ["eager"]},
    ),
    "window": Bench(
        "Swin-T at 224² with windows of several sizes",
        window_rounds,
        {"windows": [56, 28, 14, 7], "batches": [1], "modes": ALL_MODES},
        {"windows": [56, 7], "modes": ["eager"]},
    ),
    "resolution": Bench(
        "DeiT-T at several resolutions",
        resolution_rounds,
        {"sizes": [224, 384, 640, 1024], "batches": [1, 8], "modes": ALL_MODES},
        {"sizes": [224, 384, 640], "batches": [1], "modes": ["eager"]},
    ),
    "scaling": Bench(
        "how time and memory of DeiT-T grow with the number of tokens",
        scaling_rounds,
        {
            "sizes": [224, 320, 448, 640, 1024, 1440, 2048],
            "batches": [1],
            "modes": ["eager", "optimized"],
        },
        {"sizes": [224, 320, 448, 640], "modes": ["eager"]},
    ),
    # 1333×800, as detectors usually see images, filled up to multiples of 32. Without reduction, the first stage of a
    # softmax PVT has 67,200 tokens, and takes its time.
    "detection": Bench(
        "whole detectors on one image, from pixels to objects",
        detector_rounds,
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
# What the options of the benches are.
OPTIONS_HELP = {
    "tokens": "numbers of tokens, squares",
    "dim": "channels",
    "heads": "heads",
    "batch": "maps of a call",
    "backbones": "timm's names, with options as in 'pvt_tiny:sr_ratios=[1,1,1,1]'; others are compared with the first",
    "detectors": "mask_rcnn, cascade_mask_rcnn or both",
    "height": "of the image in pixels",
    "width": "of the image in pixels",
    "models": "timm's names, with options as in 'inline_swin_tiny:window_size=14'; others are compared with the first",
    "sizes": "sides of the images in pixels",
    "batches": "images of a call",
    "families": f"some of {', '.join(FAMILIES)}",
    "windows": "sides of the windows in tokens; all are compared with InLine at the first",
    "modes": f"some of {', '.join(MODES)}; optimized is for our models",
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
    return measure(what, bench.make_turns(**chosen), modes, conditions, **chosen, quick=quick)
