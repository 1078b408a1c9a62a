"""Looking inside models changes nothing, and what is seen is what the layers compute."""

import gc
import weakref
from collections.abc import Callable

import pytest
import timm
import torch
from torch import nn

from inlinevit import optimize_for_inference
from inlinevit.analysis import Layer, run_masked, watch
from inlinevit.layers import ATTENTIONS, FocusedAttention, InLineAttention

SMALL = {"num_classes": 5}
OURS = {
    **{
        f"{word}_deit": (
            "inline_deit_tiny" if kind.supports_prefix_tokens else f"{word}_deit_tiny",
            {"attention": word, "embed_dim": 32, "num_heads": 2, "depth": 2},
        )
        for word, kind in ATTENTIONS.items()
        # ViT³ has no attention weights.
        if word != "vit3"
    },
    "inline_swin": (
        "inline_swin_tiny",
        {"embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4), "window_size": 5, "attention": "inline"},
    ),
    "softmax_swin": (
        "inline_swin_tiny",
        {"embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4), "attention": "softmax"},
    ),
    "inline_cswin": (
        "inline_cswin_tiny",
        {"embed_dim": 16, "depths": (1, 2, 1), "num_heads": (2, 2, 4), "window_size": 3, "attention": "inline"},
    ),
    "inline_pvt": (
        "inline_pvt_tiny",
        {"embed_dims": (16, 32), "depths": (1, 1), "num_heads": (1, 2), "mlp_ratios": (2, 2)},
    ),
    "softmax_pvt": (
        "pvt_tiny",
        {"embed_dims": (16, 32), "depths": (1, 1), "num_heads": (1, 2), "mlp_ratios": (2, 2), "sr_ratios": (2, 1)},
    ),
}
SMALL_VIT = {"depth": 2, "embed_dim": 48, "num_heads": 3}
SMALL_SWIN = {"depths": (2, 2), "embed_dim": 24, "num_heads": (2, 4)}
TIMM = {
    "deit_distilled": ("deit_tiny_distilled_patch16_224", {**SMALL_VIT, "img_size": 96}, (96, 96)),
    "swin_tiny": ("swin_tiny_patch4_window7_224", {**SMALL_SWIN, "img_size": 112}, (112, 112)),
    "padded swin": ("swin_tiny_patch4_window7_224", {**SMALL_SWIN, "img_size": (120, 72)}, (120, 72)),
    "oblong vit": ("vit_tiny_patch16_224", {**SMALL_VIT, "dynamic_img_size": True}, (96, 160)),
    "vit that pools by attention": ("vit_base_patch16_siglip_224", {**SMALL_VIT, "img_size": 96}, (96, 96)),
}


def make(name: str, options: dict) -> nn.Module:
    """A model whose attention is far from uniform."""
    torch.manual_seed(0)
    model = timm.create_model(name, **SMALL, **options).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(2)
    return model


def projected(
    model: nn.Module, images: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What a model answers, what goes into the projection of each attention, and by which gate it was multiplied."""
    inputs, gates, hooks = {}, {}, []

    def note(name: str) -> Callable[..., None]:
        return lambda _module, args: inputs.__setitem__(name, args[0])

    for name, module in model.named_modules():
        if name.endswith("attn.proj"):
            hooks.append(module.register_forward_pre_hook(note(name.removesuffix(".proj"))))
        if name.endswith("attn.gate"):
            own = name.removesuffix(".gate")
            hooks.append(module.register_forward_hook(lambda _m, _a, out, own=own: gates.__setitem__(own, out)))
    with torch.no_grad():
        answer = model(images)
    for hook in hooks:
        hook.remove()
    return answer, inputs, gates


def outputs_by_rows(layer: Layer) -> torch.Tensor:
    """Rows times values, channel by channel, with all of a channel's kernel in them."""
    channels = [
        (layer.total_weights(channel=channel) @ layer.v[..., channel : channel + 1])
        for channel in range(layer.v.shape[-1])
    ]
    out = torch.cat(channels, dim=-1)
    if layer.convolution is not None and layer.convolution.bias is not None:
        prefix = layer.tokens - layer.convolution.size[0] * layer.convolution.size[1]
        out[:, :, prefix:] += layer.convolution.bias[:, None]
    return out


def assemble(parts: list[tuple[Layer, torch.Tensor]], like: torch.Tensor) -> torch.Tensor:
    """Outputs of a layer's shares (batch · windows, heads, tokens, width) in the shape that its projection gets."""
    joined = [(layer, out.transpose(1, 2).flatten(2)) for layer, out in parts]
    if like.shape[:2] == joined[0][1].shape[:2]:
        return torch.cat([out for _, out in joined], dim=-1)
    found = []
    for layer, out in joined:
        share = torch.zeros(layer.images, like.shape[1], out.shape[-1])
        for window, part in enumerate(out.unflatten(0, (layer.images, -1)).unbind(1)):
            is_place = layer.places[window] >= 0
            share[:, layer.places[window][is_place]] = part[:, is_place]
        found.append(share)
    return torch.cat(found, dim=-1)


def assert_rows_times_values_are_the_output(model: nn.Module, images: torch.Tensor) -> None:
    answer, inputs, gates = projected(model, images)
    seen: dict[str, list] = {}

    def visit(layer: Layer) -> None:
        by_rows, by_kernels = outputs_by_rows(layer), layer.output()
        torch.testing.assert_close(by_rows, by_kernels, rtol=1e-4, atol=1e-5)
        seen.setdefault(layer.name.split(" ")[0], []).append((layer, by_rows))

    watched = watch(model, images, visit)
    assert torch.equal(watched, answer)
    assert seen
    for name, parts in seen.items():
        # A gate is not part of the weights.
        gated = assemble(parts, inputs[name]) * gates.get(name, torch.ones(()))
        torch.testing.assert_close(gated, inputs[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", OURS)
def test_rows_times_values_are_the_output_of_our_layers(case):
    model = make(*OURS[case])
    assert_rows_times_values_are_the_output(model, torch.randn(2, 3, 75, 98))


@pytest.mark.parametrize("case", TIMM)
def test_rows_times_values_are_the_output_of_timms_layers(case):
    name, options, size = TIMM[case]
    assert_rows_times_values_are_the_output(make(name, options), torch.randn(1, 3, *size))


@pytest.mark.parametrize("case", ["inline_deit", "angular_deit", "softmax_swin", "inline_cswin"])
def test_hiding_nothing_changes_nothing(case):
    model, images = make(*OURS[case]), torch.randn(2, 3, 75, 98)

    def see_all(layer: Layer, first: int, last: int) -> torch.Tensor:
        return torch.ones(layer.windows, last - first, layer.tokens, dtype=torch.bool)

    with torch.no_grad():
        torch.testing.assert_close(run_masked(model, images, see_all), model(images), rtol=1e-4, atol=1e-5)


def test_no_layer_is_kept():
    """When the third layer is shown, the first is gone."""
    model, alive = make("inline_deit_tiny", {"embed_dim": 32, "num_heads": 2, "depth": 4}), []

    def visit(layer: Layer) -> None:
        gc.collect()
        assert sum(reference() is not None for reference in alive) <= 1
        alive.append(weakref.ref(layer.q))

    watch(model, torch.randn(1, 3, 64, 64), visit)
    assert len(alive) == 4


def test_an_optimized_model_can_be_looked_into():
    model = make("inline_deit_tiny", {"embed_dim": 32, "num_heads": 2, "depth": 2})
    optimized, images, names = optimize_for_inference(model, compile=False), torch.randn(2, 3, 64, 64), []
    torch.testing.assert_close(watch(optimized, images, lambda layer: names.append(layer.name)), optimized(images))
    assert names == ["stages.0.blocks.0.attn", "stages.0.blocks.1.attn"]


def test_hooks_are_gone_after_an_error():
    model = make("deit_tiny_patch16_224", {"depth": 1})

    def visit(layer: Layer) -> None:
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        watch(model, torch.randn(1, 3, 224, 224), visit)
    assert not any(module._forward_hooks for module in model.modules())
    assert model.blocks[0].attn.fused_attn


def test_wrong_models_are_refused():
    with pytest.raises(ValueError, match=r"call model\.eval\(\) first"):
        watch(timm.create_model("inline_deit_tiny", depth=1), torch.randn(1, 3, 32, 32), print)
    with pytest.raises(ValueError, match="no attention that can be inspected"):
        watch(timm.create_model("resnet18").eval(), torch.randn(1, 3, 32, 32), print)
    model = timm.create_model("vit_dlittle_patch16_reg1_gap_256", depth=1).eval()
    with pytest.raises(ValueError, match="not plain softmax attention"):
        watch(model, torch.randn(1, 3, 256, 256), print)


def test_places_of_a_shifted_window_are_those_of_the_map():
    """Tokens of both sides of the seam share a window, but they are no neighbours."""
    model = make("inline_swin_tiny", {**OURS["inline_swin"][1], "depths": (2,), "num_heads": (2,)})
    layers = []
    watch(model, torch.randn(1, 3, 40, 40), layers.append)
    shifted = layers[1]
    assert shifted.size == (10, 10)
    assert sorted(shifted.places[shifted.places >= 0].tolist()) == list(range(100))
    for window in range(shifted.windows):
        near = shifted.near(0, 25, 3)[window]
        places = shifted.places[window]
        for query, row in zip(places.tolist(), near, strict=True):
            rows_apart = (places // 10 - query // 10).abs()
            columns_apart = (places % 10 - query % 10).abs()
            assert torch.equal(row, (rows_apart <= 1) & (columns_apart <= 1))


def test_kinds_are_named():
    names = []
    watch(make(*OURS["focused_deit"]), torch.randn(1, 3, 32, 32), lambda layer: names.append(layer.attention))
    assert names == ["focused"] * 2
    assert {ATTENTIONS["focused"], ATTENTIONS["inline"]} == {FocusedAttention, InLineAttention}
