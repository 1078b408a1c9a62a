"""Every kind of image, as a small file, with the values that a model gets: the table of docs/images.md."""

import io
import re
import struct
import sys
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

from inlinevit.data.images import decode_image, decompression_bomb_limit, describe_image_error, open_image
from inlinevit.data.pixels import BandArray, PixelFormat, image_to_tensor, preview, to_bytes

ROW = [0, 1, 2, 3]


def grey(values: list[float], kind: type) -> np.ndarray:
    return np.array([values] * 4, kind)


def bands(count: int, kind: type, most: float = 1) -> np.ndarray:
    """(4, 4, count): in band b, all pixels are b, in units of `most`, but for the first, which is 0."""
    values = np.broadcast_to(np.arange(count) * most, (4, 4, count)).astype(kind)
    values[0, 0] = 0
    return values


def write_tiff(file: Path, values: np.ndarray, **options: Any) -> None:
    plain = {"photometric": "minisblack", "planarconfig": "contig"} if values.ndim == 3 else {}
    tifffile.imwrite(file, values, **{**plain, **options})


def write_png(file: Path, values: np.ndarray) -> None:
    """A PNG file with 16 bits per colour, which Pillow cannot write."""
    height, width, count = values.shape
    kind = {2: 4, 3: 2, 4: 6}[count]
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    chunks = ((b"IHDR", struct.pack(">IIBBBBB", width, height, 16, kind, 0, 0, 0)), (b"IDAT", zlib.compress(rows)))
    content = b"\x89PNG\r\n\x1a\n"
    for name, data in (*chunks, (b"IEND", b"")):
        content += struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
    file.write_bytes(content)


def seen(file: Path, pixels: PixelFormat) -> np.ndarray:
    """What a model gets, (height, width, channels)."""
    with open_image(file) as opened:
        return image_to_tensor(decode_image(opened, pixels)).permute(1, 2, 0).numpy()


# Name, values, format, and the first row that the model gets, of each channel.
GREY = [
    ("8 bits", grey([0, 100, 200, 255], np.uint8), PixelFormat(1), [0, 100, 200, 255]),
    ("8 bits in a range", grey([0, 50, 75, 200], np.uint8), PixelFormat(1, range=(50, 100)), [0, 0, 128, 255]),
    ("12 bits in 16", grey([0, 16, 2048, 4095], np.uint16), PixelFormat(1), [0, 1, 128, 255]),
    ("14 bits in 16", grey([0, 64, 8192, 16383], np.uint16), PixelFormat(1), [0, 1, 128, 255]),
    ("16 bits", grey([0, 256, 32768, 65535], np.uint16), PixelFormat(1), [0, 1, 128, 255]),
    ("dark with 12 bits", grey([0, 16, 32, 48], np.uint16), PixelFormat(1, range=12), [0, 1, 2, 3]),
    ("dark with 16 bits", grey([0, 256, 512, 768], np.uint16), PixelFormat(1, range="type"), [0, 1, 2, 3]),
    ("given range", grey([0, 1000, 1500, 9000], np.uint16), PixelFormat(1, range=(1000, 2000)), [0, 0, 128, 255]),
    ("signed", grey([-1024, -1000, 0, 1000], np.int16), PixelFormat(1, range=(-1000, 1000)), [0, 0, 128, 255]),
    ("signed by type", grey([-32768, 0, 1, 32767], np.int16), PixelFormat(1, range="type"), [0, 128, 128, 255]),
    ("signed bytes", grey([-128, 0, 1, 127], np.int8), PixelFormat(1, range="type"), [0, 128, 129, 255]),
    ("32 bits", grey([0, 1, 2, 4], np.int32), PixelFormat(1, range=(0, 4)), [0, 64, 128, 255]),
    ("unsigned 32 bits", grey([0, 2**24, 2**31, 2**32 - 1], np.uint32), PixelFormat(1, range="type"), [0, 1, 128, 255]),
    ("24 of 32 bits", grey([0, 2**16, 2**23, 2**24 - 1], np.uint32), PixelFormat(1, range=24), [0, 1, 128, 255]),
    ("floats to 1", grey([0, 0.25, 0.5, 1], np.float32), PixelFormat(1), [0, 64, 128, 255]),
    ("floats to 255", grey([0, 64, 128, 255], np.float32), PixelFormat(1, range=(0, 255)), [0, 64, 128, 255]),
    ("other floats", grey([-2, -1, 0, 7], np.float64), PixelFormat(1, range=(-1, 1)), [0, 0, 128, 255]),
    ("half precision", grey([0, 0.25, 0.5, 1], np.float16), PixelFormat(1), [0, 64, 128, 255]),
]


