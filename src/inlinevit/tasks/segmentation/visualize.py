"""Labels drawn on their image: colours that it shines through, and what they mean."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from ...utils.fonts import LEGIBLE_SIDE, enlargement, font_for, shortened
from .labels import SegmentationClass

OPACITY = 0.5
# Rows that are painted at a time, so that large images need little memory.
ROWS_AT_ONCE = 256
# A legend names so many classes, those with the most pixels.
MOST_NAMED = 40
GROUND, INK, FRAME = (255, 255, 255), (0, 0, 0), (128, 128, 128)


@dataclass
class ClassShare:
    """A class that occurs in an image.

    Attributes:
        kind: The class.
        share: The share of the image's pixels, from above 0 to 1.
    """

    kind: SegmentationClass
    share: float


def class_shares(indices: NDArray[np.uint8], classes: list[SegmentationClass]) -> list[ClassShare]:
    """The classes that occur in an image, the one with the most pixels first.

    Args:
        indices: (height, width) the class of each pixel.
        classes: All there are.
    """
    counts = np.sum([np.bincount(rows.ravel(), minlength=len(classes)) for rows in _in_parts(indices)], axis=0)
    shares = [ClassShare(kind, int(count) / indices.size) for kind, count in zip(classes, counts, strict=True) if count]
    return sorted(shares, key=lambda one: one.share, reverse=True)


def draw_labels(image: Image.Image, indices: NDArray[np.uint8], classes: list[SegmentationClass]) -> Image.Image:
    """An image painted with the colours of its pixels' classes, and a legend below it.

    A very small image is enlarged, by a whole factor, and the legend is never too narrow to be read.

    Args:
        image: In RGB.
        indices: (height, width) the class of each pixel.
        classes: All there are.
    """
    painted = Image.fromarray(paint(np.array(image), indices, classes))
    factor = enlargement(image)
    if factor > 1:
        painted = painted.resize((factor * image.width, factor * image.height), Image.Resampling.NEAREST)
    legend = draw_legend(class_shares(indices, classes), max(painted.width, LEGIBLE_SIDE // 2), font_for(painted))
    drawn = Image.new("RGB", (legend.width, painted.height + legend.height), GROUND)
    drawn.paste(painted, (0, 0))
    drawn.paste(legend, (0, painted.height))
    return drawn


def paint(pixels: NDArray[np.uint8], indices: NDArray[np.uint8], classes: list[SegmentationClass]) -> NDArray[np.uint8]:
    """Lay the colours of classes over an image.

    Args:
        pixels: (height, width, 3), which are changed.
        indices: (height, width) the class of each pixel.
        classes: All there are.

    Returns:
        The pixels.
    """
    colours = np.array([kind.colour for kind in classes], np.float32) * OPACITY
    for part, own in zip(_in_parts(pixels), _in_parts(indices), strict=True):
        part[:] = part * np.float32(1 - OPACITY) + colours[own]
    return pixels


def _in_parts(rows: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
    return [rows[top : top + ROWS_AT_ONCE] for top in range(0, len(rows), ROWS_AT_ONCE)]


def draw_legend(shares: list[ClassShare], width: int, font: ImageFont.FreeTypeFont) -> Image.Image:
    """The classes that occur, with their colours and shares, in columns.

    Args:
        shares: The classes, the most frequent first.
        width: Of the legend.
        font: The font.
    """
    texts = [f"{one.kind.name} {percent(one.share)}" for one in shares[:MOST_NAMED]]
    more = len(shares) - len(texts)
    swatch = round(font.size)
    margin = round(font.size / 2)
    line = round(1.5 * font.size)
    room = width - swatch - 3 * margin
    texts = [shortened(text, font, room) for text in [*texts, *([f"and {more} more"] if more else [])]]
    column = swatch + 2 * margin + max(round(font.getlength(text)) for text in texts)
    columns = max(1, (width - margin) // column)
    rows = -(-len(texts) // columns)
    legend = Image.new("RGB", (width, 2 * margin + rows * line), GROUND)
    draw = ImageDraw.Draw(legend)
    for place, text in enumerate(texts):
        left, top = margin + place // rows * column, margin + place % rows * line
        if place < len(shares[:MOST_NAMED]):
            corners = (left, top, left + swatch, top + swatch)
            draw.rectangle(corners, fill=shares[place].kind.colour, outline=FRAME, width=max(1, swatch // 12))
        draw.text((left + swatch + margin, top + swatch / 2), text, fill=INK, font=font, anchor="lm")
    return legend


def percent(share: float) -> str:
    """A share in percent, for people."""
    return "< 1 %" if share < 0.005 else f"{100 * share:.0f} %"
