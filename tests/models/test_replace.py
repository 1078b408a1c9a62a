"""Our attention in timm's models: with softmax nothing changes, and what works with timm's attention still does."""

import copy
import io
import logging
import pickle
import warnings

import pytest
import timm
import torch
from timm.models._features_fx import create_feature_extractor
from timm.models.vision_transformer import ParallelThingsBlock
from torch import nn

import inlinevit
from inlinevit import replace_attention
from inlinevit.analysis import measure_locality, run_masked, watch
from inlinevit.layers import ATTENTIONS, AttentionAdapter, FocusedAttention, InLineAttention, PatchGrid

VIT = {"depth": 3, "embed_dim": 48, "num_heads": 3, "num_classes": 5}
SWIN = {"depths": (2, 2), "embed_dim": 24, "num_heads": (2, 4), "num_classes": 5, "drop_path_rate": 0.0}
MODELS = {
    "vit": ("vit_tiny_patch16_224", {**VIT, "img_size": 96}, (96, 96)),
    "oblong vit": ("vit_tiny_patch16_224", {**VIT, "img_size": (96, 64)}, (96, 64)),
    "dynamic vit": ("vit_tiny_patch16_224", {**VIT, "dynamic_img_size": True}, (96, 160)),
    "distilled deit": ("deit_tiny_distilled_patch16_224", {**VIT, "img_size": 96}, (96, 96)),
    "registers": ("vit_small_patch14_reg4_dinov2", {**VIT, "img_size": 56}, (56, 56)),
    "padded registers": (
        "vit_small_patch14_reg4_dinov2",
        {**VIT, "img_size": 56, "dynamic_img_size": True, "dynamic_img_pad": True},
        (60, 100),
    ),
    "no bias": ("vit_tiny_patch16_224", {**VIT, "img_size": 64, "qkv_bias": False, "proj_bias": False}, (64, 64)),
    "parallel": ("vit_tiny_patch16_224", {**VIT, "img_size": 64, "block_fn": ParallelThingsBlock}, (64, 64)),
    "swin": ("swin_tiny_patch4_window7_224", {**SWIN, "img_size": 112}, (112, 112)),
    "padded swin": ("swin_tiny_patch4_window7_224", {**SWIN, "img_size": (120, 72)}, (120, 72)),
    "narrow swin": ("swin_tiny_patch4_window7_224", {**SWIN, "img_size": (112, 40)}, (112, 40)),
}
FEW = ("vit", "dynamic vit", "swin")


def make(key: str, **options: object) -> tuple[nn.Module, torch.Tensor]:
    """A model of timm whose attention is far from uniform, and images for it."""
    name, arguments, size = MODELS[key]
    torch.manual_seed(0)
    model = timm.create_model(name, **{**arguments, **options}).eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if path.endswith("gamma"):
                parameter.fill_(1.0)
            elif parameter.dim() > 1:
                parameter.mul_(6)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model, torch.randn(2, 3, *size)


def replaced(key: str, attention: str = "inline", **options: object) -> tuple[nn.Module, torch.Tensor]:
    """A model with another attention, and images for it."""
    model, images = make(key)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return replace_attention(model, attention, **options), images


@pytest.mark.parametrize("key", MODELS)
@torch.no_grad()
def test_softmax_with_the_same_weights_gives_the_same_outputs(key):
    model, images = make(key)
    expected = model(images)
    assert replace_attention(model, "softmax") is model
    adapters = [module for module in model.modules() if isinstance(module, AttentionAdapter)]
    assert len(adapters) == {"parallel": 6}.get(key, 4 if "swin" in key else 3)
    torch.testing.assert_close(model(images), expected, rtol=1e-5, atol=1e-5)
    # What is compared depends on attention.
    other, _ = replaced(key)
    assert (other(images) - expected).abs().max() > 1e-2


