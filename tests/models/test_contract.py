"""What timm's users rely on. (timm's own tests run by `make timm-suite`.)"""

import pytest
import timm
import torch
from timm.layers import DropPath
from timm.models import create_model
from timm.models._features_fx import create_feature_extractor
from timm.optim import param_groups_layer_decay, param_groups_weight_decay

from inlinevit.layers import ConvEmbed
from inlinevit.models import attention_by_stage
from tests import slow_except

FAMILIES = ("inline_deit_tiny", "inline_pvt_tiny", "inline_swin_tiny", "inline_cswin_tiny")
# Those with parameters of their own.
LEARNING_BASELINES = (
    *("angular_deit_tiny", "enhanced_deit_tiny", "focused_deit_tiny"),
    *("agent_deit_tiny", "vit3_deit_tiny", "mhla_deit_tiny", "circulant_deit_tiny"),
)
SHALLOW = {
    "inline_deit_tiny": {"depth": 3, "embed_dim": 24, "num_heads": 3, "img_size": 64},
    "inline_pvt_tiny": {"depths": (1, 1, 1, 1), "embed_dims": (16, 32, 40, 64), "img_size": 64},
    "inline_swin_tiny": {"depths": (1, 1, 2, 2), "embed_dim": 24},
    "inline_cswin_tiny": {"depths": (1, 1, 2, 1), "embed_dim": 16},
}


def shallow(name: str, **options):
    torch.manual_seed(0)
    return create_model(name, num_classes=7, **SHALLOW[name], **options).eval()


def narrow(name: str) -> dict[str, object]:
    """Few channels for a model of several stages."""
    return {"embed_dims": (16, 32, 40, 64)} if "pvt" in name else {"embed_dim": 16 if "cswin" in name else 24}


def one_block_per_stage(name: str):
    """A model that is recorded in seconds; its last stages have softmax windows or stripes where the family does."""
    options = {**SHALLOW[name], **({"depth": 1} if "depth" in SHALLOW[name] else {"depths": (1, 1, 1, 1)})}
    return create_model(name, num_classes=7, **options).eval()


@pytest.mark.integration
@pytest.mark.parametrize("name", slow_except(FAMILIES, "inline_swin_tiny"))
def test_compiles_as_one_graph(name):
    model, images = one_block_per_stage(name), torch.randn(2, 3, 96, 64)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(images), model(images))


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_inductor_trains_as_eager_does(name):
    model, images = shallow(name), torch.randn(2, 3, 96, 64)
    compiled = torch.compile(model, fullgraph=True)
    model(images).square().sum().backward()
    eager = {key: parameter.grad.clone() for key, parameter in model.named_parameters()}
    model.zero_grad()
    compiled(images).square().sum().backward()
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, eager[key], rtol=1e-3, atol=1e-4, msg=key)


@pytest.mark.integration
@pytest.mark.parametrize("name", slow_except(FAMILIES, "inline_pvt_tiny"))
def test_exports_with_a_dynamic_batch(name):
    model = one_block_per_stage(name)
    exported = torch.export.export(
        model, (torch.randn(2, 3, 64, 96),), dynamic_shapes=({0: torch.export.Dim("batch")},)
    )
    images = torch.randn(5, 3, 64, 96)
    with torch.no_grad():
        torch.testing.assert_close(exported.module()(images), model(images))


@pytest.mark.parametrize("name", FAMILIES)
def test_fx_traces(name):
    model, images = shallow(name), torch.randn(2, 3, 64, 96)
    traced = create_feature_extractor(model, ["head"])
    with torch.no_grad():
        torch.testing.assert_close(traced(images)["head"], model(images))


@pytest.mark.parametrize("name", FAMILIES)
def test_gradient_checkpointing_changes_nothing(name):
    model, images = shallow(name).train(), torch.randn(2, 3, 64, 64)
    gradients = []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        model.zero_grad()
        model(images).square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.parametrize("name", FAMILIES)
