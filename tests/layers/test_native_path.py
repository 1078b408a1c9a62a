"""The compiled kernel in InLineAttention: its numbers, and where it is taken and where not."""

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp, vmap
from torch.utils.flop_counter import FlopCounterMode

from inlinevit import kernels
from inlinevit.layers import Block, CrossStripes, InLineAttention, SquareWindows
from inlinevit.ops.inline import select_path

SIZE = (5, 7)
OPTIONS = {
    "plain": {},
    "no bias": {"qkv_bias": False},
    "no residual": {"local_residual": False},
    "LePE": {"lepe": True},
    "LePE alone": {"lepe": True, "local_residual": False},
    "padded windows": {"layout": SquareWindows(3, shifted=False)},
    "padded shifted windows, LePE alone": {
        "layout": SquareWindows(3, shifted=True),
        "lepe": True,
        "local_residual": False,
    },
    "stripes": {"layout": CrossStripes(2), "lepe": True},
    "stripes that cover the map for one head group": {"layout": CrossStripes(5)},
}


@pytest.fixture
def calls(monkeypatch) -> list[Tensor]:
    """The results of the compiled kernel."""
    if not kernels.available():
        pytest.skip(kernels.unavailable_reason())
    results, attention = [], kernels.inline_attention
    monkeypatch.setattr(kernels, "inline_attention", lambda *a, **k: results.append(attention(*a, **k)) or results[-1])
    return results


@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_it_is_the_slow_reference(calls, randomise, reference, options, prefix):
    if prefix and "layout" in options:
        pytest.skip("prefix tokens are in no window")
    mixer = randomise(InLineAttention(8, 2, path="native", **options))
    x = torch.randn(2, prefix + 35, 8, dtype=torch.float64, requires_grad=True)
    kernel_tokens = torch.randn_like(x)
    leaves = [x, *mixer.parameters()]
    for given in (None, kernel_tokens):
        out, expected = mixer(x, SIZE, given), reference(mixer, x, SIZE, given)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-10)
        cotangent = torch.randn_like(out)
        native = torch.autograd.grad(out, leaves, cotangent, allow_unused=True, materialize_grads=True)
        slow = torch.autograd.grad(expected, leaves, cotangent, allow_unused=True, materialize_grads=True)
        torch.testing.assert_close(native, slow, rtol=0, atol=1e-10)
    assert len(calls) == 2 * len(mixer.layout(SIZE))


@pytest.mark.parametrize("options", [OPTIONS["LePE"], OPTIONS["padded windows"], OPTIONS["stripes"]])
def test_double_backward(calls, randomise, options):
    mixer = randomise(InLineAttention(8, 2, **options))
    x = torch.randn(1, 35, 8, dtype=torch.float64, requires_grad=True)

    def penalty_gradients(path: str) -> tuple[Tensor, ...]:
        mixer.path = path
        (gradient,) = torch.autograd.grad(mixer(x, SIZE).pow(2).sum(), x, create_graph=True)
        leaves = [x, *mixer.parameters()]
        return torch.autograd.grad(gradient.pow(2).sum(), leaves, allow_unused=True, materialize_grads=True)

    torch.testing.assert_close(penalty_gradients("native"), penalty_gradients("covariance"), rtol=1e-9, atol=1e-9)
    assert calls


def test_batched_gradients(calls):
    mixer, x = InLineAttention(8, 2, lepe=True).double(), torch.randn(1, 35, 8, dtype=torch.float64, requires_grad=True)
    mixer.path = "native"
    out, cotangents = mixer(x, SIZE), torch.randn(3, 1, 35, 8, dtype=torch.float64)
    (batched,) = torch.autograd.grad(out, x, cotangents, is_grads_batched=True, retain_graph=True)
    one_by_one = [torch.autograd.grad(out, x, cotangent, retain_graph=True)[0] for cotangent in cotangents]
    torch.testing.assert_close(batched, torch.stack(one_by_one), rtol=0, atol=1e-12)


def test_a_block_in_float32_takes_it(calls):
    block, x = Block(InLineAttention(8, 2), 8), torch.randn(2, 35, 8)
    expected = block.double()(x.double(), SIZE)
    assert not calls
    torch.testing.assert_close(block.float()(x, SIZE).double(), expected, rtol=0, atol=1e-5)
    assert len(calls) == 1


