"""SemanticFPN and UperNet on the backbones of timm's registry."""

from typing import Any

import pytest
import segmentation_models_pytorch as smp
import torch
from torch import nn

from inlinevit.tasks.segmentation.model import semantic_fpn, upernet

PVT = {"embed_dims": (8, 16, 24, 32), "depths": (1, 1, 1, 1), "num_heads": (1, 2, 2, 2), "mlp_ratios": (1, 1, 1, 1)}
MAKE = {"semantic_fpn": semantic_fpn, "upernet": upernet}


def tiny(kind: str = "semantic_fpn", num_classes: int = 3, **options: Any) -> Any:
    torch.manual_seed(0)
    return MAKE[kind]("inline_pvt_tiny", num_classes, **{"kwargs": PVT, "channels": 64, **options})


def test_they_are_models_of_smp() -> None:
    assert isinstance(tiny(), smp.base.SegmentationModel)
    assert isinstance(tiny("upernet"), smp.base.SegmentationModel)


@pytest.mark.parametrize("kind", list(MAKE))
def test_answers_are_those_of_smp_s_own_model(kind: str) -> None:
    ours = tiny(kind, dropout=0.0).eval()
    common = {"encoder_name": "tu-inline_pvt_tiny", "encoder_weights": None, "classes": 3, **PVT}
    theirs = (
        smp.FPN(decoder_pyramid_channels=64, decoder_segmentation_channels=32, **common)
        if kind == "semantic_fpn"
        else smp.UPerNet(decoder_channels=64, **common)
    ).eval()
    weights = {
        # Ours drops channels before it classifies, so the classifier comes second.
        name.replace("segmentation_head.1.", "segmentation_head.0.") if kind == "upernet" else name: weight
        for name, weight in ours.state_dict().items()
        if not name.startswith("auxiliary")
    }
    theirs.load_state_dict(weights)
    images = torch.randn(1, 3, 64, 96)
    with torch.no_grad():
        torch.testing.assert_close(ours(images), theirs(images))


def test_padding_is_cut_off_again() -> None:
    model = tiny().eval()
    images = torch.randn(1, 3, 50, 64)
    padded = torch.cat([images, torch.zeros(1, 3, 14, 64)], dim=2)
    with torch.no_grad():
        torch.testing.assert_close(model(images), model(padded)[:, :, :50])


@pytest.mark.parametrize("kind", list(MAKE))
@pytest.mark.parametrize("size", [(1, 1), (3, 200)])
def test_images_of_any_size(kind: str, size: tuple[int, int]) -> None:
    with torch.no_grad():
        answer = tiny(kind).eval()(torch.randn(1, 3, *size))
    assert answer.shape == (1, 3, *size)
    assert answer.isfinite().all()


def test_the_auxiliary_head_sees_stride_16() -> None:
    model = tiny("upernet").train()
    seen: list[torch.Size] = []
    model.auxiliary_head.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape))
    model(torch.randn(2, 3, 64, 96))
    assert seen == [(2, 24, 4, 6)]
    assert tiny().auxiliary_head is None


def test_channels_that_smp_cannot_group_are_refused() -> None:
    with pytest.raises(ValueError, match="channels is 48: semantic_fpn needs a multiple of 64"):
        tiny(channels=48)


def test_dropout_is_before_the_classifier() -> None:
    model = tiny("upernet", dropout=0.5)
    assert isinstance(model.segmentation_head[0], nn.Dropout2d)
    assert model.segmentation_head[0].p == 0.5


@pytest.mark.parametrize("decoder", [smp.DeepLabV3Plus, smp.PAN])
def test_dilated_encoders_are_refused(decoder: Any) -> None:
    with pytest.raises(ValueError, match=r"^InLinePVT has no output_stride.*choose a decoder without"):
        decoder("tu-inline_pvt_tiny", encoder_weights=None)
    with pytest.raises(ValueError, match=r"^InLinePVT has no output_stride"):
        tiny(kwargs={"output_stride": 16})
