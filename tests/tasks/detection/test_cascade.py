"""The cascade's parts, each apart, and that a single stage is Mask R-CNN."""

from collections import OrderedDict
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torchvision.models.detection.roi_heads import RoIHeads

from inlinevit.tasks.detection.cascade import (
    BOX_WEIGHTS,
    IOU_THRESHOLDS,
    LOSS_WEIGHTS,
    CascadeRoIHeads,
    refine,
)
from inlinevit.tasks.detection.config import DetectorConfig
from inlinevit.tasks.detection.model import make_heads

CLASSES = 3
SIZE = (96, 128)


def small(**options: Any) -> DetectorConfig:
    return DetectorConfig(channels=8, box_channels=16, box_batch_size_per_image=32, box_score_thresh=0.0, **options)


def make_cascade(**options: Any) -> CascadeRoIHeads:
    torch.manual_seed(0)
    return CascadeRoIHeads([make_heads(small(**options), CLASSES, stage) for stage in range(3)])


@pytest.fixture
def features() -> OrderedDict[str, Tensor]:
    torch.manual_seed(1)
    height, width = SIZE
    return OrderedDict((str(i), torch.randn(2, 8, height // 4 // 2**i, width // 4 // 2**i)) for i in range(4))


@pytest.fixture
def targets() -> list[dict[str, Tensor]]:
    boxes = [torch.tensor([[8.0, 8, 40, 48], [60, 20, 120, 90]]), torch.tensor([[30.0, 30, 70, 80]])]
    made = []
    for some in boxes:
        masks = torch.zeros(len(some), *SIZE, dtype=torch.uint8)
        for mask, (x1, y1, x2, y2) in zip(masks, some.long().tolist(), strict=True):
            mask[y1:y2, x1:x2] = 1
        made.append({"boxes": some, "labels": torch.arange(1, len(some) + 1), "masks": masks})
    return made


@pytest.fixture
def proposals(targets: list[dict[str, Tensor]]) -> list[Tensor]:
    torch.manual_seed(2)
    near = [target["boxes"].repeat(10, 1) + 6 * torch.randn(10 * len(target["boxes"]), 4) for target in targets]
    return [torch.cat([some, torch.tensor([[90.0, 5, 110, 15], [0, 60, 20, 90]])]).clamp(0, 96) for some in near]


def test_each_stage_matches_more_strictly() -> None:
    truth = torch.tensor([[0.0, 0, 100, 100]])
    overlaps = [0.45, 0.55, 0.65, 0.75]
    boxes = torch.tensor([[0.0, 0, 100, 100 * overlap] for overlap in overlaps])
    for stage, threshold in zip(make_cascade().stages, IOU_THRESHOLDS, strict=True):
        _, labels = cast(RoIHeads, stage).assign_targets_to_proposals([boxes], [truth], [torch.tensor([2])])
        assert labels[0].tolist() == [2 if overlap >= threshold else 0 for overlap in overlaps]


def test_each_stage_decodes_what_it_codes_and_codes_more_finely() -> None:
    truth = torch.tensor([[10.0, 12, 50, 61], [3, 4, 9, 30]])
    boxes = truth + torch.tensor([[2.0, -3, 4, 5], [1, 1, -1, 2]])
    codes = []
    for stage in make_cascade().stages:
        (code,) = cast(RoIHeads, stage).box_coder.encode([truth], [boxes])
        decoded = cast(RoIHeads, stage).box_coder.decode(code, [boxes])
        torch.testing.assert_close(decoded[:, 0], truth)
        codes.append(code)
    torch.testing.assert_close(codes[1], 2 * codes[0])
    torch.testing.assert_close(codes[2], 3 * codes[0])


def test_refined_boxes_are_of_the_object_s_class_or_the_most_probable_one() -> None:
    stage = make_heads(small(), CLASSES)
    proposals = [torch.tensor([[10.0, 10, 30, 30]]).repeat(2, 1), torch.tensor([[50.0, 40, 70, 60]])]
    # A code of 10 in x moves a box by its width, in stage 0; classes 1 to 3 move by 0.1, 0.2 and 0.3 of it.
    deltas = torch.zeros(3, 4, 4)
    deltas[:, :, 0] = torch.tensor([9.0, 1, 2, 3])
    logits = torch.tensor([[9.0, 1, 3, 2], [9, 5, 3, 2], [0, 1, 2, 9]])
    shapes = [SIZE, SIZE]
    guessed = refine(stage, logits, deltas.flatten(1), proposals, shapes)
    assert [boxes[:, 0].tolist() for boxes in guessed] == [pytest.approx([14, 12]), pytest.approx([56])]
    known = refine(stage, logits, deltas.flatten(1), proposals, shapes, [torch.tensor([3, 0]), torch.tensor([1])])
    assert [boxes[:, 0].tolist() for boxes in known] == [pytest.approx([16, 12]), pytest.approx([52])]


def test_refined_boxes_stay_within_their_image() -> None:
    stage = make_heads(small(), CLASSES)
    deltas = torch.full((1, 16), 100.0)
    (boxes,) = refine(stage, torch.zeros(1, 4), deltas, [torch.tensor([[10.0, 10, 30, 30]])], [SIZE])
    assert boxes.min() >= 0
    assert (boxes[:, [0, 2]] <= SIZE[1]).all()
    assert (boxes[:, [1, 3]] <= SIZE[0]).all()


def test_a_stage_s_losses_do_not_reach_the_boxes_of_the_one_before(
    features: dict[str, Tensor], proposals: list[Tensor], targets: list[dict[str, Tensor]]
) -> None:
    cascade = make_cascade().train()
    losses = cascade.losses(features, proposals, [SIZE] * 2, targets)
    for later in (1, 2):
        total = losses[f"loss_classifier_{later}"] + losses[f"loss_box_reg_{later}"] + losses[f"loss_mask_{later}"]
        own = list(cascade.stages[later].parameters())
        before = [parameter for stage in cascade.stages[:later] for parameter in stage.parameters()]
        gradients = torch.autograd.grad(total, own + before, allow_unused=True, retain_graph=True)
        assert all(gradient is not None for gradient in gradients[: len(own)])
        assert all(gradient is None for gradient in gradients[len(own) :])


def test_losses_are_weighted_by_stage(
    features: dict[str, Tensor], proposals: list[Tensor], targets: list[dict[str, Tensor]]
) -> None:
    cascade = make_cascade().train()
    torch.manual_seed(3)
    weighted = cascade.losses(features, proposals, [SIZE] * 2, targets)
    cascade.loss_weights = (1.0, 1.0, 1.0)
    torch.manual_seed(3)
    plain = cascade.losses(features, proposals, [SIZE] * 2, targets)
    assert LOSS_WEIGHTS == (1.0, 0.5, 0.25)
    for name, loss in plain.items():
        torch.testing.assert_close(weighted[name], LOSS_WEIGHTS[int(name[-1])] * loss)


class Constant(nn.Module):
    """Gives the same logits and box codes for every region."""

    def __init__(self, logits: list[float]) -> None:
        super().__init__()
        self.logits = torch.tensor(logits, dtype=torch.float32)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.logits.repeat(len(x), 1), x.new_zeros(len(x), 4 * len(self.logits))


def test_scores_are_the_mean_of_all_stages(features: dict[str, Tensor]) -> None:
    cascade = make_cascade().eval()
    logits = [[0.0, 1, 2, 3], [1, 0, 2, 0], [0, 4, 0, 1]]
    for stage, own in zip(cascade.stages, logits, strict=True):
        stage.box_predictor = Constant(own)
    boxes = [torch.tensor([[10.0, 10, 40, 40]]), torch.tensor([[20.0, 20, 60, 60]])]
    with torch.no_grad():
        found = cascade.detect(features, boxes, [SIZE] * 2)
    expected = torch.tensor(logits, dtype=torch.float32).softmax(dim=1).mean(dim=0)[1:]
    for answer in found:
        by_label = answer["scores"][answer["labels"].argsort()]
        torch.testing.assert_close(by_label, expected)


def test_masks_are_the_mean_of_all_stages(features: dict[str, Tensor]) -> None:
    cascade = make_cascade().eval()
    boxes = [torch.tensor([[10.0, 10, 40, 40]]), torch.tensor([[20.0, 20, 60, 60]])]
    with torch.no_grad():
        found = cascade.detect(features, boxes, [SIZE] * 2)[0]
        masks = []
        for stage in cascade.stages:
            pooled = stage.mask_roi_pool(features, [found["boxes"], boxes[1]], [SIZE] * 2)
            logits = stage.mask_predictor(stage.mask_head(pooled))[: len(found["boxes"])]
            masks.append(logits.sigmoid()[torch.arange(len(logits)), found["labels"]])
    torch.testing.assert_close(found["masks"][:, 0], torch.stack(masks).mean(dim=0))


@pytest.mark.parametrize("agnostic", [False, True])
def test_one_stage_is_mask_rcnn(
    features: dict[str, Tensor], proposals: list[Tensor], targets: list[dict[str, Tensor]], agnostic: bool
) -> None:
    torch.manual_seed(0)
    alone = make_heads(small(class_agnostic_boxes=agnostic), CLASSES)
    cascade = CascadeRoIHeads([alone], [1.0])
    shapes = [SIZE] * 2
    torch.manual_seed(4)
    _, expected = alone.train()(features, proposals, shapes, targets)
    torch.manual_seed(4)
    _, losses = cascade.train()(features, proposals, shapes, targets)
    assert {name.removesuffix("_0"): loss.item() for name, loss in losses.items()} == {
        name: loss.item() for name, loss in expected.items()
    }
    with torch.no_grad():
        answers, _ = alone.eval()(features, proposals, shapes)
        found, _ = cascade.eval()(features, proposals, shapes)
    for answer, one in zip(answers, found, strict=True):
        assert len(one["boxes"]) > 0
        for name in ("boxes", "labels", "scores", "masks"):
            torch.testing.assert_close(one[name], answer[name])


def test_images_without_objects_teach_background(features: dict[str, Tensor], proposals: list[Tensor]) -> None:
    nothing = {
        "boxes": torch.zeros(0, 4),
        "labels": torch.zeros(0, dtype=torch.int64),
        "masks": torch.zeros(0, *SIZE, dtype=torch.uint8),
    }
    losses = make_cascade().train().losses(features, proposals, [SIZE] * 2, [nothing, nothing])
    assert all(loss.isfinite() for loss in losses.values())
    assert all(losses[f"loss_box_reg_{stage}"] == losses[f"loss_mask_{stage}"] == 0 for stage in range(3))
    assert all(losses[f"loss_classifier_{stage}"] > 0 for stage in range(3))


def test_boxes_that_shrink_to_nothing_are_background(
    features: dict[str, Tensor], proposals: list[Tensor], targets: list[dict[str, Tensor]]
) -> None:
    cascade = make_cascade().train()
    with torch.no_grad():
        # Far to the left: after clipping, nothing remains.
        cascade.stages[0].box_predictor.bbox_pred.bias.copy_(torch.tensor([-1e3, 0.0, 0, 0]).repeat(CLASSES + 1))
    empty = {name: value[:0] for name, value in targets[1].items()}
    losses = cascade.losses(features, proposals, [SIZE] * 2, [targets[0], empty])
    total = torch.stack(list(losses.values())).sum()
    total.backward()
    assert total.isfinite()
    assert all(one.grad is None or one.grad.isfinite().all() for one in cascade.parameters())


def test_nothing_proposed_is_nothing_found(features: dict[str, Tensor]) -> None:
    with torch.no_grad():
        found = make_cascade().eval().detect(features, [torch.zeros(0, 4)] * 2, [SIZE] * 2)
    assert [len(answer["boxes"]) for answer in found] == [0, 0]
    assert found[0]["masks"].shape[1] == 1


def test_the_stages_of_the_contract() -> None:
    assert IOU_THRESHOLDS == (0.5, 0.6, 0.7)
    assert BOX_WEIGHTS == ((10, 10, 5, 5), (20, 20, 10, 10), (30, 30, 15, 15))
    cascade = make_cascade()
    assert [stage.box_coder.weights for stage in cascade.stages] == list(BOX_WEIGHTS)
    assert len({id(stage.mask_head) for stage in cascade.stages}) == 3
