"""Regions of images of any size: all readers, levels, and that pixels are those of the ordinary path."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from inlinevit.data.array_regions import ArrayRegions, DecodedRegions, ZarrRegions
from inlinevit.data.image_source import RegionSource, choose_box, choose_level, open_regions
from inlinevit.data.images import decode_image, open_image
from inlinevit.data.pixels import BandArray, PixelFormat, image_to_tensor
from inlinevit.data.regions import GeoReference, RegionReader, SlideRegions
from inlinevit.data.tiff_regions import TiffRegions

tifffile = pytest.importorskip("tifffile", reason="needs inlinevit[huge]")
zarr = pytest.importorskip("zarr", reason="needs inlinevit[huge]")

HEIGHT, WIDTH = 150, 211


def noise(
    bands: int | None = 3, dtype: Any = np.uint8, high: int = 256, size: tuple[int, int] = (HEIGHT, WIDTH)
) -> Any:
    shape = size if bands is None else (*size, bands)
    return np.random.default_rng(0).integers(0, high, shape).astype(dtype)


def smooth() -> Any:
    """An image that JPEG keeps."""
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    return np.stack([x, y, (x + y) // 2], 2).astype(np.uint8)


# Files by what is special about them: the values, and the arguments of tifffile.
TIFFS: dict[str, tuple[Any, dict[str, Any]]] = {
    "tiles": (noise(), dict(tile=(32, 48), compression="zlib", predictor=True)),
    "strips": (noise(), dict(rowsperstrip=37, compression="lzw")),
    "one_strip": (noise(), dict(rowsperstrip=HEIGHT, compression="zlib")),
    "plain": (noise(), dict()),
    "planes_of_tiles": (np.moveaxis(noise(), 2, 0), dict(planarconfig="separate", tile=(64, 64), compression="zlib")),
    "planes": (np.moveaxis(noise(), 2, 0), dict(planarconfig="separate")),
    "bigtiff": (noise(), dict(bigtiff=True, tile=(64, 64), compression="zstd")),
    "big_endian": (noise(dtype=np.uint16, high=4096), dict(byteorder=">")),
    "16_bits": (noise(dtype=np.uint16, high=4096), dict(tile=(64, 64))),
    "cmyk": (noise(4), dict(photometric="separated", tile=(64, 64))),
    "grey": (noise(None), dict(photometric="minisblack", compression="packbits")),
    "white_is_zero": (noise(None), dict(photometric="miniswhite", tile=(32, 32))),
    "palette": (noise(None), dict(photometric="palette", colormap=noise(None, np.uint16, 65536, (3, 256)))),
    "alpha": (noise(4), dict(extrasamples=["unassalpha"], tile=(64, 64))),
    "one_bit": (noise(None, high=2).astype(bool), dict(photometric="minisblack")),
    "jpeg": (smooth(), dict(compression="jpeg", tile=(64, 64))),
    "floats": (noise(None, np.float32, 2), dict(photometric="minisblack", tile=(64, 64))),
}


def write_tiff(path: Path, kind: str) -> Path:
    values, arguments = TIFFS[kind]
    tifffile.imwrite(path, values, **{"photometric": "rgb", **arguments})
    return path


def ordinary(path: Path, pixel_format: PixelFormat) -> torch.Tensor:
    """The pixels of the path that small images take, 0 … 255."""
    with open_image(path) as image:
        return image_to_tensor(decode_image(image, pixel_format)).float()


def streamed(reader: RegionReader, pixel_format: PixelFormat, step: int = 41, **arguments: Any) -> torch.Tensor:
    """The same, read by rows."""
    channels = pixel_format.channels
    source = RegionSource(reader, pixel_format, [0.0] * channels, [1.0] * channels, **arguments)
    height = source.size[1]
    return 255 * torch.cat([source.rows(top, min(top + step, height)) for top in range(0, height, step)], 1)


@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("kind", TIFFS)
def test_tiff_pixels_are_those_of_the_ordinary_path(kind: str, channels: int, tmp_path: Path) -> None:
    path = write_tiff(tmp_path / "image.tif", kind)
    pixel_format = PixelFormat(channels)
    with open_regions(path) as reader:
        assert isinstance(reader, TiffRegions)
        assert torch.allclose(streamed(reader, pixel_format), ordinary(path, pixel_format), atol=1e-3)


@pytest.mark.parametrize("name", ["a.png", "a.jpg", "cmyk.jpg", "turned.png", "alpha.png", "palette.gif"])
def test_pixels_of_other_formats_are_those_of_the_ordinary_path(name: str, tmp_path: Path) -> None:
    image, exif = Image.fromarray(smooth()), Image.Exif()
    if name == "turned.png":
        exif[0x0112] = 6
    mode = {"cmyk.jpg": "CMYK", "alpha.png": "RGBA", "palette.gif": "P"}.get(name, "RGB")
    image.convert(mode).save(tmp_path / name, exif=exif)
    with open_regions(tmp_path / name) as reader:
        assert isinstance(reader, DecodedRegions)
        expected = ordinary(tmp_path / name, PixelFormat(3))
        assert torch.allclose(streamed(reader, PixelFormat(3)), expected, atol=1e-3)
    assert expected.shape[1:] == ((WIDTH, HEIGHT) if name == "turned.png" else (HEIGHT, WIDTH))


def test_normalisation_is_that_of_classification(tmp_path: Path) -> None:
    from inlinevit.tasks.classification.transforms import InputSpec, Normalized

    mean, std = (0.48, 0.45, 0.4), (0.22, 0.23, 0.24)
    source = RegionSource(ArrayRegions(noise()), PixelFormat(3), mean, std)
    expected = Normalized(InputSpec(1, mean, std, "bicubic", 1.0, "center"))(Image.fromarray(noise()))
    assert torch.equal(source.rows(0, HEIGHT), expected)


@pytest.mark.parametrize("kind", ["tiles", "strips", "plain", "planes_of_tiles", "planes"])
def test_any_region_of_a_tiff_file(kind: str, tmp_path: Path) -> None:
    whole = noise()
    with open_regions(write_tiff(tmp_path / "image.tif", kind)) as reader:
        for x, y, width, height in [
            (0, 0, WIDTH, HEIGHT),
            (31, 30, 34, 40),
            (WIDTH - 1, HEIGHT - 1, 1, 1),
            (5, 0, 1, 99),
        ]:
            region = reader.read_region((x, y), 0, (width, height))
            assert np.array_equal(region, whole[y : y + height, x : x + width])


def test_each_tile_is_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = []
    original = TiffRegions._decode
    monkeypatch.setattr(TiffRegions, "_decode", lambda *given: decoded.append(given[2]) or original(*given))
    with open_regions(write_tiff(tmp_path / "image.tif", "tiles")) as reader:
        streamed(reader, PixelFormat(3), step=7)
    assert sorted(decoded) == list(range(5 * 5))


def write_pyramid(path: Path, kind: str) -> list[Any]:
    """Write an image with two smaller copies; returns the levels."""
    levels = [noise(size=(128, 192)), noise(size=(64, 96)), noise(size=(32, 48))]
    options = dict(photometric="rgb", tile=(32, 32), resolutionunit="CENTIMETER")
    with tifffile.TiffWriter(path) as writer:
        copies = {"subifds": 2} if kind == "subifds" else {}
        # 10,000 pixels per centimetre are micrometres.
        writer.write(levels[0], resolution=(20_000, 20_000), **options, **copies)
        for level in levels[1:]:
            writer.write(level, subfiletype=1, **options)
        if kind == "pages":
            writer.write(noise(None, high=2, size=(128, 192)).astype(bool), photometric="minisblack", subfiletype=4)
    return levels


@pytest.mark.parametrize("kind", ["subifds", "pages"])
def test_levels_of_tiff_files(kind: str, tmp_path: Path) -> None:
    levels = write_pyramid(tmp_path / "pyramid.tif", kind)
    with open_regions(tmp_path / "pyramid.tif") as reader:
        assert reader.level_dimensions == ((192, 128), (96, 64), (48, 32))
        assert reader.level_downsamples == (1.0, 2.0, 4.0)
        for index, level in enumerate(levels):
            values = streamed(reader, PixelFormat(3), level=index)
            assert np.array_equal(values.round().numpy(), np.moveaxis(level, 2, 0))
        # Locations are in pixels of level 0.
        assert np.array_equal(reader.read_region((16, 8), 2, (5, 6)), levels[2][2:8, 4:9])
        with pytest.raises(ValueError, match="it has no level 3: there are levels 0 to 2"):
            reader.read_region((0, 0), 3, (1, 1))


def test_resolutions(tmp_path: Path) -> None:
    write_pyramid(tmp_path / "pyramid.tif", "pages")
    with open_regions(tmp_path / "pyramid.tif") as reader:
        assert reader.mpp == (0.5, 0.5)
        assert choose_level(reader, 1, None) == (1, "")
        assert choose_level(reader, None, 1.0) == (1, "level 1 has 1 micrometres per pixel, as asked")
        assert choose_level(reader, None, 2.1) == (
            2,
            "level 2 has 2 micrometres per pixel, 4.8% below the 2.1 that were asked for",
        )
        with pytest.raises(ValueError, match=r"no level is within 10% of 1\.3 .* its levels have 0\.5, 1, 2; choose"):
            choose_level(reader, None, 1.3)
        with pytest.raises(ValueError, match="give one of them"):
            choose_level(reader, 0, 1.0)
    with pytest.raises(ValueError, match="does not say how large its pixels are"):
        choose_level(ArrayRegions(noise()), None, 1.0)


@pytest.mark.parametrize(
    ("description", "mpp"),
    [
        ('<OME><Pixels PhysicalSizeX="0.25" PhysicalSizeXUnit="µm" PhysicalSizeY="0.3"/></OME>', (0.25, 0.3)),
        ('<OME><Pixels PhysicalSizeX="0.25" PhysicalSizeXUnit="nm" PhysicalSizeY="0.3"/></OME>', None),
        ("Aperio Image Library\r\n100x100|AppMag = 20|MPP = 0.4990", (0.499, 0.499)),
    ],
)
def test_resolutions_in_descriptions(description: str, mpp: Any, tmp_path: Path) -> None:
    tifffile.imwrite(
        tmp_path / "a.tif",
        noise(),
        photometric="rgb",
        description=description.encode(),
        metadata=None,
        resolutionunit=1,
    )
    with open_regions(tmp_path / "a.tif") as reader:
        assert reader.mpp == mpp


def test_boxes() -> None:
    reader = ArrayRegions(noise())
    assert choose_box(reader, 0, None) == (0, 0, WIDTH, HEIGHT)
    assert choose_box(reader, 0, (1, 2, 3, 4)) == (1, 2, 3, 4)
    for region in [(-1, 0, 5, 5), (0, 0, WIDTH + 1, 5), (0, HEIGHT, 5, 5), (0, 0, 0, 5)]:
        with pytest.raises(ValueError, match=f"not inside of it: it has {WIDTH} × {HEIGHT} pixels"):
            choose_box(reader, 0, region)
    source = RegionSource(reader, PixelFormat(3), [0.0] * 3, [1.0] * 3, box=choose_box(reader, 0, (10, 20, 30, 40)))
    assert source.size == (30, 40)
    assert np.array_equal((255 * source.rows(3, 9)).round().numpy(), np.moveaxis(noise()[23:29, 10:40], 2, 0))


@pytest.mark.parametrize("given", ["array", "memmap", "npy", "tensor", "pil", "reader"])
def test_images_in_memory_and_npy_files(given: str, tmp_path: Path) -> None:
    values = noise()
    np.save(tmp_path / "a.npy", values)
    image: Any = {
        "array": values,
        "memmap": np.load(tmp_path / "a.npy", mmap_mode="r"),
        "npy": tmp_path / "a.npy",
        "tensor": torch.from_numpy(values).permute(2, 0, 1),
        "pil": Image.fromarray(values),
        "reader": ArrayRegions(values),
    }[given]
    with open_regions(image) as reader:
        assert reader.size == reader.dimensions == (WIDTH, HEIGHT)
        assert np.array_equal(streamed(reader, PixelFormat(3)).round().numpy(), np.moveaxis(values, 2, 0))


def test_npy_files_that_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    np.save(path, np.asfortranarray(noise()))
    with pytest.raises(ValueError, match=r"column by column: save it with np.save"):
        open_regions(path)
    np.save(path, np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="it is an array of object"):
        open_regions(path)
    np.save(path, np.moveaxis(noise(), 2, 0))
    with pytest.raises(ValueError, match=r"of the shape \(3, 150, 211\): give \(height, width\)"):
        open_regions(path)
    np.save(path, noise())
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"a\.npy cannot be used \(it is truncated: its values end at byte"):
        open_regions(path)
    path.write_bytes(b"\x93NUMPY\x01\x00\x05\x00{}\n")
    with pytest.raises(ValueError, match="NumPy file that is damaged"):
        open_regions(path)


@pytest.mark.parametrize("version", [2, 3])
def test_zarr_arrays(version: int, tmp_path: Path) -> None:
    array = zarr.create_array(
        tmp_path / "a.zarr", shape=noise().shape, chunks=(32, 50, 3), dtype="u1", zarr_format=version
    )
    array[:] = noise()
    with open_regions(tmp_path / "a.zarr") as reader:
        assert isinstance(reader, ZarrRegions)
        assert reader.band_height(0) == 32
        assert np.array_equal(streamed(reader, PixelFormat(3)).round().numpy(), np.moveaxis(noise(), 2, 0))


def write_ome_zarr(path: Path, axes: str = "tczyx", datasets: Any = None) -> list[Any]:
    levels = [noise(size=(60, 80)), noise(size=(30, 40))]
    scale = [{"a": 0.0, "y": 0.5, "x": 0.25}.get(axis, 1.0) for axis in axes]
    datasets = datasets or [
        {"path": f"s{index}", "coordinateTransformations": [{"type": "scale", "scale": scale}]} for index in range(2)
    ]
    described = [{"name": axis, **({"unit": "micrometer"} if axis in "yx" else {})} for axis in axes]
    group = zarr.open_group(path, mode="w")
    group.attrs["ome"] = {"version": "0.5", "multiscales": [{"axes": described, "datasets": datasets}]}
    for index, level in enumerate(levels):
        values = np.moveaxis(level, 2, 0)[None, :, None] if axes == "tczyx" else np.moveaxis(level, 2, 0)
        group.create_array(f"s{index}", data=values, chunks=(*values.shape[:-2], 16, 32))
    return levels


@pytest.mark.parametrize("axes", ["tczyx", "cyx"])
def test_pyramids_of_ome_zarr(axes: str, tmp_path: Path) -> None:
    levels = write_ome_zarr(tmp_path / "a.zarr", axes)
    with open_regions(tmp_path / "a.zarr") as reader:
        assert reader.level_dimensions == ((80, 60), (40, 30))
        assert reader.mpp == (0.25, 0.5)
        for index, level in enumerate(levels):
            values = streamed(reader, PixelFormat(3), level=index)
            assert np.array_equal(values.round().numpy(), np.moveaxis(level, 2, 0))


def test_zarr_that_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "a.zarr"
    with pytest.raises(FileNotFoundError, match="there is no file or folder"):
        open_regions(folder)
    folder.mkdir()
    with pytest.raises(ValueError, match="it is a folder, but not one of Zarr"):
        open_regions(folder)
    (folder / "zarr.json").write_text("{")
    with pytest.raises(ValueError, match=r"its zarr\.json is not valid JSON"):
        open_regions(folder)
    write_ome_zarr(folder, datasets=[{"path": "../elsewhere"}])
    with pytest.raises(ValueError, match="are not inside of it"):
        open_regions(folder)
    write_ome_zarr(folder, datasets=[{"name": "s0"}])
    with pytest.raises(ValueError, match="its list of levels is not that of OME-Zarr"):
        open_regions(folder)
    zarr.create_array(folder, shape=(64,), dtype="u1", overwrite=True)
    with pytest.raises(ValueError, match=r"its array has the shape \(64,\)"):
        open_regions(folder)
    zarr.create_array(folder, shape=(9000, 20_000), chunks=(9000, 20_000), dtype="u1", overwrite=True)
    with pytest.raises(ValueError, match=r"one of its chunks has 180000000 pixels.*--max-pixels 180000000"):
        open_regions(folder)


@pytest.mark.parametrize("place", ["compressor", "filters"])
def test_zarr_runs_no_code(place: str, tmp_path: Path) -> None:
    """A chunk that is a pickle would be loaded by its codec."""
    folder = tmp_path / "a.zarr"
    zarr.create_array(folder, shape=(8, 8), chunks=(8, 8), dtype="u1", zarr_format=2, compressors=None)
    described = json.loads((folder / ".zarray").read_text())
    described[place] = {"id": "pickle"} if place == "compressor" else [{"id": "pickle"}]
    (folder / ".zarray").write_text(json.dumps(described))
    (folder / "0.0").write_bytes(b"cos\nsystem\n(S'touch " + os.fsencode(tmp_path / "ran") + b"'\ntR.")
    with pytest.raises(ValueError, match="compressed by pickle, which is not read"):
        open_regions(folder).read_region((0, 0), 0, (8, 8))
    assert not (tmp_path / "ran").exists()


def test_pipes_are_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.tif")
    with pytest.raises(ValueError, match="a named pipe, not a regular file"):
        open_regions(tmp_path / "a.tif")
    zarr.create_array(tmp_path / "a.zarr", shape=(8, 8), chunks=(8, 8), dtype="u1", zarr_format=2)
    os.mkfifo(tmp_path / "a.zarr" / "0.0")
    with open_regions(tmp_path / "a.zarr") as reader, pytest.raises(OSError, match="regular file"):
        reader.read_region((0, 0), 0, (8, 8))


class Slide:
    """What openslide's objects are: keyword names, RGBA, sizes of levels, properties."""

    level_dimensions = ((80, 60), (40, 30))
    properties = {"openslide.mpp-x": "0.25", "openslide.mpp-y": "0.26", "openslide.background-color": "FF0000"}  # noqa: RUF012

    def read_region(self, location: Any, level: int, size: Any) -> Any:
        values = noise(4, size=(60 >> level, 80 >> level))
        values[..., 3] = 255
        values[:4, :, 3] = 0
        (x, y), (width, height) = (place >> level for place in location), size
        return Image.fromarray(values[y : y + height, x : x + width], "RGBA")


