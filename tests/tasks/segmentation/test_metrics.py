"""Numbers of segmentations: by hand, and as torchmetrics has them."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics.classification import MulticlassAccuracy, MulticlassJaccardIndex

from inlinevit.tasks.segmentation.config import InferenceConfig
from inlinevit.tasks.segmentation.labels import IGNORED
from inlinevit.tasks.segmentation.metrics import SegmentationEvaluation, SegmentationEvaluator


def count_pixels(truth: Tensor, answer: Tensor, classes: int) -> Tensor:
    """What an evaluator counts of a model that gives this answer, whatever the image."""
    source = SimpleNamespace(labels=SimpleNamespace(classes=[SimpleNamespace(name=str(n)) for n in range(classes)]))
    evaluator = SegmentationEvaluator(source, 0, InferenceConfig(min_size=None), ((0.0,) * 3, (1.0,) * 3))
    evaluator.reset(torch.device("cpu"))
    logits = F.one_hot(answer.long(), classes).permute(2, 0, 1)[None].float()
    evaluator.update(lambda images: logits, (0, torch.zeros(3, *truth.shape, dtype=torch.uint8), truth))
    return evaluator.confusion


def test_by_hand() -> None:
    confusion = torch.tensor([[6, 2, 0, 0], [1, 3, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]])
    outcome = SegmentationEvaluation(confusion, images=2)
    iou, accuracy = outcome.class_iou().tolist(), outcome.class_accuracy().tolist()
    assert iou[:3] == pytest.approx([6 / 9, 3 / 7, 0])
    assert accuracy[:3] == pytest.approx([6 / 8, 3 / 4, 0])
    # The last class occurs nowhere.
    assert math.isnan(iou[3])
    assert math.isnan(accuracy[3])
    assert outcome.numbers() == pytest.approx(
        {"miou": (6 / 9 + 3 / 7) / 3, "macc": (6 / 8 + 3 / 4) / 3, "pixel_accuracy": 9 / 13}
    )


def test_a_class_that_is_only_in_answers_counts_for_the_iou_alone() -> None:
    outcome = SegmentationEvaluation(torch.tensor([[3, 1], [0, 0]]), images=1)
    assert outcome.class_iou().tolist() == [0.75, 0]
    assert outcome.numbers() == pytest.approx({"miou": 0.375, "macc": 0.75, "pixel_accuracy": 0.75})


def test_where_nothing_counts_there_is_no_number() -> None:
    outcome = SegmentationEvaluation(torch.zeros(3, 3, dtype=torch.int64), images=1)
    assert all(math.isnan(value) for value in outcome.numbers().values())


def test_pixels_are_counted() -> None:
    truth = torch.tensor([[0, 0, 1], [2, IGNORED, IGNORED]], dtype=torch.uint8)
    answer = torch.tensor([[0, 1, 1], [0, 2, 0]], dtype=torch.uint8)
    expected = torch.tensor([[1, 1, 0], [0, 1, 0], [1, 0, 0]])
    counted = count_pixels(truth, answer, 3)
    assert counted.dtype == torch.int64
    assert torch.equal(counted, expected)
    # Rows are the truth.
    assert torch.equal(counted.sum(dim=1), torch.tensor([2, 1, 1]))


def test_many_classes_are_not_mixed_up() -> None:
    """Bytes would run over."""
    truth = torch.tensor([[254, 3]], dtype=torch.uint8)
    counted = count_pixels(truth, torch.tensor([[253, 254]], dtype=torch.uint8), 255)
    assert counted.nonzero().tolist() == [[3, 254], [254, 253]]


def draw(classes: int, present: int) -> tuple[Tensor, Tensor]:
    """Labels and answers that are half right; only the first classes occur."""
    generator = torch.Generator().manual_seed(0)
    truth = torch.randint(0, present, (40, 50), generator=generator)
    answer = torch.where(torch.rand(40, 50, generator=generator) < 0.5, truth, truth.flip(0))
    truth[torch.rand(40, 50, generator=generator) < 0.2] = IGNORED
    return truth, answer


@pytest.mark.parametrize(("classes", "present"), [(7, 7), (150, 60)])
def test_as_torchmetrics_has_them(classes: int, present: int) -> None:
    truth, answer = draw(classes, present)
    confusion = count_pixels(truth.to(torch.uint8), answer.to(torch.uint8), classes)
    numbers = SegmentationEvaluation(confusion, images=1).numbers()
    jaccard = MulticlassJaccardIndex(classes, average="macro", ignore_index=IGNORED)
    accuracy = MulticlassAccuracy(classes, average="macro", ignore_index=IGNORED)
    of_pixels = MulticlassAccuracy(classes, average="micro", ignore_index=IGNORED)
    assert numbers["miou"] == pytest.approx(float(jaccard(answer, truth)), abs=1e-6)
    assert numbers["macc"] == pytest.approx(float(accuracy(answer, truth)), abs=1e-6)
    assert numbers["pixel_accuracy"] == pytest.approx(float(of_pixels(answer, truth)), abs=1e-6)
    by_class = MulticlassJaccardIndex(classes, average=None, ignore_index=IGNORED)(answer, truth)
    iou = SegmentationEvaluation(confusion, images=1).class_iou()
    torch.testing.assert_close(iou[:present].float(), by_class[:present])
    assert iou[present:].isnan().all()


def test_ignored_pixels_never_count() -> None:
    truth, answer = (part.to(torch.uint8) for part in draw(5, 5))
    before = count_pixels(truth, answer, 5)
    answer[truth == IGNORED] = (answer[truth == IGNORED] + 1) % 5
    assert torch.equal(count_pixels(truth, answer, 5), before)
    assert int(before.sum()) == int((truth != IGNORED).sum())