def test_the_same_input_gives_the_same_bits(calls):
    mixer, x = InLineAttention(64, 2), torch.randn(2, 35, 64, requires_grad=True)
    first, second = mixer(x, SIZE), mixer(x, SIZE)
    assert torch.equal(first, second)
    gradients = [torch.autograd.grad(out.pow(2).sum(), [x, *mixer.parameters()]) for out in (first, second)]
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


class Subclass(Tensor):
    """A tensor of another type."""


class Layer(nn.Module):
    """A layer that knows the size of its map."""

    def __init__(self, path: str | None = None) -> None:
        super().__init__()
        self.mixer = InLineAttention(8, 2, path=path)

    def forward(self, x: Tensor) -> Tensor:
        return self.mixer(x, SIZE)


def in_autocast(layer: Layer, x: Tensor) -> object:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return layer(x)


def in_flop_counter(layer: Layer, x: Tensor) -> object:
    with FlopCounterMode(display=False):
        return layer(x)


def with_tangent(layer: Layer, x: Tensor) -> object:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(layer(forward_ad.make_dual(x, x))).tangent + 0


def per_sample_gradients(layer: Layer, x: Tensor) -> object:
    def loss(parameters: dict[str, Tensor], one: Tensor) -> Tensor:
        return functional_call(layer, parameters, (one[None],)).sum()

    return vmap(grad(loss), in_dims=(None, 0))(dict(layer.named_parameters()), x)


