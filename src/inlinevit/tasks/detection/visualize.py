"""Objects drawn on their image: boxes, masks and labels."""

import colorsys
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw
from PIL.ImageFont import FreeTypeFont
from pycocotools import mask as coco_masks

from ...utils.fonts import enlargement, font_for, shortened
from .coco import Category, Record

# Hues of one category after the other are this far apart, so that neighbours and their neighbours differ.
GOLDEN_RATIO = 0.618
LIGHTNESSES = (0.55, 0.72, 0.4)
OPACITY = 0.4
# What the shorter side of an image is divided by, for lines.
LINE_PARTS = 300
Colour = tuple[int, int, int]


def draw_objects(image: Image.Image, results: Sequence[Record], categories: Sequence[Category]) -> Image.Image:
    """A copy of an image with its objects, the surest on top. A very small one is enlarged, by a whole factor.

    Args:
        image: In RGB.
        results: Its objects in COCO's results format, with box, mask or both; true objects have no score.
        categories: All there are; the place of each decides its colour.
    """
    colours = {category.id: category_colour(place) for place, category in enumerate(categories)}
    names = {category.id: category.name for category in categories}
    ranked = sorted(results, key=lambda result: result.get("score", 1.0))
    line = _line_width(image)
    pixels = np.array(image)
    for result in ranked:
        if "segmentation" not in result:
            continue
        paint_mask(pixels, result["segmentation"], colours[result["category_id"]], line)
    factor = enlargement(image)
    drawn = Image.fromarray(pixels).resize((factor * image.width, factor * image.height), Image.Resampling.NEAREST)
    draw = ImageDraw.Draw(drawn)
    boxes = [[factor * value for value in object_box(result)] for result in ranked]
    for result, (x, y, width, height) in zip(ranked, boxes, strict=True):
        corners = (x, y, x + width, y + height)
        draw.rectangle(corners, outline=colours[result["category_id"]], width=_line_width(drawn))
    # After all boxes, so that no line crosses a text.
    font = font_for(drawn)
    for result, box in zip(ranked, boxes, strict=True):
        name = names[result["category_id"]]
        texts = (f"{name} {100 * result['score']:.0f}%", name) if "score" in result else (name,)
        write_label(draw, texts, box, colours[result["category_id"]], font)
    return drawn


def object_box(result: Record) -> list[float]:
    """Return the box of an object, x, y, width and height; that of its mask, if it has no other."""
    return result["bbox"] if "bbox" in result else coco_masks.toBbox(result["segmentation"]).tolist()


def _line_width(image: Image.Image) -> int:
    return max(1, round(min(image.size) / LINE_PARTS))


def category_colour(place: int) -> Colour:
    """A colour for the category at this place, which can be told from those of its neighbours."""
    lightness = LIGHTNESSES[place % len(LIGHTNESSES)]
    red, green, blue = colorsys.hls_to_rgb(place * GOLDEN_RATIO % 1, lightness, 1.0)
    return round(255 * red), round(255 * green), round(255 * blue)


def paint_mask(pixels: np.ndarray, rle: Record, colour: Colour, line: int) -> None:
    """Lay a colour over the pixels (height, width, 3) of a mask, in place, and draw an edge of `line` pixels."""
    left, top, width, height = (int(value) for value in coco_masks.toBbox(rle))
    place = (slice(top, top + height), slice(left, left + width))
    mask = coco_masks.decode(rle)[place].astype(bool)
    around = np.pad(mask, line)
    inner = mask.copy()
    for down, right in ((0, line), (2 * line, line), (line, 0), (line, 2 * line)):
        inner &= around[down : down + height, right : right + width]
    region = pixels[place]
    region[inner] = (region[inner] * (1 - OPACITY) + np.array(colour) * OPACITY).astype(np.uint8)
    region[mask & ~inner] = colour


def write_label(
    draw: ImageDraw.ImageDraw, texts: Sequence[str], box: Sequence[float], colour: Colour, font: FreeTypeFont
) -> None:
    """Write the first of some texts that is not wider than the image above a box (x, y, width, height), or into it."""
    width, height = draw.im.size
    margin = max(1, round(font.size / 8))
    room = width - 2 * margin
    text = shortened(next((text for text in texts if font.getlength(text) <= room), texts[-1]), font, room)
    ascent, descent = font.getmetrics()
    wide, high = font.getlength(text) + 2 * margin, ascent + descent
    left = max(0.0, min(box[0], width - wide))
    top = box[1] - high if box[1] >= high else max(0.0, min(box[1], height - high))
    draw.rectangle((left, top, left + wide, top + high), fill=colour)
    # The luma of the ground.
    is_bright = np.dot(colour, (0.299, 0.587, 0.114)) > 140
    draw.text((left + margin, top), text, fill="black" if is_bright else "white", font=font)