def test_features_only_gives_the_levels(name):
    features = create_model(name, features_only=True, **SHALLOW[name]).eval()
    with torch.no_grad():
        maps = features(torch.randn(1, 3, 128, 96))
    reductions = features.feature_info.reduction()
    assert reductions == ([16, 16, 16] if name == "inline_deit_tiny" else [4, 8, 16, 32])
    for level, reduction, channels in zip(maps, reductions, features.feature_info.channels(), strict=True):
        assert level.shape == (1, channels, 128 // reduction, 96 // reduction)


@pytest.mark.parametrize("name", FAMILIES)
def test_chosen_levels_equal_all_levels(name):
    model, images = shallow(name), torch.randn(1, 3, 64, 96)
    with torch.no_grad():
        features, maps = model.forward_intermediates(images)
        torch.testing.assert_close(features, model.forward_features(images))
        (chosen,) = model.forward_intermediates(images, indices=[1], stop_early=True, intermediates_only=True)
        torch.testing.assert_close(chosen, maps[1])
        (tokens,) = model.forward_intermediates(images, indices=[1], output_fmt="NLC", intermediates_only=True)
        torch.testing.assert_close(tokens, maps[1].flatten(2).transpose(1, 2))
        normed = model.forward_intermediates(images, indices=1, norm=True, intermediates_only=True)[0]
        prefix = model.num_prefix_tokens
        last = features[:, prefix:].transpose(1, 2).unflatten(2, (4, 6)) if prefix else features
        torch.testing.assert_close(normed, last)
        # PVT with average pooling norms after the pooling.
        assert torch.allclose(maps[-1], normed) == isinstance(model.norm, torch.nn.Identity)
        pruned = create_model(name, num_classes=7, **SHALLOW[name]).eval()
        pruned.load_state_dict(model.state_dict())
        assert pruned.prune_intermediate_layers([0, 1], prune_norm=True) == [0, 1]
        torch.testing.assert_close(pruned.forward_intermediates(images, intermediates_only=True), maps[:2])
    assert sum(p.numel() for p in pruned.parameters()) < sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", FAMILIES)
def test_reset_classifier_and_pooling(name):
    model, images = shallow(name), torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        model.reset_classifier(3)
        assert model(images).shape == (2, 3)
        assert not model.head.training
        model.train().reset_classifier(3)
        assert model.head.training
        model.eval().reset_classifier(0)
        assert model(images).shape == (2, model.num_features)
        assert torch.equal(model(images), model.forward_head(model.forward_features(images), pre_logits=True))
        model.reset_classifier(0, "")
        assert torch.equal(model(images), model.forward_features(images))
        with pytest.raises(ValueError, match=r"global_pool.*choose"):
            model.reset_classifier(3, "median")


AFFINE = {"attn_kwargs": {"feature_map": "relu_affine"}}


@pytest.mark.parametrize(
    ("name", "options"),
    [*((name, {}) for name in (*FAMILIES, "pvt_tiny", "focused_deit_tiny")), ("inline_deit_tiny", AFFINE)],
)
def test_norms_biases_positions_and_tables_do_not_decay(name, options):
    model = create_model(name, device="meta", **options)
    still, decaying = param_groups_weight_decay(model, weight_decay=0.05, no_weight_decay_list=model.no_weight_decay())
    names = {id(parameter): key for key, parameter in model.named_parameters()}
    assert still["weight_decay"] == 0
    decaying_names = {names[id(parameter)] for parameter in decaying["params"]}
    for key, parameter in model.named_parameters():
        particular = (
            "cls_token",
            "pos_embed",
            "relative_position_bias_table",
            "feature_map.bias",
            "attn.spread",
        )
        expected = parameter.ndim > 1 and not key.endswith(particular)
        assert (key in decaying_names) == expected, key
    learned = {"pvt_tiny": "reduce.proj.weight", "focused_deit_tiny": "attn.conv.weight"}
    assert any(key.endswith(learned.get(name, "local_residual.fc2.weight")) for key in decaying_names)
    assert any(key.endswith("feature_map.matrix") for key in decaying_names) == bool(options)


@pytest.mark.parametrize("name", [*FAMILIES, "pvt_tiny", "cswin_tiny", "focused_deit_tiny"])
def test_layer_decay_grows_with_depth(name):
    model = create_model(name, device="meta")
    groups = param_groups_layer_decay(model, layer_decay=0.5, no_weight_decay_list=model.no_weight_decay())
    names = {id(parameter): key for key, parameter in model.named_parameters()}
    scale = {names[id(parameter)]: group["lr_scale"] for group in groups for parameter in group["params"]}
    assert set(scale) == set(names.values())
    blocks = [key for key in scale if key.endswith("attn.proj.weight")]
    scales = [scale[key] for key in blocks]
    assert scales == sorted(scales)
    assert len(set(scales)) == len(scales)
    assert scale["stages.0.patch_embed.proj.weight"] < min(scales)
    assert scale["head.weight"] == 1 > max(scales)


@pytest.mark.parametrize("name", ["inline_pvt_tiny", "inline_swin_tiny", "pvt_tiny"])
def test_a_pruned_model_works_on(name):
    model, images = create_model(name, img_size=64).eval(), torch.randn(1, 3, 64, 96)
    with torch.no_grad():
        maps = model.forward_intermediates(images, intermediates_only=True)
        taken = model.prune_intermediate_layers([0, 1], prune_norm=False)
        pruned = model.forward_intermediates(images, indices=taken, norm=True, intermediates_only=True)
        torch.testing.assert_close(pruned, maps[:2])
        model.set_input_size((64, 96))
        assert model.forward_features(images).shape == maps[1].shape


@pytest.mark.parametrize("name", [*FAMILIES, "pvt_tiny", "cswin_tiny", *LEARNING_BASELINES])
def test_init_weights_fills_an_empty_model(name):
    torch.manual_seed(0)
    options = {"depth": 2} if "deit" in name else {"depths": (1, 1, 2, 1)}
    model = create_model(name, device="meta", **options).to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, float("nan"))
    model.init_weights()
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    fresh = create_model(name, **options)
    for (key, parameter), other in zip(model.named_parameters(), fresh.parameters(), strict=True):
        spread, expected = parameter.std(correction=0).item(), other.std(correction=0).item()
        assert spread == pytest.approx(expected, rel=0.3, abs=1e-6), key


