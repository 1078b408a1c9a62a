"""What the values of an image mean: its bands, their range, and the 8 bits per band that models get.

docs/images.md has the table of all kinds of images. This module has the rules; `data/images.py` opens files.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from PIL.TiffImagePlugin import BITSPERSAMPLE, EXTRASAMPLES, PHOTOMETRIC_INTERPRETATION, SAMPLEFORMAT
from torch import Tensor

# Modes of Pillow's with 8 bits per band or fewer.
EIGHT_BITS = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV")
# What becomes of modes whose bands are not colours of light, before bands are counted.
AS_COLOURS = {
    "1": "L",
    "La": "LA",
    "PA": "RGBA",
    "RGBa": "RGBA",
    **dict.fromkeys(("CMYK", "YCbCr", "LAB", "HSV"), "RGB"),
}
# Values of TIFF's tags: alpha among extra samples, sample formats, 0 for white, and GDAL's value of no data.
ALPHA_SAMPLES, UNSIGNED, SIGNED, ZERO_IS_WHITE = (1, 2), 1, 2, 0
GDAL_NODATA = 42113
# How many bits cameras and sensors use of 16.
BITS_IN_USE = (8, 10, 12, 14, 16)
# Rows that are scaled at a time, so that large images need little memory.
ROWS_AT_ONCE = 256
ORIENTATION = 0x0112
# Pillow's methods by the orientation of EXIF data.
TRANSPOSED = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

# "auto", "type", how many bits are used, or the values that become black and white.
PixelRange = Literal["auto", "type"] | int | tuple[float, float]


@dataclass(frozen=True)
class PixelFormat:
    """How images become the input of a model.

    Attributes:
        channels: Of the model.
        bands: Which bands of an image, in this order, from 0 on; None = all, if there are as many as channels.
        range: Which values become 0 … 255. "auto": by the type of the values and, of unsigned 16-bit integers, by the
            bits that the image uses; other types than these, 8 bits and floats from 0 to 1 are refused. "type": the
            whole range of the type (floats: 0 to 1). A number: so many bits are used, and larger values are refused.
            Two numbers: from the first to the second, and what is beyond is clipped.
    """

    channels: int = 3
    bands: tuple[int, ...] | None = None
    range: PixelRange = "auto"

    def blank(self) -> "Image.Image | BandArray":
        """Return a small black image in this format."""
        return _as_image(np.zeros((64, 64, self.channels), np.uint8), self.channels)


class BandArray:
    """An image as an array: what Pillow has no mode for.

    It has the attributes of a PIL image that this library uses.

    Args:
        values: (height, width) or (height, width, bands), of any type of integers or floats.
        has_alpha: Whether the last band is alpha, which is left out unless the model has a channel for it.
        is_rgb: Whether three bands are red, green and blue, which can become grey.
        nodata: The value of pixels without data, which become black.
        orientation: As in EXIF data.
    """

    format = "array"

    def __init__(
        self,
        values: NDArray[Any] | None,
        *,
        has_alpha: bool = False,
        is_rgb: bool = True,
        nodata: float | None = None,
        orientation: int = 1,
    ) -> None:
        if values is not None:
            if values.ndim not in (2, 3) or values.dtype.kind not in "buif" or 0 in values.shape:
                raise ValueError(
                    f"it is an array of {values.dtype} of the shape {values.shape}: give (height, width) or (height, "
                    "width, bands) of integers or floats"
                )
            values = values if values.ndim == 3 else values[..., None]
            self.height, self.width, self.bands = values.shape
            self.dtype = values.dtype
        self._values = values
        self.has_alpha, self.is_rgb, self.nodata, self.orientation = has_alpha, is_rgb, nodata, orientation

    def read(self) -> NDArray[Any]:
        """Return the values, (height, width, bands)."""
        assert self._values is not None
        return self._values

    @property
    def size(self) -> tuple[int, int]:
        """Width and height."""
        return self.width, self.height

    @property
    def mode(self) -> str:
        """The bands and their type, for messages."""
        return f"{self.bands} bands of {self.dtype}"

    def getbands(self) -> tuple[str, ...]:
        """Return a name for each band."""
        return tuple(map(str, range(self.bands)))

    def close(self) -> None:
        """Close the file, if there is one."""

    def __enter__(self) -> "BandArray":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def transpose(self, method: Image.Transpose) -> "BandArray":
        """Return a copy that is flipped or rotated, as Pillow's."""
        values = self.read()
        turned = {
            Image.Transpose.FLIP_LEFT_RIGHT: lambda: values[:, ::-1],
            Image.Transpose.ROTATE_180: lambda: np.rot90(values, 2),
            Image.Transpose.FLIP_TOP_BOTTOM: lambda: values[::-1],
            Image.Transpose.TRANSPOSE: lambda: values.swapaxes(0, 1),
            Image.Transpose.ROTATE_270: lambda: np.rot90(values, -1),
            Image.Transpose.TRANSVERSE: lambda: np.rot90(values, 2).swapaxes(0, 1),
            Image.Transpose.ROTATE_90: lambda: np.rot90(values),
        }[method]()
        return BandArray(np.ascontiguousarray(turned), has_alpha=self.has_alpha, is_rgb=self.is_rgb, nodata=self.nodata)


