"""Drawings of objects. Whether they are fair to look at, no test can tell."""

import itertools
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pycocotools import mask as coco_masks

from inlinevit.tasks.detection.coco import Category
from inlinevit.tasks.detection.visualize import OPACITY, category_colour, draw_objects

CATEGORIES = [Category(3, "disc"), Category(7, "a square with a name that is much wider than the whole image")]


def found(size: tuple[int, int], box: tuple[int, int, int, int], category: int = 3, score: float = 0.9) -> Any:
    """An object that fills its box, given as x, y, width and height."""
    x, y, width, height = box
    mask = np.zeros(size, np.uint8, order="F")
    mask[y : y + height, x : x + width] = 1
    return {"category_id": category, "score": score, "bbox": list(box), "segmentation": coco_masks.encode(mask)}


def pixel(image: Image.Image, x: int, y: int) -> tuple[int, ...]:
    return tuple(np.array(image)[y, x].tolist())


def blended(ground: int, colour: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(ground * (1 - OPACITY) + part * OPACITY) for part in colour)


def test_a_mask_is_shone_through_and_a_box_is_not() -> None:
    image = Image.new("RGB", (400, 300), (100, 100, 100))
    colour = category_colour(0)
    drawn = draw_objects(image, [found((300, 400), (200, 100, 80, 60))], CATEGORIES)
    assert drawn.size == image.size
    assert pixel(drawn, 240, 130) == blended(100, colour)
    assert pixel(drawn, 200, 130) == pixel(drawn, 240, 159) == colour
    assert pixel(drawn, 350, 250) == (100, 100, 100)
    # The label stands above.
    above = np.array(drawn)[85:99, 200:280]
    assert (above == colour).all(axis=2).any()
    assert pixel(image, 240, 130) == (100, 100, 100)


def test_the_surest_is_on_top() -> None:
    image = Image.new("RGB", (400, 300))
    size, box = (300, 400), (100, 100, 200, 150)
    objects = [found(size, box, 3, 0.9), found(size, box, 7, 0.5)]
    drawn = draw_objects(image, objects, CATEGORIES)
    assert pixel(drawn, 100, 200) == category_colour(0)
    assert np.array_equal(np.array(drawn), np.array(draw_objects(image, objects[::-1], CATEGORIES)))


@pytest.mark.parametrize(("size", "expected"), [((64, 48), (320, 240)), ((2, 100), (6, 300)), ((161, 9), (161, 9))])
def test_very_small_images_are_enlarged(size: tuple[int, int], expected: tuple[int, int]) -> None:
    image = Image.new("RGB", size, (100, 100, 100))
    objects = [found(size[::-1], (0, 0, size[0], size[1]), category) for category in (3, 7)]
    assert draw_objects(image, objects, CATEGORIES).size == expected


def test_labels_grow_with_the_image() -> None:
    def label_height(side: int) -> int:
        box = (side // 4, side // 2, side // 2, side // 4)
        drawn = np.array(draw_objects(Image.new("RGB", (side, side)), [found((side, side), box)], CATEGORIES))
        return int((drawn[: side // 2] == category_colour(0)).all(axis=2).any(axis=1).sum())

    assert label_height(400) >= 12
    assert label_height(3000) == pytest.approx(label_height(1500) * 2, abs=2)


@pytest.mark.parametrize("box", [(0, 0, 0, 0), (399, 299, 1, 1), (0, 0, 400, 300), (390, 5, 10, 10)])
def test_objects_at_the_border_and_without_pixels(box: tuple[int, int, int, int]) -> None:
    objects = [found((300, 400), box, category) for category in (3, 7)]
    drawn = draw_objects(Image.new("RGB", (400, 300)), objects, CATEGORIES)
    assert drawn.size == (400, 300)
    # A label is there, and all of it.
    assert (np.array(drawn) == category_colour(1)).all(axis=2).sum() > 500


def test_nothing_to_draw() -> None:
    image = Image.new("RGB", (400, 300), (1, 2, 3))
    assert np.array_equal(np.array(draw_objects(image, [], CATEGORIES)), np.array(image))


def test_categories_can_be_told_apart() -> None:
    colours = [category_colour(place) for place in range(80)]
    assert len(set(colours)) == 80
    for first, second in itertools.pairwise(colours):
        assert sum(abs(a - b) for a, b in zip(first, second, strict=True)) > 150
