"""DeiT-T with agent attention, ViT³, MHLA and circulant attention: what is particular about these models."""

import pytest
import timm
import torch
from timm.optim import param_groups_weight_decay
from torch import nn

import inlinevit
from inlinevit.analysis import watch
from inlinevit.layers import AttentionAdapter
from inlinevit.models.catalog import count_parameters
from inlinevit.parallel.model import check_parts
from inlinevit.streaming import stream

NAMES = ("agent", "vit3", "mhla", "circulant")
every_name = pytest.mark.parametrize("name", NAMES)


def small(name: str, **options: object) -> nn.Module:
    torch.manual_seed(0)
    settings = {"img_size": 64, "depth": 2, "embed_dim": 32, "num_heads": 2, "num_classes": 5, **options}
    return timm.create_model(f"{name}_deit_tiny", **settings).eval()


@pytest.mark.parametrize(
    ("name", "heads", "parameters"),
    [
        ("agent", None, 6_015_640),
        ("agent", 6, 6_290_824),
        ("vit3", None, 6_149_416),
        ("vit3", 3, 6_596_392),
        ("mhla", None, 5_793_832),
        ("circulant", None, 6_140_200),
    ],
)
def test_parameters_are_those_of_the_papers(name, heads, parameters):
    options = {} if heads is None else {"num_heads": heads}
    assert count_parameters(timm.create_model(f"{name}_deit_tiny", device="meta", **options)) == parameters


def test_mhla_norms_the_mean():
    model, images = small("mhla"), torch.randn(2, 3, 64, 96)
    assert isinstance(model.norm, nn.Identity)
    nn.init.normal_(model.fc_norm.weight)
    with torch.no_grad():
        tokens, _, _ = model.stages[0].forward_tokens(images)
        expected = model.head(model.fc_norm(tokens.mean(dim=1)))
        torch.testing.assert_close(model(images), expected)
        # Not the mean of norms.
        assert not torch.allclose(model.head(model.fc_norm(tokens).mean(dim=1)), expected, atol=1e-3)
        torch.testing.assert_close(
            model.forward_head(model.forward_features(images), pre_logits=True), model.fc_norm(tokens.mean(dim=1))
        )
        model.reset_classifier(5, "")
        assert model(images).shape == (2, 5, 4, 6)
    assert model.stages[0].blocks[0].attn.qkv.bias is None


def test_the_others_average_the_norm():
    for name in ("vit3", "circulant"):
        model, images = small(name), torch.randn(2, 3, 64, 96)
        with torch.no_grad():
            tokens, _, _ = model.stages[0].forward_tokens(images)
            torch.testing.assert_close(model(images), model.head(model.norm(tokens).mean(dim=1)))


def test_models_without_positions():
    with pytest.raises(ValueError, match="a class token has a learned position: use pos_embed='learn', or class_token"):
        timm.create_model("inline_deit_tiny", pos_embed="none", device="meta")
    with pytest.raises(ValueError, match="unknown pos_embed 'sincos': choose learn or none"):
        timm.create_model("inline_deit_tiny", pos_embed="sincos", device="meta")
    model = small("vit3")
    model.set_input_size(96)
    assert model(torch.randn(1, 3, 96, 64)).shape == (1, 5)


@pytest.mark.parametrize("name", ["vit3", "mhla", "circulant"])
def test_a_class_token_is_refused(name):
    with pytest.raises(ValueError, match="has no place for prefix tokens: use class_token=False and global_pool='avg'"):
        timm.create_model("inline_deit_tiny", attention=name, device="meta")


