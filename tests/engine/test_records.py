"""What is recorded of single images: rows in the order of the data, and the worst images with pictures."""

import io

import pytest
import torch
from PIL import Image

from inlinevit.engine import records
from inlinevit.engine.records import LARGEST_SIDE, ImageRecorder, encode_picture, rounded, to_picture


def record(recorder: ImageRecorder, index: int, badness: float | None, drawn: list[int]) -> None:
    def draw() -> dict[str, Image.Image]:
        drawn.append(index)
        return {"truth": Image.new("RGB", (4, 4), (index, 0, 0)), "prediction": Image.new("L", (200, 100))}

    order = None if badness is None else (badness,)
    recorder.add(index, f"{index}.png", {"loss": badness}, badness=order, lines=(f"loss {badness}",), draw=draw)


def test_the_worst_images_are_kept_and_only_they_are_drawn() -> None:
    recorder, drawn = ImageRecorder(count=2), list[int]()
    for index, badness in enumerate([0.5, None, 0.1, 0.9, 0.2, 0.9, 0.9]):
        record(recorder, index, badness, drawn)
    found = recorder.gather()
    # Among equals, the first in the data; later ones are not even drawn.
    assert [case.file for case in found.worst] == ["3.png", "5.png"]
    assert drawn == [0, 2, 3, 5]
    assert found.worst[0].lines == ("loss 0.9",)
    assert [row.file for row in found.rows] == [f"{index}.png" for index in range(7)]
    assert found.columns == ("loss",)


def test_records_of_processes_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rows and the same worst images, however the data are divided, also if a process has none."""
    scores = [0.3, 0.9, 0.9, 0.1, 0.4, 0.9, 0.8]

    def outcome(parts: list[list[int]]) -> records.ImageRecords:
        recorders = [ImageRecorder(count=3) for _ in parts]
        for recorder, part in zip(recorders, parts, strict=True):
            for index in part:
                record(recorder, index, scores[index], [])
        recorders[0].skip(7, "7.png", "7.png cannot be used")
        everything = [(one.columns, one.rows, one.worst) for one in recorders]
        monkeypatch.setattr(records, "gather_object", lambda own: everything)
        return recorders[0].gather()

    alone = outcome([list(range(7))])
    assert [case.file for case in alone.worst] == ["1.png", "2.png", "5.png"]
    assert alone.rows[7] == (7, "7.png", (), "7.png cannot be used")
    assert outcome([[], [0, 2, 4, 6], [1, 3, 5]]) == alone
    assert outcome([[4, 5, 6], [0, 1, 2, 3]]) == alone


@pytest.mark.parametrize(("size", "kind", "expected"), [((28, 20), "PNG", (84, 60)), ((1000, 500), "JPEG", (640, 320))])
def test_pictures_are_neither_tiny_nor_large(size: tuple[int, int], kind: str, expected: tuple[int, int]) -> None:
    for mode in ("L", "RGB", "RGBA"):
        with Image.open(io.BytesIO(encode_picture(Image.new(mode, size)))) as picture:
            assert (picture.format, picture.size) == (kind, expected)
    assert max(expected) <= LARGEST_SIDE


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (2, "L"), (3, "RGB"), (6, "RGB")])
def test_pixels_become_pictures(channels: int, mode: str) -> None:
    pixels = torch.full((channels, 5, 7), 51, dtype=torch.uint8)
    for values in (pixels, pixels / 255):
        picture = to_picture(values)
        assert (picture.mode, picture.size) == (mode, (7, 5))
        assert picture.convert("L").getpixel((3, 3)) == 51
    # Normalised images may go a little too far.
    assert to_picture(torch.tensor([[[1.2, -0.3, float("nan")]]])).tobytes() == bytes([255, 0, 0])


def test_numbers_that_are_not_finite_are_left_out() -> None:
    assert rounded({"a": 0.1234567, "b": float("nan"), "c": float("inf")}) == {"a": 0.12346, "b": None, "c": None}
