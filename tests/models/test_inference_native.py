"""Models that are optimized for inference compute their blocks natively, in float32 and in int8."""

import copy
import io
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import inlinevit
from inlinevit import kernels
from inlinevit.layers import Block
from inlinevit.layers._inference_block import InferenceBlock
from inlinevit.layers._inference_embed import InferenceConvEmbed
from inlinevit.layers._native_linear import Int8Linear
from inlinevit.models import InLineCSWin, InLineDeiT, InLinePVT, InLineSwin
from inlinevit.models.inference import InferenceStage
from tests import pairs_of, slow_except

pytestmark = pytest.mark.skipif(not kernels.available(), reason=f"native kernels: {kernels.status().reason}")

SMALL: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "deit": (InLineDeiT, {"embed_dim": 48, "num_heads": 2, "depth": 3}),
    "deit, avg": (InLineDeiT, {"embed_dim": 30, "num_heads": 3, "depth": 2, "global_pool": "avg"}),
    "deit, windows": (
        InLineDeiT,
        {"embed_dim": 32, "num_heads": 2, "depth": 2, "window_size": 3, "class_token": False, "global_pool": "avg"},
    ),
    "pvt": (
        InLinePVT,
        {"embed_dims": (16, 32, 40, 64), "depths": (1, 2, 1, 1), "num_heads": (1, 2, 2, 4), "class_token": True},
    ),
    "pvt, windows": (
        InLinePVT,
        {"embed_dims": (16, 32, 40, 64), "depths": (2, 2, 1, 1), "num_heads": (1, 2, 2, 4), "window_size": 5},
    ),
    "swin": (InLineSwin, {"embed_dim": 16, "depths": (2, 2, 2, 1), "num_heads": (1, 2, 4, 8)}),
    "swin, windows": (
        InLineSwin,
        {"embed_dim": 16, "depths": (2, 2, 2, 1), "num_heads": (1, 2, 4, 8), "window_size": 7},
    ),
    "cswin": (InLineCSWin, {"embed_dim": 16, "depths": (1, 1, 2, 1), "num_heads": (2, 2, 4, 8)}),
    "cswin, stripes": (
        InLineCSWin,
        {"embed_dim": 16, "depths": (1, 1, 2, 1), "num_heads": (2, 2, 4, 8), "window_size": 3},
    ),
    "deit, softmax": (InLineDeiT, {"embed_dim": 48, "num_heads": 2, "depth": 2, "attention": "softmax"}),
    "swin, softmax": (
        InLineSwin,
        {"embed_dim": 16, "depths": (2, 2, 2, 1), "num_heads": (1, 2, 4, 8), "attention": "softmax"},
    ),
    "cswin, mixed": (
        InLineCSWin,
        {
            "embed_dim": 16,
            "depths": (1, 1, 2, 1),
            "num_heads": (2, 2, 4, 8),
            "attention": ("softmax", "inline", ("inline", "softmax"), "softmax"),
        },
    ),
}


def make(name: str, *, seed: int = 0, **options: Any) -> nn.Module:
    """A small model with weights that matter everywhere."""
    family, arguments = SMALL[name]
    torch.manual_seed(seed)
    model = family(img_size=64, **{"num_classes": 7, **arguments, **options}).eval().requires_grad_(False)
    for parameter in model.parameters():
        scale = 0.3 if parameter.dim() < 2 else parameter[0].numel() ** -0.5
        parameter.copy_(torch.randn_like(parameter) * scale + (parameter.dim() == 1))
    return model


def optimize(model: nn.Module, **options: Any) -> nn.Module:
    return inlinevit.optimize_for_inference(model, compile=False, **options)


