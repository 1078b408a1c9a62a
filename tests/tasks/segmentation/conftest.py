"""A small data set in ADE20K's layout, drawn by the tests."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw

# What pixels look like, by their value: 0 is not labelled, 1 is the ground.
COLOURS = ((128, 128, 128), (40, 60, 40), (220, 50, 40), (40, 180, 70), (40, 70, 220))
DrawAde = Callable[..., Path]


def draw_ade(
    folder: Path,
    splits: dict[str, int] | None = None,
    *,
    sizes: tuple[tuple[int, int], ...] = ((96, 64), (64, 96), (80, 80)),
    classes: int = 4,
    unlabelled: int = 4,
    ending: str = ".png",
    seed: int = 0,
) -> Path:
    """Draw discs and rectangles of several classes on a ground, which is a class itself.

    Args:
        folder: Gets the images in images/SPLIT/ and the label maps in annotations/SPLIT/.
        splits: How many images a split has; None = {"training": 8, "validation": 4}.
        sizes: Width and height, for one image after the other.
        classes: Classes, from 2 to 4; every one is in every image.
        unlabelled: So many columns at the left have no label.
        ending: Of the image files: .png or .jpg.
        seed: Decides the pictures.

    Returns:
        The folder.
    """
    for split, count in ({"training": 8, "validation": 4} if splits is None else splits).items():
        drawing = random.Random(f"{seed} {split}")
        images, masks = folder / "images" / split, folder / "annotations" / split
        images.mkdir(parents=True, exist_ok=True)
        masks.mkdir(parents=True, exist_ok=True)
        for number in range(count):
            mask = _draw_mask(sizes[number % len(sizes)], classes, drawing)
            mask[:, :unlabelled] = 0
            noise = np.random.default_rng(drawing.randrange(2**32)).integers(-15, 16, (*mask.shape, 3))
            pixels = np.clip(np.array(COLOURS)[mask] + noise, 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(images / f"{number:04d}{ending}")
            Image.fromarray(mask).save(masks / f"{number:04d}.png")
    return folder


def _draw_mask(size: tuple[int, int], classes: int, drawing: random.Random) -> np.ndarray:
    """Values (height, width) of bytes: the ground, and a shape of each further class in a column of its own."""
    mask = Image.new("L", size, 1)
    draw = ImageDraw.Draw(mask)
    width, height = size[0] / (classes - 1), size[1]
    columns = drawing.sample(range(classes - 1), classes - 1)
    for value, column in enumerate(columns, start=2):
        shape = draw.ellipse if drawing.random() < 0.5 else draw.rectangle
        radius = drawing.uniform(0.25, 0.4) * min(width, height)
        x = (column + 0.6) * width
        y = drawing.uniform(radius, height - radius)
        shape((x - radius, y - radius, x + radius, y + radius), fill=value)
    return np.array(mask)


@pytest.fixture(scope="session", name="draw_ade")
def give_draw_ade() -> DrawAde:
    """`draw_ade` itself, for fixtures that keep a data set for several tests."""
    return draw_ade


@pytest.fixture
def ade_folder(tmp_path: Path) -> DrawAde:
    """Draws a data set: `ade_folder(splits={"training": 8}, …)` gives its folder; options as for `draw_ade`."""

    def draw(splits: dict[str, int] | None = None, **options: Any) -> Path:
        return draw_ade(tmp_path / "ade", splits, **options)

    return draw
