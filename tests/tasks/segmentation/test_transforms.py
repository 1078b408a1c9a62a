import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torchvision.tv_tensors import Image, Mask

from inlinevit.tasks.backbone import MEAN_COLOR
from inlinevit.tasks.dense import resize_mask
from inlinevit.tasks.segmentation.config import SegmentationAugmentConfig
from inlinevit.tasks.segmentation.labels import IGNORED
from inlinevit.tasks.segmentation.transforms import (
    PHOTOMETRIC,
    BalancedRandomCrop,
    PhotometricDistort,
    Sample,
    resize_image,
    scaled_size,
    training_transform,
)

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
# Of the classes, and of what does not count: none is a mixture of others.
COLOURS = torch.tensor([[0, 0, 0], [255, 0, 0], [0, 255, 0], [0, 0, 255], [255, 255, 255]], dtype=torch.uint8)
# Changes nothing but what a test asks for.
PLAIN: dict[str, Any] = {
    "scale": (1.0, 1.0),
    "min_size": None,
    "cat_max_ratio": 1.0,
    "hflip": 0,
    "photometric_distortion": False,
}


def picture(height: int = 40, width: int = 60) -> Sample:
    """Blocks of 8 × 8 pixels, each with its class; the class is seen in the colour. Some blocks do not count."""
    blocks = torch.randint(5, (-(-height // 8), -(-width // 8)), generator=torch.Generator().manual_seed(0))
    classes = blocks.repeat_interleave(8, 0).repeat_interleave(8, 1)[:height, :width]
    labels = torch.where(classes == 4, IGNORED, classes).to(torch.uint8)
    return COLOURS[classes].permute(2, 0, 1).contiguous(), labels


def varied(sample: Sample, seed: int = 0, **options: Any) -> Sample:
    torch.manual_seed(seed)
    return training_transform(SegmentationAugmentConfig(**PLAIN | options))(Image(sample[0]), Mask(sample[1]))


def agree(image: Tensor, labels: Tensor) -> bool:
    """Whether labels are those that the colours show, where these are not mixed."""
    distances = (image[..., None].to(torch.int64) - COLOURS.T[:, None, None].to(torch.int64)).abs().amax(0)
    distance, nearest = distances.min(-1)
    sure = distance < 5
    assert sure.float().mean() > 0.2, "there is nothing to compare"
    return bool((labels[sure] == torch.where(nearest == 4, IGNORED, nearest)[sure]).all())


def test_without_variation_a_picture_is_itself() -> None:
    sample = picture(48, 48)
    image, labels = varied(sample, crop_size=48)
    assert torch.equal(image, sample[0])
    assert torch.equal(labels, sample[1])


@pytest.mark.parametrize(
    ("size", "side", "factor", "expected"),
    [
        ((60, 90), 40, 1.0, [40, 60]),
        ((90, 60), 40, 1.0, [60, 40]),
        ((60, 90), None, 0.5, [30, 45]),
        ((60, 91), 40, 2.0, [80, 121]),
        ((100, 2), 2, 0.1, [10, 1]),
    ],
)
def test_sizes(size: tuple[int, int], side: int | None, factor: float, expected: list[int]) -> None:
    assert scaled_size(*size, side, factor) == expected


@pytest.mark.parametrize("min_size", [40, 20, None])
def test_the_shorter_side_is_brought_to_its_length_times_a_factor(min_size: int | None) -> None:
    heights = []
    for seed in range(40):
        _, labels = varied(picture(), seed, scale=(0.5, 2.0), min_size=min_size, crop_size=200)
        counted = (labels != IGNORED).nonzero().amax(0) + 1
        # Those at the border may be pixels that do not count.
        heights.append(int(counted[0]))
    base = min_size or 40
    assert 0.4 * base < min(heights) < 0.75 * base
    assert 1.7 * base < max(heights) <= 2 * base


def test_factors_are_evenly_spread() -> None:
    sample = torch.zeros(3, 100, 100, dtype=torch.uint8), torch.zeros(100, 100, dtype=torch.uint8)
    sides = []
    for seed in range(100):
        _, labels = varied(sample, seed, scale=(0.5, 2.0), crop_size=200)
        sides.append(float((labels == 0).sum()) ** 0.5 / 100)
    assert 0.5 <= min(sides) < 0.55
    assert 1.95 < max(sides) <= 2
    assert sum(sides) / len(sides) == pytest.approx(1.25, abs=0.1)


@pytest.mark.parametrize("factor", [0.6, 1.0, 1.37, 2.0])
@pytest.mark.parametrize("hflip", [0, 1])
def test_labels_go_with_their_pixels(factor: float, hflip: float) -> None:
    for seed in range(5):
        image, labels = varied(picture(), seed, scale=(factor, factor), crop_size=32, hflip=hflip)
        assert image.shape == (3, 32, 32)
        assert labels.shape == (32, 32)
        # Padding is none of the colours.
        assert agree(image, labels)


@pytest.mark.parametrize("size", [[80, 120], [93, 61], [20, 30], [13, 47]])
def test_labels_are_not_moved_against_the_image(size: list[int]) -> None:
    image, labels = picture()
    for threshold in range(4):
        above = torch.where(labels == IGNORED, 4, labels) > threshold
        expected = resize_image(above[None].float(), size)[0]
        found = resize_mask(above.to(torch.uint8), size).float()
        # On both sides of an edge, what is missing here is added there.
        assert abs(float((found - expected).mean())) < 0.02
        assert float((found - expected).abs().max()) <= 1
        inner = (expected < 0.01) | (expected > 0.99)
        assert torch.equal(found[inner], expected[inner].round())
    assert agree(resize_image(image, size), resize_mask(labels, size))


def test_a_label_is_that_of_the_middle() -> None:
    labels = torch.arange(81, dtype=torch.uint8).view(9, 9)
    assert torch.equal(resize_mask(labels, [3, 3]), labels[1::3, 1::3])


def test_labels_are_never_mixed() -> None:
    _, labels = picture()
    for size in ([7, 9], [39, 61], [200, 100]):
        assert set(resize_mask(labels, size).unique().tolist()) <= set(labels.unique().tolist())


def test_training_resizes_as_evaluation_does() -> None:
    noise = torch.randint(256, (3, 61, 97), dtype=torch.uint8)
    image, _ = varied((noise, torch.zeros(61, 97, dtype=torch.uint8)), min_size=32, crop_size=64)
    assert torch.equal(image[:, :32, :51], resize_image(noise, scaled_size(61, 97, 32)))
    # Smaller images are averages, not samples.
    assert resize_image(noise, [4, 4]).float().std() < 20


def test_mirrored_images_have_mirrored_labels() -> None:
    sample = picture(48, 48)
    image, labels = varied(sample, crop_size=48, hflip=1)
    assert torch.equal(image, sample[0].flip(2))
    assert torch.equal(labels, sample[1].flip(1))
    flipped = [torch.equal(varied(sample, seed, crop_size=48, hflip=0.5)[1], sample[1].flip(1)) for seed in range(60)]
    assert 15 < sum(flipped) < 45


@pytest.mark.parametrize("photometric_distortion", [False, True])
def test_small_images_are_filled_up_with_the_mean_colour_and_ignored_pixels(photometric_distortion: bool) -> None:
    image, labels = varied(picture(20, 60), crop_size=48, hflip=1, photometric_distortion=photometric_distortion)
    assert image.shape == (3, 48, 48)
    assert torch.equal(image[:, 20:], torch.tensor(MEAN_COLOR, dtype=torch.uint8).view(3, 1, 1).expand(3, 28, 48))
    assert (labels[20:] == IGNORED).all()
    assert (labels[:20] != IGNORED).any()
    padding = torch.tensor(MEAN_COLOR) / 255
    torch.testing.assert_close((padding - torch.tensor(MEAN)) / torch.tensor(STD), torch.zeros(3), rtol=0, atol=0.01)


def test_cuts_are_anywhere() -> None:
    labels = torch.arange(100).view(10, 10).to(torch.uint8)
    image = labels.expand(3, 10, 10)
    corners = set()
    for seed in range(100):
        cut, own = varied((image, labels), seed, crop_size=8)
        assert torch.equal(cut[0], own)
        corners.add(int(own[0, 0]))
    assert corners == {10 * top + left for top in range(3) for left in range(3)}


def shares(labels: Tensor) -> float:
    counts = torch.bincount(labels.flatten(), minlength=256)[:255]
    return float(counts.max() / counts.sum())


def test_cuts_with_much_of_one_class_are_drawn_again() -> None:
    labels = torch.zeros(40, 200, dtype=torch.uint8)
    # A fifth of the image is mixed.
    labels[:20, :40] = 1
    sample = labels.expand(3, 40, 200), labels
    found = {
        most: [shares(varied(sample, seed, crop_size=40, cat_max_ratio=most)[1]) for seed in range(60)]
        for most in (1.0, 0.75)
    }
    mixed = {most: sum(share <= 0.75 for share in own) / 60 for most, own in found.items()}
    # A cut out of 161 has at least a quarter of class 1 if it begins in the first 21: 1 - (140 / 161)^11 is 0.79.
    assert mixed[1.0] < 0.3
    assert mixed[0.75] > 0.6


def test_only_so_many_cuts_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    draw = BalancedRandomCrop.draw
    monkeypatch.setattr(BalancedRandomCrop, "draw", lambda self, *size: tried.append(1) or draw(self, *size))
    monotone = torch.zeros(3, 40, 60, dtype=torch.uint8), torch.zeros(40, 60, dtype=torch.uint8)
    varied(monotone, crop_size=32, cat_max_ratio=0.75)
    assert len(tried) == 11
    tried.clear()
    # There is no other cut.
    varied(monotone, crop_size=60, cat_max_ratio=0.75)
    assert len(tried) == 1


def test_pixels_that_do_not_count_have_no_share() -> None:
    cut = BalancedRandomCrop(10, 0.75)
    labels = torch.full((10, 10), IGNORED, dtype=torch.uint8)
    assert not cut.is_balanced(labels)
    labels[0, :4] = torch.tensor([0, 0, 0, 1], dtype=torch.uint8)
    assert cut.is_balanced(labels)
    labels[0, 3] = 0
    assert not cut.is_balanced(labels)
    labels[0, :5] = torch.tensor([0, 0, 0, 0, 1], dtype=torch.uint8)
    assert not cut.is_balanced(labels)


def test_photometric_distortion_changes_colours_alone() -> None:
    sample = picture(48, 48)
    changed = 0
    for seed in range(20):
        image, labels = varied(sample, seed, crop_size=48, photometric_distortion=True)
        assert torch.equal(labels, sample[1])
        assert image.dtype == torch.uint8
        changed += not torch.equal(image, sample[0])
    assert changed > 12


def test_red_stays_nearer_to_red_than_to_blue() -> None:
    red = torch.tensor([200, 40, 40], dtype=torch.uint8).view(3, 1, 1).expand(3, 8, 8).contiguous()
    distort = PhotometricDistort(**PHOTOMETRIC)
    torch.manual_seed(0)
    found = torch.stack([distort(Image(red), Mask(red[0]))[0].as_subclass(Tensor)[:, 0, 0] for _ in range(100)])
    assert (found.argmax(1) == 0).all()
    assert len(found.unique(dim=0)) > 50
    # A tenth of the circle of colours at most: from red, a third of it leads to green.
    others = (found[:, 1:].amax(1) - found.amin(1)).float() / (found[:, 0] - found.amin(1)).clamp(min=1)
    assert 0.4 < float(others.max()) < 0.65


AUGMENTS: list[dict[str, Any]] = [
    {"scale": (0.5, 2.0), "crop_size": 32, "hflip": 0.5, "cat_max_ratio": 0.3, "photometric_distortion": True},
    {"scale": (0.2, 3.0), "min_size": 30, "crop_size": 48, "cat_max_ratio": 0.75},
]


@pytest.mark.parametrize("options", AUGMENTS)
def test_a_seed_makes_a_sample(options: dict[str, Any]) -> None:
    drawn = [varied(picture(), seed, **options) for seed in range(4)]
    random.seed(1)
    np.random.seed(1)
    again = [varied(picture(), seed, **options) for seed in range(4)]
    torch.testing.assert_close(again, drawn, rtol=0, atol=0)
    assert any(not torch.equal(drawn[0][0], other[0]) for other in drawn[1:])


@pytest.mark.parametrize("options", AUGMENTS)
@pytest.mark.parametrize("size", [(40, 60), (300, 5), (2, 200), (33, 31)])
def test_samples_are_plain_squares_of_bytes(options: dict[str, Any], size: tuple[int, int]) -> None:
    for seed in range(5):
        image, labels = varied(picture(*size), seed, **options)
        assert type(image) is type(labels) is Tensor
        assert image.dtype == labels.dtype == torch.uint8
        assert image.shape == (3, options["crop_size"], options["crop_size"])
        assert labels.shape == image.shape[1:]