# An image in memory.
AnyImage = Image.Image | BandArray


def convert_pixels(image: AnyImage, pixel_format: PixelFormat) -> AnyImage:
    """Decode an image and convert it to the input of a model, 8 bits per band, without rotation.

    Args:
        image: An image of Pillow's, or an array.
        pixel_format: The bands and values that the model gets.

    Returns:
        A PIL image in RGB or L for three channels or one; else a BandArray.

    Raises:
        OSError: It cannot be decoded.
        ValueError: It has other bands than the model needs, or it is not clear what its values mean.
    """
    channels = pixel_format.channels
    if isinstance(image, Image.Image) and _needs_no_array(image, pixel_format):
        # Pillow converts LAB to RGB only.
        image = image.convert("RGB") if image.mode == "LAB" else image
        converted = image.convert("L" if channels == 1 else "RGB")
        # EXIF data of the file say how to rotate it, not this image.
        converted.info = {}
        return converted
    bands = bands_of(image) if isinstance(image, Image.Image) else image
    chosen = chosen_bands(bands, pixel_format)
    values = bands.read()
    # Without a copy, where that is possible.
    first, count = chosen[0], len(chosen)
    is_slice = chosen == list(range(first, first + count))
    values = values[..., first : first + count] if is_slice else values[..., chosen]
    scaled = to_bytes(values, pixel_format.range, nodata=bands.nodata, bits=declared_bits(image))
    return _as_image(scaled, channels)


def _needs_no_array(image: Image.Image, pixel_format: PixelFormat) -> bool:
    """Whether Pillow itself converts an image: most images, for most models."""
    has_range = isinstance(pixel_format.range, tuple)
    is_plain = pixel_format.channels in (1, 3) and pixel_format.bands is None and not has_range
    # Without a tag that says so, a fourth band of a TIFF file is not alpha.
    has_other_bands = image.format == "TIFF" and image.mode in ("LA", "RGBA", "RGBX") and not _has_alpha(image)
    return is_plain and image.mode in EIGHT_BITS and not has_other_bands


def _has_alpha(image: Image.Image) -> bool:
    if image.format == "TIFF":
        return any(kind in ALPHA_SAMPLES for kind in tiff_tag(image, EXTRASAMPLES) or ())
    return image.mode in ("LA", "PA", "RGBA", "La", "RGBa")


def bands_of(image: Image.Image) -> BandArray:
    """Return the bands of an image of Pillow's: palettes, CMYK and the like become RGB first."""
    nodata = parse_nodata(tiff_tag(image, GDAL_NODATA))
    if image.mode in EIGHT_BITS:
        has_alpha = _has_alpha(image) or "transparency" in image.info
        if image.mode == "P":
            image = image.convert("RGBA" if "transparency" in image.info else "RGB")
        elif image.mode == "RGBX" and image.format != "TIFF":
            image = image.convert("RGB")
        else:
            image = image.convert(AS_COLOURS.get(image.mode, image.mode))
        values = np.asarray(image)
        has_alpha = has_alpha and len(image.getbands()) in (2, 4)
        return BandArray(values, has_alpha=has_alpha, nodata=nodata)
    if tiff_tag(image, PHOTOMETRIC_INTERPRETATION) == ZERO_IS_WHITE:
        raise ValueError("0 is white in it, which is supported for 8 bits only: save it with 0 for black")
    if image.mode not in ("I", "F") and not image.mode.startswith("I;16"):
        raise ValueError(f"its mode {image.mode} is not supported: convert it to RGB")
    values = np.asarray(image)
    if image.mode == "I":
        values = _stored_type(values, image)
    elif values.dtype.byteorder == ">":
        values = values.astype(values.dtype.newbyteorder("="))
    return BandArray(values, nodata=nodata)


def _stored_type(values: NDArray[Any], image: Image.Image) -> NDArray[Any]:
    """Return integers that Pillow has with 32 bits in the type that the file has."""
    if image.format in ("PNG", "PPM"):
        return values.astype(np.uint16)
    (bits, *_), (kind, *_) = tiff_tag(image, BITSPERSAMPLE) or (32,), tiff_tag(image, SAMPLEFORMAT) or (UNSIGNED,)
    if image.format != "TIFF":
        return values
    if bits == 16:
        return values.astype(np.int16 if kind == SIGNED else np.uint16)
    return values.view(np.uint32) if kind == UNSIGNED else values


