"""Text on images: in sizes that can be read, in a font that knows many alphabets."""

from functools import cache
from pathlib import Path

from PIL import Image, ImageFont

# What the shorter side of an image is divided by.
TEXT_PARTS = 36
SMALLEST_TEXT = 10
# Images whose longer side is at most half of this are enlarged: text would hide all that is on them.
LEGIBLE_SIDE = 320


def enlargement(image: Image.Image) -> int:
    """By which whole factor an image is to be enlarged before something is written on it."""
    return max(1, LEGIBLE_SIDE // max(image.size))


def font_for(image: Image.Image) -> ImageFont.FreeTypeFont:
    """A font that can be read on an image, also when the whole of it is seen on a screen."""
    return load_font(max(SMALLEST_TEXT, round(min(image.size) / TEXT_PARTS)))


@cache
def load_font(size: int) -> ImageFont.FreeTypeFont:
    """A font that knows more alphabets than Pillow's own: matplotlib brings it along."""
    # Here, because matplotlib takes its time.
    import matplotlib

    return ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"), size)


def shortened(text: str, font: ImageFont.FreeTypeFont, room: float) -> str:
    """A text that is not wider than there is room for, but for its first letter."""
    while len(text) > 1 and font.getlength(text) > room:
        text = f"{text.removesuffix('…')[:-1]}…"
    return text