@pytest.mark.parametrize(("name", "values", "pixels", "expected"), GREY, ids=[case[0] for case in GREY])
@pytest.mark.parametrize("channels", [1, 3])
def test_types_of_values(
    tmp_path: Path, name: str, values: np.ndarray, pixels: PixelFormat, expected: list[int], channels: int
) -> None:
    pixels = PixelFormat(channels, range=pixels.range)
    write_tiff(tmp_path / "x.tif", values)
    assert seen(tmp_path / "x.tif", pixels)[0].tolist() == [[value] * channels for value in expected]
    in_memory = image_to_tensor(decode_image(BandArray(values), pixels))
    assert in_memory[:, 0].T.tolist() == [[value] * channels for value in expected]


REFUSED = [
    (
        grey([0, 1, 2, 5000], np.uint16),
        PixelFormat(1, range=12),
        r"from 0 to 5000, but data.range is 12 bits",
    ),
    (grey([-5, 1, 2, 5], np.int16), PixelFormat(1), r"integers of 16 bits with a sign, from -5 to 5.* --data.range"),
    (grey([-5, 1, 2, 5], np.int16), PixelFormat(1, range=12), r"from -5 to 5, but data.range is 12 bits"),
    (grey([0, 1, 2, 5], np.uint32), PixelFormat(1), r"integers of 32 bits, from 0 to 5.* --data.range"),
    (grey([0, 1, 2, 255], np.float32), PixelFormat(1), r"from 0 to 255, .* --data.range, such as \[0, 255\]"),
    (grey([0, 1, 2, np.nan], np.float32), PixelFormat(1, range=(0, 2)), "NaN"),
    (bands(6, np.uint8), PixelFormat(3), r"has 6 bands, but the model takes 3: choose .* such as \[0, 1, 2\]"),
    (bands(4, np.uint16), PixelFormat(3), r"has 4 bands, but the model takes 3"),
    (bands(3, np.uint8), PixelFormat(1), r"has 3 bands, but the model takes 1"),
    (bands(2, np.uint8), PixelFormat(3), r"has 2 bands, but the model takes 3: train a model with --model.in_chans 2"),
    (bands(4, np.uint8), PixelFormat(2, (1, 4)), r"has 4 bands, so there is no band 4, counted from 0"),
]


@pytest.mark.parametrize(("values", "pixels", "reason"), REFUSED)
def test_what_is_not_clear_is_refused(tmp_path: Path, values: np.ndarray, pixels: PixelFormat, reason: str) -> None:
    write_tiff(tmp_path / "x.tif", values)
    with pytest.raises(ValueError, match=reason):
        seen(tmp_path / "x.tif", pixels)


# Name, bands of the file, format, and the bands that the model gets, in bytes.
BANDS = [
    ("four", bands(4, np.uint8), PixelFormat(4), [0, 1, 2, 3]),
    ("chosen", bands(4, np.uint8), PixelFormat(3, (3, 2, 1)), [3, 2, 1]),
    ("one of six for RGB", bands(6, np.uint8), PixelFormat(3, (5,)), [5, 5, 5]),
    ("one of six", bands(6, np.uint8), PixelFormat(1, (5,)), [5]),
    ("six", bands(6, np.uint8), PixelFormat(6), [0, 1, 2, 3, 4, 5]),
    ("two", bands(2, np.uint8), PixelFormat(2), [0, 1]),
    ("12 bits", bands(4, np.uint16, 1365), PixelFormat(4), [0, 85, 170, 255]),
    ("16 bits", bands(4, np.uint16, 21845), PixelFormat(4), [0, 85, 170, 255]),
    ("the bits of chosen bands", bands(4, np.uint16, 1024), PixelFormat(3, (0, 1, 2)), [0, 64, 128]),
    ("floats", bands(5, np.float32, 0.2), PixelFormat(5), [0, 51, 102, 153, 204]),
    ("three for RGB", bands(3, np.uint16, 1024), PixelFormat(3), [0, 64, 128]),
]


