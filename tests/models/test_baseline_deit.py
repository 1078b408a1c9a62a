"""The baselines with the architecture of DeiT-T. Their sizes and costs are in test_catalog.py."""

import pytest
import timm
import torch
from timm.models import create_model
from timm.models._features_fx import create_feature_extractor

import inlinevit
from inlinevit.layers import ATTENTIONS
from inlinevit.layers.block import DWConvMlp, ResidualConvMlp
from tests import slow_except

BASELINES = [name for name in ATTENTIONS if name != "inline"]
LEARN_POSITIONS = ("focused", "polaformer")
# Those without a class token and positions of the tokens, and the one without a class token alone.
NO_POSITIONS, NO_CLASS_TOKEN = ("vit3", "circulant"), ("vit3", "circulant", "mhla")
HEADS = {"hydra": 192, "circulant": 192, "vit3": 6}
every_attention = pytest.mark.parametrize("attention", BASELINES)


def shallow(attention: str, **options):
    torch.manual_seed(0)
    return create_model(f"{attention}_deit_tiny", **{"depth": 2, "num_classes": 5, **options})


def test_there_is_a_baseline_for_every_attention():
    assert set(timm.list_models(module="baseline_deit")) == {f"{attention}_deit_tiny" for attention in BASELINES}


@every_attention
def test_each_has_its_attention_in_all_twelve_blocks_and_three_heads(attention):
    model = create_model(f"{attention}_deit_tiny", device="meta")
    blocks = model.stages[0].blocks
    assert [type(block.attn) for block in blocks] == [ATTENTIONS[attention]] * 12
    assert {block.attn.num_heads for block in blocks} == {HEADS.get(attention, 3)}
    assert {isinstance(block.mlp, DWConvMlp) for block in blocks} == {attention == "enhanced"}
    assert {isinstance(block.mlp, ResidualConvMlp) for block in blocks} == {attention in ("mala", "rala")}
    assert {block.cpe is not None for block in blocks} == {attention in ("mala", "rala", *NO_POSITIONS)}
    assert (model.stages[0].cls_token is None) == (attention in NO_CLASS_TOKEN)
    assert (model.stages[0].pos_embed is None) == (attention in NO_POSITIONS)
    assert model.global_pool == ("avg" if attention in NO_CLASS_TOKEN else "token")
    if attention in LEARN_POSITIONS:
        assert {block.attn.pos_embed.shape for block in blocks} == {(1, 197, 192)}


@every_attention
@pytest.mark.parametrize("size", [(64, 64), (75, 98)])
def test_any_size_forward_and_backward(attention, size):
    model = shallow(attention)
    logits = model(torch.randn(2, 3, *size))
    assert logits.shape == (2, 5)
    logits.square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        # The head uses the class token of the last block alone, which is not convolved.
        if "blocks.1." not in name:
            assert parameter.grad.abs().max() > 0, name


@every_attention
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_autocast_stay_close(attention, dtype):
    model, images = shallow(attention).eval(), torch.randn(2, 3, 65, 98)
    with torch.no_grad():
        exact = model.double()(images.double())
        with torch.autocast("cpu", dtype=dtype):
            autocast = model.float()(images)
        half = model.to(dtype)(images.to(dtype))
    assert half.dtype == dtype
    for answer in (autocast, half):
        assert (answer.double() - exact).norm() < 0.03 * exact.norm()


@every_attention
def test_fx_traces(attention):
    model, images = shallow(attention).eval(), torch.randn(2, 3, 64, 96)
    traced = create_feature_extractor(model, ["head"])
    with torch.no_grad():
        torch.testing.assert_close(traced(images)["head"], model(images))


@pytest.mark.integration
@every_attention
def test_compiles_as_one_graph(attention):
    model, images = shallow(attention, depth=1).eval(), torch.randn(2, 3, 96, 64)
    # Each of them counts as a recompilation of the same code.
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(images), model(images))


@pytest.mark.parametrize("attention", slow_except(BASELINES, "focused"))
def test_gradient_checkpointing_changes_nothing(attention):
    model, images = shallow(attention).train(), torch.randn(2, 3, 64, 64)
    gradients = []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        model.zero_grad()
        model(images).square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    torch.testing.assert_close(gradients[0], gradients[1])


@every_attention
def test_the_class_token_alone_is_the_class_token(attention):
    model, images = shallow(attention).eval(), torch.randn(2, 3, 64, 96)
    with torch.no_grad():
        optimized = inlinevit.optimize_for_inference(model, compile=False)
        torch.testing.assert_close(optimized(images), model(images))


@every_attention
def test_set_input_size_keeps_the_answers_at_that_size(attention):
    """The positions of focused attention's keys too."""
    model, images = shallow(attention, img_size=64).eval(), torch.randn(1, 3, 96, 160)
    with torch.no_grad():
        resized_each_time = model(images)
        model.set_input_size((96, 160))
        torch.testing.assert_close(model(images), resized_each_time, rtol=0, atol=1e-5)
    tables = {name: p.shape for name, p in model.named_parameters() if name.endswith("pos_embed")}
    prefix = 0 if attention in NO_CLASS_TOKEN else 1
    assert set(tables.values()) == (set() if attention in NO_POSITIONS else {(1, prefix + 60, 192)})
    assert len(tables) == (0 if attention in NO_POSITIONS else 3 if attention in LEARN_POSITIONS else 1)