def images(*size: int, seed: int = 1) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def error(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """One entry for each block that is computed natively: whether for the prefix tokens only."""
    found: list[bool] = []
    call = kernels.PackedBlock.__call__

    def record(self: kernels.PackedBlock, x: Tensor, windows: Any, *, prefix_only: bool = False) -> Tensor:
        found.append(prefix_only)
        return call(self, x, windows, prefix_only=prefix_only)

    run = kernels.run_blocks

    def record_all(blocks: Sequence[kernels.PackedBlock], x: Tensor, windows: Any) -> Tensor:
        found.extend([False] * len(blocks))
        return run(blocks, x, windows)

    monkeypatch.setattr(kernels.PackedBlock, "__call__", record)
    monkeypatch.setattr(kernels, "run_blocks", record_all)
    return found


def count_blocks(model: nn.Module) -> int:
    return sum(isinstance(module, Block) for module in model.modules())


@pytest.mark.parametrize("size", [(1, 64, 64), (3, 50, 93), (2, 129, 32)], ids=str)
@pytest.mark.parametrize("name", SMALL)
def test_same_outputs(name: str, size: tuple[int, int, int], calls: list[bool]) -> None:
    model = make(name)
    optimized = optimize(model)
    x = images(size[0], 3, *size[1:])
    assert error(optimized(x), model(x)) < 1e-5
    assert len(calls) == count_blocks(model)


@pytest.mark.parametrize(
    "options", [{"num_classes": 0}, {"in_chans": 5}, {"qkv_bias": False}, {"attn_kwargs": {"local_residual": False}}]
)
@pytest.mark.parametrize("name", ["deit", "pvt", "swin", "cswin"])
def test_same_outputs_with_options(name: str, options: dict[str, Any], calls: list[bool]) -> None:
    model = make(name, **options)
    x = images(2, options.get("in_chans", 3), 50, 70)
    assert error(optimize(model)(x), model(x)) < 1e-5
    assert len(calls) == count_blocks(model)


@pytest.mark.parametrize("name", ["inline_deit_tiny", "inline_pvt_tiny", "inline_swin_tiny", "inline_cswin_tiny"])
def test_features_only(name: str, calls: list[bool]) -> None:
    torch.manual_seed(0)
    depth = {"depth": 4} if "deit" in name else {"depths": (1, 1, 1, 1)}
    model = timm.create_model(name, features_only=True, img_size=64, **depth).eval()
    x = images(1, 3, 64, 96)
    with torch.no_grad():
        for found, expected in zip(optimize(model)(x), model(x), strict=True):
            assert error(found, expected) < 1e-5
    assert len(calls) == count_blocks(model)


def test_last_block_computes_the_class_token_only(calls: list[bool]) -> None:
    model = make("deit")
    optimized = optimize(model)
    optimized(images(1, 3, 64, 64))
    assert calls == [False, False, True]
    calls.clear()
    assert error(optimized.forward_features(images(1, 3, 64, 64)), model.forward_features(images(1, 3, 64, 64))) < 1e-5
    assert calls == [False] * 3


def test_more_prefix_tokens_than_the_kernel_divides() -> None:
    block = make("deit").stages[0].blocks[0]
    block.attn.num_prefix_tokens = None
    x = images(1, 130 + 6, 48)
    expected = block(x, (2, 3))[:, :130]
    InferenceBlock.replace(block)
    assert error(block(x, (2, 3), prefix_only=True), expected) < 1e-5


def test_wrong_tokens_are_refused_as_before() -> None:
    block = optimize(make("deit")).stages[0].blocks[0]
    with pytest.raises(ValueError, match="17 tokens do not match feat_size"):
        block(torch.zeros(1, 17, 48), (4, 5))


# What is not computed natively


@pytest.mark.parametrize(
    "options",
    [
        {"attention": "linear"},
        {"attn_kwargs": {"feature_map": "relu"}},
        {"attn_kwargs": {"path": "explicit"}},
        {"attention": "softmax", "attn_kwargs": {"unit_queries": True}},
    ],
    ids=str,
)
def test_other_blocks_compute_as_before(options: dict[str, Any], calls: list[bool]) -> None:
    model = make("deit", **options)
    assert error(optimize(model)(images(1, 3, 64, 64)), model(images(1, 3, 64, 64))) < 1e-5
    assert calls == []


def test_softmax_with_reduced_keys(calls: list[bool]) -> None:
    """As in PVT: blocks of the last stage, without a reduction, compute natively."""
    model = make("pvt", attention="softmax")
    assert error(optimize(model)(images(1, 3, 64, 96)), model(images(1, 3, 64, 96))) < 1e-5
    assert calls == [False]


def change_activation(block: Block) -> None:
    block.mlp.act = nn.GELU(approximate="tanh")


def change_norm(block: Block) -> None:
    block.norm2 = nn.Identity()


def change_linear(block: Block) -> None:
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    block.attn.proj.__class__ = Doubled


def change_forward(block: Block) -> None:
    block.mlp.forward = lambda x: x


def add_norm(block: Block) -> None:
    block.mlp.norm = nn.LayerNorm(192).eval().requires_grad_(False)


@pytest.mark.parametrize("change", [change_activation, change_norm, change_linear, change_forward, add_norm])
@pytest.mark.parametrize("when", ["before", "after"])
def test_changed_modules_are_computed_as_they_are(change: Any, when: str, calls: list[bool]) -> None:
    model = make("deit")
    x = images(1, 3, 64, 64)
    optimized = optimize(model)
    optimized(x)
    change(model.stages[0].blocks[0])
    if when == "before":
        optimized = optimize(model)
    else:
        change(optimized.stages[0].blocks[0])
        if change in (change_linear, change_forward):
            # Changes of a class or of one method are not followed until the weights change.
            optimized.stages[0].blocks[0].norm1.weight.add_(0.0)
    calls.clear()
    assert error(optimized(x), model(x)) < 1e-5
    assert len(calls) == 2


@pytest.mark.parametrize("part", ["attn", "attn.qkv", "mlp.drop1", "norm2"])
@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_are_called(part: str, register: str, calls: list[bool]) -> None:
    model = make("deit")
    optimized = optimize(model)
    optimized(images(1, 3, 64, 64))
    calls.clear()
    count = []
    handle = getattr(optimized.stages[0].blocks[1].get_submodule(part), register)(lambda *_: count.append(1))
    assert error(optimized(images(1, 3, 64, 64)), model(images(1, 3, 64, 64))) < 1e-5
    assert calls == [False, True]
    assert count == [1]
    handle.remove()
    calls.clear()
    optimized(images(1, 3, 64, 64))
    assert len(calls) == 3


def test_global_hooks_are_called(calls: list[bool]) -> None:
    optimized, names = optimize(make("deit")), []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: names.append(type(module).__name__))
    try:
        optimized(images(1, 3, 64, 64))
    finally:
        handle.remove()
    assert calls == []
    assert names.count("LocalResidual") == 2