@pytest.mark.parametrize(("name", "values", "pixels", "expected"), BANDS, ids=[case[0] for case in BANDS])
@pytest.mark.parametrize(
    "options", [{}, {"compression": "deflate", "predictor": True}, {"planarconfig": "separate"}, {"tile": (16, 16)}]
)
def test_bands(
    tmp_path: Path, name: str, values: np.ndarray, pixels: PixelFormat, expected: list[int], options: dict[str, Any]
) -> None:
    stored = np.moveaxis(values, -1, 0) if "planarconfig" in options else values
    write_tiff(tmp_path / "x.tif", stored, **options)
    result = seen(tmp_path / "x.tif", pixels)
    assert result[0, 0].tolist() == [0] * len(expected)
    assert (result[1:] == expected).all()


# Name, how the file is written, channels, and the last pixel that the model gets.
FILES: list[tuple[str, Any, PixelFormat, list[int]]] = [
    ("RGB.png", Image.new("RGB", (4, 4), (200, 100, 50)), PixelFormat(), [200, 100, 50]),
    ("to grey.png", Image.new("RGB", (4, 4), (200, 100, 50)), PixelFormat(1), [124]),
    ("chosen.png", Image.new("RGB", (4, 4), (200, 100, 50)), PixelFormat(3, (2, 1, 0)), [50, 100, 200]),
    ("alpha.png", Image.new("RGBA", (4, 4), (200, 100, 50, 0)), PixelFormat(), [200, 100, 50]),
    ("alpha as a band.png", Image.new("RGBA", (4, 4), (200, 100, 50, 9)), PixelFormat(4), [200, 100, 50, 9]),
    ("alpha of grey.png", Image.new("LA", (4, 4), (200, 9)), PixelFormat(), [200] * 3),
    ("LA.png", Image.new("LA", (4, 4), (200, 9)), PixelFormat(2), [200, 9]),
    ("one bit.png", Image.new("1", (4, 4), 1), PixelFormat(1), [255]),
    ("palette.gif", Image.new("RGB", (4, 4), (200, 100, 50)).quantize(2), PixelFormat(), [200, 100, 50]),
    ("palette chosen.gif", Image.new("RGB", (4, 4), (200, 100, 50)).quantize(2), PixelFormat(1, (1,)), [100]),
    ("CMYK.tif", Image.new("CMYK", (4, 4), (0, 255, 0, 0)), PixelFormat(), [255, 0, 255]),
    ("CMYK chosen.tif", Image.new("CMYK", (4, 4), (0, 255, 0, 0)), PixelFormat(1, (1,)), [0]),
    ("LAB.tif", Image.new("LAB", (4, 4), (255, 128, 128)), PixelFormat(1), [255]),
    ("alpha.tif", Image.new("RGBA", (4, 4), (200, 100, 50, 0)), PixelFormat(), [200, 100, 50]),
]


@pytest.mark.parametrize(("name", "image", "pixels", "expected"), FILES, ids=[case[0] for case in FILES])
def test_kinds_of_files(
    tmp_path: Path, name: str, image: Image.Image, pixels: PixelFormat, expected: list[int]
) -> None:
    image.save(tmp_path / name)
    assert seen(tmp_path / name, pixels)[-1, -1].tolist() == expected


def test_palette_with_transparency(tmp_path: Path) -> None:
    palette = Image.new("P", (4, 4), 1)
    palette.putpalette([0, 0, 0, 200, 100, 50])
    palette.save(tmp_path / "x.png", transparency=1)
    assert seen(tmp_path / "x.png", PixelFormat())[0, 0].tolist() == [200, 100, 50]
    assert seen(tmp_path / "x.png", PixelFormat(4))[0, 0].tolist() == [200, 100, 50, 0]


