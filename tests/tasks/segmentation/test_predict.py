"""Prediction of labels: which images can be used, and how the outcome is drawn and told."""

import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from inlinevit.data.images import ImageFiles
from inlinevit.engine.predictor import predict as predict_files
from inlinevit.engine.predictor import predict_command as predict_task
from inlinevit.engine.results import Prediction
from inlinevit.tasks.segmentation import predictor as predictor_module
from inlinevit.tasks.segmentation import task as task_module
from inlinevit.tasks.segmentation.config import (
    InferenceConfig,
    InferenceOptions,
    SegmentationAugmentConfig,
    SegmentationConfig,
    SegmentationPredictOptions,
)
from inlinevit.tasks.segmentation.labels import LabelMap
from inlinevit.tasks.segmentation.predictor import SegmentationPredictor, in_windows_if_large, make_label_map
from inlinevit.tasks.segmentation.task import Segmentation
from tests.tasks.segmentation.runs import CLASSES, make_run

UNCHANGED = ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


class Colours(nn.Module):
    """Takes the strongest colour of a pixel for its class."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[tuple[int, ...]] = []

    def forward(self, images: Tensor) -> Tensor:
        self.sizes.append(tuple(images.shape[-2:]))
        return images


@pytest.fixture
def segmenter() -> SegmentationPredictor:
    config = SegmentationConfig(
        inference=InferenceConfig(min_size=None), augment=SegmentationAugmentConfig(crop_size=64)
    )
    return SegmentationPredictor(Colours(), "colours", LabelMap.from_plain(CLASSES, "here"), config, UNCHANGED)


def predict(segmenter: SegmentationPredictor, files: ImageFiles, **inference: Any) -> Iterator[Prediction]:
    options = SegmentationPredictOptions(output="unused", inference=InferenceOptions(**inference))
    return predict_files(segmenter, files, options, "cpu")


def predict_command(run: str, images: list[str], output: str) -> int:
    return predict_task(Segmentation, run, images, SegmentationPredictOptions(output=output, device="cpu"))


def patch(width: int = 60, height: int = 40) -> Image.Image:
    """A red image with a green patch near its top left, and a blue edge below."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[..., 0] = 200
    pixels[4:10, 6:18] = (0, 200, 0)
    pixels[-2:] = (0, 0, 200)
    return Image.fromarray(pixels)


def test_what_is_found(segmenter: SegmentationPredictor, tmp_path: Path) -> None:
    patch().save(tmp_path / "a.png")
    (found,) = predict(segmenter, ImageFiles([str(tmp_path)]))
    expected = np.zeros((40, 60), np.uint8)
    expected[4:10, 6:18] = 1
    expected[-2:] = 2
    assert np.array_equal(found.result, expected)
    (found,) = predict(segmenter, ImageFiles([str(tmp_path)]), window_size=16, scales=[1.0, 2.0], flip=True)
    assert np.array_equal(found.result, expected)
    assert set(segmenter.model.sizes[1:]) == {(16, 16)}  # type: ignore[index]


