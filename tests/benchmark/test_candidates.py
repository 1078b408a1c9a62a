"""Candidates, and what is refused."""

import re

import pytest
import torch

from inlinevit import kernels
from inlinevit.benchmark.candidates import create_model, layer_comparisons, model_comparisons
from inlinevit.layers.inline_attention import PATHS
from inlinevit.models.factory import parse_model

CPU = torch.device("cpu")


def test_a_model_may_have_options():
    assert parse_model("inline_swin_tiny") == ("inline_swin_tiny", {})
    name, options = parse_model("inline_swin_tiny:window_size=14,attention=softmax,qkv_bias=false")
    assert (name, options) == ("inline_swin_tiny", {"window_size": 14, "attention": "softmax", "qkv_bias": False})


def test_options_may_be_lists():
    _, options = parse_model("pvt_tiny:sr_ratios=[1,1,1,1],depths=[2, 2, 2, 1],qkv_bias=false,num_classes=5")
    assert options == {"sr_ratios": [1, 1, 1, 1], "depths": [2, 2, 2, 1], "qkv_bias": False, "num_classes": 5}


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("inline_swin_tin", "did you mean inline_swin_tiny?"),
        ("inline_swin_tiny:window_size", "write NAME:OPTION=VALUE,OPTION=VALUE"),
        ("", "timm knows no model ''"),
    ],
)
def test_a_wrong_model_is_refused(text, remedy):
    with pytest.raises(ValueError, match=re.escape(remedy)):
        parse_model(text)


def test_models_without_an_image_size_can_be_built():
    assert create_model("resnet18", {}, 64)(torch.zeros(1, 3, 64, 64)).shape == (1, 1000)


def test_models_are_made_for_the_size():
    model = create_model("deit_tiny_patch16_224", {"depth": 1}, 64)
    assert model(torch.zeros(1, 3, 64, 64)).shape == (1, 1000)


def test_an_option_that_a_model_does_not_have_is_refused():
    with pytest.raises(ValueError, match=r"resnet18 cannot be made with {'windows': 3} for images of 64²"):
        create_model("resnet18", {"windows": 3}, 64)


def test_each_size_and_batch_is_a_comparison_of_all_models():
    comparisons = model_comparisons(["resnet18", "inline_deit_tiny"], [32, 64], [1, 2])
    assert [one.title for one in comparisons] == ["32², batch 1", "64², batch 1", "32², batch 2", "64², batch 2"]
    assert [candidate.name for candidate in comparisons[0].candidates] == ["resnet18", "inline_deit_tiny"]
    _, images = comparisons[3].candidates[0].make(CPU)
    assert images.shape == (2, 3, 64, 64)


@pytest.mark.parametrize(
    ("size", "batch", "message"),
    [
        (225, 1, "size 225 is not a multiple of 32: use 224 or 256"),
        (-32, 1, "size -32 is not a multiple of 32"),
        (0, 1, "size 0 is not a multiple of 32: use 32 or 64"),
        (32, -1, "batch is -1: it should be at least 1"),
    ],
)
def test_invalid_sizes_and_batches_are_refused(size, batch, message):
    with pytest.raises(ValueError, match=message):
        model_comparisons(["resnet18"], [size], [batch])


def test_a_layer_is_measured_by_each_path():
    (comparison,) = layer_comparisons(tokens=[16], dim=8, heads=2, batch=3)
    names = [candidate.name for candidate in comparison.candidates]
    assert names == ["projections", "InLine", *(f"InLine, {path}" for path in PATHS), "linear", "softmax"]
    for candidate in comparison.candidates:
        module, tokens = candidate.make(CPU)
        assert tokens.shape == (3, 16, 8)
        if candidate.name == "InLine, native" and not kernels.available():
            with pytest.raises(ValueError, match="the native kernels are not available"):
                module(tokens)
            continue
        outputs = module(tokens)
        shapes = [out.shape for out in outputs] if isinstance(outputs, tuple) else [outputs.shape]
        assert shapes == ([(3, 16, 24), (3, 16, 8)] if candidate.name == "projections" else [(3, 16, 8)])
    assert {candidate.output_group for candidate in comparison.candidates if candidate.name.startswith("InLine")} == {
        "InLine"
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": [50]}, "50 tokens are not a square map: use 49 or 64"),
        ({"tokens": [-4]}, "-4 tokens are not a square map"),
        ({"dim": 9}, "heads should divide dim"),
        ({"dim": -8}, "dim is -8: it should be at least 1"),
        ({"heads": 0}, "heads is 0: it should be at least 1"),
        ({"batch": 0}, "batch is 0: it should be at least 1"),
    ],
)
def test_invalid_layers_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        layer_comparisons(**{"tokens": [16], "dim": 8, "heads": 2, "batch": 1, **options})