# Those that models with a class token can have without changing their blocks.
REPLACEABLE = [
    name
    for name, kind in ATTENTIONS.items()
    if not (kind.wants_dwconv_mlp or kind.surroundings.cpe) and kind.supports_prefix_tokens
]


@pytest.mark.parametrize("attention", REPLACEABLE)
@pytest.mark.parametrize("key", FEW)
def test_every_attention_trains_and_is_saved(attention, key):
    model, images = replaced(key, attention)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = copy.deepcopy(model.state_dict())
    model(images).square().sum().backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []
    optimizer.step()
    changed = [name for name, value in model.state_dict().items() if not torch.equal(value, before[name])]
    assert {name for name in changed if "attention.qkv.weight" in name or "attention.proj.weight" in name}
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other, _ = replaced(key, attention, keep_weights=False)
    other.load_state_dict(torch.load(file, weights_only=True))
    torch.testing.assert_close(other.eval()(images), model.eval()(images))


@pytest.mark.parametrize("key", FEW)
@torch.no_grad()
def test_weights_of_the_original_model_load_after_the_replacement(key):
    original, images = make(key)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = replace_attention(timm.create_model(MODELS[key][0], **MODELS[key][1]).eval())
    missing, unexpected = model.load_state_dict(original.state_dict(), strict=False)
    assert all("attention.local_residual." in name for name in missing)
    assert all(name.endswith("relative_position_bias_table") for name in unexpected)
    block = "blocks.0" if "vit" in key else "layers.0.blocks.0"
    assert torch.equal(model.get_submodule(block).attn.qkv.weight, original.get_submodule(block).attn.qkv.weight)
    softmax = replace_attention(timm.create_model(MODELS[key][0], **MODELS[key][1]).eval(), "softmax")
    softmax.load_state_dict(original.state_dict())
    torch.testing.assert_close(softmax(images), original(images), rtol=1e-5, atol=1e-5)


def test_layers_are_kept_and_new_ones_are_initialised_as_in_our_models():
    model, _ = make("vit", proj_drop_rate=0.25)
    model.train()
    qkv, proj = model.blocks[0].attn.qkv, model.blocks[0].attn.proj
    qkv.weight.requires_grad_(False)
    attention = replace_attention(model, feature_map="relu").blocks[0].attn.attention
    assert isinstance(attention, InLineAttention)
    assert attention.qkv is qkv
    assert attention.proj is proj
    assert not attention.qkv.weight.requires_grad
    assert attention.proj_drop.p == 0.25
    assert attention.training
    assert attention.proj_drop.training
    assert (attention.num_heads, attention.head_dim, attention.feature_map.name) == (3, 16, "relu")
    model, _ = make("no bias")
    attention = replace_attention(model.double(), keep_weights=False).blocks[0].attn.attention
    assert attention.qkv.bias is None
    assert attention.proj.bias is None
    assert attention.qkv.weight.std() < 0.03
    assert attention.qkv.weight.dtype == torch.float64
    assert {parameter.dtype for parameter in attention.parameters()} == {torch.float64}
    model, _ = make("oblong vit")
    focused = replace_attention(model, "focused").blocks[0].attn.attention
    assert isinstance(focused, FocusedAttention)
    assert focused.resample_pos_embed.grid == (6, 4)


def kinds(model: nn.Module) -> list[bool]:
    """Which blocks have our attention."""
    return [isinstance(block.attn, AttentionAdapter) for block in model.blocks]


def test_blocks_are_chosen_by_index_name_or_function(caplog):
    caplog.set_level(logging.INFO)
    assert kinds(replace_attention(make("vit")[0], blocks=[0, -1])) == [True, False, True]
    assert "inline attention in 2 blocks: blocks.0, blocks.2" in caplog.text
    assert kinds(replace_attention(make("vit")[0], blocks=range(1))) == [True, False, False]
    assert kinds(replace_attention(make("vit")[0], blocks=["blocks.1"])) == [False, True, False]
    assert kinds(replace_attention(make("vit")[0], blocks=lambda name, block: name > "blocks.0")) == [False, True, True]
    # In several calls, with one hook.
    model, images = make("dynamic vit")
    replace_attention(replace_attention(model, blocks=[0]), "linear", blocks=[2])
    assert kinds(model) == [True, False, True]
    assert len(model.patch_embed._forward_pre_hooks) == 1
    model(images)