def test_agent_biases_follow_the_grid(tmp_path):
    """By set_input_size, and when weights for another size are loaded."""
    model, images = small("agent"), torch.randn(1, 3, 96, 160)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    file = tmp_path / "weights.pth"
    torch.save(model.state_dict(), file)
    other = small("agent", img_size=96)
    inlinevit.load_checkpoint(other, str(file))
    assert other.stages[0].blocks[0].attn.query_row_bias.shape == (2, 6, 1, 49)
    square = torch.randn(1, 3, 96, 96)
    with torch.no_grad():
        torch.testing.assert_close(other(square), model(square), rtol=0, atol=1e-4)
        before = model(images)
        model.set_input_size((96, 160))
        torch.testing.assert_close(model(images), before, rtol=0, atol=1e-4)
    attn = model.stages[0].blocks[1].attn
    assert attn.key_row_bias.shape == (2, 49, 6, 1)
    assert attn.key_column_bias.shape == (2, 49, 1, 10)
    assert attn.query_column_bias.shape == (2, 1, 10, 49)
    assert attn.grid == (6, 10)


def test_agent_biases_do_not_decay():
    model = small("agent")
    still, _ = param_groups_weight_decay(model, weight_decay=0.05, no_weight_decay_list=model.no_weight_decay())
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {names[id(parameter)].rpartition(".")[2] for parameter in still["params"]}
    assert {name for name, _ in model.stages[0].blocks[0].attn.named_parameters(recurse=False)} <= found


@every_name
def test_streaming_and_sequence_parallel_refuse_them(name):
    model = small(name)
    with pytest.raises(ValueError, match="Attention cannot be streamed: use a model with attention of InLine"):
        stream(model, torch.randn(1, 3, 64, 64))
    with pytest.raises(ValueError, match=f"{name} attention cannot be split over processes: use one of inline"):
        check_parts(model)


def test_streaming_norms_after_the_pooling():
    model = small("mhla", attention="inline", qkv_bias=True)
    nn.init.normal_(model.fc_norm.weight)
    image = torch.randn(1, 3, 64, 96)
    with torch.no_grad():
        torch.testing.assert_close(stream(model, image), model(image), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["agent", "mhla", "circulant"])
def test_the_analysis_sees_their_weights(name):
    model, layers = small(name).double(), []
    watch(model, torch.randn(1, 3, 64, 96, dtype=torch.float64), layers.append)
    assert [layer.attention for layer in layers] == [name] * 2
    for layer in layers:
        assert layer.k.shape == layer.q.shape
        rows = torch.cat([layer.attention_weights(first, first + 5) for first in range(0, layer.tokens, 5)], dim=2)
        torch.testing.assert_close(rows, layer.attention_weights(), rtol=0, atol=1e-10)
        torch.testing.assert_close(rows.sum(dim=-1), torch.ones_like(rows[..., 0]), rtol=0, atol=1e-3)


def test_the_analysis_refuses_vit3():
    with pytest.raises(ValueError, match=r"ViT3Attention\) has no attention weights that could be inspected"):
        watch(small("vit3"), torch.randn(1, 3, 64, 64), lambda layer: None)


def vit(**options: object) -> nn.Module:
    torch.manual_seed(0)
    settings = {"img_size": 64, "depth": 2, "embed_dim": 48, "num_heads": 3, "class_token": False, "global_pool": "avg"}
    return timm.create_model("vit_tiny_patch16_224", **settings, **options).eval()


def test_replacing_attention():
    for name, options in (("agent", {}), ("mhla", {}), ("circulant", {"cpe": False})):
        model = inlinevit.replace_attention(vit(), name, **options)
        assert isinstance(model.blocks[0].attn, AttentionAdapter)
        model(torch.randn(1, 3, 64, 64)).sum().backward()
        assert [key for key, parameter in model.named_parameters() if parameter.grad is None] == []
    with pytest.raises(ValueError, match="vit3 attention has other projections, with 192 channels: use keep_weights"):
        inlinevit.replace_attention(vit(), "vit3", cpe=False)
    model = inlinevit.replace_attention(vit(), "vit3", keep_weights=False, cpe=False)
    assert model(torch.randn(1, 3, 64, 64)).isfinite().all()
    with pytest.raises(ValueError, match="cpe is a part of the block, which is not replaced: use cpe=False"):
        inlinevit.replace_attention(vit(), "vit3", keep_weights=False)
    with pytest.raises(ValueError, match="has no place for prefix tokens"):
        inlinevit.replace_attention(timm.create_model("vit_tiny_patch16_224", device="meta"), "mhla")
