"""Pictures to explore: uploads, files that the user names, the embedded test images, and drawn samples."""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from ..data.images import decode_image, decompression_bomb_limit, describe_image_error, open_image, printable
from ..data.pixels import AnyImage
from ..tasks.classification.sources import embedded_fashion_mnist
from ..tasks.classification.transforms import InputSpec, evaluation_transform

# Bytes and pixels of a picture, beyond which it is refused.
MOST_UPLOAD_BYTES = 2**25
MOST_PIXELS = 50_000_000
# Characters of a file's name that are shown.
LONGEST_NAME = 80
# Side of drawn samples.
SIDE = 448


class PictureError(ValueError):
    """A picture cannot be used; the message says why, and what to do."""


@dataclass(frozen=True)
class Sample:
    """A picture that is offered.

    Attributes:
        title: What is shown.
        load: Returns its bytes (an image file) or the image.
    """

    title: str
    load: Callable[[], bytes | Image.Image]


def read_picture(content: bytes, name: str, specs: Sequence[InputSpec], max_pixels: int = MOST_PIXELS) -> list[Tensor]:
    """Decode the bytes of an image file into the inputs of models, (channels, H, W) each.

    Args:
        content: The file.
        name: What it is called, for messages.
        specs: The input of each model.
        max_pixels: Images with more pixels are refused before they are decoded.

    Raises:
        PictureError: It cannot be used.
    """
    name = clean_name(name)
    try:
        with decompression_bomb_limit(max_pixels), open_image(io.BytesIO(content)) as opened:
            # Pillow has no error between the limit and twice the limit for formats whose size is known later.
            require_pixels(opened, name, max_pixels)
            return to_inputs(opened, specs)
    except PictureError:
        raise
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise too_large(name, str(error), max_pixels) from error
    # A broken file can make Pillow raise anything.
    except Exception as error:
        problem = describe_image_error(name, error)
        raise PictureError(f"{problem}: choose a JPEG, PNG, WebP or TIFF picture") from error


def clean_name(name: str) -> str:
    """Return the name of a file as one short line."""
    name = printable(name).strip() or "the picture"
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"


def require_pixels(image: AnyImage, name: str, max_pixels: int) -> None:
    """Refuse an image with too many pixels, before it is decoded."""
    if image.size[0] * image.size[1] > max_pixels:
        raise too_large(name, str(image.size[0] * image.size[1]), max_pixels)


def too_large(name: str, message: str, max_pixels: int) -> PictureError:
    """Return the error for an image whose number of pixels is the first number of a message."""
    digits = next((word for word in message.replace("(", " ").split() if word.isdecimal()), "0")
    pixels = int(digits)
    return PictureError(
        f"{name} has {pixels / 1e6:.0f} megapixels, more than the limit of {max_pixels / 1e6:.0f}: make it smaller, or "
        f"start with --max-pixels {pixels} if you trust it"
    )


def to_inputs(image: AnyImage, specs: Sequence[InputSpec]) -> list[Tensor]:
    """Return an image as the inputs of models; what models share is decoded once."""
    decoded: dict[object, AnyImage] = {}
    inputs = []
    for spec in specs:
        if spec.pixel_format not in decoded:
            decoded[spec.pixel_format] = decode_image(image, spec.pixel_format)
        inputs.append(evaluation_transform(spec)(decoded[spec.pixel_format]))
    return inputs


def to_png(pixels: Tensor, spec: InputSpec) -> bytes:
    """Return what a model sees, a normalised input (channels, H, W), as a PNG file."""
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (spec.mean, spec.std))
    shown = (pixels.cpu() * std + mean).clamp(0, 1)
    # Of several bands, the first three.
    shown = shown[:3] if len(shown) >= 3 else shown[:1].expand(3, -1, -1)
    buffer = io.BytesIO()
    Image.fromarray((255 * shown).round().byte().permute(1, 2, 0).numpy()).save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def fashion_samples() -> list[Sample]:
    """Return one embedded Fashion-MNIST test image of each class."""
    source = embedded_fashion_mnist(training=False)
    firsts = [int(np.flatnonzero(source.labels == label)[0]) for label in range(len(source.classes))]
    return [
        Sample(source.classes[label], lambda index=index: source.read(index)[0])  # type: ignore[misc]
        for label, index in enumerate(firsts)
    ]


