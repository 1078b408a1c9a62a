"""Detectors on the backbones of timm's registry."""

import warnings
from pathlib import Path
from typing import Any, cast

import pytest
import safetensors.torch
import timm
import torch
from torch import Tensor, nn
from torchvision.models.detection import MaskRCNN
from torchvision.models.detection.roi_heads import paste_masks_in_image

import inlinevit  # noqa: F401
from inlinevit.tasks.detection.cascade import CascadeRoIHeads
from inlinevit.tasks.detection.model import cascade_mask_rcnn, mask_rcnn
from inlinevit.tasks.detection.pyramid import PyramidBackbone

PVT = {"embed_dims": (8, 16, 24, 32), "depths": (1, 1, 1, 1), "num_heads": (1, 2, 2, 2), "mlp_ratios": (1, 1, 1, 1)}
SMALL: dict[str, Any] = {
    "channels": 16,
    "box_channels": 16,
    "box_batch_size_per_image": 16,
    "min_size": 96,
    "max_size": 160,
    "box_score_thresh": 0.0,
    "box_detections_per_img": 10,
}


def tiny(kind: str = "mask_rcnn", num_classes: int = 3, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    make = {"mask_rcnn": mask_rcnn, "cascade_mask_rcnn": cascade_mask_rcnn}[kind]
    return make("inline_pvt_tiny", num_classes, **{"kwargs": PVT, **SMALL, **options})


def images_and_targets() -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    torch.manual_seed(1)
    images = [torch.rand(3, 90, 131), torch.rand(3, 110, 75)]
    targets = []
    for image in images:
        masks = torch.zeros(2, *image.shape[-2:], dtype=torch.uint8)
        masks[0, 10:40, 5:50] = 1
        masks[1, 50:90, 30:70] = 1
        boxes = torch.tensor([[5.0, 10, 50, 40], [30, 50, 70, 90]])
        targets.append({"boxes": boxes, "labels": torch.tensor([1, 3]), "masks": masks})
    return images, targets


def total_loss(model: nn.Module, seed: int = 2) -> Tensor:
    images, targets = images_and_targets()
    torch.manual_seed(seed)
    return torch.stack(list(model(images, targets).values())).sum()


@pytest.mark.parametrize("size", [(7, 200), (1, 1)])
def test_any_image_size(size: tuple[int, int]) -> None:
    with torch.no_grad():
        (answer,) = tiny().eval()([torch.rand(3, *size)])
    assert answer["masks"].shape[-2:] == size
    assert answer["boxes"].isfinite().all()


def test_the_pyramid_is_that_of_torchvision() -> None:
    model = tiny()
    assert isinstance(model, MaskRCNN)
    maps = cast(PyramidBackbone, model.backbone)(torch.rand(1, 3, 64, 96))
    assert {name: tuple(one.shape) for name, one in maps.items()} == {
        "0": (1, 16, 16, 24),
        "1": (1, 16, 8, 12),
        "2": (1, 16, 4, 6),
        "3": (1, 16, 2, 3),
        "pool": (1, 16, 1, 2),
    }


def test_maps_with_channels_last_are_turned() -> None:
    body = timm.create_model("swin_tiny_patch4_window7_224", features_only=True, embed_dim=12, depths=(1, 1, 1, 1))
    pyramid = PyramidBackbone(body, 8).eval()
    images = torch.rand(1, 3, 224, 224)
    with torch.no_grad():
        for own, map_ in zip(pyramid.maps(images), body(images), strict=True):
            torch.testing.assert_close(own, map_.permute(0, 3, 1, 2))


@pytest.mark.parametrize("stages", [1, 4])
def test_frozen_stages_do_not_learn(stages: int) -> None:
    model = tiny(frozen_stages=stages).train()
    frozen = {name.split(".")[4] for name, one in model.named_parameters() if not one.requires_grad}
    assert frozen == {str(stage) for stage in range(stages)}
    learning = {
        name.split(".")[4] for name, one in model.backbone.body.named_parameters(prefix="x.x") if one.requires_grad
    }
    assert learning == {str(stage) for stage in range(stages, 4)}
    total_loss(model).backward()
    assert all((one.grad is None) != one.requires_grad for one in model.parameters())


def test_frozen_stages_keep_their_statistics() -> None:
    torch.manual_seed(0)
    model = mask_rcnn("resnet10t", 3, frozen_stages=2, **SMALL).train()
    before = {name: one.clone() for name, one in model.named_buffers()}
    total_loss(model)
    changed = {name.split(".")[2] for name, one in model.named_buffers() if not torch.equal(one, before[name])}
    assert changed == {"layer3", "layer4"}


def test_frozen_stages_leave_nothing_out() -> None:
    model = tiny(frozen_stages=2, drop_path_rate=0.5).train()
    stages = model.backbone.body.model.stages
    assert [stage.training for stage in stages] == [False, False, True, True]
    assert not any(part.training for stage in stages[:2] for part in stage.modules())
    assert all(part.training for part in stages[3].modules())


@pytest.mark.parametrize("kind", ["mask_rcnn", "cascade_mask_rcnn"])
def test_boxes_are_in_full_precision_under_autocast(kind: str) -> None:
    # Enough regions that none of the objects is left out at random.
    model = tiny(kind, box_batch_size_per_image=512).train()
    images, targets = images_and_targets()
    seen: list[Tensor] = []
    heads = model.roi_heads.stages[0] if kind == "cascade_mask_rcnn" else model.roi_heads
    heads.box_roi_pool.register_forward_pre_hook(lambda module, args: seen.extend(args[1]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = model(images, targets)
        with torch.no_grad():
            answers = model.eval()(images)
    assert all(loss.dtype == torch.float32 for loss in losses.values())
    assert all(boxes.dtype == torch.float32 for boxes in seen)
    # The objects themselves are among the regions to learn from, to the last digit.
    assert (seen[0] == targets[0]["boxes"][1]).all(dim=1).any()
    for answer in answers:
        assert {answer[name].dtype for name in ("boxes", "scores", "masks")} == {torch.float32}
        assert not torch.equal(answer["boxes"], answer["boxes"].bfloat16().float())


@pytest.mark.parametrize("kind", ["mask_rcnn", "cascade_mask_rcnn"])
def test_class_agnostic_boxes_have_one_box_for_all_classes(kind: str) -> None:
    model = tiny(kind, class_agnostic_boxes=True)
    heads = model.roi_heads.stages if isinstance(model.roi_heads, CascadeRoIHeads) else [model.roi_heads]
    for stage in heads:
        assert stage.box_predictor.bbox_pred.weight.shape == (4, 16)
        logits, deltas = stage.box_predictor(torch.rand(5, 16))
        assert logits.shape == (5, 4)
        by_class = deltas.view(5, 4, 4)
        assert (by_class == by_class[:, :1]).all()
    total_loss(model.train()).backward()


def test_masks_can_be_pasted_later() -> None:
    model = tiny().eval()
    images, _ = images_and_targets()
    with torch.no_grad():
        expected = model(images)
        found = model(images, paste_masks=False)
    for image, answer, one in zip(images, expected, found, strict=True):
        assert one["masks"].shape[1:] == (1, 28, 28)
        torch.testing.assert_close(one["boxes"], answer["boxes"])
        pasted = paste_masks_in_image(one["masks"], one["boxes"], tuple(image.shape[-2:]))
        torch.testing.assert_close(pasted, answer["masks"])


def test_training_images_are_not_resized_again() -> None:
    model = tiny().train()
    images, targets = images_and_targets()
    batch, resized = model.transform(images, targets)
    assert batch.image_sizes == [(90, 131), (110, 75)]
    torch.testing.assert_close(resized[0]["boxes"], targets[0]["boxes"])
    batch, _ = model.eval().transform(images)
    assert batch.image_sizes == [(96, 139), (140, 96)]


class TestWeights:
    """What a detector starts from."""

    def test_a_file_for_timm_s_backbone(self, tmp_path: Path) -> None:
        file = tmp_path / "weights.safetensors"
        classifier = timm.create_model("resnet10t", num_classes=7)
        safetensors.torch.save_file(classifier.state_dict(), file)
        model = mask_rcnn("resnet10t", 3, checkpoint=str(file), **SMALL)
        torch.testing.assert_close(model.backbone.body.conv1[0].weight, classifier.conv1[0].weight)
        with pytest.raises(ValueError, match="does not hold the weights of resnet14t"):
            mask_rcnn("resnet14t", 3, checkpoint=str(file), **SMALL)

    def test_another_family_s_file_is_refused(self, tmp_path: Path) -> None:
        file = tmp_path / "weights.safetensors"
        safetensors.torch.save_file(timm.create_model("resnet10t").state_dict(), file)
        with pytest.raises(ValueError, match=r"weights\.safetensors"):
            tiny(checkpoint=str(file))

    def test_a_detector_s_file_is_for_all_of_it(self, tmp_path: Path) -> None:
        file = tmp_path / "weights.safetensors"
        first = tiny()
        with torch.no_grad():
            for parameter in first.parameters():
                parameter.add_(0.1)
        safetensors.torch.save_file(first.state_dict(), file)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            second = tiny(checkpoint=str(file))
        for name, weight in second.state_dict().items():
            torch.testing.assert_close(weight, first.state_dict()[name])