def tiff_tag(image: Any, tag: int) -> Any:
    """Return a tag of a TIFF file that Pillow has opened; None if it does not have it, or for another format."""
    return getattr(image, "tag_v2", {}).get(tag)


def parse_nodata(text: Any) -> float | None:
    """Return GDAL's value of pixels without data, which is stored as text."""
    try:
        return float(str(text).strip("\0 "))
    except ValueError:
        return None


def declared_bits(image: AnyImage) -> int | None:
    """Return how many bits a file says that its values use; None if that is not known."""
    if not isinstance(image, Image.Image):
        return None
    # Pillow scales PGM files to 16 bits, by the largest value that they name.
    if image.format == "PPM":
        return 16
    return 12 if tiff_tag(image, BITSPERSAMPLE) == (12,) else None


def chosen_bands(image: BandArray, pixel_format: PixelFormat) -> list[int]:
    """Return which bands of an image a model gets."""
    count, channels = image.bands, pixel_format.channels
    colours = count - image.has_alpha
    has = f"it has {count} band{'' if count == 1 else 's'}"
    if pixel_format.bands is not None:
        missing = [band for band in pixel_format.bands if not 0 <= band < count]
        if missing:
            raise ValueError(
                f"{has}, so there is no band {missing[0]}, counted from 0: choose others with --data.bands"
            )
        if len(pixel_format.bands) in (channels, 1 if channels == 3 else channels):
            return list(pixel_format.bands)
        raise ValueError(
            f"{len(pixel_format.bands)} bands are chosen, but the model takes {channels}: correct --data.bands"
        )
    if colours == channels or (channels == 3 and colours == 1):
        return list(range(colours))
    if count == channels:
        return list(range(count))
    if channels == 1 and colours == 3 and image.is_rgb:
        return [0, 1, 2]
    example = list(range(min(count, channels)))
    remedy = (
        f"choose {channels} of them with --data.bands, such as {example}, or train" if count > channels else "train"
    )
    raise ValueError(f"{has}, but the model takes {channels}: {remedy} a model with --model.in_chans {count}")


def to_bytes(
    values: NDArray[Any], pixel_range: PixelRange = "auto", *, nodata: float | None = None, bits: int | None = None
) -> NDArray[np.uint8]:
    """Scale values to bytes.

    Args:
        values: (height, width, bands), of integers or floats.
        pixel_range: See PixelFormat.
        nodata: The value of pixels without data, which become 0; bytes are kept, unless the range is given.
        bits: How many bits the file says that integers use; None = it does not say.

    Raises:
        ValueError: It is not clear which values are black and white, or there are NaN.
    """
    kind, is_given = values.dtype.kind, isinstance(pixel_range, tuple)
    if kind == "b":
        values, kind = values.astype(np.uint8) * np.uint8(255), "u"
    if values.dtype == np.uint8 and not is_given:
        return np.ascontiguousarray(values)
    is_empty = without_data(values, nodata)
    if isinstance(pixel_range, tuple):
        low, high = pixel_range
    elif pixel_range == "type" and kind == "i":
        low, high = np.iinfo(values.dtype).min, np.iinfo(values.dtype).max
    elif kind == "f":
        low, high = 0.0, 1.0
    else:
        return _shifted(values, pixel_range, is_empty, bits)
    if kind == "f":
        _check_floats(values if is_empty is None else values[~is_empty], None if is_given else (low, high))
    scaled = np.empty(values.shape, np.uint8)
    for top in range(0, len(values), ROWS_AT_ONCE):
        chunk = slice(top, top + ROWS_AT_ONCE)
        rows = values[chunk].astype(np.float64)
        if is_empty is not None:
            rows[is_empty[chunk]] = low
        scaled[chunk] = ((rows - low) * 255 / (high - low) + 0.5).clip(0, 255)
    return scaled


def without_data(values: NDArray[Any], nodata: float | None) -> NDArray[np.bool_] | None:
    if nodata is None:
        return None
    return np.isnan(values) if math.isnan(nodata) and values.dtype.kind == "f" else values == nodata


def _check_floats(values: NDArray[Any], allowed: tuple[float, float] | None) -> None:
    if values.size == 0:
        return
    # NaN is the smallest and the largest value.
    least, most = float(values.min()), float(values.max())
    if math.isnan(least) or (allowed is not None and not (math.isfinite(least) and math.isfinite(most))):
        raise ValueError("it has NaN or infinite values: replace them by numbers")
    if allowed is not None and not (least >= allowed[0] and most <= allowed[1]):
        raise ValueError(
            f"its pixels are floating-point numbers from {least:g} to {most:g}, which do not tell what is black and "
            f"white: say so with --data.range, such as {_example_range(least, most)}, or scale them to 0 … 1"
        )