def test_a_fourth_band_without_alpha_is_not_dropped(tmp_path: Path) -> None:
    """Pillow opens such files as RGBA or RGBX, and six bands as RGB."""
    write_tiff(tmp_path / "x.tif", bands(4, np.uint8), photometric="rgb", extrasamples=("unspecified",))
    content = (tmp_path / "x.tif").read_bytes()
    # As it is, and without the tag that says that the fourth band is not alpha.
    for stored in (content, content.replace(struct.pack("<HH", 338, 3), struct.pack("<HH", 337, 3))):
        (tmp_path / "x.tif").write_bytes(stored)
        with pytest.raises(ValueError, match=r"has 4 bands, but the model takes 3: choose 3 of them with --data.bands"):
            seen(tmp_path / "x.tif", PixelFormat())
        assert seen(tmp_path / "x.tif", PixelFormat(3, (0, 1, 3)))[1, 1].tolist() == [0, 1, 3]
        assert seen(tmp_path / "x.tif", PixelFormat(4))[1, 1].tolist() == [0, 1, 2, 3]
    write_tiff(tmp_path / "six.tif", bands(6, np.uint8), photometric="rgb")
    with pytest.raises(ValueError, match="has 6 bands, but the model takes 3"):
        seen(tmp_path / "six.tif", PixelFormat())