def test_hooks_of_the_block_itself_see_its_output(calls: list[bool]) -> None:
    optimized, shapes = optimize(make("deit")), []
    optimized.stages[0].blocks[1].register_forward_hook(lambda module, inputs, output: shapes.append(output.shape))
    optimized(images(2, 3, 64, 64))
    assert shapes == [(2, 17, 48)]
    assert len(calls) == 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("options", [{}, {"dtype": "int8"}], ids=str)
def test_other_precisions(dtype: torch.dtype, options: dict[str, Any], calls: list[bool]) -> None:
    model = make("pvt")
    optimized = optimize(model, **options)
    before = optimized(images(1, 3, 64, 64))
    calls.clear()
    found = optimized.to(dtype)(images(1, 3, 64, 64).to(dtype))
    assert calls == []
    assert torch.equal(found, optimize(model.to(dtype), **options)(images(1, 3, 64, 64).to(dtype)))
    optimized.float()
    again = optimized(images(1, 3, 64, 64))
    assert len(calls) == count_blocks(model)
    # The weights were rounded.
    assert error(again, before) < (0.2 if dtype == torch.bfloat16 else 0.05)


def test_autocast_keeps_its_meaning(calls: list[bool]) -> None:
    model = make("deit")
    with torch.autocast("cpu", torch.bfloat16):
        assert error(optimize(model)(images(1, 3, 64, 64)).float(), model(images(1, 3, 64, 64)).float()) < 0.05
    assert calls == []


def test_meta_tensors(calls: list[bool]) -> None:
    optimized = optimize(make("deit")).to("meta")
    assert optimized(torch.empty(2, 3, 64, 64, device="meta")).shape == (2, 7)
    assert calls == []


