"""The paper's ablations on CIFAR-10, and what the paper expects of them."""

from dataclasses import replace

from .design import Cell, Claim, Study, attention_cell

MAPS = {"relu": "ReLU", "relu_affine": "ReLU(A·+b)", "leaky_relu": "LeakyReLU", "identity": "identity", "exp": "exp"}
LINEAR = {phi: attention_cell(f"linear-{phi}", f"linear, {MAPS[phi]}", "linear", feature_map=phi) for phi in MAPS}
PLAIN_INLINE = {
    phi: attention_cell(
        f"inline-{phi}-plain", f"InLine, {MAPS[phi]}, no residual", "inline", feature_map=phi, local_residual=False
    )
    for phi in MAPS
}
INLINE = {phi: attention_cell(f"inline-{phi}", f"InLine, {MAPS[phi]}", "inline", feature_map=phi) for phi in MAPS}
SOFTMAX = attention_cell("softmax", "softmax", "softmax")
UNIT_SOFTMAX = attention_cell("softmax-unit", "softmax, queries of unit length", "softmax", unit_queries=True)
BASELINES = [attention_cell(word, word, word) for word in ("hydra", "efficient", "angular", "enhanced", "focused")]
WINDOWS = (2, 4, 8, 16)
WINDOWED = {
    (width, residual): Cell(
        f"window-{width}" if residual else f"window-{width}-plain",
        f"window {width} × {width}, {'with' if residual else 'without'} residual",
        {"attention": "inline", "attn_kwargs": {"local_residual": residual}, "window_size": width},
        "reproduce_16x16",
    )
    for residual in (False, True)
    for width in WINDOWS
}
ABLATED_MAPS = ("relu", "relu_affine", "leaky_relu", "identity")
OTHERS = (SOFTMAX, LINEAR["relu"], *BASELINES)
ENHANCED, FOCUSED = (cell for cell in BASELINES if cell.label in ("enhanced", "focused"))
# Where the convolution is, how large, and whether its kernels depend on the image.
STATIC = {
    side: attention_cell(
        f"inline-lepe{side}", f"InLine, LePE {side} × {side}", "inline", local_residual=False, lepe=side
    )
    for side in (3, 5)
}
GATED = attention_cell("inline-gate", "InLine, local residual, gate", "inline", gate=True)
IN_MLP = attention_cell("inline-mlp_conv", "InLine, MLP convolution", "inline", local_residual=False, mlp_conv=True)
LINEAR_IN_MLP = attention_cell("linear-mlp_conv", "linear, MLP convolution", "linear", mlp_conv=True)
BOTH = attention_cell("inline-residual-mlp_conv", "InLine, local residual, MLP convolution", "inline", mlp_conv=True)
RESIDUAL_RATES = {
    factor: replace(
        INLINE["identity"],
        key=f"inline-identity-residual-rate{factor:g}",
        label=f"InLine, learning rate of the local residual × {factor:g}",
        changes={"optimizer": {"lr_scales": {"*.local_residual.*": factor}}},
    )
    for factor in (0.25, 4.0)
}
BARE_FOCUSED = attention_cell("focused-plain", "focused, no convolution", "focused", value_conv=False)

ABLATIONS = {
    "injectivity": Study(
        "Injectivity: division or subtraction",
        "Linear and InLine attention differ in one thing here: weights are normalised by division, which loses the "
        "length of a query, or by subtraction, which keeps it.",
        (*(LINEAR[phi] for phi in ABLATED_MAPS), *(PLAIN_INLINE[phi] for phi in ABLATED_MAPS)),
        tuple(Claim(f"InLine above linear with {MAPS[phi]}", PLAIN_INLINE[phi], LINEAR[phi]) for phi in ABLATED_MAPS),
    ),
    "softmax": Study(
        "Injectivity: softmax with unit-length queries",
        "If injectivity matters, softmax should be worse with queries that pass a map that is not injective.",
        (SOFTMAX, UNIT_SOFTMAX),
        (Claim("plain softmax above softmax of unit queries", SOFTMAX, UNIT_SOFTMAX),),
    ),
    "locality": Study(
        "Locality: window size and the local residual",
        "InLine attention within windows from 2 × 2 tokens to the whole feature map of 16 × 16, shifted in every "
        "second block, with and without the local residual.",
        tuple(WINDOWED.values()),
        (
            *(
                Claim(f"with residual above without at window {width}", WINDOWED[width, True], WINDOWED[width, False])
                for width in WINDOWS
            ),
            Claim("with residual, the whole map above the smallest window", WINDOWED[16, True], WINDOWED[2, True]),
        ),
    ),
    "maps": Study(
        "Feature maps of InLine attention",
        "InLine attention with the local residual under four maps φ of queries and keys.",
        tuple(INLINE[phi] for phi in ("identity", "relu", "leaky_relu", "exp")),
    ),
    "baselines": Study(
        "InLine and earlier attentions as published",
        "InLine with its local residual and the attentions that the paper compares it with, in the same transformer, "
        "each with the convolutions that belong to it.",
        (*OTHERS, INLINE["identity"]),
        tuple(Claim(f"InLine above {cell.label}", INLINE["identity"], cell) for cell in OTHERS),
    ),
    "convolution": Study(
        "Place, size and kind of the convolution",
        "Enhanced attention is linear attention with a 3 × 3 convolution in the MLP, before GELU. Focused attention "
        "has a 5 × 5 one of the values, and InLine a 3 × 3 one of the values with kernels that depend on the image. "
        "InLine attention with static kernels, with a gate, with another learning rate of the layers that make its "
        "kernels, and with the MLP convolution that is an option of every attention, after GELU.",
        (
            PLAIN_INLINE["identity"],
            INLINE["identity"],
            *STATIC.values(),
            *RESIDUAL_RATES.values(),
            GATED,
            IN_MLP,
            BOTH,
            LINEAR_IN_MLP,
            ENHANCED,
            FOCUSED,
            BARE_FOCUSED,
        ),
        (
            Claim("the local residual above none", INLINE["identity"], PLAIN_INLINE["identity"]),
            Claim("the local residual above a static 3 × 3 convolution", INLINE["identity"], STATIC[3]),
            Claim("static 5 × 5 above static 3 × 3", STATIC[5], STATIC[3]),
            *(
                Claim(f"learning rate of the local residual × {factor:g} above × 1", cell, INLINE["identity"])
                for factor, cell in RESIDUAL_RATES.items()
            ),
            Claim("local residual and gate above the local residual", GATED, INLINE["identity"]),
            Claim("the convolution in the MLP above the local residual", IN_MLP, INLINE["identity"]),
            Claim("both above the convolution in the MLP", BOTH, IN_MLP),
            Claim("InLine above enhanced, both with a convolution in the MLP", IN_MLP, ENHANCED),
            Claim("InLine above linear, both with the MLP convolution after GELU", IN_MLP, LINEAR_IN_MLP),
            Claim("linear: convolution in the MLP before GELU above after GELU", ENHANCED, LINEAR_IN_MLP),
            Claim("InLine with both above enhanced", BOTH, ENHANCED),
            Claim("InLine above focused, both with static 5 × 5", STATIC[5], FOCUSED),
            Claim("InLine above focused, both without a convolution", PLAIN_INLINE["identity"], BARE_FOCUSED),
        ),
        expectation="what could explain it",
    ),
}