class CuImage:
    """What cucim's objects are: another order of arguments, a method `size`, arrays."""

    resolutions = {"level_count": 2, "level_dimensions": ((80, 60), (40, 30))}  # noqa: RUF012

    def size(self, order: str) -> list[int]:
        return [80, 60]

    def spacing(self, order: str) -> list[float]:
        return [0.25, 0.26]

    def spacing_units(self, order: str) -> list[str]:
        return ["micrometer", "micrometer"]

    def read_region(self, location: Any, size: Any, level: int = 0) -> Any:
        return np.asarray(Slide().read_region(location, level, size))[..., :3]


@pytest.mark.parametrize("kind", [Slide, CuImage])
@pytest.mark.parametrize("level", [0, 1])
def test_readers_of_slides_work_as_they_are(kind: Any, level: int) -> None:
    reader = open_regions(kind())
    assert isinstance(reader, SlideRegions)
    assert reader.mpp == (0.25, 0.26)
    expected = noise(4, size=(60 >> level, 80 >> level))[..., :3]
    if kind is Slide:
        # Transparent pixels have the background colour.
        expected[:4] = (255, 0, 0)
    assert np.array_equal(streamed(reader, PixelFormat(3), level=level).round().numpy(), np.moveaxis(expected, 2, 0))


def test_objects_that_are_no_images() -> None:
    with pytest.raises(TypeError, match=r"of type dict: give a path.*or a reader with read_region"):
        open_regions({})  # type: ignore[arg-type]

    class Nameless:
        def read_region(self, location: Any, level: int, size: Any) -> Any: ...

    with pytest.raises(ValueError, match="not the size of its levels"):
        open_regions(Nameless())


