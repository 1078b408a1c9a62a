"""What detectors and segmentation models have in common: backbones of timm's registry, and initial weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import timm
import torch
from timm.layers import DropPath
from torch import Tensor, nn

from inlinevit.tasks.detection import cascade_mask_rcnn, mask_rcnn
from inlinevit.tasks.detection.cost import DETECTOR_CATALOG
from inlinevit.tasks.detection.cost import measure_facts as measure_detectors
from inlinevit.tasks.segmentation import semantic_fpn, upernet
from inlinevit.tasks.segmentation.cost import SEGMENTER_CATALOG
from inlinevit.tasks.segmentation.cost import measure_facts as measure_segmenters

PVT = {"embed_dims": (8, 16, 24, 32), "depths": (1, 1, 1, 1), "num_heads": (1, 2, 2, 2), "mlp_ratios": (1, 1, 1, 1)}
BACKBONES: dict[str, dict[str, Any]] = {
    "inline_pvt_tiny": PVT,
    "inline_swin_tiny": {"embed_dim": 16, "depths": (1, 1, 1, 1), "num_heads": (1, 1, 2, 2)},
    "inline_cswin_tiny": {"embed_dim": 16, "depths": (1, 1, 1, 1), "num_heads": (2, 2, 2, 2)},
    "pvt_tiny": PVT,
    "swin_tiny_patch4_window7_224": {"embed_dim": 12, "depths": (1, 1, 1, 1), "num_heads": (1, 1, 2, 2)},
    "resnet10t": {},
    "test_convnext": {},
}
SMALL_DETECTOR = {
    "channels": 16,
    "box_channels": 16,
    "box_batch_size_per_image": 16,
    "min_size": 64,
    "max_size": 96,
    "box_score_thresh": 0.0,
    "box_detections_per_img": 10,
}
SMALL_SEGMENTER = {"channels": 64}
ARCHS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "mask_rcnn": (mask_rcnn, SMALL_DETECTOR),
    "cascade_mask_rcnn": (cascade_mask_rcnn, SMALL_DETECTOR),
    "semantic_fpn": (semantic_fpn, SMALL_SEGMENTER),
    "upernet": (upernet, SMALL_SEGMENTER),
}
# One of each task.
SIMPLE = ("mask_rcnn", "semantic_fpn")


def build(arch: str, backbone: str = "inline_pvt_tiny", num_classes: int = 3, **options: Any) -> Any:
    torch.manual_seed(0)
    make, small = ARCHS[arch]
    return make(backbone, num_classes, **{"kwargs": BACKBONES.get(backbone, {}), **small, **options})


def body_of(model: nn.Module) -> Any:
    return model.backbone.body if "rcnn" in type(model).__name__.lower() else model.encoder.model


def total_loss(model: nn.Module) -> Tensor:
    """A loss that depends on all that the model learns."""
    torch.manual_seed(1)
    if "rcnn" not in type(model).__name__.lower():
        answer = model(torch.randn(2, 3, 70, 99))
        return sum(part.square().mean() for part in ([answer] if isinstance(answer, Tensor) else answer))
    masks = torch.zeros(2, 70, 99, dtype=torch.uint8)
    masks[0, 10:40, 5:50] = masks[1, 35:65, 30:70] = 1
    boxes = torch.tensor([[5.0, 10, 50, 40], [30, 35, 70, 65]])
    target = {"boxes": boxes, "labels": torch.tensor([1, 3]), "masks": masks}
    return sum(model([torch.rand(3, 70, 99)], [target]).values())


@pytest.mark.parametrize(
    ("arch", "backbone"),
    [
        *((arch, backbone) for arch in SIMPLE for backbone in BACKBONES),
        ("cascade_mask_rcnn", "inline_pvt_tiny"),
        ("upernet", "inline_pvt_tiny"),
    ],
)
def test_any_backbone_with_the_strides_can_be_trained(arch: str, backbone: str) -> None:
    model = build(arch, backbone).train()
    total_loss(model).backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []
    with torch.no_grad():
        if arch.endswith("rcnn"):
            (answer,) = model.eval()([torch.rand(3, 45, 61)])
            count = len(answer["boxes"])
            assert 0 < count <= 10
            assert answer["masks"].shape == (count, 1, 45, 61)
            assert set(answer["labels"].tolist()) <= {1, 2, 3}
            assert answer["scores"].isfinite().all()
        else:
            assert model.eval()(torch.randn(1, 3, 33, 40)).shape == (1, 3, 33, 40)


@pytest.mark.parametrize(
    ("backbone", "message"),
    [
        ("inline_deit_tiny", "strides 16, 16, 16, but a feature pyramid needs 4, 8, 16, 32"),
        ("inline_pvt_tinny", "did you mean inline_pvt_tiny"),
        ("maxvit_pico_rw_256", "maxvit_pico_rw_256 does not take images of any size .*: choose another backbone"),
        ("vit_tiny_patch16_224", "choose a hierarchical backbone"),
    ],
)
def test_other_backbones_are_refused(backbone: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build("mask_rcnn", backbone)


@pytest.mark.parametrize("arch", SIMPLE)
def test_wrong_options_are_refused(arch: str) -> None:
    with pytest.raises(ValueError, match="did you mean depths"):
        build(arch, kwargs={"depth": 3})
    with pytest.raises(ValueError, match=r"set model\.drop_path_rate instead"):
        build(arch, kwargs={"drop_path_rate": 0.3})


@pytest.mark.parametrize("arch", SIMPLE)
def test_stochastic_depth_reaches_the_backbone(arch: str) -> None:
    rates = [part.drop_prob for part in build(arch, drop_path_rate=0.3).modules() if isinstance(part, DropPath)]
    assert max(rates) == pytest.approx(0.3)
    model = build(arch, drop_path_rate=0.0)
    assert not [part for part in model.modules() if isinstance(part, DropPath) and part.drop_prob]


@pytest.mark.parametrize("arch", SIMPLE)
def test_positions_do_not_decay(arch: str) -> None:
    model = build(arch)
    names = dict(model.named_parameters())
    kept = model.no_weight_decay()
    assert kept
    assert all(name in names and "pos" in name for name in kept)


@pytest.mark.parametrize("arch", ["mask_rcnn", "semantic_fpn", "upernet"])
def test_gradient_checkpointing_changes_nothing_but_memory(arch: str) -> None:
    options = {} if arch == "mask_rcnn" else {"dropout": 0.0}
    gradients, calls = [], []
    for enable in (False, True):
        model = build(arch, drop_path_rate=0.0, **options).train()
        model.set_grad_checkpointing(enable)
        count: list[int] = []
        block = body_of(model).model.stages[2].blocks[0]
        block.register_forward_pre_hook(lambda module, args, count=count: count.append(1))
        total_loss(model).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
        calls.append(len(count))
    assert calls == [1, 2]
    torch.testing.assert_close(gradients[0], gradients[1])


def test_gradient_checkpointing_of_timm_s_backbones() -> None:
    model = build("mask_rcnn", "resnet10t")
    model.set_grad_checkpointing()
    assert body_of(model).grad_checkpointing


class TestWeights:
    """What a model starts from."""

    @pytest.mark.parametrize("arch", SIMPLE)
    def test_a_classifier_s_file_is_for_the_backbone(self, arch: str, tmp_path: Path) -> None:
        classifier = timm.create_model("inline_pvt_tiny", num_classes=7, **PVT)
        file = tmp_path / "weights.safetensors"
        safetensors.torch.save_file(classifier.state_dict(), file)
        body = body_of(build(arch, checkpoint=str(file))).model.state_dict()
        for name, weight in classifier.state_dict().items():
            if not name.startswith("head"):
                torch.testing.assert_close(body[name], weight)

    @pytest.mark.parametrize(
        ("arch", "layers"),
        [
            ("mask_rcnn", ("box_predictor.cls_score", "box_predictor.bbox_pred", "mask_predictor.mask_fcn_logits")),
            ("semantic_fpn", ("segmentation_head.0",)),
            ("upernet", ("segmentation_head.1", "auxiliary_head.classify")),
        ],
    )
    def test_layers_for_other_classes_are_initialised(self, arch: str, layers: tuple[str, ...], tmp_path: Path) -> None:
        file = tmp_path / "weights.safetensors"
        first = build(arch, num_classes=5).state_dict()
        safetensors.torch.save_file(first, file)
        with pytest.warns(UserWarning, match="another number of classes"):
            second = build(arch, checkpoint=str(file)).state_dict()
        anew = {name for name, weight in first.items() if weight.shape != second[name].shape}
        assert {name.rpartition(".")[0].removeprefix("roi_heads.") for name in anew} == set(layers)
        assert all(torch.equal(weight, second[name]) for name, weight in first.items() if name not in anew)

    @pytest.mark.parametrize(("arch", "other"), [("mask_rcnn", "cascade_mask_rcnn"), ("semantic_fpn", "upernet")])
    def test_another_model_s_file_is_refused(self, arch: str, other: str, tmp_path: Path) -> None:
        file = tmp_path / "weights.safetensors"
        safetensors.torch.save_file(build(other).state_dict(), file)
        with pytest.raises(ValueError, match="does not hold the weights of this model"):
            build(arch, checkpoint=str(file))


@pytest.mark.parametrize(
    ("catalog", "measure", "prefix"),
    [
        pytest.param(DETECTOR_CATALOG, measure_detectors, "cascade_", id="detection"),
        pytest.param(SEGMENTER_CATALOG, measure_segmenters, "upernet_", id="segmentation"),
    ],
)
class TestCatalog:
    """The stored costs of models on all backbones."""

    @pytest.mark.integration
    @pytest.mark.parametrize("name", ["inline_pvt_tiny", "swin_tiny_patch4_window7_224"])
    def test_the_catalog_is_measured(self, catalog: dict, measure: Callable, prefix: str, name: str) -> None:
        assert measure(name) == catalog[name]

    @pytest.mark.slow
    def test_all_of_the_catalog_is_measured(self, catalog: dict, measure: Callable, prefix: str) -> None:
        assert {name: measure(name) for name in catalog} == catalog

    def test_each_inline_backbone_stands_above_its_counterpart(
        self, catalog: dict, measure: Callable, prefix: str
    ) -> None:
        names = list(catalog)
        assert len(names) == 20
        for inline, softmax in zip(names[::2], names[1::2], strict=True):
            assert inline.startswith("inline_")
            assert softmax.startswith(inline.removeprefix("inline_"))
            for field in ("gmacs", f"{prefix}gmacs"):
                assert catalog[inline][field] < catalog[softmax][field]
