"""From an image of any size to the rows of normalised pixels that a streamed model reads."""

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..utils.files import open_regular
from ..utils.validation import require
from .array_regions import NPY_SIGNATURE, ArrayRegions, DecodedRegions, NpyRegions, ZarrRegions, is_zarr
from .images import decompression_bomb_limit, display_name, has_valid_size, open_image
from .inputs import EXPECTED, to_image
from .pixels import PixelFormat, bits_in_use, chosen_bands, convert_pixels, image_to_tensor, without_data
from .regions import Pair, RegionReader, Slide, SlideRegions, check_level, readable
from .tiff_regions import TiffRegions, is_tiff

# Extensions of slides that openslide reads. TIFF files with other extensions are read by tifffile.
SLIDE_EXTENSIONS = (".svs", ".ndpi", ".mrxs", ".scn", ".vms", ".vmu", ".bif", ".svslide", ".czi")
# How far the resolution of a level may be from the one that is asked for.
MPP_TOLERANCE = 0.1

# What a caller can give in place of a file.
RegionInput = str | os.PathLike[str] | RegionReader | Slide | Image.Image | np.ndarray | Tensor


class Box(NamedTuple):
    """A rectangle of a level, in its pixels.

    Attributes:
        left: The first column.
        top: The first row.
        width: Number of columns.
        height: Number of rows.
    """

    left: int
    top: int
    width: int
    height: int


def name_of(image: RegionInput) -> str:
    """Return what an image is called in messages."""
    return display_name(os.fspath(image)) if isinstance(image, str | os.PathLike) else "the image"


def open_regions(image: RegionInput, max_pixels: int | None = None) -> RegionReader:
    """Open an image by the reader of its format, whatever its extension says; slides are known by theirs.

    Args:
        image: A path of a file or of a Zarr folder, a reader, a PIL image, an array (height, width, bands) or a tensor
            (bands, height, width).
        max_pixels: The largest number of pixels that are decoded together: the whole image for JPEG, PNG and the like,
            else a tile, a strip or a chunk; None = Pillow's limit.

    Raises:
        ModuleNotFoundError: A package is missing that the format needs.
        TypeError: It is none of these.
        ValueError: It cannot be used.
    """
    if isinstance(image, RegionReader):
        return image
    with readable(name_of(image)):
        if isinstance(image, str | os.PathLike):
            return _open_path(Path(image), max_pixels or Image.MAX_IMAGE_PIXELS or 2**62)
        if isinstance(image, Slide):
            return SlideRegions(image)
        if isinstance(image, np.ndarray):
            return ArrayRegions(image)
        if isinstance(image, Image.Image | Tensor):
            return DecodedRegions(to_image(image))
    raise TypeError(f"the image is of type {type(image).__name__}: {EXPECTED}, or a reader with read_region")


def _open_path(path: Path, max_pixels: int) -> RegionReader:
    if path.is_dir():
        require(is_zarr(path), "it is a folder, but not one of Zarr: name one image")
        return ZarrRegions(path, max_pixels)
    with open_regular(path) as stream:
        prefix = stream.read(8)
    if path.suffix.lower() in SLIDE_EXTENSIONS:
        import openslide

        return SlideRegions(openslide.OpenSlide(path))
    if is_tiff(prefix):
        return TiffRegions(path, max_pixels)
    if prefix.startswith(NPY_SIGNATURE):
        return NpyRegions(path)
    with decompression_bomb_limit(max_pixels), open_image(path) as image:
        return DecodedRegions(image)


def choose_level(reader: RegionReader, level: int | None, mpp: float | None) -> tuple[int, str]:
    """Return the level to read, and what to tell the user about it ("" = nothing).

    Images are not resampled: a resolution is that of the nearest level.

    Args:
        reader: The image.
        level: The level that the user has named.
        mpp: Or the resolution, in micrometres per pixel.

    Raises:
        ValueError: There is no such level, no level is within MPP_TOLERANCE of the resolution, or that of the image is
            not known.
    """
    if mpp is None:
        check_level(level or 0, reader.level_count)
        return level or 0, ""
    require(level is None, "--level and --mpp both choose a level: give one of them")
    require(mpp > 0, f"--mpp is {mpp:g}: it should be above 0")
    if reader.mpp is None:
        raise ValueError("it does not say how large its pixels are, so that --mpp means nothing: choose a --level")
    known = [math.sqrt(reader.mpp[0] * reader.mpp[1]) * factor for factor in reader.level_downsamples]
    nearest = min(range(len(known)), key=lambda index: abs(math.log(known[index] / mpp)))
    difference = known[nearest] / mpp - 1
    listed = ", ".join(f"{value:.4g}" for value in known)
    require(
        abs(difference) <= MPP_TOLERANCE,
        f"no level is within {MPP_TOLERANCE:.0%} of {mpp:g} micrometres per pixel: its levels have {listed}; choose "
        "one with --level, or resample the image",
    )
    if abs(difference) < 5e-4:
        near = "as asked"
    else:
        near = f"{abs(difference):.1%} {'above' if difference > 0 else 'below'} the {mpp:g} that were asked for"
    return nearest, f"level {nearest} has {known[nearest]:.4g} micrometres per pixel, {near}"


