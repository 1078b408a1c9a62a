"""Image files: which ones are meant, and how they become images."""

import ast
import gc
import io
import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, UnidentifiedImageError
from PIL.TiffImagePlugin import ImageFileDirectory_v2

from inlinevit.data.images import (
    FORMATS,
    ImageFiles,
    decode_image,
    decompression_bomb_limit,
    describe_image_error,
    find_images,
    image_extensions,
    open_image,
    printable,
    supported_formats,
    unique_names,
)
from inlinevit.data.pixels import PixelFormat, convert_pixels
from tests import ROOT

RGB, GREY = PixelFormat(3), PixelFormat(1)
FORMAT_OF_MODE = {"RGB": RGB, "L": GREY}


def noise(height: int, width: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.mark.parametrize("size", [(1, 1), (1, 50), (2, 300)])
def test_images_that_show_nothing_are_refused(size: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=f"{size[0]} × {size[1]} pixels"):
        decode_image(Image.new("RGB", size), RGB)


def test_images_are_turned_as_their_exif_data_say() -> None:
    image = noise(20, 30)
    exif = image.getexif()
    exif[0x0112] = 6  # turned by a quarter
    image.info["exif"] = exif.tobytes()
    assert decode_image(image, RGB).size == (20, 30)
    assert decode_image(noise(20, 30), GREY).mode == "L"


def test_colours_without_turning() -> None:
    image = noise(20, 30)
    exif = image.getexif()
    exif[0x0112] = 6
    image.info["exif"] = exif.tobytes()
    assert convert_pixels(image, RGB).size == (30, 20)
    assert convert_pixels(image, GREY).mode == "L"


def test_sixteen_bits_become_eight() -> None:
    deep = Image.fromarray(np.full((4, 4), 30_000, np.uint16))
    assert convert_pixels(deep, RGB).getpixel((0, 0)) == (30_000 // 256,) * 3


def encoded(values: np.ndarray | Image.Image, kind: str, **options: object) -> io.BytesIO:
    stream = io.BytesIO()
    image = values if isinstance(values, Image.Image) else Image.fromarray(values)
    image.save(stream, kind, **options)
    stream.seek(0)
    return stream


def greys(stream: io.BytesIO, mode: str = "L") -> list[int]:
    """The first row of an image, as a model sees it."""
    with open_image(stream) as image:
        seen = decode_image(image, FORMAT_OF_MODE[mode])
    assert seen.mode == mode
    return np.asarray(seen)[0].reshape(seen.width, -1)[:, 0].tolist()


def rows(values: list[float], kind: type) -> np.ndarray:
    return np.array([values] * 4, kind)


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_floats_go_from_black_to_white(mode: str) -> None:
    assert greys(encoded(rows([0, 0.25, 0.5, 1], np.float32), "TIFF"), mode) == [0, 64, 128, 255]
    assert greys(encoded(rows([0, 0, 0, 0], np.float32), "TIFF"), mode) == [0] * 4


@pytest.mark.parametrize("worst", [1.01, 255, 65535, -0.01, float("nan"), float("inf")])
def test_floats_that_do_not_tell_what_is_white_are_refused(worst: float) -> None:
    with pytest.raises(ValueError, match=r"floating-point numbers .*: say so with --data.range|NaN or infinite values"):
        greys(encoded(rows([0, 0.5, 1, worst], np.float32), "TIFF"))


@pytest.mark.parametrize("most", [1, 255, 65535, 2**31 - 1])
def test_integers_of_32_bits_do_not_tell_what_is_white(most: int) -> None:
    with pytest.raises(ValueError, match=r"integers of 32 bits .* --data.range, .* save it with 8 or 16 bits"):
        greys(encoded(rows([0, 1, 1, most], np.int32), "TIFF"))


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "JPEG2000"])
def test_sixteen_bits_of_files_become_eight(kind: str) -> None:
    options = {"irreversible": False} if kind == "JPEG2000" else {}
    assert greys(encoded(rows([0, 256, 30_000, 65535], np.uint16), kind, **options)) == [0, 1, 117, 255]


