"""SemanticFPN and UperNet on the backbones of timm's registry."""

from pathlib import Path
from typing import Any, cast

import pytest
import safetensors.torch
import segmentation_models_pytorch as smp
import timm
import torch
from timm.layers import DropPath
from torch import Tensor, nn

from inlinevit.tasks.segmentation.config import SegmenterConfig
from inlinevit.tasks.segmentation.model import build_segmenter, semantic_fpn, upernet

PVT = {"embed_dims": (8, 16, 24, 32), "depths": (1, 1, 1, 1), "num_heads": (1, 2, 2, 2), "mlp_ratios": (1, 1, 1, 1)}
MAKE = {"semantic_fpn": semantic_fpn, "upernet": upernet}


def tiny(kind: str = "semantic_fpn", num_classes: int = 3, **options: Any) -> Any:
    torch.manual_seed(0)
    return MAKE[kind]("inline_pvt_tiny", num_classes, **{"kwargs": PVT, "channels": 64, **options})


def total(answer: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    parts = [answer] if isinstance(answer, Tensor) else answer
    return torch.stack([part.square().mean() for part in parts]).sum()


@pytest.mark.parametrize("kind", list(MAKE))
@pytest.mark.parametrize(
    ("backbone", "options"),
    [
        ("inline_pvt_tiny", PVT),
        ("inline_swin_tiny", {"embed_dim": 16, "depths": (1, 1, 1, 1), "num_heads": (1, 1, 2, 2)}),
        ("inline_cswin_tiny", {"embed_dim": 16, "depths": (1, 1, 1, 1), "num_heads": (2, 2, 2, 2)}),
        ("pvt_tiny", PVT),
        ("swin_tiny_patch4_window7_224", {"embed_dim": 12, "depths": (1, 1, 1, 1), "num_heads": (1, 1, 2, 2)}),
        ("resnet10t", {}),
        ("test_convnext", {}),
    ],
)
def test_any_hierarchical_backbone_learns_and_answers(kind: str, backbone: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    config = SegmenterConfig(arch=cast(Any, kind), backbone=backbone, kwargs=options, channels=64)
    model = build_segmenter(config, 3).train()
    answer = model(torch.randn(2, 3, 70, 99))
    total(answer).backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []
    shapes = [one.shape for one in answer] if isinstance(answer, tuple) else [answer.shape]
    assert shapes == [(2, 3, 70, 99)] * (2 if kind == "upernet" else 1)
    with torch.no_grad():
        assert model.eval()(torch.randn(1, 3, 33, 40)).shape == (1, 3, 33, 40)


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
@pytest.mark.parametrize("size", [(1, 1), (32, 32), (20, 28), (3, 200)])
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


@pytest.mark.parametrize(
    ("backbone", "message"),
    [
        ("inline_deit_tiny", "strides 16, 16, 16, but a feature pyramid needs 4, 8, 16, 32"),
        ("inline_pvt_tinny", "did you mean inline_pvt_tiny"),
        ("maxvit_pico_rw_256", "maxvit_pico_rw_256 does not take images of any size .*: choose another backbone"),
    ],
)
def test_other_backbones_are_refused(backbone: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        semantic_fpn(backbone, 3)


def test_wrong_options_are_refused() -> None:
    with pytest.raises(ValueError, match="did you mean depths"):
        tiny(kwargs={"depth": 3})
    with pytest.raises(ValueError, match="channels is 48: semantic_fpn needs a multiple of 64"):
        tiny(channels=48)


def test_stochastic_depth_reaches_the_backbone() -> None:
    rates = [part.drop_prob for part in tiny(drop_path_rate=0.3).modules() if isinstance(part, DropPath)]
    assert max(rates) == pytest.approx(0.3)


@pytest.mark.parametrize("kind", list(MAKE))
def test_gradient_checkpointing_changes_nothing_but_memory(kind: str) -> None:
    gradients = []
    for enable in (False, True):
        model = tiny(kind, drop_path_rate=0.0, dropout=0.0).train()
        model.set_grad_checkpointing(enable)
        torch.manual_seed(1)
        total(model(torch.randn(2, 3, 64, 64))).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(gradients[0], gradients[1])


def test_positions_do_not_decay() -> None:
    model = tiny()
    kept = model.no_weight_decay()
    assert kept
    assert kept <= dict(model.named_parameters()).keys()


class TestWeights:
    """What a model starts from."""

    def test_a_classifier_s_file_is_for_the_backbone(self, tmp_path: Path) -> None:
        classifier = timm.create_model("inline_pvt_tiny", num_classes=7, **PVT)
        file = tmp_path / "weights.safetensors"
        safetensors.torch.save_file(classifier.state_dict(), file)
        body = tiny(checkpoint=str(file)).encoder.model.model.state_dict()
        for name, weight in classifier.state_dict().items():
            if not name.startswith("head"):
                torch.testing.assert_close(body[name], weight)

    @pytest.mark.parametrize("kind", list(MAKE))
    def test_other_classes_begin_anew(self, kind: str, tmp_path: Path) -> None:
        file = tmp_path / "weights.safetensors"
        first = tiny(kind, num_classes=5)
        safetensors.torch.save_file(first.state_dict(), file)
        with pytest.warns(UserWarning, match="another number of classes"):
            second = tiny(kind, checkpoint=str(file)).state_dict()
        anew = {name for name, weight in first.state_dict().items() if weight.shape != second[name].shape}
        assert {name.rpartition(".")[0] for name in anew} == (
            {"segmentation_head.0"} if kind == "semantic_fpn" else {"segmentation_head.1", "auxiliary_head.classify"}
        )
        assert all(torch.equal(weight, second[name]) for name, weight in first.state_dict().items() if name not in anew)

    def test_another_model_s_file_is_refused(self, tmp_path: Path) -> None:
        file = tmp_path / "weights.safetensors"
        safetensors.torch.save_file(tiny("upernet").state_dict(), file)
        with pytest.raises(ValueError, match="does not hold the weights of this model"):
            tiny(checkpoint=str(file))


def test_dropout_is_before_the_classifier() -> None:
    model = tiny("upernet", dropout=0.5)
    assert isinstance(model.segmentation_head[0], nn.Dropout2d)
    assert model.segmentation_head[0].p == 0.5