BAD_BLOCKS = [
    ([3], "there is no block 3: the model has 3, from 0 to 2"),
    ([-4], "there is no block -4"),
    ([True], "there is no block True"),
    (["blocks.7"], "no block 'blocks.7': choose from blocks.0 to blocks.2"),
    ("blocks.1", "should be a list of names"),
    ([], "chooses none of the 3 blocks"),
    (lambda name, block: False, "chooses none"),
]


@pytest.mark.parametrize(("blocks", "message"), BAD_BLOCKS, ids=[message for _, message in BAD_BLOCKS])
def test_blocks_that_do_not_exist_are_refused(blocks, message):
    model, _ = make("vit")
    with pytest.raises(ValueError, match=message):
        replace_attention(model, blocks=blocks)
    assert not any(kinds(model))


SMALL_SWIN = {"depths": (2,), "embed_dim": 24, "num_heads": (2,), "img_size": 64}
REFUSED = [
    ("vit_tiny_patch16_224", {**VIT, "qk_norm": True}, {}, r"has no q_norm.weight.*: use keep_weights=False"),
    ("vit_tiny_patch16_224", {**VIT, "attn_layer": "diff"}, {}, "has no lambda_q1"),
    ("vit_tiny_patch16_224", {**VIT, "attn_drop_rate": 0.1}, {}, "create the model with attn_drop_rate=0"),
    ("vit_tiny_patch16_224", {**VIT, "patch_drop_rate": 0.1}, {}, "create it with patch_drop_rate=0"),
    ("vit_tiny_patch16_224", VIT, {"attention": "inlin"}, "unknown attention 'inlin': choose one of "),
    ("vit_tiny_patch16_224", VIT, {"attention": "enhanced"}, "convolutions in the MLPs"),
    ("vit_tiny_patch16_224", VIT, {"keep_weight": True}, "has no argument 'keep_weight'"),
    ("vit_tiny_patch16_224", VIT, {"feature_map": 3}, "feature_map in attn_kwargs is 3"),
    ("swinv2_tiny_window8_256", SMALL_SWIN, {}, "has no logit_scale.*: use keep_weights=False"),
    ("eva02_tiny_patch14_224", {"depth": 1}, {"keep_weights": False}, "takes rotary position embeddings"),
    ("vit_relpos_small_patch16_224", {"depth": 1}, {"keep_weights": False}, "takes a relative position bias"),
    ("pvt_v2_b0", {}, {"keep_weights": False}, "takes 'feat_size'"),
    ("convit_tiny", {"depth": 1}, {"keep_weights": False}, "separate projections"),
    ("nest_tiny", {}, {"keep_weights": False}, r"does not take tokens \(batch, tokens, channels\)"),
    ("davit_tiny", {}, {"blocks": ["stages.0.blocks.0.1"]}, "does not compute plain softmax attention"),
    ("naflexvit_base_patch16_gap", {"depth": 1}, {}, "packs maps of several sizes"),
    ("resnet10t", {}, {}, "has no block with a child 'attn'"),
    ("inline_deit_tiny", {"depth": 1}, {}, "choose it when you create the model"),
]


@pytest.mark.parametrize(("name", "arguments", "options", "message"), REFUSED, ids=[row[3] for row in REFUSED])
def test_what_cannot_be_replaced_is_refused_in_a_sentence(name, arguments, options, message):
    model = timm.create_model(name, **arguments)
    before = repr(model)
    with pytest.raises(ValueError, match=message):
        replace_attention(model, **options)
    assert repr(model) == before


def test_replacing_twice_is_refused():
    with pytest.raises(ValueError, match="was replaced before"):
        replace_attention(replaced("vit")[0])


