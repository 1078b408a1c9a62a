"""The benchmarks of `inlinevit bench` and their options. This module loads without torch."""

from dataclasses import dataclass, field
from typing import Any

INLINE_DEIT, SOFTMAX_DEIT = "inline_deit_tiny", "deit_tiny_patch16_224"
INLINE_SWIN, SOFTMAX_SWIN = "inline_swin_tiny", "swin_tiny_patch4_window7_224"

# InLine models and their softmax counterparts, by family.
FAMILIES: dict[str, dict[str, str | None]] = {
    "deit": {INLINE_DEIT: SOFTMAX_DEIT, "inline_deit_small": None, "inline_deit_base": None},
    "pvt": {
        "inline_pvt_tiny": "pvt_tiny",
        "inline_pvt_small": "pvt_small",
        "inline_pvt_medium": None,
        "inline_pvt_large": None,
    },
    "swin": {
        INLINE_SWIN: SOFTMAX_SWIN,
        "inline_swin_small": "swin_small_patch4_window7_224",
        "inline_swin_base": "swin_base_patch4_window7_224",
    },
    "cswin": {f"inline_cswin_{size}": f"cswin_{size}" for size in ("tiny", "small", "base")},
}


# DeiT-T with every attention, as published: with its own surroundings and number of heads.
ATTENTION_MODELS = [
    f"{name}_deit_tiny"
    for name in (
        "inline",
        "softmax",
        "linear",
        "hydra",
        "efficient",
        "angular",
        "enhanced",
        "focused",
        "mala",
        "rala",
        "polaformer",
        "agent",
        "vit3",
        "mhla",
        "circulant",
    )
]


# How a candidate can be run; runtimes.MODES has the functions.
ALL_MODES = [
    "eager",
    "compiled",
    "optimized",
    "optimized-int8",
    "openvino",
    "openvino-int8",
    "onnxruntime",
    "onnxruntime-int8",
    "exported-onnxruntime",
    "exported-onnxruntime-int8",
    "exported-openvino",
    "exported-openvino-int8",
]


@dataclass(frozen=True)
class Bench:
    """A benchmark.

    Attributes:
        help: What it measures.
        options: Its own options with their defaults; lists take several values.
        quick: Defaults that differ with --quick.
        modes: The modes that can be chosen.
        longest_call: Candidates that would take more seconds per call are left out; a thirtieth of it with --quick.
    """

    help: str
    options: dict[str, Any]
    quick: dict[str, Any] = field(default_factory=dict)
    modes: list[str] = field(default_factory=lambda: ALL_MODES)
    longest_call: float = 30.0


FLOAT_MODES = ["eager", "compiled", "optimized", "openvino"]
BENCHES = {
    "layer": Bench(
        "an attention layer: InLine on each of its paths, linear, softmax, and the projections alone",
        {
            "tokens": [49, 196, 576, 1600, 4096, 16384],
            "dim": 192,
            "heads": 6,
            "batch": 1,
            "modes": ["eager", "compiled"],
        },
        {"tokens": [196, 1600, 4096], "modes": ["eager"]},
        modes=[mode for mode in ALL_MODES if not mode.startswith(("optimized", "exported"))],
    ),
    "model": Bench(
        "any models of timm, side by side",
        {"models": [INLINE_DEIT, SOFTMAX_DEIT], "sizes": [224, 384], "batches": [1, 8], "modes": FLOAT_MODES},
        {"sizes": [224], "batches": [1], "modes": ["eager", "optimized", "openvino"]},
    ),
    "accuracy": Bench(
        "published accuracy and measured time of all families",
        {"families": list(FAMILIES), "batches": [1], "modes": ["optimized", "openvino"]},
        {"families": ["deit", "pvt"], "modes": ["eager"]},
    ),
    "window": Bench(
        "Swin-T at 224² with windows of several sizes",
        {"windows": [56, 28, 14, 7], "batches": [1], "modes": ["eager", "optimized", "openvino"]},
        {"windows": [56, 7], "modes": ["eager"]},
    ),
    "resolution": Bench(
        "DeiT-T at several resolutions",
        {"sizes": [224, 384, 640, 1024], "batches": [1, 8], "modes": FLOAT_MODES},
        {"sizes": [224, 384, 640], "batches": [1], "modes": ["eager"]},
    ),
    "attentions": Bench(
        "DeiT-T with every attention, at two resolutions",
        {"models": ATTENTION_MODELS, "sizes": [224, 640], "batches": [1], "modes": ["eager", "optimized"]},
        {"sizes": [224], "modes": ["eager"]},
    ),
    "scaling": Bench(
        "how time and memory of DeiT-T grow with the number of tokens",
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
        {
            "backbones": ["inline_pvt_tiny", "pvt_tiny", "pvt_tiny:sr_ratios=[1,1,1,1]"],
            "detectors": ["mask_rcnn"],
            "height": 800,
            "width": 1344,
            "modes": ["eager"],
        },
        {"height": 256, "width": 416},
        modes=["eager", "compiled"],
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
    "models": "names in timm, with options as in 'inline_swin_tiny:window_size=14', and with a mode as in "
    "'deit_tiny_patch16_224@openvino' instead of all of --modes; others are compared with the first",
    "sizes": "side lengths of the images in pixels",
    "batches": "images per call",
    "families": f"some of {', '.join(FAMILIES)}",
    "windows": "side lengths of the windows in tokens; all are compared with InLine at the first",
    "modes": f"some of {', '.join(ALL_MODES)}; optimized is for models of this package; exported is for images of "
    "any size, as `inlinevit export` writes models; openvino and onnxruntime need the extra bench",
}
