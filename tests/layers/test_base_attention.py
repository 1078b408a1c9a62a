"""All attentions agree with the slow reference in conftest.py, on all layouts."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from inlinevit import ops
from inlinevit.layers import (
    ATTENTIONS,
    AgentAttention,
    AngularAttention,
    BaseAttention,
    CirculantAttention,
    CrossStripes,
    EfficientAttention,
    EnhancedAttention,
    FocusedAttention,
    HydraAttention,
    InLineAttention,
    LinearAttention,
    MALAAttention,
    MHLAAttention,
    PolaFormerAttention,
    RALAAttention,
    SoftmaxAttention,
    SquareWindows,
    ViT3Attention,
    WholeMap,
)
from inlinevit.ops.weights import WEIGHT_FUNCTIONS
from inlinevit.ops.windows import window_means, window_reverse
from inlinevit.testing import ATTENTION_CHECKS, check_attention
from tests import pairs_of, slow_except

# Rotary positions need heads of four channels.
DIM, HEADS = 16, 4
PLAIN = {"gate": False, "rope": False}
# The attentions and options of the comparisons; "relative" is for windows alone.
MIXERS = {
    "inline": (InLineAttention, {}),
    "inline-affine": (InLineAttention, {"feature_map": "relu_affine", "qkv_bias": False}),
    "inline-plain": (InLineAttention, {"feature_map": "exp", "local_residual": False}),
    "linear": (LinearAttention, {}),
    "linear-affine": (LinearAttention, {"feature_map": "relu_affine"}),
    "softmax": (SoftmaxAttention, {}),
    "softmax-unit": (SoftmaxAttention, {"unit_queries": True}),
    "hydra": (HydraAttention, {}),
    "efficient": (EfficientAttention, {}),
    "angular": (AngularAttention, {}),
    "enhanced": (EnhancedAttention, {}),
    # Positions that fit the map or the window in some tests, and are resized in others.
    "focused": (FocusedAttention, {"grid": (4, 4)}),
    "mala": (MALAAttention, {}),
    "mala-plain": (MALAAttention, PLAIN),
    "rala": (RALAAttention, {}),
    "rala-plain": (RALAAttention, PLAIN),
    "polaformer": (PolaFormerAttention, {"grid": (4, 4)}),
    "inline-surrounded": (InLineAttention, {"gate": True, "rope": True}),
    "softmax-surrounded": (SoftmaxAttention, {"gate": True, "rope": True}),
    "focused-surrounded": (FocusedAttention, {"gate": True, "rope": True, "grid": (4, 4)}),
    "agent": (AgentAttention, {"grid": (4, 4), "agent_side": 3}),
    "agent-surrounded": (AgentAttention, {"gate": True, "rope": True, "grid": (5, 3), "agent_side": 2}),
    "mhla": (MHLAAttention, {}),
    "mhla-code": (MHLAAttention, {"shared_divisor": True, "qkv_bias": False, "gate": True, "rope": True}),
    "circulant": (CirculantAttention, {}),
    "circulant-plain": (CirculantAttention, {"gate": False, "qkv_bias": False}),
}
# Those without an N×N form; see their own tests.
OTHERS = {"vit3": (ViT3Attention, {}), "vit3-surrounded": (ViT3Attention, {"gate": True, "rope": True, "lepe": 5})}
# One of each attention; the others differ in an option.
PLAINEST = [name for name in MIXERS | OTHERS if name in ATTENTIONS]
every_mixer = pytest.mark.parametrize("name", MIXERS)
every_kind = pytest.mark.parametrize("kind", ATTENTIONS.values(), ids=ATTENTIONS)
WITH_PREFIX = {name: kind for name, kind in ATTENTIONS.items() if kind.supports_prefix_tokens}
every_kind_with_prefix = pytest.mark.parametrize("kind", WITH_PREFIX.values(), ids=WITH_PREFIX)
# Every attention with the numbers of prefix tokens that it takes.
PREFIXES = [
    (name, prefix)
    for name, (kind, _) in MIXERS.items()
    for prefix in ((0, 1, 3) if kind.supports_prefix_tokens else (0,))
]


def tokens(count: int, batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, count, DIM, dtype=torch.float64)


def assert_same(mixer, reference, x, size, kernel_tokens=None) -> None:
    with torch.no_grad():
        # Where windows are padded, a query may see little of the weights that Fourier transforms round as a whole.
        padded = isinstance(mixer, CirculantAttention) and not isinstance(mixer.layout, WholeMap)
        near = 1e-7 if padded else 1e-10
        torch.testing.assert_close(
            mixer(x, size, kernel_tokens), reference(mixer, x, size, kernel_tokens), rtol=near, atol=near
        )


@pytest.mark.parametrize("lepe", [False, True])
@pytest.mark.parametrize(("name", "prefix"), PREFIXES)
def test_whole_map(randomise, reference, name, prefix, lepe):
    kind, options = MIXERS[name]
    assert_same(randomise(kind(DIM, HEADS, lepe=lepe, **options)), reference, tokens(prefix + 15), (3, 5))


# Divided evenly; padded along one axis, along both; covered along one axis, along both; a single row.
WINDOW_SIZES = [(8, 8), (8, 6), (5, 7), (3, 9), (3, 3), (1, 6)]


@pytest.mark.parametrize(("name", "size", "shifted"), pairs_of(list(MIXERS), WINDOW_SIZES, [False, True]))
def test_square_windows(randomise, reference, name, size, shifted):
    kind, options = MIXERS[name]
    mixer = randomise(kind(DIM, HEADS, layout=SquareWindows(4, shifted=shifted), **options))
    assert_same(mixer, reference, tokens(size[0] * size[1]), size)


@pytest.mark.parametrize("lepe", [False, True])
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("size", WINDOW_SIZES)
def test_square_windows_with_relative_positions(randomise, reference, size, shifted, lepe):
    layout = SquareWindows(4, shifted=shifted)
    mixer = randomise(SoftmaxAttention(DIM, HEADS, layout=layout, relative_window=4, lepe=lepe))
    assert_same(mixer, reference, tokens(size[0] * size[1]), size)


@every_mixer
@pytest.mark.parametrize("size", [(6, 6), (5, 7), (2, 7), (7, 2), (2, 2), (1, 5)])
def test_cross_stripes_with_lepe(randomise, reference, name, size):
    """x̄ comes from another tensor, as in CSWin, where it is the input before the norm."""
    kind, options = MIXERS[name]
    mixer = randomise(kind(DIM, HEADS, layout=CrossStripes(2), lepe=True, **options))
    count = size[0] * size[1]
    assert_same(mixer, reference, tokens(count), size, kernel_tokens=tokens(count))


@settings(deadline=None, max_examples=25, derandomize=True)
@given(size=st.tuples(st.integers(1, 9), st.integers(1, 9)), window=st.integers(1, 6), shifted=st.booleans())
@pytest.mark.parametrize("name", ["inline", "softmax"])
def test_any_window_on_any_map(randomise, reference, name, size, window, shifted):
    kind, options = MIXERS[name]
    mixer = randomise(kind(4, 2, layout=SquareWindows(window, shifted=shifted), **options))
    assert_same(mixer, reference, torch.randn(1, size[0] * size[1], 4, dtype=torch.float64), size)


# Explicit weights


def kernels_of(mixer, kernel_tokens, windows, count: int) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """Kernels of each window, (count, channels, side · side), and their bias: dynamic and static ones."""
    kernels, static = mixer.local_kernels(kernel_tokens, windows), mixer.static_kernels(windows)
    found = [] if kernels is None else [(kernels, None)]
    return found if static is None else [*found, (static[0].flatten(1).expand(count, -1, -1), static[1])]


def by_weights(mixer, x, size, kernel_tokens, chunk: int) -> torch.Tensor:
    """What mixer(x, size, kernel_tokens) should give, from its weights for chunks of queries, and its kernels."""
    outputs = []
    for q, k, v, windows in mixer.partition(x, size):
        chunks = [
            mixer.attention_weights(q[:, :, first : first + chunk], k, v, windows, first=first)
            for first in range(0, q.shape[2], chunk)
        ]
        out = ops.apply_weights(torch.cat(chunks, dim=2), v).transpose(1, 2).flatten(2)
        for kernels, bias in kernels_of(mixer, kernel_tokens, windows, len(q)):
            height, width = windows.window_height, windows.window_width
            prefix, side = out.shape[1] - height * width, math.isqrt(kernels.shape[-1])
            for window, (value, kernel) in enumerate(zip(v, kernels, strict=True)):
                # (heads, tokens, width) -> (channels, H, W)
                maps = value[:, prefix:].transpose(1, 2).flatten(0, 1).unflatten(1, (height, width))
                weight = kernel.view(len(maps), 1, side, side)
                added = F.conv2d(maps, weight, bias, padding=side // 2, groups=len(maps))
                out[window, prefix:] += added.flatten(1).T
        outputs.append(window_reverse(out, windows))
    out = torch.cat(outputs, dim=-1)
    return mixer.proj(out if mixer.gate is None else out * mixer.gate(x))


# Layout, prefix, size and LePE; windows are padded and shifted.
CASES = {
    "whole": (WholeMap(), 1, (3, 5), False),
    "whole-lepe": (WholeMap(), 0, (3, 5), True),
    "windows": (SquareWindows(4, shifted=False), 0, (5, 7), False),
    "shifted": (SquareWindows(4, shifted=True), 0, (5, 7), False),
    "stripes": (CrossStripes(2), 0, (5, 7), True),
}
every_case = pytest.mark.parametrize(("layout", "prefix", "size", "lepe"), CASES.values(), ids=CASES)


@every_mixer
@every_case
def test_weights_and_kernels_are_what_attention_does(randomise, name, layout, prefix, size, lepe):
    kind, options = MIXERS[name]
    if kind is SoftmaxAttention and isinstance(layout, SquareWindows):
        options = {**options, "relative_window": 4}
    mixer = randomise(kind(DIM, HEADS, layout=layout, lepe=lepe, **options))
    prefix = prefix if kind.supports_prefix_tokens else 0
    x, kernel_tokens = tokens(prefix + size[0] * size[1]), tokens(prefix + size[0] * size[1])
    with torch.no_grad():
        expected = mixer(x, size, kernel_tokens)
        for chunk in (100, 6, 1):
            found = by_weights(mixer, x, size, kernel_tokens, chunk)
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-10)


# What every attention promises


@pytest.mark.parametrize("name", slow_except([*MIXERS, *OTHERS], *PLAINEST))
@pytest.mark.parametrize("check", slow_except(ATTENTION_CHECKS, *(set(ATTENTION_CHECKS) - {"compile"})))
def test_promises(name, check):
    """The same checks that attentions of other packages use."""
    kind, options = (MIXERS | OTHERS)[name]
    check_attention(kind, checks=[check], **options)


@pytest.mark.parametrize("shifted", [False, True])
def test_gradients_reach_relative_positions(randomise, shifted):
    """On a padded map, where a NaN would come from softmax rows of padding."""
    layout = SquareWindows(4, shifted=shifted)
    mixer = randomise(SoftmaxAttention(DIM, HEADS, layout=layout, relative_window=4))
    x = tokens(35).requires_grad_()
    mixer(x, (5, 7)).square().sum().backward()
    for tensor in (*mixer.parameters(), x):
        assert tensor.grad.isfinite().all()
        assert tensor.grad.abs().max() > 1e-8


def test_context_is_used_for_the_kernels_alone(randomise):
    x, kernel_tokens = tokens(15), tokens(15)
    mixer = randomise(InLineAttention(DIM, HEADS))
    assert torch.equal(mixer(x, (3, 5)), mixer(x, (3, 5), x))
    assert not torch.allclose(mixer(x, (3, 5)), mixer(x, (3, 5), kernel_tokens))
    plain = randomise(InLineAttention(DIM, HEADS, local_residual=False))
    assert torch.equal(plain(x, (3, 5)), plain(x, (3, 5), kernel_tokens))


LAYOUTS = {
    "whole": (WholeMap(), False),
    "shifted": (SquareWindows(4, shifted=True), False),
    "stripes": (CrossStripes(2), True),
}
every_layout = pytest.mark.parametrize(("layout", "lepe"), LAYOUTS.values(), ids=LAYOUTS)


@pytest.mark.parametrize("name", slow_except(MIXERS, *PLAINEST))
@every_layout
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(name, layout, lepe, dtype):
    """A module in half precision, and one in float32 under autocast, both come close to float32."""
    kind, options = MIXERS[name]
    # Wide heads: the direction of a narrow φ(q), all that linear attention sees, may hang on a digit.
    mixer = kind(64, HEADS, layout=layout, lepe=lepe, **options)
    x = torch.randn(2, 35, 64)
    with torch.no_grad():
        expected = mixer(x, (5, 7))
        with torch.autocast("cpu", dtype=dtype):
            under_autocast = mixer(x, (5, 7))
        half = mixer.to(dtype)(x.to(dtype), (5, 7))
    for out in (under_autocast, half):
        assert out.dtype == dtype
        assert (out.float() - expected).norm() <= 4 * torch.finfo(dtype).eps * expected.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_relative_positions_under_autocast(dtype):
    for size in [(8, 8), (5, 7), (3, 3)]:
        mixer = SoftmaxAttention(DIM, HEADS, layout=SquareWindows(4, shifted=False), relative_window=4)
        x = torch.randn(2, size[0] * size[1], DIM)
        with torch.autocast("cpu", dtype=dtype):
            out = mixer(x, size)
        assert out.dtype == dtype
        expected = mixer(x, size)
        assert (out - expected).norm() <= 4 * torch.finfo(dtype).eps * expected.norm()


def test_dropout_acts_in_training_alone():
    mixer = InLineAttention(DIM, HEADS, proj_drop=0.5)
    x = torch.randn(1, 36, DIM)
    assert (mixer.train()(x, (6, 6)) == 0).float().mean() > 0.3
    assert torch.all(mixer.eval()(x, (6, 6)) != 0)


# Means of windows


def test_window_means_of_large_numbers_in_half_precision():
    """A mean of numbers that fit into float16 fits, too; their sum does not."""
    for size in [(14, 14), (13, 13)]:
        (windows,) = SquareWindows(7, shifted=False)(size)
        means = window_means(torch.full((1, size[0] * size[1], 2), 2000.0, dtype=torch.float16), windows)
        torch.testing.assert_close(means, torch.full_like(means, 2000.0), rtol=1e-3, atol=0)


# The table of attentions


def test_the_attentions_are_there():
    words = {"inline", "softmax", "linear", "hydra", "efficient", "angular", "enhanced", "focused"}
    words |= {"mala", "rala", "polaformer"}
    words |= {"agent", "vit3", "mhla", "circulant"}
    assert set(ATTENTIONS) == words
    # And all of them are compared with the reference and with their explicit weights, above.
    assert {kind for kind, _ in (MIXERS | OTHERS).values()} == set(ATTENTIONS.values())


def test_every_attention_has_an_explicit_form():
    """Enhanced attention is linear attention with another MLP. The output of ViT³ is not linear in the values."""
    assert set(WEIGHT_FUNCTIONS) == set(ATTENTIONS) - {"enhanced", "vit3"}
    for name, kind in ATTENTIONS.items():
        assert issubclass(kind, BaseAttention)
        assert (kind.attention_weights is not BaseAttention.attention_weights) == (name != "vit3")


# Errors


@pytest.mark.parametrize("kind", [kind for name, kind in ATTENTIONS.items() if name not in ("hydra", "circulant")])
@pytest.mark.parametrize("heads", [3, 0, -2, 16])
def test_heads_that_do_not_divide_the_channels_are_refused(kind, heads):
    with pytest.raises(ValueError, match=f"dim must be divisible by num_heads, but dim is 8 and num_heads is {heads}"):
        kind(8, heads)


@pytest.mark.parametrize("kind", [kind for kind in ATTENTIONS.values() if kind.supports_windows])
def test_heads_that_stripes_cannot_halve_are_refused(kind):
    with pytest.raises(ValueError, match=r"(?i)heads"):
        kind(9, 3, layout=CrossStripes(2))(torch.randn(1, 36, 9), (6, 6))


@every_kind
def test_too_few_tokens_are_refused(kind):
    with pytest.raises(ValueError, match=r"15 tokens do not match feat_size=\(4, 4\).*16 tokens"):
        kind(DIM, HEADS)(torch.randn(1, 15, DIM), (4, 4))


@every_kind_with_prefix
@pytest.mark.parametrize("count", [16, 18])
def test_another_number_of_prefix_tokens_is_refused(kind, count):
    mixer = kind(DIM, HEADS, num_prefix_tokens=1)
    assert mixer(torch.randn(1, 17, DIM), (4, 4)).shape == (1, 17, DIM)
    with pytest.raises(
        ValueError, match=rf"{count} tokens do not match feat_size=\(4, 4\).*1 prefix tokens.*16 tokens"
    ):
        mixer(torch.randn(1, count, DIM), (4, 4))


@every_kind_with_prefix
@pytest.mark.parametrize("layout", [SquareWindows(3, shifted=False), CrossStripes(2)])
def test_prefix_tokens_with_windows_are_refused(kind, layout):
    with pytest.raises(ValueError, match=r"do not cover the map of 4×4.*use the whole map, or no prefix tokens"):
        kind(DIM, HEADS, layout=layout)(torch.randn(1, 17, DIM), (4, 4))


def test_unknattn_kwargs_names_are_refused():
    for kind in ATTENTIONS.values():
        with pytest.raises(TypeError, match="qk_bias"):
            kind(DIM, HEADS, qk_bias=True)


def test_the_base_class_does_not_attend():
    with pytest.raises(NotImplementedError):
        BaseAttention(DIM, HEADS)(torch.randn(1, 16, DIM), (4, 4))
    q = torch.randn(1, 4, 16, 2)
    with pytest.raises(NotImplementedError):
        BaseAttention(DIM, HEADS).attention_weights(q, q, q, WholeMap()((4, 4))[0])


def test_layout_is_the_whole_map_by_default():
    mixer = InLineAttention(DIM, HEADS)
    assert isinstance(mixer.layout, WholeMap)


def test_kernels_of_a_new_attention_are_added():
    """A subclass needs no forward of its own to add a convolution that it makes from the tokens."""

    class Doubled(LinearAttention):
        def local_kernels(self, kernel_tokens, windows):
            """The centre tap alone: each token's value is added to its output."""
            kernels = kernel_tokens.new_zeros(kernel_tokens.shape[0], kernel_tokens.shape[2], 9)
            kernels[..., 4] = 1
            return kernels

    torch.manual_seed(0)
    layer = Doubled(16, 2)
    plain = LinearAttention(16, 2)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(2, 12, 16)
    values = F.linear(x, layer.qkv.weight[32:], layer.qkv.bias[32:])
    expected = plain(x, (3, 4)) + F.linear(values, layer.proj.weight)
    torch.testing.assert_close(layer(x, (3, 4)), expected)