def test_modules_are_initialised_in_the_order_of_the_forward_pass():
    model = shallow("inline_swin_tiny")
    torch.manual_seed(0)
    embed = ConvEmbed(3, 24, kernel=4, stride=4)
    assert torch.equal(model.stages[0].patch_embed.proj.weight, embed.proj.weight)


@pytest.mark.parametrize("name", [*FAMILIES, "pvt_tiny", "cswin_tiny", *LEARNING_BASELINES])
def test_an_empty_batch_is_answered_empty(name):
    options = {"depth": 1} if "deit" in name else {"depths": (1, 1, 1, 1), **narrow(name)}
    assert create_model(name, num_classes=3, **options).eval()(torch.zeros(0, 3, 64, 64)).shape == (0, 3)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_head_without_pooling_answers_for_every_place(name):
    model = shallow(name, global_pool="")
    logits = model(torch.randn(1, 3, 64, 96))
    assert logits.shape == ((1, 1 + 4 * 6, 7) if model.num_prefix_tokens else (1, 7, 2, 3))


@pytest.mark.parametrize("name", ["inline_deit_tiny", "inline_pvt_tiny"])
def test_the_mean_of_the_tokens_is_without_the_class_token(name):
    model = shallow(name, global_pool="avg", class_token=True)
    features = model.forward_features(torch.randn(1, 3, 64, 96))
    assert model.num_prefix_tokens == 1
    mean = features[:, 1:].mean(dim=1)
    torch.testing.assert_close(model.forward_head(features), model.head(model.fc_norm(mean)))


def test_softmax_swin_answers_as_timms_does():
    torch.manual_seed(0)
    theirs = create_model("swin_tiny_patch4_window7_224", depths=(2, 2, 2, 2)).eval()
    torch.nn.init.normal_(theirs.layers[0].blocks[1].attn.relative_position_bias_table)
    ours = create_model("inline_swin_tiny", depths=(2, 2, 2, 2), attention="softmax").eval()
    weights = {}
    for name, value in theirs.state_dict().items():
        if not name.endswith(("relative_position_index", "attn_mask")):
            name = name.replace("patch_embed.", "stages.0.patch_embed.").replace("layers.", "stages.")
            weights[name.replace("head.fc.", "head.")] = value
    ours.load_state_dict(weights)
    images = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        torch.testing.assert_close(ours(images), theirs(images), rtol=0, atol=1e-5)


