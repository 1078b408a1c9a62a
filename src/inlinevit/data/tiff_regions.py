"""Regions of TIFF files, by tifffile: tiles and strips, BigTIFF, pyramids, planes, and what the tags say of colours."""

import io
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ..utils.files import open_regular
from ..utils.validation import require
from .band_files import COMPRESSIONS, COPY_OR_MASK, MOST_BANDS, PLAIN, RGB, SEVERAL_PAGES
from .images import open_image
from .pixels import ALPHA_SAMPLES, GDAL_NODATA, ORIENTATION, ZERO_IS_WHITE, parse_nodata
from .regions import ROWS_AT_ONCE, GeoReference, Pair, PixelKind, RegionReader

# Beginnings of TIFF and BigTIFF files, in both byte orders.
SIGNATURES = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
# Compressions, by number, whose tiles are images with a size of their own: JPEG, JPEG 2000 (three numbers), WebP.
IMAGES_IN_TILES = (7, 33003, 33005, 34712, 50001)
PALETTE, MASK, CMYK, YCBCR = 3, 4, 5, 6
SEPARATE_PLANES = 2
COLOR_MAP = 320
# Flags of further pages: a smaller copy, a mask.
SMALLER_COPY, IS_MASK = 1, 4
# Tags of GeoTIFF: the scale of pixels, the matrix, and the keys.
GEO_TAGS = (33550, 34264, 34735)
# Micrometres of an inch and a centimetre, by the number of the unit.
UNITS = {2: 25400.0, 3: 10000.0}
X_RESOLUTION, Y_RESOLUTION, RESOLUTION_UNIT = 282, 283, 296
# What OME and Aperio write into the description.
OME_MPP = re.compile(r'PhysicalSizeX="([\d.eE+-]+)"(?=[^>]*PhysicalSizeY="([\d.eE+-]+)")')
OME_OTHER_UNIT = re.compile(r'PhysicalSizeXUnit="(?!µm|&#181;m|&#xB5;m)')
APERIO_MPP = re.compile(r"\|\s*MPP = ([\d.]+)")
# How much the aspect ratio of a smaller copy may differ from that of the image.
SAME_RATIO = 0.02


