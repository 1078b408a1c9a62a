"""Regions of arrays: NumPy arrays, .npy files, Zarr arrays and pyramids, and images that Pillow decodes as a whole."""

import math
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ..utils.files import NotRegularFileError, is_inside, open_regular, read_json
from ..utils.validation import require
from .images import check_size
from .inputs import MOST_COLOURS
from .pixels import ORIENTATION, AnyImage, BandArray, bands_of, declared_bits, transposed
from .regions import ROWS_AT_ONCE, PixelKind, RegionReader

NPY_SIGNATURE = b"\x93NUMPY"
# Files that describe a Zarr array or group: of version 3 and of version 2.
ZARR_FILES = ("zarr.json", ".zarray", ".zgroup")
# Codecs that are decoded, by name in either version. Others, such as pickle, could run code.
ZARR_CODECS = (
    "bytes", "transpose", "sharding_indexed", "crc32c", "blosc", "gzip", "zstd", "zlib", "lz4", "bz2", "lzma", "delta",
    "shuffle", "numcodecs.zlib", "numcodecs.lz4", "numcodecs.bz2", "numcodecs.lzma", "numcodecs.shuffle",
)  # fmt: skip
MICROMETRES = {"micrometer": 1.0, "micrometre": 1.0, "um": 1.0, "µm": 1.0, "nanometer": 1e-3, "millimeter": 1e3}


def check_array(shape: Sequence[int], dtype: np.dtype[Any]) -> PixelKind:
    """Return what the values of an array (height, width) or (height, width, bands) are; refuse other arrays."""
    is_swapped = len(shape) == 3 and shape[0] <= MOST_COLOURS < shape[2]
    require(
        len(shape) in (2, 3) and 0 not in shape and not is_swapped and dtype.kind in "buif",
        f"it is an array of {dtype} of the shape {tuple(shape)}: give (height, width) or (height, width, bands) of "
        "integers or floats",
    )
    return PixelKind(dtype.newbyteorder("="), shape[2] if len(shape) == 3 else 1)


class ArrayRegions(RegionReader):
    """An array (height, width) or (height, width, bands) that can be sliced, such as a memory map."""

    def __init__(self, values: Any) -> None:
        self.values = values
        kind = check_array(values.shape, np.dtype(values.dtype))
        super().__init__(kind, [(values.shape[1], values.shape[0])])

    def band_height(self, level: int) -> int:
        return ROWS_AT_ONCE

    def read_band(self, level: int, rows: slice, columns: slice) -> NDArray[Any]:
        values = np.asarray(self.values[rows, columns])
        return values.reshape(*values.shape[:2], self.kind.bands).astype(self.kind.dtype, copy=False)