@pytest.mark.parametrize("kind", ["png", "tif"])
@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("by_torchvision", [False, True])
def test_colours_with_16_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, count: int, by_torchvision: bool
) -> None:
    """Pillow would keep the upper 8 bits, and 12 bits would be black."""
    if (kind, count) == ("tif", 2):
        pytest.skip("grey with alpha is a plain band more in TIFF")
    if by_torchvision:
        monkeypatch.setitem(sys.modules, "imagecodecs", None)
    for most, step in ((1365, 16), (21845, 256)):
        values, file = bands(count, np.uint16, most), tmp_path / f"x.{kind}"
        write_png(file, values) if kind == "png" else write_tiff(file, values, photometric="rgb")
        colours = count - 1 if count in (2, 4) else 3
        chosen = range(count if count == 2 else 3)
        with open_image(file) as opened:
            assert isinstance(opened, BandArray)
        every = PixelFormat(count, tuple(chosen) if count == 3 else None)
        assert seen(file, every)[1, 1].tolist() == [band * most // step for band in range(count)]
        grey_or_colours = seen(file, PixelFormat(3, range=12 if step == 16 else 16))[1, 1].tolist()
        assert grey_or_colours == ([0] * 3 if colours == 1 else [band * most // step for band in range(3)])


def test_geotiff(tmp_path: Path) -> None:
    """Geographic tags are not used; pixels without data are black, and do not count as values."""
    geo = [(33550, 12, 3, (1.0, 1.0, 0.0), False), (42113, 2, 6, "-9999", False)]
    write_tiff(tmp_path / "x.tif", grey([-9999, 0, 0.5, 1], np.float32), extratags=geo)
    assert seen(tmp_path / "x.tif", PixelFormat(1))[0, :, 0].tolist() == [0, 0, 128, 255]
    missing = [(42113, 2, 4, "nan", False)]
    write_tiff(tmp_path / "nan.tif", np.stack([grey([np.nan, 0, 5, 10], np.float32)] * 2, -1), extratags=missing)
    assert seen(tmp_path / "nan.tif", PixelFormat(2, range=(0, 10)))[0, :, 1].tolist() == [0, 0, 128, 255]
    full = [(42113, 2, 6, "65535", False)]
    write_tiff(tmp_path / "full.tif", grey([65535, 0, 2048, 4095], np.uint16), extratags=full)
    assert seen(tmp_path / "full.tif", PixelFormat(1))[0, :, 0].tolist() == [0, 0, 128, 255]


@pytest.mark.parametrize("count", [1, 6])
def test_first_page_with_a_warning(tmp_path: Path, count: int) -> None:
    values = bands(count, np.uint8).squeeze()
    with tifffile.TiffWriter(tmp_path / "pages.tif") as pages:
        for page in (values, values[::2]):
            pages.write(page, photometric="minisblack", planarconfig="contig" if count > 1 else None)
    with pytest.warns(UserWarning, match="several pages: only the first is used"):
        assert seen(tmp_path / "pages.tif", PixelFormat(count)).shape == (4, 4, count)
    # Smaller copies of the first page are no further images.
    with tifffile.TiffWriter(tmp_path / "copies.tif") as pages, warnings.catch_warnings():
        for page, kind in ((values, 0), (values[::2], 1)):
            planes = "contig" if count > 1 else None
            pages.write(page, photometric="minisblack", planarconfig=planes, subfiletype=kind)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert seen(tmp_path / "copies.tif", PixelFormat(count)).shape == (4, 4, count)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_rotation_is_the_same_for_all_files(tmp_path: Path, orientation: int) -> None:
    values = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)
    write_tiff(tmp_path / "bands.tif", values, extratags=[(274, 3, 1, orientation, True)])
    exif = Image.Exif()
    exif[274] = orientation
    Image.fromarray(values[..., :3]).save(tmp_path / "x.png", exif=exif)
    assert np.array_equal(
        seen(tmp_path / "bands.tif", PixelFormat(4))[..., :3], seen(tmp_path / "x.png", PixelFormat())
    )


def test_large_images_name_the_option(tmp_path: Path) -> None:
    write_tiff(tmp_path / "bands.tif", bands(6, np.uint8))
    Image.new("L", (4, 4)).save(tmp_path / "x.png")
    for name in ("bands.tif", "x.png"):
        for limit in (15, 4):
            errors = Image.DecompressionBombWarning, Image.DecompressionBombError
            with pytest.raises(errors) as caught, decompression_bomb_limit(limit):
                open_image(tmp_path / name)
            reason = rf"16 pixels, more than the limit of {limit} against .* --max-pixels 16, .*segment predict"
            assert re.search(reason, describe_image_error(name, caught.value))
        with decompression_bomb_limit(16), open_image(tmp_path / name) as opened:
            assert opened.size == (4, 4)


def test_a_tile_larger_than_the_image_is_refused(tmp_path: Path) -> None:
    write_tiff(tmp_path / "x.tif", bands(6, np.uint8), tile=(64, 64), compression="deflate")
    with pytest.raises(Image.DecompressionBombWarning), decompression_bomb_limit(4095):
        open_image(tmp_path / "x.tif")


def test_other_compressions_and_colours_are_named(tmp_path: Path) -> None:
    write_tiff(tmp_path / "x.tif", bands(6, np.uint8), compression="lzma")
    with pytest.raises(ValueError, match="compressed as LZMA: save it with deflate or LZW"):
        open_image(tmp_path / "x.tif")
    write_tiff(tmp_path / "cmyk.tif", bands(4, np.uint16), photometric="separated")
    with pytest.raises(ValueError, match="colours are separated with 16 bits: convert it to RGB"):
        open_image(tmp_path / "cmyk.tif")


def test_damaged_files(tmp_path: Path) -> None:
    write_tiff(tmp_path / "x.tif", bands(6, np.uint16), compression="deflate")
    content = (tmp_path / "x.tif").read_bytes()
    for length in range(8, len(content), 7):
        with pytest.raises(Exception), open_image(io.BytesIO(content[:length])) as opened:  # noqa: B017, PT011
            decode_image(opened, PixelFormat(6))


def test_arrays(tmp_path: Path) -> None:
    converted = decode_image(BandArray(grey([0, 16, 2048, 4095], np.uint16)), PixelFormat(3))
    assert image_to_tensor(converted).shape == (3, 4, 4)
    values = np.zeros((4, 4, 3), np.uint8)
    assert isinstance(decode_image(BandArray(values), PixelFormat(1)), Image.Image)
    with pytest.raises(ValueError, match=r"array of object of the shape"):
        BandArray(np.array([["a"]], object))
    with pytest.raises(ValueError, match=r"array of uint8 of the shape \(1, 2, 3, 4\): give \(height, width\)"):
        BandArray(np.zeros((1, 2, 3, 4), np.uint8))
    assert preview(BandArray(bands(6, np.uint8))).getpixel((1, 1)) == (0, 1, 2)
    assert preview(BandArray(bands(2, np.uint8))).getpixel((1, 1)) == (0, 0, 0)
    assert to_bytes(np.array([[[True], [False]]])).tolist() == [[[255], [0]]]


def test_images_of_8_bits_are_pillows_own(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)
    for name in ("x.jpg", "x.png", "x.tif", "x.webp"):
        Image.fromarray(noise).save(tmp_path / name)
        for channels, mode in ((3, "RGB"), (1, "L")):
            with Image.open(tmp_path / name) as image, open_image(tmp_path / name) as opened:
                result = decode_image(opened, PixelFormat(channels))
                assert isinstance(result, Image.Image)
                assert result.tobytes() == image.convert(mode).tobytes()
                tensor = image_to_tensor(result)
                assert torch.equal(tensor, torch.from_numpy(np.array(result)).view(20, 30, -1).permute(2, 0, 1))
