"""Image files: which ones are meant, and how they become images."""

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, UnidentifiedImageError

from inlinevit.images import (
    ImageFiles,
    bombs_refused,
    find_images,
    free_names,
    image_endings,
    in_colours,
    on_one_line,
    upright,
    why_unusable,
)


def noise(height: int, width: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.mark.parametrize("size", [(1, 1), (1, 50), (2, 300)])
def test_images_that_show_nothing_are_refused(size: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=f"{size[0]} × {size[1]} pixels"):
        upright(Image.new("RGB", size), "RGB")


def test_images_are_turned_as_their_exif_data_say() -> None:
    image = noise(20, 30)
    exif = image.getexif()
    exif[0x0112] = 6  # turned by a quarter
    image.info["exif"] = exif.tobytes()
    assert upright(image, "RGB").size == (20, 30)
    assert upright(noise(20, 30), "L").mode == "L"


def test_colours_without_turning() -> None:
    image = noise(20, 30)
    exif = image.getexif()
    exif[0x0112] = 6
    image.info["exif"] = exif.tobytes()
    assert in_colours(image, "RGB").size == (30, 20)
    assert in_colours(image, "L").mode == "L"


def test_sixteen_bits_become_eight() -> None:
    deep = Image.fromarray(np.full((4, 4), 30_000, np.uint16))
    assert in_colours(deep, "RGB").getpixel((0, 0)) == (30_000 // 256,) * 3


def test_large_images_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    noise(40, 40).save(tmp_path / "large.png")
    # Pillow warns from this number of pixels on, and refuses twice as many.
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(Image.DecompressionBombWarning), bombs_refused():
        Image.open(tmp_path / "large.png")


def test_who_can_bear_more_says_how_much(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    noise(40, 40).save(tmp_path / "large.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with bombs_refused(1600):
        Image.open(tmp_path / "large.png")
    assert Image.MAX_IMAGE_PIXELS == 1000
    with pytest.raises(Image.DecompressionBombWarning), bombs_refused(1599):
        Image.open(tmp_path / "large.png")
    assert Image.MAX_IMAGE_PIXELS == 1000


def test_why_an_image_cannot_be_used() -> None:
    assert why_unusable("a.png", UnidentifiedImageError("cannot identify")) == "a.png cannot be used (it is no image)"
    assert why_unusable("a.png", OSError("truncated")) == "a.png cannot be used (truncated)"
    assert why_unusable("a.png", KeyError()) == "a.png cannot be used (KeyError)"


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
    assert free_names(files, tmp_path, ("_one.png", "_two.png")) == ["a", "a-2", "b-2", "b_two", "A-3"]
    assert free_names(files, tmp_path) == ["a", "a-2", "b-2", "b_two-2", "A-3"]


def test_lines_stay_whole() -> None:
    assert on_one_line("a\nb\x1b[1mé") == "a?b?[1mé"


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
    assert list(find_images([f"{tmp_path}/pipe.png"]).values()) == ["it is no regular file"]
    assert list(find_images([f"{tmp_path}/*.png"]).values()) == [
        "there is no such file or folder", "it is no regular file"
    ]  # fmt: skip


def test_endings_are_those_that_pillow_can_read() -> None:
    endings = image_endings()
    assert {".png", ".jpg", ".jpeg", ".gif", ".webp", ".tif", ".bmp", ".ppm"} <= endings
    assert not {".pdf", ".h5", ".grib", ".txt", ""} & endings
