import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torchvision.models.detection.transform import GeneralizedRCNNTransform
from torchvision.ops import box_iou

from inlinevit.tasks.backbone import MEAN_COLOR
from inlinevit.tasks.detection.config import DetectionAugmentConfig
from inlinevit.tasks.detection.transforms import (
    Sample,
    as_tv_tensors,
    keep_visible,
    paste_objects,
    training_transform,
)

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def squares(height: int, width: int, *boxes: tuple[int, int, int, int], colour: int = 200) -> Sample:
    """A dark image with bright squares, labelled 1, 2, …"""
    image = torch.full((3, height, width), 10, dtype=torch.uint8)
    masks = torch.zeros(len(boxes), height, width, dtype=torch.uint8)
    for mask, (left, top, right, bottom) in zip(masks, boxes, strict=True):
        mask[top:bottom, left:right] = 1
        image[:, top:bottom, left:right] = colour
    corners = torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4)
    return image, {"boxes": corners, "labels": torch.arange(1, len(boxes) + 1), "masks": masks}


def varied(sample: Sample, seed: int = 0, **options: Any) -> Sample:
    torch.manual_seed(seed)
    return training_transform(DetectionAugmentConfig(**options))(*as_tv_tensors(*sample))


def bounds(masks: Tensor) -> Tensor:
    """The boxes around masks, found pixel by pixel."""
    found = []
    for mask in masks:
        rows, columns = mask.nonzero(as_tuple=True)
        found.append([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1])
    return torch.tensor(found, dtype=torch.float32).reshape(-1, 4)


@pytest.mark.parametrize(("size", "expected"), [((60, 90), (40, 60)), ((90, 60), (60, 40)), ((30, 120), (20, 80))])
def test_the_shorter_side_is_as_asked_unless_the_longer_one_gets_too_long(
    size: tuple[int, int], expected: tuple[int, int]
) -> None:
    image, target = varied(squares(*size, (6, 9, 24, 27)), min_sizes=[40], max_size=80, hflip=0)
    assert tuple(image.shape) == (3, *expected)
    assert tuple(target["masks"].shape) == (1, *expected)
    factor = expected[0] / size[0]
    torch.testing.assert_close(target["boxes"], torch.tensor([[6.0, 9, 24, 27]]) * factor)
    torch.testing.assert_close(bounds(target["masks"]), target["boxes"], rtol=0, atol=1)


@pytest.mark.parametrize("side", [7, 20, 33, 50, 90])
def test_masks_are_no_more_than_half_a_pixel_off(side: int) -> None:
    _, target = varied(squares(40, 64, (7, 9, 24, 28), (50, 0, 61, 5)), min_sizes=[side], hflip=0)
    torch.testing.assert_close(bounds(target["masks"]), target["boxes"], rtol=0, atol=0.501)


def test_each_of_the_sides_comes() -> None:
    sample = squares(60, 90, (6, 9, 24, 27))
    heights = {varied(sample, seed, min_sizes=[20, 30, 40])[0].shape[1] for seed in range(30)}
    assert heights == {20, 30, 40}


@pytest.mark.parametrize("size", [(61, 97), (97, 61), (40, 40)])
def test_training_resizes_as_evaluation_does(size: tuple[int, int]) -> None:
    noise = torch.randint(256, (3, *size), dtype=torch.uint8)
    image, _ = varied((noise, squares(*size)[1]), min_sizes=[32], max_size=50, hflip=0)
    detector = GeneralizedRCNNTransform(32, 50, MEAN, STD)
    resized, _ = detector.resize(noise.to(torch.float32))
    # Half a step of bytes, and some for how they are rounded.
    torch.testing.assert_close(image.to(torch.float32), resized, rtol=0, atol=1)