@pytest.mark.parametrize("most", [1023, 4095, 65535])
def test_pgm_files_tell_what_is_white(most: int) -> None:
    values = np.array([[0, most // 2, most, most]] * 4, ">u2")
    assert greys(io.BytesIO(f"P5 4 4 {most}\n".encode() + values.tobytes())) == [0, 127, 255, 255]


def test_an_older_pillow_opens_16_bits_of_png_as_32() -> None:
    image = Image.fromarray(rows([0, 256, 30_000, 65535], np.int32))
    image.format = "PNG"
    assert np.asarray(convert_pixels(image, GREY))[0].tolist() == [0, 1, 117, 255]


def tiff(values: np.ndarray, bits: int, photometric: int = 1, orientation: int = 1) -> io.BytesIO:
    """A TIFF file written by hand: Pillow does not write all that it reads."""
    tags = ImageFileDirectory_v2()
    content = values.tobytes()
    height, width = len(values), values.shape[1] if bits != 12 else values.shape[1] * 8 // 12
    numbers = {256: width, 257: height, 258: bits, 259: 1, 262: photometric, 274: orientation, 277: 1, 278: height}
    for number, value in {**numbers, 279: len(content), 339: 3 if values.dtype == np.float32 else 1}.items():
        tags[number] = value
    # Counted from the end of the tags.
    tags[273] = 0
    return io.BytesIO(b"II*\x00\x08\x00\x00\x00" + tags.tobytes(8) + content)


def test_twelve_bits_become_eight() -> None:
    # 0, 16, 2048 and 4095, two values in three bytes.
    packed = np.array([[0x00, 0x00, 0x10, 0x80, 0x0F, 0xFF]] * 4, np.uint8)
    assert greys(tiff(packed, 12)) == [0, 1, 128, 255]


@pytest.mark.parametrize("kind", [np.uint16, np.float32])
def test_zero_for_white_is_refused_where_pillow_does_not_turn_it_around(kind: type) -> None:
    values = rows([0, 0, 1, 1], kind)
    assert len(greys(tiff(values, 8 * values.itemsize))) == 4
    with pytest.raises(ValueError, match="0 is white in it"):
        greys(tiff(values, 8 * values.itemsize, photometric=0))
    assert greys(tiff(rows([0, 255, 255, 0], np.uint8), 8, photometric=0)) == [255, 0, 0, 255]


@pytest.mark.parametrize("kind", [np.uint16, np.int32, np.float32])
def test_what_values_mean_does_not_depend_on_how_an_image_lies(kind: type) -> None:
    white = 65535 if kind is np.uint16 else 1
    values = np.array([[0, white], [white, white], [0, 0]], kind)
    with open_image(tiff(values, 8 * values.itemsize, orientation=6)) as image:
        if kind is np.int32:
            with pytest.raises(ValueError, match="32 bits"):
                decode_image(image, GREY)
        else:
            assert np.asarray(decode_image(image, GREY)).tolist() == [[0, 255, 0], [0, 255, 255]]
    inverted = tiff(values, 8 * values.itemsize, photometric=0, orientation=6)
    with pytest.raises(ValueError, match=r"0 is white|pixel type that is not supported"):
        decode_image(open_image(inverted), GREY)


def test_pixel_types_that_pillow_does_not_know_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """They used to be "no image"."""
    with pytest.raises(ValueError, match=r"^it is a TIFF file that is damaged \("):
        open_image(io.BytesIO(b"II*\0" + bytes(60)))
    monkeypatch.setitem(sys.modules, "tifffile", None)
    reason = (
        r"^it is a TIFF file of 1 band with 64 bits, for which tifffile is needed: pip install 'inlinevit\[tiff\]'$"
    )
    with pytest.raises(ValueError, match=reason):
        open_image(tiff(np.zeros((4, 4), np.float64), 64))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "LAB", "HSV"])
@pytest.mark.parametrize("wanted", ["RGB", "L"])
def test_every_mode_of_8_bits_can_be_seen(mode: str, wanted: str) -> None:
    image = Image.new("RGB", (4, 4), (200, 100, 50)).convert("P" if mode == "PA" else mode)
    seen = convert_pixels(image.convert(mode), FORMAT_OF_MODE[wanted])
    assert seen.mode == wanted
    if mode in ("RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "LAB", "HSV") and wanted == "RGB":
        np.testing.assert_allclose(np.asarray(seen)[0, 0], (200, 100, 50), atol=6)


def test_transparency_is_left_out() -> None:
    clear = Image.new("RGBA", (4, 4), (200, 100, 50, 0))
    assert convert_pixels(clear, RGB).getpixel((0, 0)) == (200, 100, 50)


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 20 20\n%%EndComments\nshowpage\n%%EOF\n"


def iptc(content: bytes) -> bytes:
    """An image inside of IPTC data, which Pillow would open as whatever it is."""

    def field(record: int, number: int, value: bytes) -> bytes:
        return bytes([0x1C, record, number, len(value) >> 8, len(value) & 255]) + value

    fields = [(3, 20, b"\0\x14"), (3, 30, b"\0\x14"), (3, 60, b"\1\0"), (3, 120, b"\1"), (8, 10, content)]
    return b"".join(field(*each) for each in fields)


@pytest.fixture
def no_programs(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Programs that are started, in place of starting them; Pillow thinks that there is Ghostscript."""
    from PIL import EpsImagePlugin

    started: list[object] = []

    def start(command: object, *arguments: object, **options: object) -> None:
        started.append(command)
        raise OSError("not started")

    for name in ("check_call", "run", "call", "Popen"):
        monkeypatch.setattr(subprocess, name, start)
    monkeypatch.setattr(os, "system", start)
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", "gs")
    return started


@pytest.mark.parametrize("name", ["x.jpg", "x.eps", "x.png"])
def test_no_program_is_started_for_eps(tmp_path: Path, no_programs: list[object], name: str) -> None:
    (tmp_path / name).write_bytes(EPS)
    with pytest.raises(OSError, match="not started"):
        Image.open(tmp_path / name).load()
    assert no_programs, "Pillow itself would have started one"
    no_programs.clear()
    with pytest.raises(ValueError, match=r"^its format is EPS, which is not supported: .* JPEG, PNG, WEBP, TIFF, BMP"):
        decode_image(open_image(tmp_path / name), RGB)
    assert not no_programs


def test_no_program_is_started_for_what_is_inside_of_iptc(no_programs: list[object]) -> None:
    with pytest.raises((OSError, ValueError)):
        decode_image(open_image(io.BytesIO(iptc(EPS))), RGB)
    assert not no_programs


def test_only_formats_that_pillow_decodes_itself() -> None:
    Image.init()
    never = {"EPS", "WMF", "IPTC", "BUFR", "GRIB", "HDF5", "FPX", "MIC", "MPEG", "PSD"}
    assert not never & set(FORMATS)
    assert set(supported_formats()) <= set(Image.OPEN)
    assert {"JPEG", "PNG", "WEBP", "TIFF", "BMP", "GIF", "PPM"} <= set(supported_formats())


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_is_read(tmp_path: Path, kind: str) -> None:
    if kind not in supported_formats():
        pytest.skip("Pillow is built without it")
    # Under a name that tells another format.
    noise(24, 32).save(tmp_path / "x.jpg", kind)
    with open_image(tmp_path / "x.jpg") as image:
        assert decode_image(image, RGB).width > 0
        assert image.format in FORMATS


def test_multi_picture_files_are_read(tmp_path: Path) -> None:
    noise(24, 32).save(tmp_path / "x.mpo", save_all=True, append_images=[noise(24, 32)])
    with open_image(tmp_path / "x.mpo") as image:
        assert decode_image(image, RGB).size == (32, 24)
    assert list(find_images([str(tmp_path)])) == [str(tmp_path / "x.mpo")]


def test_files_are_closed(tmp_path: Path) -> None:
    noise(8, 8).save(tmp_path / "x.png")
    (tmp_path / "text.png").write_text("no image")
    before = len(os.listdir("/proc/self/fd"))
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        for _ in range(3):
            with open_image(tmp_path / "x.png") as image:
                decode_image(image, RGB)
            del image
            with pytest.raises(UnidentifiedImageError):
                open_image(tmp_path / "text.png")
        gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_images_are_opened_in_one_place() -> None:
    """Anything else might start other programs, or wait for a pipe."""
    folder = ROOT / "src" / "inlinevit"
    calls = []
    for file in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and node.attr == "open" and ast.unparse(node.value).endswith("Image"):
                calls.append(str(file.relative_to(folder)))
            if isinstance(node, ast.ImportFrom) and node.module == "PIL.Image":
                calls += [str(file.relative_to(folder)) for name in node.names if name.name == "open"]
    assert calls == ["data/images.py"]


def test_large_images_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    noise(40, 40).save(tmp_path / "large.png")
    # Pillow warns from this number of pixels on, and refuses twice as many.
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(Image.DecompressionBombWarning), decompression_bomb_limit():
        Image.open(tmp_path / "large.png")


def test_who_can_bear_more_says_how_much(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    noise(40, 40).save(tmp_path / "large.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with decompression_bomb_limit(1600):
        Image.open(tmp_path / "large.png")
    assert Image.MAX_IMAGE_PIXELS == 1000
    with pytest.raises(Image.DecompressionBombWarning), decompression_bomb_limit(1599):
        Image.open(tmp_path / "large.png")
    assert Image.MAX_IMAGE_PIXELS == 1000


def test_why_an_image_cannot_be_used() -> None:
    assert (
        describe_image_error("a.png", UnidentifiedImageError("cannot identify"))
        == "a.png cannot be used (it is not an image)"
    )
    assert describe_image_error("a.png", OSError("truncated")) == "a.png cannot be used (truncated)"
    assert describe_image_error("a.png", KeyError()) == "a.png cannot be used (KeyError)"


def test_files_that_were_named(tmp_path: Path) -> None:
    noise(4, 5).save(tmp_path / "a.png")
    path = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.png")
    Path(path).write_bytes((tmp_path / "a.png").read_bytes())
    files = ImageFiles([str(tmp_path), "nothing.png"])
    assert len(files) == 3
    assert [files.name(index) for index in range(3)] == [f"{tmp_path}/a.png", f"{tmp_path}/\\xff.png", "nothing.png"]
    assert files.open(1).size == (5, 4)
    with pytest.raises(ValueError, match="there is no such file or folder"):
        files.open(2)


def test_drawings_of_an_image_go_by_one_name(tmp_path: Path) -> None:
    files = ImageFiles(["x/a.jpg", "y/a.png", f"{tmp_path}/b.png", f"{tmp_path}/b_two.png", "A.gif"])
    # There are disks that take A.png for a.png.
    assert unique_names(files, tmp_path, ("_one.png", "_two.png")) == ["a", "a-2", "b-2", "b_two", "A-3"]
    assert unique_names(files, tmp_path) == ["a", "a-2", "b-2", "b_two-2", "A-3"]


def test_lines_stay_whole() -> None:
    assert printable("a\nb\x1b[1mé") == "a?b?[1mé"


def test_which_files_are_meant(tmp_path: Path) -> None:
    for name in ("b.png", "a.JPG", "deep/er/c.webp", "deep/notes.txt", "deep/no_ending", "d[1].gif", "text.md", "x.h5"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "folder.png").mkdir()

    def names(*arguments: str) -> list[str]:
        return [os.path.relpath(path, tmp_path) for path in find_images(f"{tmp_path}/{name}" for name in arguments)]

    assert names("") == ["a.JPG", "b.png", "d[1].gif", "deep/er/c.webp"]
    assert names("b.png", "", "deep/../a.JPG", "b.png") == ["b.png", "a.JPG", "d[1].gif", "deep/er/c.webp"]
    assert names("*.png", "**/*.webp") == ["b.png", "folder.png", "deep/er/c.webp"]
    assert names("d[1].gif", "text.md") == ["d[1].gif", "text.md"]
    problems = find_images([f"{tmp_path}/{name}" for name in ("nothing.png", "*.xyz", "empty", "b.png")])
    assert list(problems.values()) == [
        "there is no such file or folder", "nothing matches this pattern", "the folder holds no images", ""
    ]  # fmt: skip


def test_pipes_are_not_opened(tmp_path: Path) -> None:
    """Reading from one would wait for a writer that never comes."""
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "gone.png").symlink_to(tmp_path / "nowhere")
    assert list(find_images([f"{tmp_path}/pipe.png"]).values()) == ["it is not a regular file"]
    for meant in (f"{tmp_path}/*.png", str(tmp_path)):
        assert list(find_images([meant]).values()) == ["there is no such file or folder", "it is not a regular file"]


def test_endings_are_those_that_pillow_can_read() -> None:
    endings = image_extensions()
    assert {".png", ".jpg", ".jpeg", ".gif", ".webp", ".tif", ".bmp", ".ppm"} <= endings
    assert not {".pdf", ".h5", ".grib", ".txt", "", ".eps", ".ps", ".wmf", ".emf", ".iim", ".mpg", ".psd"} & endings
    assert {Image.registered_extensions()[ending] for ending in endings - {".mpo"}} == set(supported_formats())