class NpyRegions(RegionReader):
    """A .npy file. Rows are read, not mapped, so that they do not count as memory of this process."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.stream: BinaryIO = open_regular(path)
        try:
            try:
                version = np.lib.format.read_magic(self.stream)
                read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
                shape, is_fortran, dtype = read(self.stream)
            except ValueError as error:
                raise ValueError(f"it is a NumPy file that is damaged ({error}): save it again") from error
            kind = check_array(shape, dtype)
            require(
                not is_fortran or len(shape) < 2,
                "its values are stored column by column: save it with np.save(FILE, np.ascontiguousarray(ARRAY))",
            )
            self.start, self.dtype, self.width = self.stream.tell(), dtype, shape[1]
            end, length = self.start + math.prod(shape) * dtype.itemsize, os.fstat(self.stream.fileno()).st_size
            require(
                end <= length,
                f"it is truncated: its values end at byte {end}, but the file has {length}: copy it again",
            )
            super().__init__(kind, [(shape[1], shape[0])])
        except BaseException:
            self.stream.close()
            raise

    def band_height(self, level: int) -> int:
        return ROWS_AT_ONCE

    def read_band(self, level: int, rows: slice, columns: slice) -> NDArray[Any]:
        row_bytes = self.width * self.kind.bands * self.dtype.itemsize
        self.stream.seek(self.start + rows.start * row_bytes)
        values = np.frombuffer(self.stream.read((rows.stop - rows.start) * row_bytes), self.dtype)
        return values.reshape(-1, self.width, self.kind.bands)[:, columns].astype(self.kind.dtype, copy=False)

    def close(self) -> None:
        self.stream.close()


class ZarrRegions(RegionReader):
    """A Zarr array on the disk, or a group of levels as OME-Zarr has them.

    Axes are those of OME-Zarr (axes other than x, y and c have one entry); of arrays without them, (height, width) or
    (height, width, bands).

    Args:
        folder: The array or the group.
        max_pixels: Chunks with more pixels are refused.

    Raises:
        ValueError: It is not Zarr, it is damaged, or it uses a codec that is not in ZARR_CODECS.
    """

    def __init__(self, folder: str | os.PathLike[str], max_pixels: int) -> None:
        root = Path(folder)
        attributes = _zarr_attributes(root)
        described = attributes.get("ome", attributes)
        scales = described.get("multiscales") if isinstance(described, dict) else None
        try:
            names = [str(one["path"]) for one in scales[0]["datasets"]] if scales else [""]
            axes = "".join(_axis_name(axis) for axis in scales[0].get("axes", "tczyx")) if scales else ""
            mpp = _zarr_mpp(scales[0]) if scales else None
        except (TypeError, KeyError, IndexError, ValueError, AttributeError) as error:
            raise ValueError(f"its list of levels is not that of OME-Zarr ({error!r}): save it again") from error
        require(
            all(is_inside(root / name, root) for name in names if scales),
            f"its levels {names} are not inside of it: save it again",
        )
        self.arrays = [_open_zarr(root / name, max_pixels) for name in names]
        first = self.arrays[0]
        self.axes = axes or "yxc"[: first.ndim]
        require(
            len(self.axes) == first.ndim and {"y", "x"} <= set(self.axes) <= {"t", "c", "z", "y", "x"},
            f"its array has the shape {first.shape}: give (height, width) or (height, width, bands)",
        )
        for axis, length in zip(self.axes, first.shape, strict=True):
            require(
                axis in "yxc" or length == 1,
                f"it has {length} images along {axis}: save the one to be used as an array of its own",
            )
        sizes = [tuple(array.shape[self.axes.index(axis)] for axis in "xy") for array in self.arrays]
        bands = first.shape[self.axes.index("c")] if "c" in self.axes else 1
        kind = check_array((sizes[0][1], sizes[0][0], bands), np.dtype(first.dtype))
        super().__init__(kind, sizes, mpp=mpp)

    def band_height(self, level: int) -> int:
        array = self.arrays[level]
        # Shards hold several chunks, which are read one by one.
        return int(array.chunks[self.axes.index("y")])

    def read_band(self, level: int, rows: slice, columns: slice) -> NDArray[Any]:
        parts: dict[str, Any] = {"y": rows, "x": columns, "c": slice(None)}
        values = np.asarray(self.arrays[level][tuple(parts.get(axis, 0) for axis in self.axes)])
        kept = [axis for axis in self.axes if axis in parts]
        values = values.transpose([kept.index(axis) for axis in "yxc" if axis in kept])
        return values.reshape(*values.shape[:2], self.kind.bands).astype(self.kind.dtype, copy=False)


def is_zarr(folder: Path) -> bool:
    """Whether a folder is a Zarr array or group."""
    return any((folder / name).exists() for name in ZARR_FILES)


def _zarr_attributes(folder: Path) -> dict[str, Any]:
    """Return the attributes of a Zarr array or group."""
    for name in ("zarr.json", ".zattrs"):
        if (folder / name).exists():
            content = _read_zarr_json(folder / name)
            found = content.get("attributes", {}) if name == "zarr.json" else content
            return found if isinstance(found, dict) else {}
    return {}


def _read_zarr_json(file: Path) -> dict[str, Any]:
    try:
        content = read_json(file)
    except ValueError as error:
        raise ValueError(f"its {file.name} is not valid JSON ({error}): save it again") from error
    require(isinstance(content, dict), f"its {file.name} is not a JSON object: save it again")
    return content


def _open_zarr(folder: Path, max_pixels: int) -> Any:
    """Open an array for reading, after its codecs and its chunks have been checked."""
    description = next((folder / name for name in ("zarr.json", ".zarray") if (folder / name).exists()), None)
    if description is None:
        raise ValueError(f"there is no Zarr array in {folder}: name the folder of an array or of an OME-Zarr image")
    content = _read_zarr_json(description)
    codecs = content.get("codecs") or [content.get("compressor"), *(content.get("filters") or ())]
    for codec in _codec_names(codecs):
        require(
            codec in ZARR_CODECS,
            f"it is compressed by {codec}, which is not read: save it with one of zstd, blosc, gzip or lz4",
        )
    import zarr
    from zarr.storage import LocalStore

    class RegularFiles(LocalStore):
        """A folder in which only regular files are opened: a pipe would block."""

        async def get(self, key: str, prototype: Any = None, byte_range: Any = None) -> Any:
            path = self.root / key
            if path.exists() and not stat.S_ISREG(path.stat().st_mode):
                raise NotRegularFileError(path, "no regular file")
            return await super().get(key, prototype, byte_range)

    try:
        array = zarr.open_array(RegularFiles(folder, read_only=True), mode="r")
        # Of damaged metadata, zarr can raise anything.
    except Exception as error:
        raise ValueError(f"its metadata are damaged ({error}): save it again") from error
    pixels = math.prod(sorted(array.chunks)[-2:])
    require(
        pixels <= max_pixels,
        f"one of its chunks has {pixels} pixels, more than the limit of {max_pixels} against decompression bombs: save "
        f"it with smaller chunks, or, if you trust it, allow more with --max-pixels {pixels}",
    )
    return array


def _codec_names(codecs: Any) -> list[str]:
    """Return the names of all codecs, also of those inside of shards."""
    names = []
    for codec in codecs if isinstance(codecs, list) else [codecs]:
        if codec is None:
            continue
        if not isinstance(codec, dict):
            names.append(str(codec))
            continue
        names.append(str(codec.get("name") or codec.get("id")))
        configuration = codec.get("configuration")
        if isinstance(configuration, dict):
            for inner in ("codecs", "index_codecs"):
                names += _codec_names(configuration.get(inner))
    return names


def _axis_name(axis: Any) -> str:
    return str(axis["name"] if isinstance(axis, dict) else axis)


def _zarr_mpp(scales: dict[str, Any]) -> tuple[float, float] | None:
    """Return the micrometres per pixel of OME-Zarr's first level, (x, y); None if they are not known."""
    axes = {_axis_name(axis): place for place, axis in enumerate(scales.get("axes", ()))}
    steps = scales["datasets"][0].get("coordinateTransformations") or ()
    scale = next((step["scale"] for step in steps if step.get("type") == "scale"), None)
    if scale is None or not {"x", "y"} <= set(axes):
        return None
    units = [MICROMETRES.get(scales["axes"][axes[axis]].get("unit", "")) for axis in "xy"]
    if None in units:
        return None
    x, y = (float(scale[axes[axis]]) * float(unit or 0) for axis, unit in zip("xy", units, strict=True))
    return x, y