def test_images_are_turned_upright(segmenter: SegmentationPredictor, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    patch().save(tmp_path / "a.png", exif=exif)
    (found,) = predict(segmenter, ImageFiles([str(tmp_path)]))
    assert found.image is not None
    assert found.image.size == (40, 60)
    # What was left and above is right and above, once turned by a quarter; what was below is on the left.
    assert (found.result[6:18, 30:36] == 1).all()
    assert (found.result[:, :2] == 2).all()


def test_large_images_are_seen_in_windows(
    segmenter: SegmentationPredictor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch(300, 200).save(tmp_path / "a.png")
    files = ImageFiles([str(tmp_path)])
    model = segmenter.model
    assert isinstance(model, Colours)
    (whole,) = predict(segmenter, files)
    assert model.sizes == [(200, 300)]
    monkeypatch.setattr(predictor_module, "MOST_AT_ONCE", 200 * 300 - 1)
    (found,) = predict(segmenter, files)
    # As large as what the model has seen in training.
    assert set(model.sizes[1:]) == {(64, 64)}
    assert np.array_equal(found.result, whole.result)
    # A window that was named stays.
    list(predict(segmenter, files, window_size=100))
    assert model.sizes[-1] == (100, 100)


def test_what_counts_is_how_large_the_model_sees_an_image() -> None:
    huge, strip = Image.new("L", (6000, 4000)), Image.new("L", (40, 4000))
    assert in_windows_if_large(InferenceConfig(min_size=512), huge, 512).window_size is None
    assert in_windows_if_large(InferenceConfig(min_size=None), huge, 512).window_size == 512
    assert in_windows_if_large(InferenceConfig(min_size=512, scales=[1.0, 4.0]), huge, 512).window_size == 512
    assert in_windows_if_large(InferenceConfig(min_size=512), strip, 512).window_size == 512


def test_images_larger_than_pillow_likes(
    segmenter: SegmentationPredictor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch().save(tmp_path / "a.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    (found,) = predict(segmenter, ImageFiles([str(tmp_path)]))
    assert found.error is None
    assert Image.MAX_IMAGE_PIXELS == 100
    monkeypatch.setattr(SegmentationPredictor, "max_pixels", 2000)
    (found,) = predict(segmenter, ImageFiles([str(tmp_path)]))
    assert "2400 pixels" in (found.error or "")


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    (folder / "deep").mkdir(parents=True)
    patch().save(folder / "a.png")
    (folder / "b broken\n.png").write_text("no image")
    patch(300, 700).save(folder / "c.jpg", quality=95)
    Image.new("RGB", (50, 50), (0, 0, 9)).save(folder / "deep" / "a.png")
    patch().save(folder / "deep" / "C.tiff")
    Path(os.fsdecode(os.fsencode(folder) + b"/\xff.png")).write_bytes((folder / "a.png").read_bytes())
    return folder


def run_command(
    segmenter: SegmentationPredictor, monkeypatch: pytest.MonkeyPatch, images: list[str], output: Path
) -> int:
    monkeypatch.setattr(task_module, "load_segmenter", lambda run, checkpoint: segmenter)
    return predict_command("run", images, str(output))


def test_the_command_and_its_files(
    segmenter: SegmentationPredictor,
    images: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "new" / "out"
    assert run_command(segmenter, monkeypatch, [str(images), "nothing.png"], output) == 1
    told = json.loads((output / "predictions.json").read_text(encoding="utf-8"))
    assert [Path(one["file"]).name for one in told] == [
        "a.png", "b broken\n.png", "c.jpg", "C.tiff", "a.png", "\\xff.png", "nothing.png"
    ]  # fmt: skip
    names = ["a", None, "c", "C-2", "a-2", "\\xff", None]
    assert [one.get("labels") for one in told] == [name and f"{name}_labels.png" for name in names]
    assert [one.get("overlay") for one in told] == [name and f"{name}_overlay.png" for name in names]
    written = {os.fsencode(name) for name in os.listdir(output)}
    stems = (b"a", b"c", b"C-2", b"a-2", b"\xff")
    assert written == {b"predictions.json", *(s + end for s in stems for end in (b"_labels.png", b"_overlay.png"))}
    assert set(told[1]) == {"file", "error"}
    assert told[6]["error"] == "nothing.png cannot be used (there is no such file or folder)"
    first = told[0]
    assert (first["width"], first["height"]) == (60, 40)
    assert [one["name"] for one in first["classes"]] == ["red", "blue", "green [b]"]
    assert [one["share"] for one in first["classes"]] == pytest.approx([0.92, 0.05, 0.03])
    # The values of the training data.
    stored = Image.open(output / "a_labels.png")
    assert (stored.mode, stored.size) == ("L", (60, 40))
    values = np.array(stored)
    assert (values[20, 20], values[6, 10], values[39, 0]) == (7, 2, 9)
    assert set(np.unique(values).tolist()) == {2, 7, 9}
    captured = capsys.readouterr()
    assert len(captured.err.splitlines()) == 2
    lines = captured.out.splitlines()
    assert len(lines) == 5
    assert lines[0] == f"{images}/a.png: red 92 %, blue 5 %, green [b] 3 %"
    assert lines[3] == f"{images}/deep/a.png: blue 100 %"
    drawn = Image.open(output / "c_overlay.png")
    assert drawn.width == 300
    assert drawn.height > 700


def test_no_image_is_written_over(
    segmenter: SegmentationPredictor, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch().save(images / "a_overlay.png")
    before = {file: file.read_bytes() for file in images.rglob("*") if file.is_file()}
    run_command(segmenter, monkeypatch, [str(images)], images)
    assert {file: file.read_bytes() for file in before} == before
    # Both files of an image go by one name.
    assert (images / "a-2_overlay.png").is_file()
    assert (images / "a-2_labels.png").is_file()
    assert not (images / "a_labels.png").exists()


def test_what_was_told_before_a_failure_is_whole(
    segmenter: SegmentationPredictor, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoilt(images: Tensor) -> Tensor:
        if images.shape[-1] == 300:
            raise KeyboardInterrupt
        return images

    monkeypatch.setattr(segmenter.model, "forward", spoilt)
    with pytest.raises(KeyboardInterrupt):
        run_command(segmenter, monkeypatch, [str(images)], tmp_path / "out")
    assert len(json.loads((tmp_path / "out" / "predictions.json").read_text())) == 2


def test_a_model_that_gives_no_numbers_is_told_of(
    segmenter: SegmentationPredictor, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segmenter.model, "forward", lambda images: images * torch.nan)
    (found,) = predict(segmenter, ImageFiles([str(images / "a.png")]))
    assert found.error == f"{images / 'a.png'} gives NaN or infinite values: check the model's weights"


def test_nothing_to_see(segmenter: SegmentationPredictor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_command(segmenter, monkeypatch, [], tmp_path / "out") == 0
    assert json.loads((tmp_path / "out" / "predictions.json").read_text()) == []


def test_letters_that_the_terminal_does_not_know(
    segmenter: SegmentationPredictor, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (images / "ä.png").write_bytes((images / "a.png").read_bytes())
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii"))
    assert run_command(segmenter, monkeypatch, [str(images / "ä.png")], tmp_path / "out") == 0
    sys.stdout.flush()
    assert "\\xe4.png: red" in shown.getvalue().decode()


def test_label_maps_have_16_bits_where_values_need_them(tmp_path: Path) -> None:
    records = [{"name": "a", "values": [7]}, {"name": "b", "values": [40_000, 3]}]
    labels = LabelMap.from_plain({"ignored": [0], "classes": records}, "here")
    indices = np.zeros((600, 4), np.uint8)
    indices[300:] = 1
    make_label_map(indices, labels).save(tmp_path / "a.png")
    values = np.array(Image.open(tmp_path / "a.png"))
    assert values.shape == (600, 4)
    assert (values[:300] == 7).all()
    assert (values[300:] == 40_000).all()
    # They can be read back as the labels that they are.
    assert np.array_equal(labels.to_indices(values).numpy(), indices)


@pytest.mark.parametrize("size", [(2, 2), (300, 3), (333, 500)])
def test_a_run_sees_images_of_any_size(size: tuple[int, int], tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    Image.effect_noise(size, 80).convert("RGB").save(tmp_path / "a.png")
    run, image, output = str(tmp_path / "run"), str(tmp_path / "a.png"), str(tmp_path / "out")
    assert predict_command(run, [image], output) == 0
    (told,) = json.loads((tmp_path / "out" / "predictions.json").read_text())
    assert (told["width"], told["height"]) == size
    assert sum(one["share"] for one in told["classes"]) == pytest.approx(1)
    assert Image.open(tmp_path / "out" / "a_labels.png").size == size


def test_a_full_disk_leaves_what_was_there(
    segmenter: SegmentationPredictor,
    images: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    file_limit: Callable[[int], AbstractContextManager[None]],
) -> None:
    output = tmp_path / "out"
    output.mkdir()
    for name in ("predictions.json", "a_labels.png"):
        (output / name).write_text("old")
    with file_limit(16), pytest.raises(OSError, match=r"^no space left on the disk for .*out.*: free some"):
        run_command(segmenter, monkeypatch, [str(images / "a.png")], output)
    assert {file.name: file.read_text() for file in output.iterdir()} == {
        "predictions.json": "old",
        "a_labels.png": "old",
    }


def test_an_interruption_leaves_the_list_before(
    segmenter: SegmentationPredictor, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(images: object) -> None:
        raise KeyboardInterrupt

    (tmp_path / "predictions.json").write_text("old")
    monkeypatch.setattr(segmenter.model, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_command(segmenter, monkeypatch, [str(images)], tmp_path)
    assert (tmp_path / "predictions.json").read_text() == "old"


def test_an_image_with_the_name_of_the_list_is_not_written_over(
    segmenter: SegmentationPredictor, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (images / "a.png").rename(images / "predictions.json")
    before = (images / "predictions.json").read_bytes()
    for output in (images, images / "link"):
        if output != images:
            output.symlink_to(images)
        with pytest.raises(ValueError, match=r"predictions\.json is read by this command"):
            run_command(segmenter, monkeypatch, [str(images / "predictions.json")], output)
    assert (images / "predictions.json").read_bytes() == before