@pytest.mark.parametrize("options", [{}, {"dtype": "int8"}], ids=str)
def test_gradients_of_inputs_and_of_weights(options: dict[str, Any], calls: list[bool]) -> None:
    model = make("pvt")
    optimized = optimize(model, **options)
    x, y = images(1, 3, 64, 64).requires_grad_(), images(1, 3, 64, 64).requires_grad_()
    optimized(x).sum().backward()
    model(y).sum().backward()
    assert error(x.grad, y.grad) < 1e-4
    # One weight: its block, and what follows, have gradients.
    weight = optimized.stages[3].blocks[0].mlp.fc1.weight.requires_grad_()
    optimized(images(1, 3, 64, 64)).sum().backward()
    assert weight.grad is not None
    assert len(calls) == 4
    with torch.no_grad():
        calls.clear()
        optimized(x)
        assert len(calls) == 5


def test_training_mode(calls: list[bool]) -> None:
    optimized = optimize(make("deit", proj_drop_rate=0.5, drop_path_rate=0.5))
    x = images(1, 3, 64, 64)
    assert torch.equal(optimized(x), optimized(x))
    calls.clear()
    optimized.stages[0].blocks[0].mlp.drop1.train()
    assert not torch.equal(optimized(x), optimized(x))
    assert len(calls) == 4
    calls.clear()
    optimized.train()
    optimized(x)
    assert calls == []


def test_torch_func_and_forward_mode(calls: list[bool]) -> None:
    model = make("deit")
    optimized = optimize(model)
    x, tangent = images(2, 3, 64, 64), images(2, 3, 64, 64, seed=2)
    stacked = torch.func.vmap(lambda image: optimized(image.unsqueeze(0)).squeeze(0))(x)
    assert error(stacked, model(x)) < 1e-5
    gradient = torch.func.grad(lambda image: optimized(image).sum())(x)
    assert error(gradient, torch.func.grad(lambda image: model(image).sum())(x)) < 1e-4
    with torch.autograd.forward_ad.dual_level():
        found = optimized(torch.autograd.forward_ad.make_dual(x, tangent))
        assert torch.autograd.forward_ad.unpack_dual(found).tangent is not None
    assert calls == []
    other = make("deit", seed=1)
    assert error(torch.func.functional_call(optimized, dict(other.named_parameters()), (x,)), other(x)) < 1e-5
    tensors = {name: parameter.data for name, parameter in other.named_parameters()}
    calls.clear()
    assert error(torch.func.functional_call(optimized, tensors, (x,)), other(x)) < 1e-5
    assert calls == []
    assert error(optimized(x), model(x)) < 1e-5
    assert len(calls) == 3


def test_operations_are_counted() -> None:
    model, x = make("deit", global_pool="avg"), images(1, 3, 64, 64)
    counts = []
    for counted in (model, optimize(model)):
        with FlopCounterMode(display=False) as counter:
            counted(x)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


# Weights


def load(model: nn.Module, other: nn.Module) -> None:
    model.load_state_dict(other.state_dict())


def assign(model: nn.Module, other: nn.Module) -> None:
    model.load_state_dict({name: value.clone() for name, value in other.state_dict().items()}, assign=True)


def copy_in_place(model: nn.Module, other: nn.Module) -> None:
    with torch.inference_mode():
        for parameter, value in zip(model.parameters(), other.parameters(), strict=True):
            parameter.copy_(value)


def replace_data(model: nn.Module, other: nn.Module) -> None:
    for parameter, value in zip(model.parameters(), other.parameters(), strict=True):
        parameter.data = value.data.clone()


def replace_modules(model: nn.Module, other: nn.Module) -> None:
    for (name, module), twin in zip(list(model.named_modules()), other.modules(), strict=True):
        if type(twin) in (nn.Linear, nn.LayerNorm, nn.Conv1d, nn.Conv2d):
            model.set_submodule(name, copy.deepcopy(twin))
        else:
            for key, parameter in twin.named_parameters(recurse=False):
                setattr(module, key, nn.Parameter(parameter.clone(), requires_grad=False))


@pytest.mark.parametrize(
    ("name", "change", "options"),
    pairs_of(
        ["deit", "pvt", "cswin"],
        [load, assign, copy_in_place, replace_data, replace_modules],
        [{}, {"dtype": "int8"}],
    ),
)
def test_changes_of_weights_are_followed(name: str, options: dict[str, Any], change: Any, calls: list[bool]) -> None:
    model, other = make(name), make(name, seed=1)
    optimized = optimize(model, **options)
    x = images(1, 3, 64, 64)
    before = optimized(x)
    change(optimized, other)
    calls.clear()
    found = optimized(x)
    assert torch.equal(found, optimize(other, **options)(x)) or change is replace_modules
    assert error(found, other(x)) < (0.2 if options else 1e-5)
    assert error(found, before) > 0.3
    assert len(calls) == 2 * count_blocks(model) or change is replace_modules


