"""Models that are optimized for inference answer as those they are made from."""

import pytest
import timm
import torch
from torch import nn

import inlinevit

SHALLOW = {
    "inline_deit_tiny": {"depth": 3},
    "inline_pvt_tiny": {"depths": (1, 1, 1, 1)},
    "inline_swin_tiny": {"depths": (1, 1, 2, 1)},
    "inline_cswin_tiny": {"depths": (1, 1, 1, 1)},
}


def shallow(name: str, **options: object) -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=7, **SHALLOW[name], **options).eval()
    # By default weights are so small that attention hardly counts.
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
    return model


def assert_same(optimized, model, *sizes) -> None:
    with torch.no_grad():
        for size in sizes:
            images = torch.randn(2, 3, *size)
            torch.testing.assert_close(optimized(images), model(images), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", SHALLOW)
def test_the_answers_are_the_same_at_any_size(name):
    model = shallow(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    optimized = inlinevit.optimize_for_inference(model, compile=False)
    assert type(optimized) is type(model)
    assert_same(optimized, model, (224, 224), (97, 130), (224, 224))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not any(parameter.requires_grad for parameter in optimized.parameters())
    assert not optimized.training


@pytest.mark.parametrize("pool", ["avg", "token", ""])
def test_any_pooling_of_a_plain_transformer(pool):
    model = shallow("inline_deit_tiny", global_pool=pool)
    assert_same(inlinevit.optimize_for_inference(model, compile=False), model, (64, 96))


@pytest.mark.parametrize("attention", ["softmax", "linear"])
def test_other_attentions(attention):
    model = shallow("inline_deit_tiny", attention=attention)
    assert_same(inlinevit.optimize_for_inference(model, compile=False), model, (64, 96))


def test_only_the_class_token_is_computed_in_the_last_block():
    optimized = inlinevit.optimize_for_inference(shallow("inline_deit_tiny"), compile=False)
    shapes = []
    for block in optimized.stages[0].blocks:
        block.register_forward_hook(lambda module, arguments, output: shapes.append(tuple(output.shape)))
    optimized(torch.randn(1, 3, 64, 64))
    assert shapes == [(1, 17, 192), (1, 17, 192), (1, 1, 192)]
    assert optimized.forward_features(torch.randn(1, 3, 64, 64)).shape == (1, 17, 192)


def test_features():
    torch.manual_seed(0)
    model = timm.create_model("inline_pvt_tiny", features_only=True, depths=(1, 1, 1, 1)).eval()
    optimized = inlinevit.optimize_for_inference(model, compile=False)
    images = torch.randn(1, 3, 64, 96)
    with torch.no_grad():
        for ours, expected in zip(optimized(images), model(images), strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


def test_compiled_as_a_whole_and_in_pieces(monkeypatch):
    model = shallow("inline_deit_tiny")
    optimized = inlinevit.optimize_for_inference(model)
    assert_same(optimized, model, (64, 64))
    monkeypatch.setattr("inlinevit.inference.FEW_PIXELS", 0)
    monkeypatch.setattr("inlinevit.layers.block.PIECE", 2**13)
    assert_same(optimized, model, (64, 64))


def test_a_model_without_our_blocks_is_refused():
    with pytest.raises(ValueError, match="Linear has no block of inlinevit's"):
        inlinevit.optimize_for_inference(nn.Linear(2, 2))