def test_mirrored_images_have_mirrored_objects() -> None:
    sample = squares(40, 60, (6, 9, 24, 27), (50, 0, 60, 5))
    image, target = varied(sample, min_sizes=[40], hflip=1)
    assert torch.equal(image, sample[0].flip(2))
    assert torch.equal(target["masks"], sample[1]["masks"].flip(2))
    assert target["boxes"].tolist() == [[36, 9, 54, 27], [0, 0, 10, 5]]
    assert torch.equal(varied(sample, min_sizes=[40], hflip=0)[0], sample[0])


OPTIONS: list[dict[str, Any]] = [
    {"min_sizes": [20, 30, 40], "max_size": 50},
    {"scale_jitter": (0.1, 2.0), "jitter_size": 48},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_a_seed_makes_a_sample(options: dict[str, Any]) -> None:
    sample = squares(40, 60, (6, 9, 24, 27), (50, 0, 60, 5))
    drawn = [varied(sample, seed, **options) for seed in (0, 1, 2, 3)]
    torch.testing.assert_close([varied(sample, seed, **options) for seed in (0, 1, 2, 3)], drawn, rtol=0, atol=0)
    assert any(not torch.equal(drawn[0][0], other[0]) for other in drawn[1:])


@pytest.mark.parametrize("options", OPTIONS)
def test_samples_are_plain_tensors_with_or_without_objects(options: dict[str, Any]) -> None:
    for sample in (squares(40, 60), squares(40, 60, (0, 0, 60, 40))):
        for seed in range(5):
            image, target = varied(sample, seed, **options)
            count = len(target["labels"])
            assert {type(values) for values in (image, *target.values())} == {Tensor}
            assert image.dtype == target["masks"].dtype == torch.uint8
            assert target["boxes"].shape == (count, 4)
            assert target["boxes"].dtype == torch.float32
            assert target["masks"].shape == (count, *image.shape[1:])
            assert count == len(sample[1]["labels"])


def test_scale_jitter_makes_squares_in_which_boxes_are_those_of_the_masks() -> None:
    sample = squares(40, 60, (6, 9, 24, 27), (50, 0, 60, 5))
    counts = set()
    for seed in range(40):
        image, target = varied(sample, seed, scale_jitter=(0.1, 3.0), jitter_size=48)
        assert image.shape == (3, 48, 48)
        assert torch.equal(target["boxes"], bounds(target["masks"]))
        assert (target["boxes"][:, 2:] > target["boxes"][:, :2]).all()
        counts.add(tuple(target["labels"].tolist()))
        for mask in target["masks"]:
            # Of a narrow strip, there may be only the edge, where resizing mixes bright and dark.
            if int(mask.any(0).sum()) > 4 < int(mask.any(1).sum()):
                assert image[0][mask.bool()].to(torch.float32).mean() > 150
    assert counts >= {(1, 2), (1,), (2,)}


def test_small_images_are_filled_up_with_the_mean_colour() -> None:
    image, target = varied(squares(40, 60, (6, 10, 24, 28)), scale_jitter=(0.5, 0.5), jitter_size=60, hflip=0)
    assert target["boxes"].tolist() == [[3, 5, 12, 14]]
    assert (image[:, :20, :30].amax((1, 2)) > 150).all()
    for border in (image[:, 20:], image[:, :20, 30:]):
        assert torch.equal(border, torch.tensor(MEAN_COLOR, dtype=torch.uint8).view(3, 1, 1).expand_as(border))
    padding = torch.tensor(MEAN_COLOR) / 255
    torch.testing.assert_close((padding - torch.tensor(MEAN)) / torch.tensor(STD), torch.zeros(3), rtol=0, atol=0.01)


def test_long_strips_keep_a_pixel() -> None:
    image, target = varied(squares(2, 200, (0, 0, 200, 2)), scale_jitter=(0.1, 0.1), jitter_size=60)
    assert image.shape == (3, 60, 60)
    assert target["boxes"].tolist() == [[0, 0, 6, 1]]


def test_cuts_of_large_images_are_anywhere() -> None:
    corners = set()
    for seed in range(60):
        _, target = varied(
            squares(40, 40, *((x, y, x + 2, y + 2) for x in (0, 38) for y in (0, 38))),
            seed,
            scale_jitter=(1.1, 1.1),
            jitter_size=40,
        )
        corners |= set(target["labels"].tolist())
    assert corners == {1, 2, 3, 4}


def test_what_is_not_seen_is_dropped() -> None:
    image, target = squares(20, 20, (0, 0, 5, 5), (5, 5, 6, 6), (10, 10, 20, 20))
    target["masks"][0] = 0
    _, kept = keep_visible(image, target)
    assert kept["labels"].tolist() == [2, 3]
    assert kept["boxes"].tolist() == [[5, 5, 6, 6], [10, 10, 20, 20]]


def test_pasted_objects_hide_what_is_below() -> None:
    below = squares(20, 30, (0, 0, 10, 10), (12, 2, 14, 4), (20, 10, 30, 20), colour=100)
    above = squares(20, 30, (5, 0, 16, 8), (0, 15, 3, 18), colour=200)
    before = below[0].clone()
    image, target = paste_objects(below, above, torch.tensor([0]))
    # The first loses its right upper part, the second all of itself, the third nothing.
    assert target["labels"].tolist() == [1, 3, 1]
    assert target["boxes"].tolist() == [[0, 0, 10, 10], [20, 10, 30, 20], [5, 0, 16, 8]]
    assert target["masks"].sum((1, 2)).tolist() == [100 - 5 * 8, 100, 11 * 8]
    assert int(target["masks"].sum(0).max()) == 1
    assert target["masks"].dtype == torch.uint8
    assert (image[:, :8, 5:16] == 200).all()
    assert (image[:, 10:20, 20:30] == 100).all()
    assert (image[:, 15:18, :3] == 10).all(), "an object that was not chosen is seen"
    assert torch.equal(below[0], before)


def test_nothing_to_paste_changes_nothing() -> None:
    below = squares(20, 30, (0, 0, 10, 10))
    image, target = paste_objects(below, squares(20, 30), torch.tensor([], dtype=torch.int64))
    assert torch.equal(image, below[0])
    torch.testing.assert_close(target, below[1])


def test_objects_may_be_pasted_into_an_empty_image() -> None:
    _, target = paste_objects(squares(20, 30), squares(20, 30, (5, 0, 16, 8)), torch.tensor([0]))
    assert target["boxes"].tolist() == [[5, 0, 16, 8]]


@pytest.mark.parametrize("size", [(10, 60), (60, 10), (10, 10), (60, 60)])
def test_images_of_other_sizes_may_be_pasted(size: tuple[int, int]) -> None:
    height, width = size
    below = squares(20, 30, (0, 0, 2, 2), colour=100)
    above = squares(height, width, (4, 4, width, height), (width - 2, height - 2, width, height), colour=200)
    image, target = paste_objects(below, above, torch.tensor([0]))
    right, bottom = min(30, width), min(20, height)
    assert target["boxes"].tolist() == [[0, 0, 2, 2], [4, 4, right, bottom]]
    assert target["masks"].shape == (2, 20, 30)
    assert (image[:, 4:bottom, 4:right] == 200).all()
    _, beyond = paste_objects(below, above, torch.tensor([1]))
    assert len(beyond["labels"]) == (1 if height > 20 or width > 30 else 2)


def test_boxes_keep_to_their_masks_at_all_scales() -> None:
    sample = squares(200, 300, (33, 41, 120, 170), (150, 20, 290, 199))
    for seed in range(10):
        _, target = varied(sample, seed, min_sizes=[97, 151, 263], max_size=333)
        overlap = box_iou(target["boxes"], bounds(target["masks"])).diagonal()
        assert math.isclose(overlap.min(), 1, abs_tol=0.05)