def test_attention_is_spelled_out_by_stage_and_block():
    assert attention_by_stage("inline", (1, 2)) == [["inline"], ["inline", "inline"]]
    assert attention_by_stage(("inline", ("inline", "softmax")), (2, 4)) == [
        ["inline"] * 2,
        ["inline", "softmax", "softmax", "softmax"],
    ]
    base = create_model("inline_swin_base", device="meta")
    kinds = [[type(block.attn).__name__ for block in stage.blocks] for stage in base.stages]
    assert kinds[0] == kinds[1] == ["InLineAttention"] * 2
    assert kinds[2] == ["InLineAttention"] * 2 + ["SoftmaxAttention"] * 16
    assert kinds[3] == ["SoftmaxAttention"] * 2


@pytest.mark.parametrize("name", ["inline_pvt_tiny", "inline_swin_tiny", "inline_cswin_tiny", "pvt_tiny", "cswin_tiny"])
@pytest.mark.parametrize(
    "names", [("linear", "inline", "softmax", "inline"), ("hydra", "focused", "angular", "enhanced")]
)
def test_any_mix_by_stage(name, names):
    model = create_model(name, attention=names, num_classes=4, depths=(1, 1, 1, 1), **narrow(name))
    assert [type(stage.blocks[0].attn).__name__.lower().removesuffix("attention") for stage in model.stages] == [*names]
    assert model(torch.randn(1, 3, 64, 64)).shape == (1, 4)


def test_wrong_arguments_are_named():
    with pytest.raises(
        ValueError,
        match=r"'flash'.*agent, angular, circulant, efficient, enhanced, focused, hydra, inline, .*, softmax, vit3",
    ):
        create_model("inline_swin_tiny", attention="flash")
    with pytest.raises(ValueError, match="names 2 stages, but the model has 4"):
        create_model("inline_swin_tiny", attention=("inline", "softmax"))
    with pytest.raises(ValueError, match="1 to 2 attention names"):
        create_model("inline_swin_tiny", attention=(("inline",) * 3, "inline", "inline", "inline"))
    with pytest.raises(ValueError, match=r"stage 0 .* 8 times.*sr_ratio of 1"):
        create_model("inline_pvt_tiny", sr_ratios=(8, 4, 2, 1))
    with pytest.raises(ValueError, match="class_token=False"):
        create_model("inline_deit_tiny", window_size=4)
    with pytest.raises(ValueError, match="num_heads must have an entry for each of the 4 stages"):
        create_model("inline_swin_tiny", num_heads=(3, 6))
    with pytest.raises(ValueError, match="sr_ratios must have an entry for each of the 4 stages"):
        create_model("pvt_tiny", sr_ratios=(8, 4, 2))
    with pytest.raises(ValueError, match="at least one block"):
        create_model("inline_deit_tiny", depth=0)
    with pytest.raises(ValueError, match="num_heads=1 must be even"):
        create_model("cswin_tiny", num_heads=(1, 2, 4, 8))
    with pytest.raises(ValueError, match=r"sr_ratio=2 .* prefix tokens"):
        create_model("pvt_tiny", sr_ratios=(8, 4, 2, 2))
    with pytest.raises(TypeError, match="atention"):
        create_model("inline_deit_tiny", atention="inline")


@pytest.mark.parametrize("name", FAMILIES)
def test_wrong_images_are_refused(name):
    model = shallow(name)
    with pytest.raises(ValueError, match=r"floating-point images.*uint8.*normalise"):
        model(torch.zeros(1, 3, 64, 64, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"\(batch, 3, height, width\)"):
        model(torch.zeros(1, 1, 64, 64))
    with pytest.raises(ValueError, match=r"\(batch, 3, height, width\)"):
        model(torch.zeros(3, 64, 64))


def test_importing_registers_all_models():
    for name in ("deit", "pvt", "swin", "cswin"):
        assert f"inline_{name}_tiny" in timm.list_models(module=f"inline_{name}")
    assert "hydra_deit_tiny" in timm.list_models(module="baseline_deit")


def test_stochastic_depth_rises_linearly_with_the_block() -> None:
    model = timm.create_model("inline_deit_tiny", depth=4, embed_dim=16, num_heads=2, img_size=32, drop_path_rate=0.3)
    rates = [module.drop_prob for module in model.modules() if isinstance(module, DropPath)]
    # Two branches of each block; the first block has none.
    assert rates == pytest.approx([0.1, 0.1, 0.2, 0.2, 0.3, 0.3])
