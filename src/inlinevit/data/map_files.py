"""Maps that are written while they are made: features as .npy or Zarr, classes as TIFF or GeoTIFF.

The classes here are sinks of `inlinevit.streaming`. Files are written aside and renamed at the end.
"""

import json
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..models._weight_files import classes_of_head, read_state_dict, require_finite
from ..streaming.mask import any_of_cells
from ..utils.atomic import atomic_folder, atomic_path, atomic_write_json, disk_full_errors
from ..utils.memory import GIGABYTE
from ..utils.validation import require
from .array_regions import is_zarr
from .image_source import RegionSource
from .regions import GeoReference

NPY, ZARR, TIFF = (".npy",), (".zarr",), (".tif", ".tiff")
# Tokens of a chunk of features, (height, width), and of a tile of classes along a side.
CHUNK = (16, 256)
TILE = 256
# The value of tokens that are masked, in maps of classes.
MASKED = 255


class LinearHead(NamedTuple):
    """A linear classifier of tokens.

    Attributes:
        weight: (classes, channels).
        bias: (classes).
    """

    weight: Tensor
    bias: Tensor


def read_head(path: str | Path) -> LinearHead:
    """Read a safetensors file with `weight` (classes, channels) and, if there is one, `bias` (classes).

    Raises:
        OSError: The file cannot be read.
        ValueError: It is damaged, or holds something else.
    """
    remedy = "save the weight (classes, channels) and the bias (classes) of a linear layer as safetensors"
    require(Path(path).suffix == ".safetensors", f"{path} is not a .safetensors file: {remedy}")
    weights = read_state_dict(Path(path))
    require_finite(weights, path)
    require(
        {"weight"} <= set(weights) <= {"weight", "bias"},
        f"{path} holds {', '.join(sorted(weights)[:4])} in place of weight and bias: {remedy}",
    )
    classes = classes_of_head({f"head.{name}": value for name, value in weights.items()}, "head", path)
    weight = weights["weight"].float()
    require(weight.dim() == 2, f"the weight in {path} has the shape {tuple(weight.shape)}: {remedy}")
    return LinearHead(weight, weights.get("bias", torch.zeros(classes or 0)).float())


def check_head(head: LinearHead, channels: int, what: str) -> None:
    """Refuse a head that is for other features than these."""
    require(
        head.weight.shape[1] == channels,
        f"the head takes {head.weight.shape[1]} channels, but {what} has {channels}: choose a head that was trained on "
        "these features",
    )


@dataclass
class Coordinates:
    """Where the entries of a map are in the image.

    Attributes:
        level: The level that was read.
        origin: The pixel (x, y) of level 0 at the upper left corner of the map.
        downsample: Pixels of level 0 in a pixel of the level, (x, y).
        size: (width, height) of the part that was read, in pixels of the level.
        mpp: Micrometres per pixel of level 0, (x, y).
        geo: Where level 0 is on the earth.
        nodata: The value of pixels without data in the image.
    """

    level: int
    origin: tuple[float, float]
    downsample: tuple[float, float]
    size: tuple[int, int]
    mpp: tuple[float, float] | None = None
    geo: GeoReference | None = None
    nodata: float | None = None

    @classmethod
    def of(cls, source: RegionSource) -> "Coordinates":
        """Return the coordinates of maps of an image."""
        reader, box = source.reader, source.box
        x, y = (full / own for full, own in zip(reader.dimensions, source.level_size, strict=True))
        origin = (box.left * x, box.top * y)
        return cls(source.level, origin, (x, y), source.size, reader.mpp, reader.geo, reader.kind.nodata)

    def to_geo(self, stride: int) -> GeoReference | None:
        """Return where a map with `stride` pixels per entry is on the earth."""
        if self.geo is None:
            return None
        return self.geo.scaled(self.origin, (stride * self.downsample[0], stride * self.downsample[1]))

    def to_plain(self, stride: int) -> dict[str, Any]:
        """Return the attributes of a map with `stride` pixels of the level per entry."""
        geo = self.to_geo(stride)
        return {
            "stride": stride,
            "level": self.level,
            "origin": list(self.origin),
            "downsample": list(self.downsample),
            "image_size": list(self.size),
            "mpp": None if self.mpp is None else list(self.mpp),
            "crs": None if geo is None else geo.crs,
            "transform": None if geo is None else list(geo.transform),
        }


class _Aborted(Exception):
    """Ends a context whose result is not wanted."""