ELSEWHERE = {
    "autocast": in_autocast,
    "FLOP counter": in_flop_counter,
    "subclass": lambda layer, x: layer(x.as_subclass(Subclass)),
    "float64": lambda layer, x: layer.double()(x.double()),
    "bfloat16": lambda layer, x: layer.bfloat16()(x.bfloat16()),
    "meta": lambda layer, x: layer.to("meta")(x.to("meta")),
    "jvp": lambda layer, x: jvp(layer, (x,), (x,)),
    "dual numbers": with_tangent,
    "per-sample gradients": per_sample_gradients,
    "jit.trace": lambda layer, x: torch.jit.trace(layer.requires_grad_(False), x, check_trace=False),
    "compile": lambda layer, x: torch.compile(layer.requires_grad_(False), backend="eager", fullgraph=True)(x),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("call", ELSEWHERE.values(), ids=ELSEWHERE)
def test_it_is_not_taken_where_operators_are_more_than_called(calls, call):
    layer, x = Layer(), torch.randn(2, 35, 8)
    layer(x)
    assert len(calls) == 1
    call(layer, x)
    assert len(calls) == 1


def operators(layer: Layer, x: Tensor) -> str:
    return str(torch.export.export(layer, (x,)).graph)


def test_exported_graphs_have_the_operator_only_if_it_is_forced(calls):
    x = torch.randn(2, 35, 8)
    assert "inlinevit" not in operators(Layer(), x)
    assert "torch.ops.inlinevit.attention" in operators(Layer("native"), x)


@pytest.mark.parametrize("path", [None, "native"])
def test_under_compile_it_has_its_own_gradient(calls, path):
    layer, x = Layer(path), torch.randn(2, 35, 8, requires_grad=True)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(
        torch.autograd.grad(compiled(x).pow(2).sum(), x), torch.autograd.grad(layer(x).pow(2).sum(), x)
    )


def recorded(layer: Layer, x: Tensor) -> str:
    graphs: list[str] = []

    def backend(module: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        graphs.append(str(module.graph))
        return module.forward

    torch.compile(layer, backend=backend, fullgraph=True)(x)
    return graphs[0]


def test_compiled_graphs_have_the_operator_in_training(calls):
    layer, x = Layer(), torch.randn(2, 35, 8)
    assert "inlinevit.attention" in recorded(layer, x.clone().requires_grad_())
    with torch.no_grad():
        assert "inlinevit.attention" not in recorded(layer, x.clone().requires_grad_())
    assert "inlinevit.attention" not in recorded(layer.double(), x.double().requires_grad_())


def test_forced_it_counts_what_the_path_covariance_counts_on_the_meta_device(calls):
    x, counts = torch.randn(2, 35, 8, device="meta"), []
    for path in ("native", "covariance"):
        with FlopCounterMode(display=False) as counter:
            Layer(path).to("meta")(x)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1]


def test_hooks_are_called(calls):
    mixer, seen = InLineAttention(8, 2), []
    for module in (mixer.qkv, mixer.proj, mixer.local_residual):
        module.register_forward_hook(lambda module, arguments, output: seen.append(module))
    mixer(torch.randn(1, 35, 8), SIZE)
    assert seen == [mixer.qkv, mixer.local_residual, mixer.proj]
    assert len(calls) == 1


def test_a_subclass_with_its_own_attention_is_called(calls):
    class Halved(InLineAttention):
        def attend(self, q, k, v, windows):
            return 0.5 * super().attend(q, k, v, windows)

    Halved(8, 2)(torch.randn(1, 35, 8), SIZE)
    assert not calls
    with pytest.raises(ValueError, match="'native' is not possible here: Halved has its own attend"):
        Halved(8, 2, path="native")(torch.randn(1, 35, 8), SIZE)


@pytest.mark.parametrize(
    ("options", "dtype", "message"),
    [
        ({}, torch.bfloat16, "float32 and float64 on a CPU, not torch.bfloat16 on cpu"),
        ({"feature_map": "relu"}, torch.float32, "feature_map is 'relu'"),
    ],
)
def test_where_it_is_impossible_the_reason_is_given(calls, options, dtype, message):
    mixer = InLineAttention(8, 2, path="native", **options).to(dtype)
    with pytest.raises(ValueError, match=f"path 'native' is not possible here: .*{message}"):
        mixer(torch.randn(1, 35, 8, dtype=dtype), SIZE)


def test_without_the_library(monkeypatch):
    monkeypatch.setattr(kernels, "unavailable_reason", lambda: "the native kernels are not available: no compiler")
    mixer, x = InLineAttention(8, 2), torch.randn(1, 35, 8)
    assert select_path(mixer.path_params(x, mixer.layout(SIZE))) == "folded"
    mixer.path = "native"
    with pytest.raises(ValueError, match=r"'native' is not possible here: .* not available: no compiler"):
        mixer(x, SIZE)


@pytest.mark.parametrize("options", [OPTIONS["plain"], OPTIONS["LePE"], OPTIONS["padded windows"], OPTIONS["stripes"]])
@pytest.mark.parametrize("gradients", [False, True])
def test_the_kernels_of_the_local_residual_are_native(calls, randomise, reference, options, gradients):
    mixer = randomise(InLineAttention(8, 2, path="native", **options))
    x, kernel_tokens = torch.randn(2, 2, 35, 8, dtype=torch.float64)
    mixer.local_residual.forward = None  # It would fail.
    with torch.set_grad_enabled(gradients):
        out = mixer(x, SIZE, kernel_tokens)
        del mixer.local_residual.forward
        torch.testing.assert_close(out, reference(mixer, x, SIZE, kernel_tokens), rtol=0, atol=1e-10)


def test_local_kernels_of_a_subclass_are_called(calls):
    class Without(InLineAttention):
        def local_kernels(self, kernel_tokens, windows):
            return torch.zeros_like(super().local_kernels(kernel_tokens, windows))

    mixer, x = Without(8, 2), torch.randn(1, 35, 8)
    plain = InLineAttention(8, 2, local_residual=False)
    plain.load_state_dict(mixer.state_dict(), strict=False)
    with torch.no_grad():
        torch.testing.assert_close(mixer(x, SIZE), plain(x, SIZE))
    assert len(calls) == 2


@pytest.mark.parametrize("gradients", [False, True])
def test_hooks_of_the_local_residual_are_called(calls, gradients):
    mixer, seen = InLineAttention(8, 2), []
    mixer.local_residual.register_forward_hook(lambda module, arguments, output: seen.append(module))
    with torch.set_grad_enabled(gradients):
        mixer(torch.randn(1, 35, 8), SIZE)
    assert seen == [mixer.local_residual]
