"""The backbone of torchvision's detectors by itself; docs/detection.md has detectors that use it, which are tests."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torchvision.ops.feature_pyramid_network import LastLevelP6P7

from inlinevit.tasks.detection import PyramidBackbone, pyramid_backbone

PVT = {"embed_dims": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "num_heads": [1, 2, 2, 2], "mlp_ratios": [1, 1, 1, 1]}


def tiny(**options: Any) -> PyramidBackbone:
    return pyramid_backbone("inline_pvt_tiny", 16, kwargs=PVT, **options)


def test_levels_of_retinanet() -> None:
    backbone = tiny(returned_layers=[2, 3, 4], extra_blocks=LastLevelP6P7(16, 16))
    maps = backbone(torch.rand(1, 3, 128, 128))
    assert {name: tuple(one.shape[1:]) for name, one in maps.items()} == {
        "0": (16, 16, 16),
        "1": (16, 8, 8),
        "2": (16, 4, 4),
        "p6": (16, 2, 2),
        "p7": (16, 1, 1),
    }
    sum(one.sum() for one in maps.values()).backward()
    assert all(one.grad is not None for name, one in backbone.named_parameters() if name.startswith("fpn."))


def test_weights_of_a_whole_backbone(tmp_path: Path) -> None:
    first = tiny()
    save_file(first.state_dict(), tmp_path / "backbone.safetensors")
    second = tiny(checkpoint=str(tmp_path / "backbone.safetensors"))
    assert all(torch.equal(one, second.state_dict()[name]) for name, one in first.state_dict().items())


def test_mistakes_get_a_sentence() -> None:
    with pytest.raises(ValueError, match=r"returned_layers is \[1, 4\]: it should be the last stages"):
        tiny(returned_layers=[1, 4])
    with pytest.raises(ValueError, match="frozen_stages is 5: it should be at most 4"):
        tiny(frozen_stages=5)
    with pytest.raises(ValueError, match="a feature pyramid needs 4, 8, 16, 32: choose a hierarchical backbone"):
        pyramid_backbone("inline_deit_tiny")