@pytest.mark.parametrize("name", ["norm1.bias", "attn.qkv.weight", "attn.local_residual.fc2.bias", "attn.lepe.weight"])
def test_each_weight_counts(name: str) -> None:
    model = make("cswin")
    optimized = optimize(model)
    x = images(1, 3, 64, 64)
    before = optimized(x)
    for changed in (model, optimized):
        changed.stages[0].blocks[0].get_parameter(name).mul_(-1.5)
    assert error(optimized(x), model(x)) < 1e-5
    assert not torch.equal(optimized(x), before)


def test_weights_without_versions_are_not_packed(calls: list[bool]) -> None:
    model, x = make("deit"), images(1, 3, 64, 64)
    with torch.inference_mode():
        # Copies of normal weights.
        optimized = optimize(model)
        optimized(x)
        assert len(calls) == 3
        calls.clear()
        block = optimized.stages[0].blocks[0]
        block.norm1.weight = nn.Parameter(2 * block.norm1.weight, requires_grad=False)
        optimized(x)
        assert len(calls) == 2
        block.norm1.weight.mul_(0.5)
        assert error(optimized(x), model(x)) < 1e-5


@pytest.mark.parametrize("options", [{}, {"dtype": "int8"}], ids=str)
@pytest.mark.parametrize("name", ["deit", "pvt"])
def test_copies_do_not_contain_packed_weights(name: str, options: dict[str, Any]) -> None:
    model, x = make(name), images(1, 3, 64, 64)
    optimized = optimize(model, **options)
    expected = optimized(x)
    weights = sum(parameter.nbytes for parameter in optimized.parameters())
    assert len(pickle.dumps(optimized)) < 1.1 * weights + 2**18
    file = io.BytesIO()
    torch.save(optimized, file)
    file.seek(0)
    copies = [
        copy.deepcopy(optimized),
        pickle.loads(pickle.dumps(optimized)),
        torch.load(file, weights_only=False),
    ]
    for other in copies:
        assert all(module.packed.state is None for module in other.modules() if hasattr(module, "packed"))
        assert torch.equal(other(x), expected)
    copies[0].stages[0].blocks[0].mlp.fc1.weight.zero_()
    assert not torch.equal(copies[0](x), expected)
    assert torch.equal(optimized(x), expected)
    assert model.state_dict().keys() == optimized.state_dict().keys()


def test_a_block_that_is_used_twice() -> None:
    model = make("deit")
    model.stages[0].blocks[1] = model.stages[0].blocks[0]
    assert error(optimize(model)(images(1, 3, 64, 64)), model(images(1, 3, 64, 64))) < 1e-5


@pytest.mark.parametrize("options", [{}, {"dtype": "int8"}], ids=str)
def test_threads(options: dict[str, Any]) -> None:
    """Several threads begin at the same time, and meet again when the weights have changed."""
    model, other = make("pvt"), make("pvt", seed=1)
    optimized = optimize(model, **options)
    batches = [images(1, 3, 32 + 8 * i, 64, seed=i) for i in range(6)] * 2
    with ThreadPoolExecutor(4) as pool:
        for weights in (model, other, model):
            optimized.load_state_dict(weights.state_dict())
            expected = [optimize(weights, **options)(x) for x in batches[:6]] * 2
            assert all(map(torch.equal, pool.map(optimized, batches), expected))


# All models, and int8

FAMILIES = ("inline_deit", "inline_pvt", "inline_swin", "inline_cswin", "baseline_deit")


def registered() -> list[Any]:
    """All models; only two small InLine models are quick."""
    names = [name for family in FAMILIES for name in timm.list_models(module=family)]
    return slow_except(names, "inline_deit_tiny", "inline_pvt_tiny")