class FileSink(ABC):
    """A sink that writes a file or a folder; see MapSink.

    Args:
        path: Where it will be when it is complete.
        coordinates: Where its entries are.
    """

    def __init__(self, path: Path, coordinates: Coordinates) -> None:
        self.path, self.coordinates = path, coordinates
        self.stack = ExitStack()

    def begin(self, shape: tuple[int, int, int], stride: int) -> None:
        """See MapSink.begin."""
        self.shape, self.stride = shape, stride
        needed = self.count_bytes()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.path.parent).free
        require(
            needed <= free,
            f"{self.path} would have {needed / GIGABYTE:.2f} GB, but {free / GIGABYTE:.2f} GB are free: name another "
            "disk with --output",
        )
        self.open()

    def write_rows(self, top: int, rows: Tensor) -> None:
        """See MapSink.write_rows."""
        with disk_full_errors(self.path):
            self.write(top, rows)

    def close(self) -> None:
        """See MapSink.close; the file appears."""
        with disk_full_errors(self.path):
            self.finish()
        self.stack.close()

    def abort(self) -> None:
        """See MapSink.abort; a file that is complete stays."""
        with suppress(_Aborted), self.stack:
            raise _Aborted

    def count_bytes(self) -> int:
        """Return how many bytes the map has before it is compressed."""
        height, width, channels = self.shape
        return 4 * height * width * channels

    @abstractmethod
    def open(self) -> None:
        """Create the file aside, in the context `stack`."""

    @abstractmethod
    def write(self, top: int, rows: Tensor) -> None:
        """Write rows (rows, width, channels)."""

    @abstractmethod
    def finish(self) -> None:
        """Write what is left."""


class NpySink(FileSink):
    """Features as a .npy file (height, width, channels), float32, and their coordinates as FILE.json."""

    def open(self) -> None:
        aside = self.stack.enter_context(atomic_path(self.path))
        self.stream = self.stack.enter_context(aside.open("xb"))
        header = {"descr": "<f4", "fortran_order": False, "shape": self.shape}
        np.lib.format.write_array_header_1_0(self.stream, header)

    def write(self, top: int, rows: Tensor) -> None:
        self.stream.write(np.ascontiguousarray(rows.numpy(), dtype="<f4").data)

    def finish(self) -> None:
        self.stream.flush()
        atomic_write_json(self.path.with_name(f"{self.path.name}.json"), self.coordinates.to_plain(self.stride))


class ZarrSink(FileSink):
    """Features as a Zarr array (height, width, channels), float32, whose attributes are their coordinates."""

    def open(self) -> None:
        import zarr

        aside = self.stack.enter_context(atomic_folder(self.path))
        height, width, channels = self.shape
        self.array: Any = zarr.create_array(
            aside,
            shape=self.shape,
            chunks=(min(CHUNK[0], height), min(CHUNK[1], width), channels),
            dtype="float32",
            dimension_names=("y", "x", "channel"),
            attributes=self.coordinates.to_plain(self.stride),
        )
        # Rows of chunks are written as a whole.
        self.buffer = np.empty((min(CHUNK[0], height), width, channels), np.float32)

    def write(self, top: int, rows: Tensor) -> None:
        step, height = len(self.buffer), self.shape[0]
        done = 0
        while done < len(rows):
            place = (top + done) % step
            count = min(step - place, len(rows) - done)
            self.buffer[place : place + count] = rows[done : done + count].numpy()
            done += count
            end = top + done
            if end % step == 0 or end == height:
                start = (end - 1) // step * step
                self.array[start:end] = self.buffer[: end - start]

    def finish(self) -> None:
        """Nothing is left: the last rows were written with the last chunks."""