def choose_box(reader: RegionReader, level: int, region: Sequence[int] | None) -> Box:
    """Return the part of a level to read.

    Args:
        reader: The image.
        level: The level.
        region: (x, y, width, height) in pixels of level 0; None = all of it.
    """
    whole, own = reader.dimensions, reader.level_dimensions[level]
    if region is None:
        return Box(0, 0, *own)
    x, y, width, height = region
    require(
        0 <= x < x + width <= whole[0] and 0 <= y < y + height <= whole[1],
        f"the region {x},{y},{width},{height} is not inside of it: it has {whole[0]} × {whole[1]} pixels at level 0, "
        "in which regions are given",
    )
    left, top = round(x * own[0] / whole[0]), round(y * own[1] / whole[1])
    right, bottom = round((x + width) * own[0] / whole[0]), round((y + height) * own[1] / whole[1])
    require(
        right > left and bottom > top,
        f"the region {x},{y},{width},{height} has no pixel of level {level}: choose a larger one",
    )
    return Box(left, top, right - left, bottom - top)


class RegionSource:
    """The normalised rows of a part of an image: an ImageSource of `inlinevit.streaming`.

    The values are those that the same model gets of a small image. Where the range is "auto" and the image has 16 bits,
    the part is read once before, to find how many of the bits it uses.

    Args:
        reader: The image.
        pixel_format: The bands and values that the model gets.
        mean: By channel, where white is 1.
        std: By channel.
        level: The level to read.
        box: The part of the level; None = all of it.
        name: What it is called in messages.
    """

    def __init__(
        self,
        reader: RegionReader,
        pixel_format: PixelFormat,
        mean: Sequence[float],
        std: Sequence[float],
        *,
        level: int = 0,
        box: Box | None = None,
        name: str = "the image",
    ) -> None:
        self.reader, self.level, self.name = reader, level, name
        self.box = choose_box(reader, level, None) if box is None else box
        self.mean, self.std = (torch.tensor(tuple(values)).view(-1, 1, 1) for values in (mean, std))
        with readable(name):
            require(
                has_valid_size(self.size),
                f"its {self.box.width} × {self.box.height} pixels show nothing: choose a larger region",
            )
            # Refuses wrong bands before anything is computed.
            bands = chosen_bands(reader.kind.wrap(np.zeros((1, 1, reader.kind.bands), reader.kind.dtype)), pixel_format)
            self.pixel_format = self._resolve_range(pixel_format, bands)

    @property
    def size(self) -> Pair:
        """(width, height) in pixels."""
        return self.box.width, self.box.height

    @property
    def channels(self) -> int:
        """Number of channels."""
        return self.pixel_format.channels

    @property
    def fingerprint(self) -> str:
        """What the rows depend on, but for the content of the file: for jobs that are resumed."""
        path = Path(self.name)
        status = path.stat() if path.exists() else None
        state = () if status is None else (str(path.absolute()), status.st_size, status.st_mtime_ns)
        return repr((state, self.level, self.box, self.pixel_format, self.mean.tolist(), self.std.tolist()))

    def read(self, top: int, bottom: int) -> np.ndarray:
        """Return rows as they are stored, (rows, width, bands)."""
        factors = [full / own for full, own in zip(self.reader.dimensions, self.level_size, strict=True)]
        location = (round(self.box.left * factors[0]), round((self.box.top + top) * factors[1]))
        return self.reader.read_region(location, self.level, (self.box.width, bottom - top))

    @property
    def level_size(self) -> Pair:
        """(width, height) of the whole level."""
        return self.reader.level_dimensions[self.level]

    def rows(self, top: int, bottom: int) -> Tensor:
        """See ImageSource.rows."""
        with readable(self.name):
            image = convert_pixels(self.reader.kind.wrap(self.read(top, bottom)), self.pixel_format)
        pixels = image_to_tensor(image).to(torch.float32, memory_format=torch.contiguous_format)
        return pixels.div_(255).sub_(self.mean).div_(self.std)

    def _resolve_range(self, pixel_format: PixelFormat, bands: list[int]) -> PixelFormat:
        """Return the format with a number of bits in place of "auto", for unsigned 16-bit integers."""
        kind = self.reader.kind
        if pixel_format.range != "auto" or kind.dtype != np.uint16:
            return pixel_format
        bits = kind.bits
        if bits is None:
            most, step = 0, self.reader.band_height(self.level)
            for top in range(0, self.box.height, step):
                values = self.read(top, min(top + step, self.box.height))[..., bands]
                is_empty = without_data(values, kind.nodata)
                most = max(most, int((values if is_empty is None else values[~is_empty]).max(initial=0)))
            bits = bits_in_use(most)
        return PixelFormat(pixel_format.channels, pixel_format.bands, bits)