def drawn_samples() -> list[Sample]:
    """Return pictures that are drawn by this file."""
    return [
        Sample("shapes", draw_shapes),
        Sample("landscape", draw_landscape),
        Sample("repeated tiles", draw_tiles),
    ]


def coordinates() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return rows and columns of a sample, from 0 to 1."""
    axis = (np.arange(SIDE) + 0.5) / SIDE
    rows, columns = np.meshgrid(axis, axis, indexing="ij")
    return rows, columns


def paint(canvas: NDArray[np.float64], where: NDArray[np.bool_], color: tuple[int, int, int]) -> None:
    """Color the pixels of a canvas (side, side, 3)."""
    canvas[where] = color


def draw_shapes() -> Image.Image:
    """Draw a disc, a square, a triangle and two equal rings on a soft background."""
    y, x = coordinates()
    canvas = np.stack([205 + 30 * x, 212 + 20 * y, 225 - 25 * x], axis=-1)
    paint(canvas, (y - 0.3) ** 2 + (x - 0.28) ** 2 < 0.16**2, (214, 94, 0))
    paint(canvas, (abs(y - 0.68) < 0.14) & (abs(x - 0.27) < 0.14), (0, 114, 178))
    paint(canvas, (y < 0.85) & (y - 0.5 > 1.7 * abs(x - 0.7)), (0, 158, 115))
    for center in (0.57, 0.83):
        radius = np.sqrt((y - 0.25) ** 2 + (x - center) ** 2)
        paint(canvas, (radius < 0.11) & (radius > 0.06), (90, 60, 120))
    return Image.fromarray(canvas.clip(0, 255).astype(np.uint8))


def draw_landscape() -> Image.Image:
    """Draw hills, water, a sun and trees."""
    y, x = coordinates()
    canvas = np.stack([120 + 130 * y, 170 + 60 * y, 235 - 20 * y], axis=-1)
    paint(canvas, (y - 0.22) ** 2 + (x - 0.75) ** 2 < 0.08**2, (255, 236, 170))
    paint(canvas, y > 0.5 - 0.16 * np.sin(5 * x + 0.4) * np.sin(2 * x), (96, 125, 139))
    paint(canvas, y > 0.62 - 0.07 * np.sin(7 * x + 2), (76, 120, 84))
    paint(canvas, y > 0.8 + 0.02 * np.sin(9 * x), (58, 110, 165))
    paint(canvas, (y > 0.8) & (np.sin(160 * y) * np.sin(23 * x + 40 * y) > 0.75), (150, 190, 225))
    for trunk, top in ((0.14, 0.5), (0.24, 0.56), (0.55, 0.54)):
        paint(canvas, (abs(x - trunk) < 0.012) & (y > top) & (y < top + 0.23), (84, 60, 44))
        paint(canvas, (y > top) & (y < top + 0.16) & (abs(x - trunk) < 0.42 * (y - top)), (36, 82, 52))
    return Image.fromarray(canvas.clip(0, 255).astype(np.uint8))


def draw_tiles() -> Image.Image:
    """Draw equal tiles that differ in brightness only: their queries tend to have one direction and several lengths."""
    y, x = coordinates()
    inner_y, inner_x = (y * 7) % 1 - 0.5, (x * 7) % 1 - 0.5
    pattern = (np.abs(inner_y) + np.abs(inner_x) < 0.4).astype(float)
    light = 0.25 + 0.75 * (np.floor(x * 7) + np.floor(y * 7)) / 12
    canvas = light[..., None] * np.stack([60 + 150 * pattern, 90 + 60 * pattern, 200 - 130 * pattern], axis=-1)
    return Image.fromarray(canvas.clip(0, 255).astype(np.uint8))