def test_on_the_meta_device():
    for keep_weights in (True, False):
        with torch.device("meta"):
            model = timm.create_model("vit_tiny_patch16_224", **VIT)
            replace_attention(model, keep_weights=keep_weights)
        assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


class OwnAttention(nn.Module):
    """Attention that looks like timm's, with another scale."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.num_heads, self.scale = 3, scale
        self.qkv, self.proj = nn.Linear(48, 144), nn.Linear(48, 48)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(2, (3, 3, 16)).permute(2, 0, 3, 1, 4)
        out = nn.functional.scaled_dot_product_attention(q, k, v, scale=self.scale)
        return self.proj(out.transpose(1, 2).flatten(2))


class OwnViT(nn.Module):
    """A ViT without the attributes of timm's."""

    def __init__(self, scale: float = 0.25) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, 48, 16, 16)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 48))
        self.block = nn.Module()
        self.block.attn = OwnAttention(scale)

    def forward(self, x):
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        return self.block.attn(torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1))


@torch.no_grad()
def test_similar_models_work_if_their_attention_is_softmax():
    model, images = OwnViT(), torch.randn(2, 3, 64, 64)
    expected = model(images)
    assert model.block.attn.qkv.weight.std() < 0.1
    torch.testing.assert_close(replace_attention(model, "softmax")(images), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="does not compute plain softmax attention"):
        replace_attention(OwnViT(scale=1.0))
    # Maps of any shape.
    sizes = []
    model = replace_attention(OwnViT()).eval()
    watch(model, torch.randn(2, 3, 64, 160), lambda layer: sizes.append(layer.size))
    assert sizes == [(4, 10)]
    with pytest.raises(ValueError, match="a map of 4×10: attention needs all tokens"):
        model.block.attn(torch.randn(2, 1 + 39, 48))
    model.patch_embed = nn.Sequential(model.patch_embed)
    model.block.attn.feat_size = PatchGrid(model.patch_embed)
    with pytest.raises(ValueError, match="Sequential has neither grid_size nor patch_size"):
        model(images)


@pytest.mark.parametrize("key", MODELS)
@torch.no_grad()
def test_copies_features_and_inference_give_the_same_outputs(key):
    model, images = replaced(key)
    expected = model(images)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(images), expected)
        # A copy has a grid of its own.
        embed = other.patch_embed
        for adapter in other.modules():
            if isinstance(adapter, AttentionAdapter) and isinstance(adapter.feat_size, PatchGrid):
                assert adapter.feat_size.patch_embed is embed
    optimized = inlinevit.optimize_for_inference(model, compile=False)
    torch.testing.assert_close(optimized(images), expected)
    last, maps = model.forward_intermediates(images, norm=True)
    torch.testing.assert_close(last, model.forward_features(images))
    assert len(maps) == (2 if "swin" in key else 3)


