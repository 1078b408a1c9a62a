"""Fonts for text on images: legible sizes, many alphabets."""

from functools import cache
from pathlib import Path

from PIL import Image, ImageFont

# The shorter side of an image divided by the size of its text.
TEXT_PARTS = 36
SMALLEST_TEXT = 10
# Images whose longer side is at most half of this are enlarged: text would hide all that is on them.
LEGIBLE_SIDE = 320


def enlargement(image: Image.Image) -> int:
    """Return the integer factor to enlarge an image by before text is drawn on it."""
    return max(1, LEGIBLE_SIDE // max(image.size))


def font_for(image: Image.Image) -> ImageFont.FreeTypeFont:
    """Return a font that is legible on an image, also when the whole image is shown on a screen."""
    return load_font(max(SMALLEST_TEXT, round(min(image.size) / TEXT_PARTS)))


@cache
def load_font(size: int) -> ImageFont.FreeTypeFont:
    """Return a font with more alphabets than Pillow's own; it comes with matplotlib."""
    # Here, because importing matplotlib is slow.
    import matplotlib

    return ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"), size)


def shortened(text: str, font: ImageFont.FreeTypeFont, max_width: float) -> str:
    """Return a text cut to a width in pixels; its first letter always stays."""
    while len(text) > 1 and font.getlength(text) > max_width:
        text = f"{text.removesuffix('…')[:-1]}…"
    return text