@pytest.mark.parametrize("name", registered())
def test_every_model(name: str) -> None:
    torch.manual_seed(0)
    size = 64 if "deit" in name else 96
    model = timm.create_model(name, img_size=size).eval().requires_grad_(False)
    x = images(2, 3, size, size)
    expected = model(x)
    assert error(optimize(model)(x), expected) < 1e-5
    found = optimize(model, dtype="int8")(x)
    assert torch.cosine_similarity(found, expected).min() > 0.999
    assert not torch.equal(found, expected)


@pytest.mark.parametrize("name", SMALL)
def test_int8_of_small_models(name: str, calls: list[bool]) -> None:
    model = make(name)
    x = images(2, 3, 50, 93)
    optimized = optimize(model, dtype=torch.int8)
    found, expected = optimized(x), model(x)
    assert 1e-4 < error(found, expected) < 0.2
    assert len(calls) == count_blocks(model)
    assert type(optimized.head) is nn.Linear


@pytest.mark.parametrize("options", [{"attention": "linear"}, {"attention": "softmax"}], ids=str)
@pytest.mark.parametrize("name", ["deit", "pvt, windows"])
def test_int8_of_other_attentions(name: str, options: dict[str, Any]) -> None:
    model = make(name, **options)
    x = images(2, 3, 64, 64)
    assert 1e-4 < error(optimize(model, dtype="int8")(x), model(x)) < 0.2


def test_int8_of_other_models() -> None:
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", depth=2, img_size=64, num_classes=7).eval().requires_grad_(False)
    inlinevit.replace_attention(model, blocks=[1])
    optimized = inlinevit.optimize_for_inference(model, dtype="int8")
    kinds = {name: type(module) for name, module in optimized.named_modules() if isinstance(module, nn.Linear)}
    assert kinds.pop("head") is nn.Linear
    assert set(kinds.values()) == {Int8Linear}
    assert len(kinds) == 8
    x = images(2, 3, 64, 64)
    assert 0.999 < torch.cosine_similarity(optimized(x), model(x)).min() < 1 - 1e-7


def test_int8_with_hooks_stays_int8() -> None:
    model, x = make("deit"), images(2, 3, 64, 64)
    optimized = optimize(model, dtype="int8")
    expected = optimized(x)
    for block in optimized.stages[0].blocks:
        block.attn.register_forward_hook(lambda *_: None)
    # The products are the same, the sums of float32 in between are not, and may be rounded to other integers.
    assert error(optimized(x), expected) < 0.5 * error(model(x), expected)


def test_optimized_again_in_another_precision() -> None:
    model, x = make("pvt"), images(2, 3, 64, 64)
    plain, int8 = optimize(model), optimize(model, dtype="int8")
    assert torch.equal(optimize(int8)(x), plain(x))
    assert torch.equal(optimize(plain, dtype="int8")(x), int8(x))
    assert not any(isinstance(module, Int8Linear) for module in optimize(int8).modules())


@pytest.mark.parametrize("dtype", ["int4", torch.bfloat16, 8, "float32"])
def test_other_types_are_refused(dtype: Any) -> None:
    with pytest.raises(ValueError, match='it should be "int8", or None'):
        optimize(make("deit"), dtype=dtype)


# Graphs


@pytest.mark.integration
@pytest.mark.parametrize(("compile", "options"), [(False, {}), (True, {"dtype": "int8"})], ids=str)
def test_compiled_and_exported(compile: bool, options: dict[str, Any]) -> None:
    """A graph has the operations of the plain model: packed weights could not follow the weights."""
    model, x = make("deit, avg"), images(1, 3, 64, 64)
    optimized = inlinevit.optimize_for_inference(model, compile=compile, **options)
    optimized(x)
    with torch.no_grad():
        program = torch.export.export(optimized, (x,))
        assert error(program.module()(x), model(x)) < 1e-5
        assert "inlinevit.block" not in str(program.graph)
        compiled = torch.compile(optimized, backend="eager")
        assert error(compiled(x), model(x)) < 1e-5
        other = make("deit, avg", seed=1)
        optimized.load_state_dict(other.state_dict())
        assert error(compiled(x), other(x)) < 1e-5


def test_native_models_are_not_compiled(monkeypatch: pytest.MonkeyPatch, calls: list[bool]) -> None:
    monkeypatch.setattr(torch, "compile", lambda *_, **__: pytest.fail("compiled"))
    for name, options in (("deit", {}), ("pvt", {}), ("deit", {"dtype": "int8"})):
        inlinevit.optimize_for_inference(make(name), **options)(images(1, 3, 64, 64))
    assert len(calls) == 3 + 5 + 3


