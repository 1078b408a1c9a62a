"""Regions of images of any size: the protocol of slide readers, and what our own readers share.

A reader gives rectangles of an image at one of its levels: level 0 is the full resolution, further levels are smaller
copies. Objects of openslide, tiffslide and cucim are used as they are; `data/tiff_regions.py` and
`data/array_regions.py` read TIFF, Zarr and NumPy files, arrays, and what Pillow decodes.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ..utils.memory import require_memory
from ..utils.validation import require
from .images import describe_image_error
from .pixels import BandArray

# (width, height) or (x, y) in pixels.
Pair = tuple[int, int]
# Where the readers of slides have the size of a pixel, in micrometres, among their properties.
MPP_PROPERTIES = (
    ("openslide.mpp-x", "openslide.mpp-y"),
    ("tiffslide.mpp-x", "tiffslide.mpp-y"),
    ("aperio.MPP", "aperio.MPP"),
)
BACKGROUND_PROPERTY = "openslide.background-color"
WHITE = (255, 255, 255)
# Rows of arrays and slides that are read at a time, where nothing else decides.
ROWS_AT_ONCE = 256


@runtime_checkable
class Slide(Protocol):
    """What readers of slides have in common: those of openslide, tiffslide and cucim, and ours.

    They also have the size of each level: `level_dimensions`, or `resolutions["level_dimensions"]` (cucim), or of one
    level `dimensions` or `size`.
    """

    def read_region(self, location: Pair, level: int, size: Pair) -> Any:
        """Return a rectangle as an image or an array (height, width, bands).

        It is called with keywords only, because cucim has another order.

        Args:
            location: The upper left corner, (x, y) in pixels of level 0.
            level: The level.
            size: (width, height) in pixels of the level.
        """
        ...


class PixelKind(NamedTuple):
    """What the values of an image are; see BandArray.

    Attributes:
        dtype: Their type.
        bands: How many there are.
        has_alpha: Whether the last band is alpha.
        is_rgb: Whether three bands are red, green and blue.
        nodata: The value of pixels without data.
        bits: How many bits the file says that integers use; None = it does not say.
    """

    dtype: np.dtype[Any]
    bands: int
    has_alpha: bool = False
    is_rgb: bool = True
    nodata: float | None = None
    bits: int | None = None

    def wrap(self, values: NDArray[Any]) -> BandArray:
        """Return values (height, width, bands) as an image."""
        return BandArray(values, has_alpha=self.has_alpha, is_rgb=self.is_rgb, nodata=self.nodata)


@dataclass(frozen=True)
class GeoReference:
    """Where an image is on the earth.

    Attributes:
        crs: The coordinate reference system, as WKT; None = not known.
        transform: (a, b, c, d, e, f): the pixel corner (x, y) lies at (a·x + b·y + c, d·x + e·y + f).
    """

    crs: str | None
    transform: tuple[float, float, float, float, float, float]

    def scaled(self, origin: tuple[float, float], step: tuple[float, float]) -> "GeoReference":
        """Return the reference of a map whose corner is at a pixel of this image, with `step` pixels per entry."""
        a, b, c, d, e, f = self.transform
        (x, y), (right, down) = origin, step
        return GeoReference(self.crs, (a * right, b * down, a * x + b * y + c, d * right, e * down, d * x + e * y + f))


class RegionReader(ABC):
    """A reader of ours: it gives the stored values, all bands of them.

    Files are decoded in whole bands of rows: a row of tiles or chunks, or a strip. The last band is kept, so that an
    image that is read from top to bottom is decoded once. This, and what is returned, is all the memory that is used.

    Args:
        kind: What the values are.
        level_dimensions: (width, height) of each level, the largest first.
        mpp: Micrometres per pixel of level 0, (x, y); None = not known.
        geo: Where it is on the earth, if it is.
    """

    def __init__(
        self,
        kind: PixelKind,
        level_dimensions: Sequence[Pair],
        *,
        mpp: tuple[float, float] | None = None,
        geo: GeoReference | None = None,
    ) -> None:
        self.kind, self.mpp, self.geo = kind, mpp, geo
        self.level_dimensions = tuple(level_dimensions)
        self._band: tuple[tuple[int, int, int, int], NDArray[Any]] | None = None

    @property
    def dimensions(self) -> Pair:
        """(width, height) of level 0."""
        return self.level_dimensions[0]

    @property
    def size(self) -> Pair:
        """The same as `dimensions`."""
        return self.dimensions

    @property
    def level_count(self) -> int:
        """Number of levels."""
        return len(self.level_dimensions)

    @property
    def level_downsamples(self) -> tuple[float, ...]:
        """How many pixels of level 0 a pixel of each level is wide."""
        return tuple(self.dimensions[0] / width for width, _ in self.level_dimensions)

    @abstractmethod
    def band_height(self, level: int) -> int:
        """Return how many rows of a level are decoded together."""

    @abstractmethod
    def read_band(self, level: int, rows: slice, columns: slice) -> NDArray[Any]:
        """Decode one band: (rows, columns, bands). `rows` begins at a multiple of `band_height`."""

    def read_region(self, location: Pair, level: int, size: Pair) -> NDArray[Any]:
        """Return a rectangle as (height, width, bands); see Slide.read_region.

        Raises:
            ValueError: The level does not exist, the rectangle is not inside of it, or the file is damaged.
        """
        check_level(level, self.level_count)
        whole, (width, height) = self.level_dimensions[level], size
        left, top = (round(place * whole[axis] / self.dimensions[axis]) for axis, place in enumerate(location))
        require(
            0 <= left <= left + width <= whole[0] and 0 <= top <= top + height <= whole[1] and width > 0 < height,
            f"the region of {width} × {height} pixels at ({left}, {top}) is not inside of level {level}, which has "
            f"{whole[0]} × {whole[1]} pixels: choose another one",
        )
        result = np.empty((height, width, self.kind.bands), self.kind.dtype)
        step = self.band_height(level)
        for start in range(top // step * step, top + height, step):
            band = self._decoded(level, start, min(start + step, whole[1]), left, left + width)
            first, end = max(start, top), min(start + len(band), top + height)
            result[first - top : end - top] = band[first - start : end - start]
        return result

    def _decoded(self, level: int, start: int, end: int, left: int, right: int) -> NDArray[Any]:
        key = (level, start, left, right)
        if self._band is None or self._band[0] != key:
            # The one before is not needed any more.
            self._band = None
            needed = (end - start) * (right - left) * self.kind.bands * self.kind.dtype.itemsize
            require_memory(needed, f"{end - start} rows of it, which are stored together,", "save it in smaller tiles")
            self._band = key, self.read_band(level, slice(start, end), slice(left, right))
        return self._band[1]

    def close(self) -> None:
        """Close the file, if there is one, and free what is kept of it."""
        self._band = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class SlideRegions(RegionReader):
    """The reader of another library: RGB, where transparent pixels have the background colour of the slide.

    Args:
        slide: An object of openslide, tiffslide or cucim, or one with the same methods.
    """

    def __init__(self, slide: Slide) -> None:
        self.slide = slide
        found = _properties(slide).get(BACKGROUND_PROPERTY)
        self.background = WHITE if found is None else tuple(bytes.fromhex(str(found).removeprefix("#")))
        super().__init__(PixelKind(np.dtype(np.uint8), 3), slide_levels(slide), mpp=slide_mpp(slide))

    def band_height(self, level: int) -> int:
        return ROWS_AT_ONCE

    def read_band(self, level: int, rows: slice, columns: slice) -> NDArray[Any]:
        factors = [full / own for full, own in zip(self.dimensions, self.level_dimensions[level], strict=True)]
        location = (round(columns.start * factors[0]), round(rows.start * factors[1]))
        size = (columns.stop - columns.start, rows.stop - rows.start)
        region = self.slide.read_region(location=location, level=level, size=size)
        if isinstance(region, Image.Image) and region.mode == "RGBA":
            flat = Image.new("RGB", region.size, self.background)
            flat.paste(region, mask=region.getchannel("A"))
            region = flat
        values = np.asarray(region.convert("RGB") if isinstance(region, Image.Image) else region)
        require(
            values.shape == (size[1], size[0], 3) and values.dtype == np.uint8,
            f"its reader returned {values.dtype} of the shape {values.shape} for a region of {size[0]} × {size[1]} "
            "pixels: give one that returns RGB with 8 bits",
        )
        return values

    def close(self) -> None:
        if hasattr(self.slide, "close"):
            self.slide.close()


def slide_levels(slide: Any) -> list[Pair]:
    """Return (width, height) of each level of the reader of another library."""
    sizes = getattr(slide, "level_dimensions", None)
    if sizes is None and isinstance(resolutions := getattr(slide, "resolutions", None), dict):
        sizes = resolutions.get("level_dimensions")
    for name in ("dimensions", "size"):
        one = getattr(slide, name, None)
        if sizes is None and isinstance(one, tuple):
            sizes = [one]
    if not sizes:
        raise TypeError(
            f"{type(slide).__name__} has read_region, but not the size of its levels: add level_dimensions or size, "
            "(width, height)"
        )
    return [(int(width), int(height)) for width, height in sizes]


def slide_mpp(slide: Any) -> tuple[float, float] | None:
    """Return the micrometres per pixel of the reader of another library; None if it does not know them."""
    properties = _properties(slide)
    for names in MPP_PROPERTIES:
        if all(properties.get(name) for name in names):
            return float(properties[names[0]]), float(properties[names[1]])
    # cucim.
    if callable(getattr(slide, "spacing", None)) and set(slide.spacing_units("XY")) <= {"micrometer", "um", "µm"}:
        x, y = slide.spacing("XY")
        return float(x), float(y)
    return None


def _properties(slide: Any) -> Any:
    return getattr(slide, "properties", None) or {}


def check_level(level: int, count: int) -> None:
    """Refuse a level that does not exist."""
    exist = "there is only level 0" if count == 1 else f"there are levels 0 to {count - 1}"
    require(0 <= level < count, f"it has no level {level}: {exist}, choose one of them with --level")


@contextmanager
def readable(name: str) -> Iterator[None]:
    """Turn whatever a damaged or unsuitable image makes its reader raise into a sentence with its name."""
    try:
        yield
    except (KeyboardInterrupt, MemoryError, ModuleNotFoundError):
        raise
    except Exception as error:
        if isinstance(error, FileNotFoundError) and error.errno is not None:
            raise FileNotFoundError(f"there is no file or folder {name}: check the path") from error
        raise ValueError(describe_image_error(name, error)) from error