class ClassMapSink(FileSink):
    """From a map of logits (height, width, classes) to the most probable class of each token: a tiled TIFF file.

    It is a GeoTIFF file if the image was one.

    Rows are collected in a file aside, with one or two bytes per token, and tiles are compressed at the end.

    Args:
        path: The file.
        coordinates: Where its entries are.
        probabilities: A second file, for the probability of each class, float32; None = none.
        mask: Which tokens of this or an earlier stage count, (height, width); others get the value MASKED, or 65535
            in files of 16 bits.
        mask_stride: Pixels per entry of the mask; None = as many as per token of this map.
    """

    def __init__(
        self,
        path: Path,
        coordinates: Coordinates,
        *,
        probabilities: Path | None = None,
        mask: NDArray[np.bool_] | None = None,
        mask_stride: int | None = None,
    ) -> None:
        super().__init__(path, coordinates)
        self.probabilities, self.mask, self.mask_stride = probabilities, mask, mask_stride
        self.size = (0, 0)

    def count_bytes(self) -> int:
        height, width, self.classes = self.shape
        self.size = (width, height)
        kind = np.uint8 if self.classes <= MASKED else np.uint16
        self.dtype, self.masked_value = np.dtype(kind), int(np.iinfo(kind).max)
        has_gaps = self.mask is not None or self.coordinates.nodata is not None
        # The value of no data that the file names.
        self.nodata: int | None = self.masked_value if has_gaps else None
        entry = self.dtype.itemsize + (4 * self.classes if self.probabilities else 0)
        # The rows, and the files that are made of them.
        return 2 * height * width * entry

    def open(self) -> None:
        if self.mask is not None:
            side = self.stride // (self.mask_stride or self.stride)
            self.mask = any_of_cells(torch.from_numpy(self.mask), max(1, side)).numpy()
        # Files appear when the contexts end, in the reverse order.
        self.outputs = [
            _TiledOutput(path, dtype, bands, self.stack)
            for path, dtype, bands in (
                (self.path, self.dtype, 1),
                (self.probabilities, np.dtype(np.float32), self.classes),
            )
            if path is not None
        ]

    def values_of(self, rows: Tensor, masked: NDArray[np.bool_] | None) -> NDArray[Any]:
        """Return the value of the most probable class of each token, (rows, width); any where it is masked."""
        return rows.argmax(dim=2).numpy().astype(self.dtype)

    def is_masked(self, top: int, count: int) -> NDArray[np.bool_] | None:
        """Return which entries of rows are masked, (rows, width); None = none."""
        if self.mask is None:
            return None
        # Entries per entry of the mask: of pixels, there are several.
        side = max(1, (self.mask_stride or self.stride) // self.stride)
        rows, columns = np.arange(top, top + count) // side, np.arange(self.shape[1]) // side
        return ~self.mask[rows][:, columns]

    def write(self, top: int, rows: Tensor) -> None:
        masked = self.is_masked(top, len(rows))
        classes = self.values_of(rows, masked)
        if masked is not None:
            classes[masked] = self.masked_value
        self.outputs[0].append(classes)
        if self.probabilities is not None:
            probabilities = rows.softmax(dim=2).numpy()
            if masked is not None:
                probabilities[masked] = np.nan
            self.outputs[1].append(probabilities)

    def finish(self) -> None:
        height, width, _ = self.shape
        geo = self.coordinates.to_geo(self.stride)
        about = json.dumps(self.coordinates.to_plain(self.stride))
        for output, nodata in zip(self.outputs, (self.nodata, float("nan")), strict=False):
            output.finish((height, width), geo, about, None if self.nodata is None else nodata)


class LabelMapSink(ClassMapSink):
    """From a map of logits (height, width, classes) to a label map like those of the training data: a tiled TIFF file.

    Args:
        path: The file.
        coordinates: Where its entries are.
        values: The value of each class in label maps.
        ignored: The value of pixels that do not count, if there is one: "no data" in the file. Masked pixels have it,
            or a value that no class has.
        probabilities: A second file, for the probability of each class, float32; None = none.
        mask: Which tokens of the first stage count; see ClassMapSink.
        mask_stride: Pixels per token.

    Attributes:
        counts: How many entries have each class, (classes).
    """

    def __init__(
        self,
        path: Path,
        coordinates: Coordinates,
        values: Sequence[int],
        *,
        ignored: int | None = None,
        probabilities: Path | None = None,
        mask: NDArray[np.bool_] | None = None,
        mask_stride: int | None = None,
    ) -> None:
        super().__init__(path, coordinates, probabilities=probabilities, mask=mask, mask_stride=mask_stride)
        if ignored is None and mask is not None:
            ignored = next(value for value in (0, MASKED, *range(256, 512)) if value not in values)
        self.table, self.ignored = np.array(values, np.int64), ignored
        self.counts = np.zeros(len(values), np.int64)

    def count_bytes(self) -> int:
        super().count_bytes()
        height, width, _ = self.shape
        self.dtype = np.dtype(np.uint8 if max(*self.table, self.ignored or 0) < 256 else np.uint16)
        self.nodata = self.ignored
        self.masked_value = self.ignored or 0
        return 2 * height * width * (self.dtype.itemsize + (4 * self.classes if self.probabilities else 0))

    def values_of(self, rows: Tensor, masked: NDArray[np.bool_] | None) -> NDArray[Any]:
        if not bool(rows.isfinite().all()):
            raise ValueError("the model gives NaN or infinite values for this image: check its weights")
        indices = rows.argmax(dim=2).numpy()
        counted = indices.ravel() if masked is None else indices[~masked]
        self.counts += np.bincount(counted, minlength=len(self.table))
        return self.table.astype(self.dtype)[indices]


class _TiledOutput:
    """A TIFF file that is made of rows: they are collected in a file aside first.

    Args:
        path: The file.
        dtype: Of its values.
        bands: How many there are.
        stack: The context at whose end the file appears.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any], bands: int, stack: ExitStack) -> None:
        self.dtype, self.bands = dtype, bands
        self.aside = stack.enter_context(atomic_path(path))
        collected = self.aside.with_name(f"{self.aside.name}.rows")
        collected.unlink(missing_ok=True)
        stack.callback(collected.unlink, missing_ok=True)
        self.stream = stack.enter_context(collected.open("x+b"))

    def append(self, rows: NDArray[Any]) -> None:
        """Add rows (rows, width) or (rows, width, bands)."""
        self.stream.write(np.ascontiguousarray(rows).data)

    def finish(self, size: tuple[int, int], geo: GeoReference | None, about: str, nodata: float | None) -> None:
        """Write the file: (height, width), where it is on the earth, its description, the value of no data."""
        write = self._write_tiff if geo is None else self._write_geotiff
        self.stream.seek(0)
        write(size, geo, about, nodata)

    def _stripes(self, size: tuple[int, int]) -> Iterator[NDArray[Any]]:
        """Yield rows of tiles, (rows, width, bands), from top to bottom."""
        height, width = size
        for top in range(0, height, TILE):
            count = min(TILE, height - top) * width * self.bands
            stripe = np.frombuffer(self.stream.read(count * self.dtype.itemsize), self.dtype)
            yield stripe.reshape(-1, width, self.bands)

    def _tiles(self, size: tuple[int, int]) -> Iterator[NDArray[Any]]:
        for stripe in self._stripes(size):
            for left in range(0, size[1], TILE):
                tile = np.zeros((TILE, TILE, self.bands), self.dtype)
                part = stripe[:, left : left + TILE]
                tile[: part.shape[0], : part.shape[1]] = part
                yield tile[..., 0] if self.bands == 1 else tile

    def _write_tiff(self, size: tuple[int, int], geo: GeoReference | None, about: str, nodata: float | None) -> None:
        import tifffile

        shape = size if self.bands == 1 else (*size, self.bands)
        tags = [] if nodata is None else [(42113, "s", 0, f"{nodata:g}", True)]
        is_large = int(np.prod(shape)) * self.dtype.itemsize > 2**31
        with tifffile.TiffWriter(self.aside, bigtiff=is_large) as writer:
            writer.write(
                self._tiles(size),
                shape=shape,
                dtype=self.dtype,
                tile=(TILE, TILE),
                compression="zlib",
                photometric="minisblack",
                planarconfig=None if self.bands == 1 else "contig",
                description=about,
                metadata=None,
                extratags=tags,
            )

    def _write_geotiff(self, size: tuple[int, int], geo: GeoReference | None, about: str, nodata: float | None) -> None:
        import rasterio
        from rasterio.windows import Window

        assert geo is not None
        height, width = size
        profile = {
            "driver": "GTiff",
            "height": height,
            "width": width,
            "count": self.bands,
            "dtype": self.dtype.name,
            "crs": geo.crs,
            "transform": rasterio.Affine(*geo.transform),
            "nodata": nodata,
            "tiled": True,
            "blockxsize": TILE,
            "blockysize": TILE,
            "compress": "deflate",
            "BIGTIFF": "IF_SAFER",
        }
        with rasterio.Env(GDAL_PAM_ENABLED="NO"), rasterio.open(self.aside, "w", **profile) as dataset:
            dataset.update_tags(TIFFTAG_IMAGEDESCRIPTION=about)
            for place, stripe in enumerate(self._stripes(size)):
                window = Window(0, place * TILE, width, len(stripe))
                dataset.write(np.moveaxis(stripe, 2, 0), window=window)


def feature_sink(path: Path, coordinates: Coordinates) -> FileSink:
    """Return the sink for a file of features: .npy or .zarr."""
    kinds: dict[str, type[FileSink]] = {**dict.fromkeys(NPY, NpySink), **dict.fromkeys(ZARR, ZarrSink)}
    require(
        path.suffix.lower() in kinds, f"{path} should end in .npy or .zarr, the formats of features: rename --output"
    )
    if path.suffix.lower() in ZARR:
        require(
            not os.path.lexists(path) or is_zarr(path),
            f"{path} exists and is not a Zarr folder: name another --output, or remove it",
        )
    return kinds[path.suffix.lower()](path, coordinates)