# Without kernels

WITHOUT_KERNELS = """
import torch, inlinevit
from inlinevit.models import InLineDeiT
model = InLineDeiT(img_size=32, embed_dim=32, num_heads=2, depth=2).eval()
x = torch.randn(1, 3, 32, 32)
with torch.no_grad():
    torch.testing.assert_close(inlinevit.optimize_for_inference(model, compile=False)(x), model(x))
try:
    inlinevit.optimize_for_inference(model, dtype="int8")
except ValueError as error:
    print(error)
"""


@pytest.mark.integration
def test_without_kernels() -> None:
    environment = {**os.environ, "INLINEVIT_KERNELS": "off"}
    command = [sys.executable, "-c", WITHOUT_KERNELS]
    printed = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    assert printed.startswith("int8 needs the native kernels, which are not in use (switched off by INLINEVIT_KERNELS=")
    assert "inlinevit info" in printed


# Embeddings


@pytest.mark.parametrize("options", [{}, {"dtype": "int8"}], ids=str)
@pytest.mark.parametrize("name", ["deit", "pvt", "swin", "cswin"])
def test_embeddings_are_native(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, calls: list[bool]
) -> None:
    """No convolution, and no linear layer but the head's, is left to torch."""
    model, x = make(name), images(2, 3, 64, 96)
    expected = model(x)
    optimized = optimize(model, **options)
    for function in ("conv2d", "layer_norm"):
        original = getattr(nn.functional, function)
        used: list[int] = []

        def count(*args: Any, _original: Any = original, _used: list[int] = used, **kwargs: Any) -> Tensor:
            _used.append(1)
            return _original(*args, **kwargs)

        monkeypatch.setattr(nn.functional, function, count)
        assert error(optimized(x), expected) < (0.1 if options else 1e-5)
        # The norm before the head.
        assert len(used) <= (function == "layer_norm")
    assert any(isinstance(module, InferenceConvEmbed) for module in optimized.modules())


def test_changed_embeddings_are_computed_as_they_are() -> None:
    model, x = make("swin"), images(1, 3, 64, 64)
    for change in (
        lambda model: setattr(model.stages[0].patch_embed, "norm", nn.Identity()),
        lambda model: setattr(model.stages[0].patch_embed.proj, "padding_mode", "reflect"),
        lambda model: setattr(model.stages[1].downsample, "norm", nn.LayerNorm(64, elementwise_affine=False)),
        lambda model: model.stages[1].downsample.reduction.register_forward_hook(lambda *args: args[2] * 2),
        lambda model: model.stages[1].downsample.norm.weight.mul_(2),
    ):
        plain = copy.deepcopy(model)
        optimized = optimize(plain)
        optimized(x)
        for one in (plain, optimized):
            change(one)
        assert error(optimized(x), plain(x)) < 1e-5


# Blocks that are computed together


def test_a_hook_between_blocks_is_called(calls: list[bool]) -> None:
    model, x = make("deit, avg", depth=3), images(1, 3, 64, 64)
    optimized = optimize(model)
    blocks = next(module for module in optimized.modules() if isinstance(module, InferenceStage)).blocks
    seen: list[Tensor] = []
    handle = blocks[1].register_forward_hook(lambda module, inputs, output: seen.append(output))
    assert error(optimized(x), model(x)) < 1e-5
    assert len(seen) == 1
    assert len(calls) == 3
    handle.remove()
    blocks[1].forward = lambda x, feat_size: x
    assert error(optimized(x), model(x)) > 1e-2
    del blocks[1].forward
    assert error(optimized(x), model(x)) < 1e-5


def test_intermediate_features_are_those_between_blocks(calls: list[bool]) -> None:
    model, x = make("deit, avg", depth=3), images(1, 3, 64, 64)
    optimized = optimize(model)
    for indices in ([0, 1, 2], [1], [2]):
        expected, found = (
            one.forward_intermediates(x, indices=indices, intermediates_only=True) for one in (model, optimized)
        )
        assert len(expected) == len(found)
        assert all(error(a, b) < 1e-5 for a, b in zip(found, expected, strict=True))