def _example_range(least: float, most: float) -> str:
    """Return values of black and white for a message: those of an image, which may have one value only."""
    return f"[{least:g}, {most if most > least else least + 1:g}]"


def _shifted(
    values: NDArray[Any], pixel_range: PixelRange, is_empty: NDArray[np.bool_] | None, declared: int | None
) -> NDArray[np.uint8]:
    """Return the upper 8 of the bits that integers use."""
    if is_empty is not None:
        values = np.where(is_empty, np.zeros((), values.dtype), values)
    least, most = int(values.min()), int(values.max())
    if pixel_range == "type":
        bits = 8 * values.dtype.itemsize
    elif isinstance(pixel_range, int):
        bits = pixel_range
        if least < 0 or most >= 2**bits:
            raise ValueError(
                f"its pixels are from {least} to {most}, but data.range is {bits} bits, 0 to {2**bits - 1}: raise "
                "--data.range, or give the values of black and white, such as --data.range "
                f"'[{least}, {most}]'"
            )
    elif values.dtype == np.uint16:
        bits = declared or bits_in_use(most)
    else:
        raise ValueError(
            f"its pixels are integers of {8 * values.dtype.itemsize} bits"
            f"{' with a sign' if values.dtype.kind == 'i' else ''}, from {least} to {most}, which do not tell what is "
            f"black and white: say so with --data.range, such as {_example_range(least, most)}, or save it "
            "with 8 or 16 bits"
        )
    return (values >> (bits - 8)).astype(np.uint8)


def bits_in_use(most: int) -> int:
    """Return how many of 16 bits are used, if this is the largest value: 8, 10, 12, 14 or 16."""
    return next(bits for bits in BITS_IN_USE if most < 2**bits)


def measure_bits(image: AnyImage, pixel_format: PixelFormat) -> int | None:
    """Return how many bits an image with unsigned 16-bit integers uses; None for others, which are not decoded."""
    if isinstance(image, Image.Image) and image.mode in EIGHT_BITS:
        return None
    bands = bands_of(image) if isinstance(image, Image.Image) else image
    if bands.dtype != np.uint16:
        return None
    values = bands.read()[..., chosen_bands(bands, pixel_format)]
    is_empty = without_data(values, bands.nodata)
    values = values if is_empty is None else values[~is_empty]
    return declared_bits(image) or bits_in_use(int(values.max(initial=0)))


def measure_bands(images: Iterable[AnyImage]) -> tuple[list[float], list[float]]:
    """Return the mean and the standard deviation of each channel of converted images, where 255 is 1.

    Raises:
        ZeroDivisionError: There are no images.
    """
    count, total, squares = 0, np.zeros(()), np.zeros(())
    for image in images:
        values = np.asarray(image) if isinstance(image, Image.Image) else image.read()
        values = values.reshape(image.width * image.height, -1) / 255
        count, total, squares = count + len(values), total + values.sum(0), squares + (values**2).sum(0)
    if count == 0:
        raise ZeroDivisionError("there are no images")
    mean = total / count
    # A band of one value has no deviation.
    std = np.sqrt((squares / count - mean**2).clip(1 / 255**2))
    return [round(float(value), 4) for value in mean], [round(float(value), 4) for value in std]


def _as_image(values: NDArray[np.uint8], channels: int) -> AnyImage:
    """Return bytes (height, width, bands) as an image with this number of channels."""
    if channels not in (1, 3):
        return BandArray(values)
    image = Image.fromarray(np.ascontiguousarray(values[..., 0] if values.shape[-1] == 1 else values))
    return image.convert("L" if channels == 1 else "RGB")


def transposed(image: AnyImage, orientation: int) -> AnyImage:
    """Return an image turned as an orientation of EXIF data says."""
    method = TRANSPOSED.get(orientation)
    return image if method is None else image.transpose(method)


def image_to_tensor(image: AnyImage) -> Tensor:
    """Return a converted image as a tensor (channels, height, width) of bytes."""
    pixels = torch.from_numpy(np.array(image if isinstance(image, Image.Image) else image.read()))
    pixels = pixels.view(image.height, image.width, -1)
    return pixels.permute(2, 0, 1)


def preview(image: AnyImage) -> Image.Image:
    """Return a converted image in RGB, to draw on: of several bands the first three, or the first if there are two."""
    if isinstance(image, Image.Image):
        return image.convert("RGB")
    values = image.read()[..., :3]
    return Image.fromarray(np.ascontiguousarray(values if values.shape[-1] == 3 else values[..., 0])).convert("RGB")
