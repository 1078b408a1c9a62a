"""Labels drawn on their image in colours that it shines through, and a legend of what they mean."""

from operator import itemgetter

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from ...utils.fonts import load_font, shortened
from .labels import SegmentationClass

OPACITY = 0.5
# A legend names so many classes, those with the most pixels.
MOST_NAMED = 40
# Pixels.
LEGEND_WIDTH, LEGEND_TEXT, NARROWEST = 640, 16, 160
GROUND, INK, FRAME = (255, 255, 255), (0, 0, 0), (128, 128, 128)


def class_shares(indices: NDArray[np.uint8], classes: list[SegmentationClass]) -> list[tuple[SegmentationClass, float]]:
    """Return the classes that occur in an image with their shares of its pixels, the most frequent first.

    Args:
        indices: (height, width) the class of each pixel.
        classes: All there are.
    """
    # Pillow counts bytes as they are; numpy would need eight times the memory.
    counts = Image.fromarray(indices).histogram()
    shares = [(one, count / indices.size) for one, count in zip(classes, counts, strict=False) if count]
    return sorted(shares, key=itemgetter(1), reverse=True)


def draw_labels(image: Image.Image, indices: NDArray[np.uint8], classes: list[SegmentationClass]) -> Image.Image:
    """Return an image painted with the colours of its pixels' classes, in its own size.

    Args:
        image: In RGB.
        indices: (height, width) the class of each pixel; pixels of other values are black.
        classes: All there are.
    """
    colours = Image.fromarray(indices)
    colours.putpalette([value for one in classes for value in one.colour])
    return Image.blend(image, colours.convert("RGB"), OPACITY)


def draw_with_legend(image: Image.Image, indices: NDArray[np.uint8], classes: list[SegmentationClass]) -> Image.Image:
    """Return draw_labels() with its legend below it, at least NARROWEST pixels wide; arguments as there."""
    painted = draw_labels(image, indices, classes)
    legend = draw_legend(class_shares(indices, classes), max(painted.width, NARROWEST))
    drawn = Image.new("RGB", (legend.width, painted.height + legend.height), GROUND)
    drawn.paste(painted, (0, 0))
    drawn.paste(legend, (0, painted.height))
    return drawn


def draw_legend(
    shares: list[tuple[SegmentationClass, float]], width: int = LEGEND_WIDTH, text_size: int = LEGEND_TEXT
) -> Image.Image:
    """Draw the classes that occur, the most frequent first, with their colours and shares, in columns.

    Args:
        shares: See class_shares().
        width: Of the drawing, in pixels.
        text_size: Of its letters, in pixels.
    """
    font = load_font(text_size)
    texts = [f"{one.name} {whole_percent(share)}" for one, share in shares[:MOST_NAMED]]
    more = len(shares) - len(texts)
    swatch = round(font.size)
    margin = round(font.size / 2)
    line = round(1.5 * font.size)
    room = width - swatch - 3 * margin
    texts = [shortened(text, font, room) for text in [*texts, *([f"and {more} more"] if more else [])]]
    column = swatch + 2 * margin + max((round(font.getlength(text)) for text in texts), default=0)
    columns = max(1, (width - margin) // column)
    rows = -(-len(texts) // columns)
    legend = Image.new("RGB", (width, 2 * margin + rows * line), GROUND)
    draw = ImageDraw.Draw(legend)
    for place, text in enumerate(texts):
        left, top = margin + place // rows * column, margin + place % rows * line
        if place < len(shares[:MOST_NAMED]):
            corners = (left, top, left + swatch, top + swatch)
            draw.rectangle(corners, fill=shares[place][0].colour, outline=FRAME, width=max(1, swatch // 12))
        draw.text((left + swatch + margin, top + swatch / 2), text, fill=INK, font=font, anchor="lm")
    return legend


def whole_percent(share: float) -> str:
    """Return a share in percent, for people."""
    return "< 1 %" if share < 0.005 else f"{100 * share:.0f} %"