def test_openslide_reads_a_tiled_tiff(tmp_path: Path) -> None:
    openslide = pytest.importorskip("openslide", reason="needs inlinevit[slides]")
    write_pyramid(tmp_path / "pyramid.tif", "pages")
    values = noise(size=(128, 192))
    with openslide.OpenSlide(tmp_path / "pyramid.tif") as slide:
        reader = open_regions(slide)
        assert reader.level_dimensions[0] == (192, 128)
        assert np.array_equal(streamed(reader, PixelFormat(3)).round().numpy(), np.moveaxis(values, 2, 0))
    # Slides are known by their extensions.
    (tmp_path / "pyramid.tif").rename(tmp_path / "pyramid.svs")
    with open_regions(tmp_path / "pyramid.svs") as reader:
        assert isinstance(reader, SlideRegions)
        assert np.array_equal(reader.read_region((3, 5), 0, (7, 9)), values[5:14, 3:10])


def test_truncated_tiff_files(tmp_path: Path) -> None:
    for kind in ("tiles", "plain", "one_strip"):
        path = write_tiff(tmp_path / f"{kind}.tif", kind)
        content = path.read_bytes()
        for length in (4, 100, len(content) // 2, len(content) - 1):
            path.write_bytes(content[:length])
            with pytest.raises(ValueError, match=rf"{kind}\.tif cannot be used \(it is .*(truncated|damaged)"):
                open_regions(path)


def test_damaged_tiles(tmp_path: Path) -> None:
    path = write_tiff(tmp_path / "a.tif", "tiles")
    with tifffile.TiffFile(path) as file:
        offset = file.pages[0].dataoffsets[7]
    content = bytearray(path.read_bytes())
    content[offset : offset + 40] = bytes(40)
    path.write_bytes(content)
    with open_regions(path) as reader:
        source = RegionSource(reader, PixelFormat(3), [0.0] * 3, [1.0] * 3, name="a.tif")
        with pytest.raises(ValueError, match=r"a\.tif cannot be used \(its tile 7 cannot be decoded"):
            source.rows(0, HEIGHT)


def test_tiles_that_are_larger_than_they_say(tmp_path: Path) -> None:
    """A JPEG tile has a size of its own, which could fill the memory."""
    path = write_tiff(tmp_path / "a.tif", "jpeg")
    large = io.BytesIO()
    Image.new("RGB", (4096, 4096)).save(large, "JPEG")
    with tifffile.TiffFile(path, mode="r+b") as file:
        page = file.pages[0]
        start = path.stat().st_size
        offsets = [start, *page.dataoffsets[1:]]
        counts = [len(large.getvalue()), *page.databytecounts[1:]]
        page.tags["TileOffsets"].overwrite(offsets)
        page.tags["TileByteCounts"].overwrite(counts)
    with path.open("r+b") as stream:
        stream.seek(start)
        stream.write(large.getvalue())
    with open_regions(path) as reader, pytest.raises(ValueError, match="4096 × 4096 pixels, more than a tile"):
        reader.read_region((0, 0), 0, (5, 5))


def test_tiff_files_that_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.tif"
    write_tiff(path, "one_strip")
    with pytest.raises(
        ValueError, match=f"strips has {WIDTH * HEIGHT} pixels, more than the limit of 1000.*--max-pixels"
    ):
        open_regions(path, max_pixels=1000)
    with open_regions(write_tiff(path, "plain"), max_pixels=1000):
        """Rows that are stored as they are can be read one by one."""
    tifffile.imwrite(path, noise(4, np.uint16), photometric="separated")
    with pytest.raises(ValueError, match="its colours are separated with 16 bits: convert it to RGB"):
        open_regions(path)
    tifffile.imwrite(path, noise(), photometric="rgb", extratags=[(274, "H", 1, 6, True)])
    with pytest.raises(ValueError, match=r"rotated or mirrored \(orientation 6\).*: save it upright"):
        open_regions(path)
    tifffile.imwrite(path, noise(None, np.uint16), photometric="miniswhite")
    with pytest.raises(ValueError, match="0 is white in it"):
        open_regions(path)
    tifffile.imwrite(path, noise(5, size=(16, 16)).transpose(2, 0, 1), photometric="minisblack")
    with pytest.warns(UserWarning, match="several pages"):
        open_regions(path)


def test_bands(tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "four.tif", noise(4), photometric="minisblack", planarconfig="contig")
    with open_regions(tmp_path / "four.tif") as reader:
        with pytest.raises(
            ValueError, match=r"it has 4 bands, but the model takes 3: choose 3 of them with --data.bands"
        ):
            streamed(reader, PixelFormat(3))
        values = streamed(reader, PixelFormat(3, bands=(3, 0, 1)))
        assert np.array_equal(values.round().numpy(), np.moveaxis(noise(4)[..., [3, 0, 1]], 2, 0))
        assert streamed(reader, PixelFormat(4)).shape[0] == 4


def test_ranges_of_16_bits(tmp_path: Path) -> None:
    values = noise(None, np.uint16, 1000)
    values[-1, -1] = 4000
    # The largest value, in the last row, decides for all of them.
    assert int(streamed(ArrayRegions(values), PixelFormat(1)).max().round()) == 4000 >> 4
    expected = image_to_tensor(decode_image(BandArray(values), PixelFormat(1))).float()
    assert torch.allclose(streamed(ArrayRegions(values), PixelFormat(1)), expected, atol=1e-3)
    by_range = streamed(ArrayRegions(values), PixelFormat(1, range=(0.0, 1000.0)))
    assert int(by_range.max().round()) == 255
    with pytest.raises(ValueError, match=r"data.range is 8 bits"):
        streamed(ArrayRegions(values), PixelFormat(1, range=8))
    with pytest.raises(ValueError, match=r"integers of 32 bits.*say so with --data.range"):
        streamed(ArrayRegions(values.astype(np.uint32)), PixelFormat(1))


def test_images_that_show_nothing() -> None:
    with pytest.raises(ValueError, match=r"the image cannot be used .its 400 × 2 pixels show nothing"):
        RegionSource(ArrayRegions(noise(size=(2, 400))), PixelFormat(3), [0.0] * 3, [1.0] * 3)


def test_geotiff(tmp_path: Path) -> None:
    rasterio = pytest.importorskip("rasterio", reason="needs inlinevit[geo]")
    from tests.data.test_map_files import write_geotiff

    write_geotiff(tmp_path / "field.tif", np.moveaxis(noise(dtype=np.uint16), 2, 0), nodata=7)
    with open_regions(tmp_path / "field.tif") as reader:
        assert reader.kind.nodata == 7
        assert reader.geo is not None
        assert reader.geo.transform == (10.0, 0.0, 500_000.0, 0.0, -10.0, 4_600_000.0)
        assert rasterio.CRS.from_wkt(reader.geo.crs).to_epsg() == 32633
    moved = GeoReference(None, (10.0, 0.0, 500.0, 0.0, -10.0, 400.0)).scaled((3, 4), (16, 32))
    assert moved.transform == (160.0, 0.0, 530.0, 0.0, -320.0, 360.0)


SCRIPT = """
import resource, sys
import numpy as np, torch
from inlinevit.data.image_source import RegionSource, open_regions
from inlinevit.data.pixels import PixelFormat
source = RegionSource(open_regions(sys.argv[1]), PixelFormat(3), [0.5] * 3, [0.25] * 3)
width, height = source.size
source.rows(0, 16)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for top in range(16, height, 16):
    source.rows(top, min(top + 16, height))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tiles", "strips", "plain", "npy", "zarr"])
def test_memory_is_that_of_a_row_of_tiles(kind: str, tmp_path: Path) -> None:
    values = np.tile(noise(size=(256, 256)), (32, 16, 1))
    path = tmp_path / {"npy": "a.npy", "zarr": "a.zarr"}.get(kind, "a.tif")
    if kind == "npy":
        np.save(path, values)
    elif kind == "zarr":
        zarr.create_array(path, data=values, chunks=(256, 256, 3))
    else:
        options = {
            "tiles": dict(tile=(256, 256), compression="zlib"),
            "strips": dict(rowsperstrip=64, compression="zlib"),
        }
        tifffile.imwrite(path, values, photometric="rgb", **options.get(kind, {}))
    command = [sys.executable, "-c", SCRIPT, str(path)]
    more = float(subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout)
    # The image has 100 MB, a row of tiles 3 MB.
    assert values.nbytes > 100e6
    assert more < 25
