"""Text on images."""

import pytest
from PIL import Image

from inlinevit.utils.fonts import enlargement, font_for, load_font, shortened


@pytest.mark.parametrize(
    ("size", "expected"), [((2, 2), 160), ((64, 48), 5), ((160, 90), 2), ((161, 9), 1), ((6000, 9), 1)]
)
def test_small_images_are_enlarged(size: tuple[int, int], expected: int) -> None:
    assert enlargement(Image.new("L", size)) == expected


def test_text_grows_with_the_shorter_side() -> None:
    assert font_for(Image.new("L", (4000, 100))).size == 10
    assert font_for(Image.new("L", (3600, 7200))).size == 100


def test_texts_are_made_to_fit() -> None:
    font = load_font(12)
    assert shortened("short", font, 100) == "short"
    cut = shortened("a text that is much too long", font, 100)
    assert cut.startswith("a text")
    assert cut.endswith("…")
    assert font.getlength(cut) <= 100
    assert shortened("text", font, 0) == "…"