class TiffRegions(RegionReader):
    """A TIFF file: its first page, and the smaller copies of it.

    Smaller copies are found in SubIFDs of the page, or as further pages that are marked as such. Bits, palettes, CMYK
    and files with 0 for white become what `open_image` makes of them.

    Args:
        path: The file.
        max_pixels: Tiles and strips with more pixels are refused.

    Raises:
        ValueError: It is damaged, truncated, or of a kind that is not supported.
    """

    def __init__(self, path: str | os.PathLike[str], max_pixels: int) -> None:
        import tifffile

        self.stream = open_regular(path)
        try:
            try:
                self.file: Any = tifffile.TiffFile(self.stream, name=Path(path).name)
                first: Any = self.file.pages[0]
                self.pages = [first, *_smaller_copies(self.file, first)]
            # A damaged file can make tifffile raise anything.
            except Exception as error:
                raise ValueError(f"it is a TIFF file that is damaged or truncated ({error}): save it again") from error
            self.length = os.fstat(self.stream.fileno()).st_size
            self.convert = _Conversion(first)
            for page in self.pages:
                self._check(page, max_pixels)
            kind = PixelKind(
                self.convert.dtype,
                self.convert.bands,
                has_alpha=bool(first.extrasamples) and first.extrasamples[-1] in ALPHA_SAMPLES,
                is_rgb=first.photometric != PLAIN,
                nodata=parse_nodata(first.tags.valueof(GDAL_NODATA)),
                bits=first.bitspersample if first.bitspersample == 12 else None,
            )
            sizes = [(page.imagewidth, page.imagelength) for page in self.pages]
            geo = read_geo(path) if any(tag in first.tags for tag in GEO_TAGS) else None
            super().__init__(kind, sizes, mpp=_find_mpp(first), geo=geo)
        except BaseException:
            self.stream.close()
            raise

    def _check(self, page: Any, max_pixels: int) -> None:
        require(
            page.dtype is not None and page.axes in ("YX", "YXS", "SYX") and 1 <= page.samplesperpixel <= MOST_BANDS,
            f"its pixels are {page.samplesperpixel} bands of {page.bitspersample} bits with the axes {page.axes}, "
            "which is not supported: save it with 8 or 16 bits",
        )
        require(
            page.compression in (*COMPRESSIONS, *IMAGES_IN_TILES),
            f"it is compressed as {page.compression.name}: save it with deflate, LZW, Zstandard or JPEG",
        )
        orientation = int(page.tags.valueof(ORIENTATION) or 1)
        require(
            orientation == 1,
            f"it is stored rotated or mirrored (orientation {orientation}), so that it cannot be read by rows: save it "
            "upright",
        )
        height, width = _segment_size(page)
        require(
            height * width <= max_pixels or _is_plain(page),
            f"one of its {'tiles' if page.is_tiled else 'strips'} has {height * width} pixels, more than the limit of "
            f"{max_pixels} against decompression bombs: save it with smaller tiles, or, if you trust it, allow more "
            f"with --max-pixels {height * width}",
        )
        offsets, counts = (np.asarray(values, np.int64) for values in (page.dataoffsets, page.databytecounts))
        down, across = -(-page.imagelength // height), -(-page.imagewidth // width)
        planes = page.samplesperpixel if page.planarconfig == SEPARATE_PLANES else 1
        ends = (offsets + counts)[counts > 0]
        is_short = len(offsets) != len(counts) or len(offsets) < down * across * planes
        last = int(offsets[0]) + page.nbytes if _is_plain(page) and len(offsets) else int(ends.max(initial=0))
        require(
            not is_short and last <= self.length,
            f"it is truncated: its pixels end at byte {last}, but the file has {self.length}: copy it again",
        )

    def band_height(self, level: int) -> int:
        page = self.pages[level]
        return ROWS_AT_ONCE if _is_plain(page) else _segment_size(page)[0]

    def read_band(self, level: int, rows: slice, columns: slice) -> NDArray[Any]:
        page = self.pages[level]
        read = self._read_plain if _is_plain(page) else self._decode_segments
        return self.convert(read(page, rows, columns))

    def _read_plain(self, page: Any, rows: slice, columns: slice) -> NDArray[Any]:
        """Read rows of an image that is stored as it is."""
        planes = page.samplesperpixel if page.planarconfig == SEPARATE_PLANES else 1
        dtype = page.dtype.newbyteorder(page.parent.byteorder)
        samples = page.samplesperpixel // planes
        row_bytes = page.imagewidth * samples * dtype.itemsize
        parts = []
        for plane in range(planes):
            self.stream.seek(page.dataoffsets[0] + row_bytes * (plane * page.imagelength + rows.start))
            content = self.stream.read(row_bytes * (rows.stop - rows.start))
            values = np.frombuffer(content, dtype).reshape(-1, page.imagewidth, samples)[:, columns]
            parts.append(values.astype(page.dtype, copy=False))
        return parts[0] if planes == 1 else np.concatenate(parts, axis=2)

    def _decode_segments(self, page: Any, rows: slice, columns: slice) -> NDArray[Any]:
        """Decode the tiles of a row, or a strip, that have some of the columns."""
        height, width = _segment_size(page)
        across = -(-page.imagewidth // width)
        per_plane = across * -(-page.imagelength // height)
        planes = page.samplesperpixel if page.planarconfig == SEPARATE_PLANES else 1
        empty = parse_nodata(page.tags.valueof(GDAL_NODATA)) or 0
        result = np.full(
            (rows.stop - rows.start, columns.stop - columns.start, page.samplesperpixel), empty, page.dtype
        )
        for plane in range(planes):
            bands = slice(plane, plane + 1) if planes > 1 else slice(None)
            for column in range(columns.start // width, -(-columns.stop // width)):
                index = plane * per_plane + rows.start // height * across + column
                segment = self._decode(page, index)
                # Tiles that were never written have no bytes.
                if segment is None:
                    continue
                left, right = max(column * width, columns.start), min(column * width + segment.shape[1], columns.stop)
                result[: len(segment), left - columns.start : right - columns.start, bands] = segment[
                    : len(result), left - column * width : right - column * width
                ]
        return result

    def _decode(self, page: Any, index: int) -> NDArray[Any] | None:
        count = page.databytecounts[index]
        if count == 0:
            return None
        self.stream.seek(page.dataoffsets[index])
        content = self.stream.read(count)
        try:
            if page.compression in IMAGES_IN_TILES:
                _check_image_size(content, _segment_size(page))
            segment, _, shape = page.decode(content, index, jpegtables=page.jpegtables)
        # A damaged file can make a decoder raise anything.
        except Exception as error:
            kind = "tile" if page.is_tiled else "strip"
            raise ValueError(f"its {kind} {index} cannot be decoded ({error}): save it again") from error
        return segment[0, : shape[1], : shape[2]]

    def close(self) -> None:
        self.stream.close()


class _Conversion:
    """What is done to the stored values of a page: as Pillow does it, but by rows.

    Attributes:
        dtype: Of the result.
        bands: Of the result.
    """

    def __init__(self, page: Any) -> None:
        self.photometric, self.bits = int(page.photometric), page.bitspersample
        self.dtype, self.bands = page.dtype, page.samplesperpixel
        self.colors: NDArray[np.uint8] | None = None
        is_jpeg = page.compression in IMAGES_IN_TILES
        if self.photometric == PALETTE and self.bits <= 8 and self.bands == 1:
            # 16 bits each of red, green and blue.
            self.colors = (np.asarray(page.colormap) >> 8).astype(np.uint8).T
            self.dtype, self.bands = np.dtype(np.uint8), 3
        elif self.photometric == CMYK and self.bits == 8 and self.bands == 4:
            self.bands = 3
        elif self.photometric == ZERO_IS_WHITE:
            require(self.bits <= 8, "0 is white in it, which is supported for 8 bits only: save it with 0 for black")
        elif self.photometric not in (PLAIN, RGB, MASK) and not (self.photometric == YCBCR and is_jpeg):
            raise ValueError(
                f"its colours are {page.photometric.name.lower()} with {self.bits} bits: convert it to RGB"
            )
        # Fewer bits are scaled to 8.
        self.scale = 255 // (2**self.bits - 1) if self.bits < 8 and self.colors is None else 1
        if self.scale > 1:
            self.dtype = np.dtype(np.uint8)

    def __call__(self, values: NDArray[Any]) -> NDArray[Any]:
        """Convert values (height, width, bands)."""
        if self.colors is not None:
            return self.colors[np.minimum(values[..., 0], len(self.colors) - 1)]
        if self.scale > 1:
            values = values.astype(np.uint8) * np.uint8(self.scale)
        if self.photometric == CMYK:
            return np.asarray(Image.fromarray(np.ascontiguousarray(values), "CMYK").convert("RGB"))
        return np.uint8(255) - values if self.photometric == ZERO_IS_WHITE else values


def is_tiff(prefix: bytes) -> bool:
    """Whether a file that begins so is a TIFF file."""
    return prefix.startswith(SIGNATURES)


def _segment_size(page: Any) -> Pair:
    """Return (height, width) of the tiles of a page, or of its strips."""
    if page.is_tiled:
        return page.tilelength, page.tilewidth
    return min(page.rowsperstrip or page.imagelength, page.imagelength), page.imagewidth


def _is_plain(page: Any) -> bool:
    """Whether the pixels of a page are stored without compression, one row after the other."""
    return bool(page.is_final) and not page.is_tiled


def _smaller_copies(file: Any, first: Any) -> Iterator[Any]:
    """Yield the pages that are smaller copies of the first one, the largest first."""
    others = list(first.pages or ())
    has_other_images = False
    for index in range(1, len(file.pages)):
        page = file.pages[index]
        flags = int(page.subfiletype)
        if flags & SMALLER_COPY and not flags & IS_MASK:
            others.append(page)
        elif not flags & COPY_OR_MASK:
            # Aperio does not mark them; its thumbnails are not tiled.
            if first.is_svs and page.is_tiled:
                others.append(page)
            has_other_images = not first.is_svs
    if has_other_images:
        warnings.warn(SEVERAL_PAGES, stacklevel=2)
    ratio = first.imagewidth / first.imagelength
    width = first.imagewidth
    for page in sorted(others, key=lambda one: -one.imagewidth):
        is_alike = page.samplesperpixel == first.samplesperpixel and page.dtype == first.dtype
        # The sides of small copies are rounded.
        tolerance = max(SAME_RATIO, 2 / min(page.imagewidth, page.imagelength))
        if is_alike and page.imagewidth < width and abs(page.imagewidth / page.imagelength / ratio - 1) < tolerance:
            width = page.imagewidth
            yield page


def _find_mpp(page: Any) -> tuple[float, float] | None:
    """Return the micrometres per pixel that a page states, (x, y)."""
    text = str(page.description or "")[:100_000]
    if (ome := OME_MPP.search(text)) and not OME_OTHER_UNIT.search(text):
        return float(ome[1]), float(ome[2])
    if aperio := APERIO_MPP.search(text):
        return float(aperio[1]), float(aperio[1])
    unit = UNITS.get(int(page.tags.valueof(RESOLUTION_UNIT) or 0))
    found = [page.tags.valueof(tag) for tag in (X_RESOLUTION, Y_RESOLUTION)]
    if unit is None or any(not isinstance(value, tuple) or 0 in value for value in found):
        return None
    x, y = (unit * denominator / numerator for numerator, denominator in found)
    return x, y


def _check_image_size(content: bytes, largest: Pair) -> None:
    """Refuse a tile whose own header says that it is larger than the tiles of the file."""
    width, height = open_image(io.BytesIO(content)).size
    require(height <= largest[0] and width <= largest[1], f"it has {width} × {height} pixels, more than a tile")


def read_geo(path: str | os.PathLike[str]) -> GeoReference | None:
    """Return where a GeoTIFF file is on the earth; None, with a warning, if rasterio is not installed."""
    try:
        import rasterio
    except ImportError:
        warnings.warn(
            f"{os.fspath(path)} is a GeoTIFF file: its coordinates are left out without rasterio, pip install "
            "'inlinevit[geo]'",
            stacklevel=2,
        )
        return None
    # Nothing but the file itself is read.
    with (
        rasterio.Env(GDAL_DISABLE_READDIR_ON_OPEN="EMPTY_DIR", GDAL_PAM_ENABLED="NO"),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        try:
            with rasterio.open(Path(path), driver="GTiff") as dataset:
                crs, transform = dataset.crs, dataset.transform
        except rasterio.errors.RasterioError as error:
            raise ValueError(f"its geographic tags cannot be read ({error}): save it again") from error
    if transform.is_identity:
        return None
    return GeoReference(crs.to_wkt() if crs else None, tuple(transform)[:6])