@every_attention
def test_features_only_gives_the_levels(attention):
    features = create_model(f"{attention}_deit_tiny", features_only=True, depth=3).eval()
    with torch.no_grad():
        maps = features(torch.randn(1, 3, 64, 96))
    assert [level.shape for level in maps] == [(1, 192, 4, 6)] * 3


def test_the_softmax_baseline_is_timms_deit():
    torch.manual_seed(0)
    theirs = create_model("deit_tiny_patch16_224", depth=2).eval()
    for parameter in theirs.parameters():
        parameter.data.add_(0.05 * torch.randn_like(parameter))
    ours = shallow("softmax", num_classes=1000).eval()
    places = {"cls_token": "stages.0.cls_token", "pos_embed": "stages.0.pos_embed"}
    weights = {}
    for name, value in theirs.state_dict().items():
        name = places.get(name, name).replace("patch_embed.", "stages.0.patch_embed.")
        weights["stages.0." + name if name.startswith("blocks.") else name] = value
    ours.load_state_dict(weights)
    images = torch.randn(2, 3, 224, 224)
    with torch.no_grad():
        expected = theirs(images)
        torch.testing.assert_close(ours(images), expected, rtol=0, atol=1e-5)
    assert (expected[0] - expected[1]).abs().mean() > 0.05


# Options of the attention


def test_attention_options_reach_the_layers():
    def attentions(**options):
        model = create_model("inline_deit_tiny", device="meta", depth=3, **options)
        return [block.attn for block in model.stages[0].blocks]

    for attn in attentions(attn_kwargs={"feature_map": "relu_affine", "local_residual": False, "path": "explicit"}):
        assert (attn.feature_map.name, attn.local_residual, attn.path) == ("relu_affine", None, "explicit")
        assert attn.feature_map.matrix.shape == (6, 32, 32)
    for attn in attentions(attention="linear", attn_kwargs={"feature_map": "exp"}):
        assert attn.feature_map.name == "exp"
    for attn in attentions(attention="softmax", attn_kwargs={"unit_queries": True}):
        assert attn.unit_queries
    for attn in attentions():
        assert attn.feature_map.name == "identity"
        assert attn.local_residual is not None


def test_each_of_mixed_attentions_gets_the_options_that_it_has():
    given = {"feature_map": "relu", "unit_queries": True, "local_residual": False}
    model = create_model(
        "inline_deit_tiny", depth=5, attention=("inline", "softmax", "linear", "hydra"), attn_kwargs=given
    )
    inline, softmax, linear, hydra, last = (block.attn for block in model.stages[0].blocks)
    assert (inline.feature_map.name, inline.local_residual) == ("relu", None)
    assert softmax.unit_queries
    assert linear.feature_map.name == "relu"
    assert type(hydra) is type(last) is ATTENTIONS["hydra"]
    assert model(torch.randn(1, 3, 64, 64)).shape == (1, 1000)
    assert given == {"feature_map": "relu", "unit_queries": True, "local_residual": False}


@pytest.mark.parametrize("name", ["inline_pvt_tiny", "inline_swin_tiny", "inline_cswin_tiny"])
def test_attention_options_in_pyramids(name):
    words, given = ("inline", "linear", "softmax", "inline"), {"feature_map": "exp", "unit_queries": True}
    model = create_model(name, device="meta", attention=words, attn_kwargs=given)
    attentions = [stage.blocks[-1].attn for stage in model.stages]
    assert [attn.feature_map.name for attn in (attentions[0], attentions[1], attentions[3])] == ["exp"] * 3
    assert attentions[2].unit_queries


@pytest.mark.parametrize(
    ("attention", "option", "remedy"),
    [
        ("inline", "featuremap", "choose one of cpe, feature_map, gate, lepe, local_residual, mlp_conv, path, rope"),
        ("linear", "local_residual", "choose one of cpe, feature_map, gate, lepe, mlp_conv, rope"),
        ("softmax", "relative_window", "choose one of cpe, gate, lepe, mlp_conv, rope, unit_queries"),
        ("hydra", "feature_map", "choose one of cpe, gate, lepe, mlp_conv, rope"),
        ("enhanced", "feature_map", "choose one of cpe, gate, lepe, mlp_conv, rope"),
        ("focused", "grid", "choose one of cpe, gate, lepe, mlp_conv, rope, value_conv"),
        (("hydra", "softmax"), "path", "choose one of cpe, gate, lepe, mlp_conv, rope, unit_queries"),
    ],
)
def test_options_that_no_attention_has_are_refused(attention, option, remedy):
    words = attention if isinstance(attention, str) else " and ".join(attention)
    message = f"^{words} attention has no argument '{option}' in attn_kwargs: {remedy}$"
    with pytest.raises(ValueError, match=message):
        create_model("inline_deit_tiny", device="meta", attention=attention, attn_kwargs={option: 1})
