"""A small data set in COCO's format, drawn by the tests."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from pycocotools import mask as coco_masks

# Ids with gaps, and not in order, as they may be in a file.
CATEGORIES = [{"id": 90, "name": "triangle"}, {"id": 3, "name": "disc"}, {"id": 7, "name": "square"}]
COLOURS = {"triangle": (40, 70, 220), "disc": (220, 50, 40), "square": (40, 180, 70)}
DrawCoco = Callable[..., Path]


def draw_coco(
    folder: Path,
    splits: dict[str, int] | None = None,
    *,
    sizes: tuple[tuple[int, int], ...] = ((96, 64), (64, 96), (80, 80)),
    objects: int = 3,
    empty: int = 1,
    crowds: int = 1,
    segmentation: str = "mixed",
    ending: str = ".png",
    seed: int = 0,
) -> Path:
    """Draw discs, squares and triangles on noise.

    Args:
        folder: Gets the images in SPLIT/ and the annotations in annotations/instances_SPLIT.json.
        splits: How many images a split has; None = {"train2017": 8, "val2017": 4}.
        sizes: Width and height, for one image after the other.
        objects: Objects of an image, at most; at least one.
        empty: So many images of a split, the last ones, have no objects.
        crowds: So many images of a split, the first ones, have a crowd.
        segmentation: How masks are written: polygon, counts (RLE as a list), rle (compressed), mixed = all in turn.
        ending: Of the image files: .png or .jpg.
        seed: Decides the pictures.

    Returns:
        The folder.
    """
    for split, count in ({"train2017": 8, "val2017": 4} if splits is None else splits).items():
        drawing = random.Random(f"{seed} {split}")
        (folder / split).mkdir(parents=True, exist_ok=True)
        (folder / "annotations").mkdir(exist_ok=True)
        images: list[dict[str, Any]] = []
        annotations: list[dict[str, Any]] = []
        for number in range(count):
            width, height = sizes[number % len(sizes)]
            # Ids with gaps here, too.
            record = {"id": 10 + 3 * number, "file_name": f"{number:04d}{ending}", "width": width, "height": height}
            noise = np.random.default_rng(drawing.randrange(2**32)).integers(90, 140, (height, width, 3), np.uint8)
            image = Image.fromarray(noise)
            free = np.ones((height, width), bool)
            for _ in range(0 if number >= count - empty else drawing.randint(1, objects)):
                category = drawing.choice(CATEGORIES)
                points = _outline(category["name"], free, drawing)
                ImageDraw.Draw(image).polygon(points, fill=COLOURS[category["name"]])
                kind = ("polygon", "counts", "rle")[len(annotations) % 3] if segmentation == "mixed" else segmentation
                annotations.append(_annotation(len(annotations) + 1, record, category["id"], points, kind))
            if number < crowds:
                corner = [(0, 0), (width // 4, 0), (width // 4, height // 4), (0, height // 4)]
                crowd = _annotation(len(annotations) + 1, record, 3, corner, "counts")
                annotations.append(crowd | {"iscrowd": 1})
            image.save(folder / split / record["file_name"])
            images.append(record)
        # Records come in any order in a file.
        content = {"images": images[::-1], "annotations": annotations, "categories": CATEGORIES}
        (folder / "annotations" / f"instances_{split}.json").write_text(json.dumps(content))
    return folder


def _outline(name: str, free: NDArray[np.bool_], drawing: random.Random) -> list[tuple[float, float]]:
    """The corners of a shape somewhere in the image, where no other is if there is room; takes its place."""
    height, width = free.shape
    corners, first = {"triangle": (3, 0.75), "square": (4, 0.125), "disc": (24, 0.0)}[name]
    angles = [2 * np.pi * (first + corner / corners) for corner in range(corners)]
    for _ in range(50):
        radius = drawing.uniform(0.15, 0.3) * min(width, height)
        x, y = drawing.uniform(radius, width - radius), drawing.uniform(radius, height - radius)
        place = free[int(y - radius) : int(y + radius) + 1, int(x - radius) : int(x + radius) + 1]
        if place.all():
            break
    place[:] = False
    return [(float(x + radius * np.cos(angle)), float(y + radius * np.sin(angle))) for angle in angles]


def _annotation(
    number: int, image: dict[str, Any], category: int, points: list[tuple[float, float]], kind: str
) -> dict[str, Any]:
    """COCO's record of a shape, with its mask written as asked for."""
    polygon = [float(value) for point in points for value in point]
    rle = coco_masks.merge(coco_masks.frPyObjects([polygon], image["height"], image["width"]))
    segmentation: Any = [polygon]
    if kind == "rle":
        segmentation = {"size": rle["size"], "counts": rle["counts"].decode()}
    elif kind == "counts":
        # Column by column, beginning with zeros.
        pixels = coco_masks.decode(rle).flatten(order="F")
        edges = np.flatnonzero(np.diff(pixels, prepend=0)).tolist()
        segmentation = {"size": rle["size"], "counts": np.diff([0, *edges, len(pixels)]).tolist()}
    left, top = (min(point[axis] for point in points) for axis in (0, 1))
    right, bottom = (max(point[axis] for point in points) for axis in (0, 1))
    return {
        "id": number,
        "image_id": image["id"],
        "category_id": category,
        "bbox": [left, top, right - left, bottom - top],
        "area": float(coco_masks.area(rle)),
        "iscrowd": 0,
        "segmentation": segmentation,
    }


@pytest.fixture(scope="session", name="draw_coco")
def give_draw_coco() -> DrawCoco:
    """`draw_coco` itself, for fixtures that keep a data set for several tests."""
    return draw_coco


@pytest.fixture
def coco_folder(tmp_path: Path) -> DrawCoco:
    """Draws a data set: `coco_folder(splits={"train2017": 8}, …)` gives its folder; options as for `draw_coco`."""

    def draw(splits: dict[str, int] | None = None, **options: Any) -> Path:
        return draw_coco(tmp_path / "coco", splits, **options)

    return draw