class DecodedRegions(RegionReader):
    """An image that is decoded as a whole, because its format has no parts: JPEG, PNG and others of Pillow's.

    Args:
        image: As `open_image` returns it, or an image of Pillow's.
    """

    def __init__(self, image: AnyImage) -> None:
        check_size(image)
        bits = declared_bits(image)
        bands = bands_of(image) if isinstance(image, Image.Image) else BandArray(image.read(), **_facts(image))
        # Some formats have their EXIF data behind the pixels.
        orientation = image.getexif().get(ORIENTATION, 1) if isinstance(image, Image.Image) else image.orientation
        turned = transposed(bands, orientation)
        assert isinstance(turned, BandArray)
        self.values = turned.read()
        kind = PixelKind(self.values.dtype, self.values.shape[2], bits=bits, **_facts(bands))
        super().__init__(kind, [(self.values.shape[1], self.values.shape[0])])

    def band_height(self, level: int) -> int:
        return ROWS_AT_ONCE

    def read_band(self, level: int, rows: slice, columns: slice) -> NDArray[Any]:
        return self.values[rows, columns]


def _facts(bands: BandArray) -> dict[str, Any]:
    return {"has_alpha": bands.has_alpha, "is_rgb": bands.is_rgb, "nodata": bands.nodata}
