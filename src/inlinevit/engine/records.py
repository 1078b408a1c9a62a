"""What an evaluation records of single images: a row of predictions.csv each, and pictures of the worst."""

import heapq
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from accelerate.utils import gather_object
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2.functional import to_pil_image

from ..data.images import display_name
from ..utils.atomic import finite

# How many of the worst images have a picture.
WORST_IMAGES = 20
# Sides of pictures: larger images are reduced, very small ones are enlarged by a whole factor.
LARGEST_SIDE = 640
SMALLEST_SIDE = 96
JPEG_QUALITY = 88
# Digits of numbers in predictions.csv: the order of additions, which depends on the batch, must not show.
DIGITS = 5


class Row(NamedTuple):
    """One image in predictions.csv: its index in the data, its file, its values, and why there are none, if so."""

    place: int
    file: str
    values: tuple[Any, ...]
    error: str = ""


class WorstImage(NamedTuple):
    """One of the worst images.

    Attributes:
        badness: What images are ranked by; the largest is the worst.
        order: The negative index in the data: among equals, the first comes first.
        file: The image.
        lines: What to say about it.
        pictures: Encoded images by what they show.
    """

    badness: tuple[float, ...]
    order: int
    file: str
    lines: tuple[str, ...]
    pictures: dict[str, bytes]


@dataclass
class ImageRecords:
    """The records of all images.

    Attributes:
        columns: What the values of rows are called.
        rows: In the order of the data.
        worst: The worst images, the worst first.
    """

    columns: tuple[str, ...] = ()
    rows: list[Row] = field(default_factory=list)
    worst: list[WorstImage] = field(default_factory=list)


class ImageRecorder:
    """Records the images that one process evaluates.

    Only the worst images are drawn, when they are met, and only their pictures are kept: it does not matter whether the
    data can be read again.

    Args:
        count: How many of the worst images to keep.
    """

    def __init__(self, count: int = WORST_IMAGES) -> None:
        self.count = count
        self.columns: tuple[str, ...] = ()
        self.rows: list[Row] = []
        self.worst: list[WorstImage] = []

    def add(
        self,
        index: int,
        file: str,
        values: Mapping[str, Any],
        *,
        badness: tuple[float, ...] | None,
        lines: tuple[str, ...],
        draw: Callable[[], dict[str, Image.Image]],
    ) -> None:
        """Record an image.

        Args:
            index: Its index in the data.
            file: What it is called.
            values: Its values by column, the same columns for each image; None where there is no value.
            badness: What images are ranked by, the largest is the worst; None = there is nothing wrong with it.
            lines: What to say about it, if it is one of the worst.
            draw: Makes pictures of it, by what they show; called only if it is one of the worst so far.
        """
        self.columns = tuple(values)
        self.rows.append(Row(index, display_name(file), tuple(values.values())))
        if badness is None:
            return
        rank = badness, -index
        if len(self.worst) == self.count and rank < self.worst[0][:2]:
            return
        pictures = {name: encode_picture(image) for name, image in draw().items()}
        heapq.heappush(self.worst, WorstImage(*rank, display_name(file), lines, pictures))
        if len(self.worst) > self.count:
            heapq.heappop(self.worst)

    def skip(self, index: int, file: str, error: str) -> None:
        """Record an image that could not be used."""
        self.rows.append(Row(index, display_name(file), (), display_name(error)))

    def gather(self) -> ImageRecords:
        """Return the records of all processes, the same on each; all of them call this."""
        parts = gather_object([(self.columns, self.rows, self.worst)])
        columns = next((own for own, _, _ in parts if own), ())
        rows = sorted((row for _, own, _ in parts for row in own), key=lambda row: row.place)
        worst = sorted((case for _, _, own in parts for case in own), key=lambda case: case[:2], reverse=True)
        return ImageRecords(columns, rows, worst[: self.count])


def rounded(values: Mapping[str, float]) -> dict[str, float | None]:
    """Return numbers as predictions.csv has them; None for NaN and infinity."""
    return {name: None if value is None else round(value, DIGITS) for name, value in finite(dict(values)).items()}


def to_picture(pixels: Tensor) -> Image.Image:
    """Return pixels (channels, height, width), bytes or numbers from 0 to 1, as an image.

    Of images with more than three channels, the first three are shown; of those with two, the first.
    """
    shown = pixels[:3] if len(pixels) >= 3 else pixels[:1]
    if shown.is_floating_point():
        shown = (255 * shown.float().nan_to_num().clamp(0, 1) + 0.5).to(torch.uint8)
    return to_pil_image(shown)


def encode_picture(image: Image.Image) -> bytes:
    """Return an image as a small file: JPEG, or PNG if it is so small that its pixels count."""
    factor = SMALLEST_SIDE // max(image.size)
    shown = image.convert("RGB")
    buffer = io.BytesIO()
    if factor > 1:
        shown = shown.resize((factor * image.width, factor * image.height), Image.Resampling.NEAREST)
        shown.save(buffer, format="PNG")
    else:
        shown.thumbnail((LARGEST_SIDE, LARGEST_SIDE))
        shown.save(buffer, format="JPEG", quality=JPEG_QUALITY)
    return buffer.getvalue()
