import os
import struct
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms.v2.functional import pil_to_tensor

from inlinevit.tasks.segmentation.ade import AdeSource, open_ade
from inlinevit.tasks.segmentation.config import SegmentationDataConfig
from inlinevit.tasks.segmentation.labels import IGNORED, ade_labels

DrawAde = Callable[..., Path]
IMAGES, MASKS = "images/training", "annotations/training"
LABELS = ade_labels(4)


def opened(folder: Path, training: bool = True, **options: Any) -> AdeSource:
    return open_ade(SegmentationDataConfig(path=str(folder), **options), LABELS, training)


def replace_mask(folder: Path, values: Any, **options: Any) -> None:
    """The label map of the first image, which is 96 × 64."""
    image = values if isinstance(values, Image.Image) else Image.fromarray(values)
    image.save(folder / MASKS / "0000.png", **options)


def write_grey_png(file: Path, values: np.ndarray, bits: int) -> None:
    """A grey PNG of so many bits a pixel, which Pillow would not write."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    height, width = values.shape
    rows = [
        b"\0" + np.packbits(np.unpackbits(row[:, None], axis=1)[:, -bits:].ravel()).tobytes()
        for row in values.astype(np.uint8)
    ]
    header = struct.pack(">IIBBBBB", width, height, bits, 0, 0, 0, 0)
    chunks = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"".join(rows))) + chunk(b"IEND", b"")
    file.write_bytes(b"\x89PNG\r\n\x1a\n" + chunks)


def test_images_and_label_maps_are_paired_by_name(ade_folder: DrawAde) -> None:
    folder = ade_folder()
    source = opened(folder)
    assert len(source) == 8
    assert len(opened(folder, training=False)) == 4
    assert source.stems[:3] == ["0000", "0001", "0002"]
    assert source.image_files[1] == f"{folder}/{IMAGES}/0001.png"


@pytest.mark.parametrize("ending", [".png", ".jpg"])
def test_labels_are_what_the_picture_shows(ade_folder: DrawAde, ending: str) -> None:
    source = opened(ade_folder(ending=ending))
    for index in range(len(source)):
        image, labels = source.read_image(index), source.read_labels(index)
        assert image.mode == "RGB"
        assert labels.dtype == torch.uint8
        assert tuple(labels.shape) == image.size[::-1]
        assert set(labels.unique().tolist()) == {0, 1, 2, 3, IGNORED}
        pixels = pil_to_tensor(image).to(torch.float32)
        assert (labels[:, :4] == IGNORED).all()
        # The ground is dark; the others are red, green and blue.
        assert pixels[:, labels == 0].mean() < 60
        for channel in range(3):
            assert int(pixels[:, labels == channel + 1].mean(1).argmax()) == channel


def test_the_first_images_alone(ade_folder: DrawAde) -> None:
    folder = ade_folder()
    # What is not taken need not be complete.
    (folder / MASKS / "0005.png").unlink()
    source = opened(folder, max_train_samples=2)
    assert source.stems == ["0000", "0001"]
    assert len(opened(folder, training=False, max_eval_samples=100)) == 4


def test_files_may_lie_in_subfolders_and_have_any_ending_that_pillow_reads(ade_folder: DrawAde) -> None:
    folder = ade_folder()
    for part in (IMAGES, MASKS):
        (folder / part / "deep" / "er").mkdir(parents=True)
        (folder / part / "0002.png").rename(folder / part / "deep" / "er" / "0000.png")
    Image.open(folder / IMAGES / "0001.png").save(folder / IMAGES / "0001.JPEG")
    (folder / IMAGES / "0001.png").unlink()
    (folder / IMAGES / "README.txt").write_text("no image")
    (folder / MASKS / "0001.png").rename(folder / MASKS / "0001.PNG")
    source = opened(folder)
    assert source.stems == ["0000", "0001", "0003", "0004", "0005", "0006", "0007", "deep/er/0000"]
    for index in (1, 7):
        assert source.read_labels(index).shape == source.read_image(index).size[::-1]


def test_missing_label_maps_are_named_when_the_data_are_opened(ade_folder: DrawAde) -> None:
    folder = ade_folder()
    (folder / MASKS / "0003.png").rename(folder / MASKS / "0003.tif")
    (folder / MASKS / "0005.png").unlink()
    with pytest.raises(
        FileNotFoundError,
        match=rf"^2 of 8 images have no label map, such as {folder}/{IMAGES}/0003.png: add {folder}/{MASKS}/0003.png",
    ):
        opened(folder)


def test_label_maps_without_image_are_left_out_with_a_word(ade_folder: DrawAde) -> None:
    folder = ade_folder()
    (folder / IMAGES / "0003.png").unlink()
    (folder / IMAGES / "0005.png").unlink()
    with pytest.warns(UserWarning, match=rf"^2 label maps in {folder}/{MASKS} have no image, such as .*/0003.png: "):
        source = opened(folder)
    assert len(source) == 6
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opened(folder, training=False)


def test_images_of_one_name_are_refused(ade_folder: DrawAde) -> None:
    folder = ade_folder()
    Image.new("RGB", (96, 64)).save(folder / IMAGES / "0003.jpg")
    with pytest.raises(ValueError, match=rf"{IMAGES}/0003.jpg and .*{IMAGES}/0003.png have one name.*: rename one"):
        opened(folder)


@pytest.mark.parametrize("part", ["train", "eval"])
def test_the_option_to_check_is_named(ade_folder: DrawAde, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ade_folder()
    options = rf"check --data.path and --data.{part}_split$"
    listed = r"\(the splits are training, validation\)"
    for path, split, splits in (
        (folder, "other", listed),
        (folder / "images", "training", r"\(there are no splits\)"),
    ):
        expected = rf"^no folder of images at {path}/images/{split} {splits}: {options}"
        with pytest.raises(FileNotFoundError, match=expected):
            opened(path, part == "train", **{f"{part}_split": split})
    (folder / "images" / "other").mkdir()
    expected = rf"^no folder of annotations at {folder}/annotations/other {listed}: {options}"
    with pytest.raises(FileNotFoundError, match=expected):
        opened(folder, part == "train", **{f"{part}_split": "other"})
    (folder / "annotations" / "other").mkdir()
    with pytest.raises(ValueError, match=rf"^{folder}/images/other holds no images: name another"):
        opened(folder, part == "train", **{f"{part}_split": "other"})
    monkeypatch.setenv("HOME", str(folder))
    assert len(opened(Path("~"), part == "train")) == {"train": 8, "eval": 4}[part]


@pytest.mark.parametrize("kind", [IMAGES, MASKS])
def test_what_is_not_a_regular_file_is_refused(ade_folder: DrawAde, kind: str) -> None:
    """It used to be left out without a word."""
    folder = ade_folder()
    os.mkfifo(folder / kind / "pipe.png")
    with pytest.raises(ValueError, match=rf"^{folder}/{kind}/pipe.png cannot be used \(it is not a regular file\): "):
        opened(folder)


def test_a_label_map_of_another_size_is_refused(ade_folder: DrawAde) -> None:
    folder = ade_folder(ending=".jpg")
    source = opened(folder)
    replace_mask(folder, np.ones((96, 64), np.uint8))
    with pytest.raises(
        ValueError, match=rf"^{folder}/{MASKS}/0000.png has 64 × 96 pixels, but .*{IMAGES}/0000.jpg has 96 × 64: label"
    ):
        source.read_labels(0)


def test_label_maps_are_for_images_as_they_are_stored(ade_folder: DrawAde) -> None:
    folder = ade_folder(ending=".jpg")
    file = folder / IMAGES / "0000.jpg"
    before = np.array(Image.open(file))
    quarter = Image.Exif()
    # To be seen turned by a quarter.
    quarter[0x0112] = 6
    Image.fromarray(before).save(file, exif=quarter, quality=95)
    source = opened(folder)
    assert source.read_image(0).size == (96, 64)
    assert source.read_labels(0).shape == (64, 96)
    assert np.abs(np.array(source.read_image(0)).astype(int) - before).mean() < 5


COLOURED = [("RGB", "png"), ("RGBA", "png"), ("LA", "png"), ("L", "jpeg"), ("RGB", "jpeg"), ("L", "tiff")]


@pytest.mark.parametrize(("mode", "kind"), COLOURED)
def test_colours_and_inexact_formats_are_no_labels(ade_folder: DrawAde, mode: str, kind: str) -> None:
    folder = ade_folder()
    replace_mask(folder, Image.new(mode, (96, 64)), format=kind)
    message = (
        rf"^{folder}/{MASKS}/0000.png is not a label map \(it is a {kind.upper()} of the colours {mode}\): convert "
    )
    with pytest.raises(ValueError, match=message + "it to a PNG of one channel, whose values are the numbers"):
        opened(folder).read_labels(0)


VALUES = np.tile(np.array([0, 1, 2, 3, 4, 3], np.uint8), (64, 16))


@pytest.mark.parametrize("mode", ["L", "P", "P with transparency", "P of 4 bits", "I;16"])
def test_values_are_those_that_are_stored(ade_folder: DrawAde, mode: str) -> None:
    folder = ade_folder()
    image = Image.fromarray(VALUES)
    options: dict[str, Any] = {}
    if mode.startswith("P"):
        image.putpalette([200, 10, 30, 90, 90, 90, 0, 0, 0, 5, 5, 5, 200, 10, 30])
        options = {"P with transparency": {"transparency": 1}, "P of 4 bits": {"bits": 4}}.get(mode, {})
    elif mode == "I;16":
        image = Image.fromarray(VALUES.astype(np.uint16))
    replace_mask(folder, image, **options)
    assert torch.equal(opened(folder).read_labels(0), LABELS.to_indices(VALUES))


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_grey_values_of_few_bits_are_not_stretched(ade_folder: DrawAde, bits: int) -> None:
    folder = ade_folder()
    values = np.minimum(VALUES, 2**bits - 1)
    write_grey_png(folder / MASKS / "0000.png", values, bits)
    assert torch.equal(opened(folder).read_labels(0), LABELS.to_indices(values))


@pytest.mark.parametrize(("value", "kind"), [(5, np.uint8), (255, np.uint8), (300, np.uint16)])
def test_labels_above_the_number_of_classes_are_named(ade_folder: DrawAde, value: int, kind: Any) -> None:
    folder = ade_folder()
    values = VALUES.astype(kind)
    values[10:12, 20] = value
    replace_mask(folder, values)
    with pytest.raises(
        ValueError,
        match=rf"^{folder}/{MASKS}/0000.png cannot be used \(it has pixels of the value {value}, which is neither one "
        r"of the 4 classes nor ignored\): fix it, or .* --model.num_classes or a file for --data.labels$",
    ):
        opened(folder).read_labels(0)


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "1", "I;16"])
def test_images_become_rgb(ade_folder: DrawAde, mode: str) -> None:
    folder = ade_folder()
    Image.new(mode, (96, 64)).save(folder / IMAGES / "0000.png")
    image = opened(folder).read_image(0)
    assert (image.mode, image.size) == ("RGB", (96, 64))


@pytest.mark.parametrize("part", [IMAGES, MASKS])
@pytest.mark.parametrize("damage", ["cut", "text", "empty", "gone", "headless"])
def test_broken_files_are_named(ade_folder: DrawAde, part: str, damage: str) -> None:
    folder = ade_folder()
    source = opened(folder)
    file = folder / part / "0000.png"
    content = file.read_bytes()
    if damage == "gone":
        file.unlink()
    else:
        # A PNG's header takes 33 bytes.
        damaged = {"cut": content[: len(content) // 2], "text": b"no image", "empty": b"", "headless": content[:33]}
        file.write_bytes(damaged[damage])
    read = source.read_image if part == IMAGES else source.read_labels
    with pytest.raises(ValueError, match=rf"^{file} cannot be used .*: copy it again, or remove it"):
        read(0)


def test_strips_are_refused(ade_folder: DrawAde) -> None:
    folder = ade_folder()
    Image.new("RGB", (300, 2)).save(folder / IMAGES / "0000.png")
    with pytest.raises(ValueError, match=r"0000.png cannot be used \(it has 300 × 2 pixels, which show nothing: "):
        opened(folder).read_image(0)


def test_bombs_are_refused(ade_folder: DrawAde, monkeypatch: pytest.MonkeyPatch) -> None:
    source = opened(ade_folder())
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 5000)
    for read in (source.read_image, source.read_labels):
        with pytest.raises(ValueError, match=r"0000.png cannot be used \(.*decompression bomb"):
            read(0)
