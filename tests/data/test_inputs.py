"""Images that a caller gives in Python."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from inlinevit.data.images import decode_image
from inlinevit.data.inputs import ImageInputs, to_image
from inlinevit.data.pixels import PixelFormat

BYTES = np.random.default_rng(0).integers(0, 256, (6, 9, 3), dtype=np.uint8)
FLOATS = BYTES.astype(np.float32) / 255
GREY = BYTES[..., 0]


def pixels(image: object) -> np.ndarray:
    return np.asarray(decode_image(to_image(image), PixelFormat()))


@pytest.mark.parametrize(
    "image",
    [
        Image.fromarray(BYTES),
        BYTES,
        BYTES[:, ::-1][:, ::-1],
        FLOATS,
        FLOATS.astype(np.float64),
        FLOATS.astype(np.float16),
        BYTES.astype(np.uint16) * 257,
        torch.from_numpy(BYTES).permute(2, 0, 1),
        torch.from_numpy(FLOATS).permute(2, 0, 1).requires_grad_(),
    ],
)
def test_colours(image: object) -> None:
    assert np.array_equal(pixels(image), BYTES)


@pytest.mark.parametrize(
    "image",
    [
        GREY,
        GREY[..., None],
        GREY.astype(np.float32) / 255,
        GREY.astype(np.uint16) * 257,
        torch.from_numpy(GREY),
        torch.from_numpy(GREY)[None],
        torch.from_numpy(GREY)[None].double() / 255,
        torch.from_numpy(GREY).expand(3, 6, 9),
    ],
)
def test_grey(image: object) -> None:
    assert np.array_equal(pixels(image), np.stack([GREY] * 3, axis=-1))


def test_black_and_white() -> None:
    assert np.array_equal(pixels(GREY > 99), np.stack([255 * (GREY > 99)] * 3, axis=-1))
    assert np.abs(pixels(torch.from_numpy(FLOATS).permute(2, 0, 1).bfloat16()).astype(int) - BYTES).max() <= 1


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (torch.from_numpy(BYTES), r"its shape is \(6, 9, 3\): arrays are \(height, width, bands\), tensors are"),
        (np.moveaxis(BYTES, -1, 0), r"its shape is \(3, 6, 9\): arrays are"),
        (np.dstack([BYTES, GREY]), r"it has 4 bands, but the model takes 3: choose 3 of them with --data\.bands"),
        (torch.zeros(2, 3, 8, 8), "give several images as a list"),
        (np.zeros((0, 9, 3)), "its shape is"),
        (BYTES.astype(np.int64), r"integers of 64 bits with a sign, .*: say so with --data\.range"),
        (FLOATS * 255, r"floating-point numbers from 0 to .*, or scale them to 0 … 1"),
        (FLOATS * 60 + 250, r"numbers from 25\d.* to 3\d\d.*, such as \[25\d"),
        (np.full((6, 9), 7, np.int32), r"from 7 to 7, .* such as \[7, 8\], or save"),
        (FLOATS * np.nan, "it has NaN or infinite values"),
    ],
)
def test_what_is_refused(image: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pixels(image)


def test_which_images_are_meant(tmp_path: Path) -> None:
    for name in ("b.png", "a.png"):
        Image.fromarray(BYTES).save(tmp_path / name)
    first = tmp_path / "a.png"
    inputs = ImageInputs([first, BYTES, str(first), str(tmp_path), tmp_path / "?.png"])
    names = [inputs.name(index) for index in range(len(inputs))]
    a, b = str(first), str(tmp_path / "b.png")
    assert names == [a, "images[1]", a, a, b, a, b]
    for index in range(len(inputs)):
        with inputs.open(index) as image:
            assert np.array_equal(np.asarray(decode_image(image, PixelFormat())), BYTES)
    single = [str(first), first, BYTES, torch.zeros(3, 4, 4), Image.fromarray(BYTES), "nothing.png"]
    assert [ImageInputs(one).is_single for one in single] == [True] * 6
    several = [[first], (first,), tmp_path, str(tmp_path / "*.png"), tmp_path.glob("*.png"), []]
    assert [ImageInputs(some).is_single for some in several] == [False] * 6


def test_images_of_the_caller_stay_open(tmp_path: Path) -> None:
    Image.fromarray(BYTES).save(tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as image:
        with ImageInputs(image).open(0):
            pass
        assert np.array_equal(np.asarray(image), BYTES)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (3, "the image is of type int: give a path, a PIL image, .*, or a list of them"),
        (None, "the image is of type NoneType"),
        (b"a.png", "the image is of type bytes"),
        (["a.png", 3], r"images\[1\] is of type int: give a path"),
        ([["a.png"]], r"images\[0\] is of type list"),
    ],
)
def test_what_is_not_an_image(images: object, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        ImageInputs(images)  # type: ignore[arg-type]