@pytest.mark.parametrize("key", FEW)
@torch.no_grad()
def test_features_only(key):
    name, arguments, size = MODELS[key]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        backbone = timm.create_model(name, features_only=True, out_indices=(0, 1), **arguments)
        replace_attention(backbone)
    maps = backbone(torch.randn(1, 3, *size))
    reductions = (4, 8) if "swin" in key else (16, 16)
    spatial = (1, 2) if "swin" in key else (2, 3)
    expected = [(size[0] // reduction, size[1] // reduction) for reduction in reductions]
    assert [tuple(one.shape[axis] for axis in spatial) for one in maps] == expected


@pytest.mark.parametrize("key", FEW)
def test_gradient_checkpointing_gives_the_same_gradients(key):
    model, images = replaced(key)
    sizes = [images, images[:, :, :64, :64]] if key == "dynamic vit" else [images]
    gradients = []
    for enable in (False, True):
        model.zero_grad()
        model.train()
        model.set_grad_checkpointing(enable)
        torch.manual_seed(0)
        # Blocks run again in the backward pass, after images of another size.
        sum(model(batch).square().sum() for batch in sizes).backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for once, again in zip(*gradients, strict=True):
        torch.testing.assert_close(once, again)


@torch.no_grad()
def test_other_input_sizes():
    model, _ = replaced("dynamic vit")
    for size in ((64, 144), (144, 64), (96, 96)):
        images = torch.randn(1, 3, *size)
        same, _ = replaced("dynamic vit")
        same.load_state_dict(model.state_dict())
        same.set_input_size(img_size=size)
        expected = [(size[0] // 16, size[1] // 16)] * 3
        seen = []
        watch(model, images, lambda layer, seen=seen: seen.append(layer.size))
        assert seen == expected
        torch.testing.assert_close(same(images), model(images))
    model, images = make("swin")
    expected = copy.deepcopy(model)
    expected.set_input_size((96, 96), window_size=(6, 6))
    replace_attention(model, "softmax").set_input_size((96, 96), window_size=(6, 6))
    images = torch.randn(1, 3, 96, 96)
    torch.testing.assert_close(model(images), expected(images), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_fx_traces_models_of_a_fixed_size_only():
    for key in ("vit", "swin"):
        model, images = replaced(key)
        extractor = create_feature_extractor(model, {"norm": "out"})
        assert torch.equal(extractor(images)["out"], model.forward_features(images))
    with pytest.raises(ValueError, match="fixed img_size"):
        create_feature_extractor(replaced("dynamic vit")[0], {"norm": "out"})


@pytest.mark.slow
@pytest.mark.parametrize("key", ["vit", "swin"])
@torch.no_grad()
def test_export_with_a_dynamic_batch_size(key):
    model, images = replaced(key)
    batch = torch.export.Dim("batch", min=1, max=16)
    exported = torch.export.export(model, (images,), dynamic_shapes=({0: batch},)).module()
    more = torch.cat([images, images + 1, images - 1])
    torch.testing.assert_close(exported(more), model(more), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("key", ["vit", "dynamic vit", "swin"])
@torch.no_grad()
def test_compile(key):
    model, images = replaced(key)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(images), model(images), rtol=1e-4, atol=1e-5)
    if key == "dynamic vit":
        for size in ((128, 64), (64, 128)):
            images = torch.randn(1, 3, *size)
            torch.testing.assert_close(compiled(images), model(images), rtol=1e-4, atol=1e-5)
        # What the compiler recorded is neither copied nor saved.
        pickle.dumps(copy.deepcopy(model))


@pytest.mark.parametrize("key", MODELS)
@torch.no_grad()
def test_analysis_sees_the_same_layers_as_before(key):
    model, images = make(key)
    before: dict[str, object] = {}
    watch(model, images, lambda layer: before.__setitem__(layer.name, (layer, layer.attention_weights())))
    softmax, _ = replaced(key, "softmax")
    seen: dict[str, object] = {}
    watched = watch(softmax, images, lambda layer: seen.__setitem__(layer.name, (layer, layer.attention_weights())))
    assert torch.equal(watched, softmax(images))
    assert list(seen) == list(before)
    for name, (layer, weights) in seen.items():
        expected, expected_weights = before[name]
        assert layer.size == expected.size
        assert torch.equal(layer.places, expected.places)
        torch.testing.assert_close(weights, expected_weights, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("key", FEW)
@torch.no_grad()
def test_analysis_of_inline_attention(key):
    model, images = replaced(key)
    names = []
    watch(model, images, lambda layer: names.append((layer.name, layer.attention, layer.images)))
    assert {row[1:] for row in names} == {("inline", 2)}
    assert len(measure_locality(model, [images])) == len(names)
    everything = run_masked(
        model,
        images,
        lambda layer, first, last: torch.ones(layer.windows, last - first, layer.tokens, dtype=torch.bool),
    )
    torch.testing.assert_close(everything, model(images), rtol=1e-3, atol=1e-4)
