"""Drawings of labels. Whether they are fair to look at, no test can tell."""

import numpy as np
import pytest
from PIL import Image

from inlinevit.tasks.segmentation.labels import SegmentationClass, ade_labels
from inlinevit.tasks.segmentation.visualize import (
    OPACITY,
    class_shares,
    draw_labels,
    draw_legend,
    whole_percent,
)

RED, GREEN, BLUE = (
    SegmentationClass(name, [1], colour)
    for name, colour in (
        ("red", (200, 0, 0)),
        ("a green with a name that is much wider than the whole image", (0, 200, 0)),
        ("blue", (0, 0, 200)),
    )
)
CLASSES = [RED, GREEN, BLUE]


def halves(height: int, width: int) -> np.ndarray:
    """Red on the left, blue on the right."""
    indices = np.zeros((height, width), np.uint8)
    indices[:, width // 2 :] = 2
    return indices


def blended(ground: int, colour: tuple[int, ...]) -> list[int]:
    return [int(ground * (1 - OPACITY) + part * OPACITY) for part in colour]


def test_the_image_shines_through() -> None:
    image = Image.new("RGB", (400, 300), (100, 100, 100))
    drawn = np.array(draw_labels(image, halves(300, 400), CLASSES))
    assert (drawn[:, :200] == blended(100, RED.colour)).all()
    assert (drawn[:, 200:] == blended(100, BLUE.colour)).all()
    # The image itself is left as it was.
    assert image.getpixel((0, 0)) == (100, 100, 100)


def test_the_legend_has_the_classes_that_occur() -> None:
    legend = np.array(draw_legend(class_shares(halves(300, 400), CLASSES)))
    assert 10 < len(legend) < 60
    for kind, expected in ((RED, True), (GREEN, False), (BLUE, True)):
        assert ((legend == kind.colour).all(axis=2).sum() > 50) == expected
    # Some of it is text.
    assert (legend.max(axis=2) < 80).sum() > 50


@pytest.mark.parametrize("size", [(64, 48), (2, 100), (3000, 9)])
def test_an_overlay_has_the_size_of_its_image(size: tuple[int, int]) -> None:
    image = Image.new("RGB", size, (100, 100, 100))
    assert draw_labels(image, np.ones((size[1], size[0]), np.uint8), CLASSES).size == size


def test_all_of_a_legend_is_to_be_seen() -> None:
    """Nothing is written over the border, however narrow it is and however many there are."""
    classes = ade_labels(150).classes
    indices = np.arange(150, dtype=np.uint8)[:, None].repeat(3, axis=1)
    for width in (160, 500, 2000):
        for some in (indices, indices[:40], indices[:3]):
            legend = draw_legend(class_shares(some, classes), width, 20)
            assert legend.width == width
            border = np.array(legend)
            for edge in (border[0], border[-1], border[:, 0], border[:, -1]):
                assert (edge == 255).all()
    tall = draw_legend(class_shares(indices[:40], classes), 160, 20)
    more = draw_legend(class_shares(indices, classes), 160, 20)
    # A line that there are more of them.
    assert tall.height < more.height < 1.1 * tall.height


def test_shares_of_classes() -> None:
    indices = np.zeros((512, 10), np.uint8)
    indices[-1, :5] = 2
    shares = class_shares(indices, CLASSES)
    assert [one for one, _ in shares] == [RED, BLUE]
    assert shares[1][1] == pytest.approx(0.5 / (512))
    assert sum(share for _, share in shares) == pytest.approx(1)
    assert class_shares(halves(4, 5), CLASSES)[0][0] == BLUE


def test_shares_in_words() -> None:
    assert [whole_percent(share) for share in (1.0, 0.256, 0.006, 0.0049)] == ["100 %", "26 %", "1 %", "< 1 %"]
