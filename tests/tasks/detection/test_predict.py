"""Prediction of objects: which images can be used, and how the outcome is drawn and told."""

import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from pycocotools import mask as coco_masks
from torch import Tensor, nn

from inlinevit.data.images import ImageFiles, unique_names
from inlinevit.engine.predictor import predict as predict_files
from inlinevit.engine.predictor import predict_command as predict_task
from inlinevit.engine.results import Prediction
from inlinevit.tasks.detection import task as task_module
from inlinevit.tasks.detection.coco import Category
from inlinevit.tasks.detection.config import DetectionPredictOptions, DetectorConfig
from inlinevit.tasks.detection.predictor import DetectionPredictor
from inlinevit.tasks.detection.task import Detection
from tests.tasks.detection.runs import make_run


class Bright(nn.Module):
    """Finds the box around what is bright, with doubts: three objects in the same place."""

    def __init__(self) -> None:
        super().__init__()
        self.transform = SimpleNamespace(pastes_masks=True)

    def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        (image,) = images
        rows, columns = torch.nonzero(image.mean(dim=0) > 0.5, as_tuple=True)
        count = 3 if len(rows) else 0
        box = [float(f()) for f in (columns.min, rows.min, columns.max, rows.max)] if count else [0.0] * 4
        return [
            {
                "boxes": torch.tensor([box])[[0] * count] + torch.tensor([0.0, 0, 1, 1]),
                "labels": torch.tensor([1, 2, 2])[:count],
                "scores": torch.tensor([0.6, 0.9, 0.3])[:count],
                "masks": torch.ones(count, 1, 28, 28),
            }
        ]


@pytest.fixture
def detector() -> DetectionPredictor:
    return DetectionPredictor(Bright(), "bright", [Category(3, "disc"), Category(7, "[bold]squäre")], DetectorConfig())


def predict(detector: DetectionPredictor, files: ImageFiles, **options: Any) -> Iterator[Prediction]:
    return predict_files(detector, files, DetectionPredictOptions(output="unused", **options), "cpu")


def predict_command(run: str, images: list[str], output: str, **options: Any) -> int:
    return predict_task(Detection, run, images, DetectionPredictOptions(output=output, device="cpu", **options))


def patch(width: int = 60, height: int = 40) -> Image.Image:
    """A black image with a white patch near its top left."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[4:10, 6:18] = 255
    return Image.fromarray(pixels)


def test_what_is_found(detector: DetectionPredictor, tmp_path: Path) -> None:
    patch().save(tmp_path / "a.png")
    (found,) = predict(detector, ImageFiles([str(tmp_path)]))
    assert [(one["category_id"], round(one["score"], 3)) for one in found.result] == [(7, 0.9), (3, 0.6)]
    assert [one["bbox"] for one in found.result] == [[6.0, 4.0, 12.0, 6.0]] * 2
    mask = coco_masks.decode(found.result[0]["segmentation"])
    assert mask.shape == (40, 60)
    assert mask[5:9, 7:17].all()
    assert mask.sum() <= 8 * 14
    (found,) = predict(detector, ImageFiles([str(tmp_path)]), threshold=0.0)
    assert len(found.result) == 3
    (found,) = predict(detector, ImageFiles([str(tmp_path)]), threshold=0.95)
    assert found.result == []
    with pytest.raises(ValueError, match=r"threshold is 1\.5: it should be at most 1"):
        next(predict(detector, ImageFiles([str(tmp_path)]), threshold=1.5))


def test_images_are_turned_upright(detector: DetectionPredictor, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    patch().save(tmp_path / "a.png", exif=exif)
    (found,) = predict(detector, ImageFiles([str(tmp_path)]))
    assert found.image is not None
    assert found.image.size == (40, 60)
    # What was left and above is right and above, once turned by a quarter.
    assert found.result[0]["bbox"] == [30.0, 6.0, 6.0, 12.0]


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    (folder / "deep").mkdir(parents=True)
    patch().save(folder / "a.png")
    (folder / "b broken\n.png").write_text("no image")
    patch(300, 700).save(folder / "c.jpg", quality=95)
    Image.new("RGB", (50, 50)).save(folder / "deep" / "a.png")
    patch().convert("L").save(folder / "deep" / "C.tiff")
    Path(os.fsdecode(os.fsencode(folder) + b"/\xff.png")).write_bytes((folder / "a.png").read_bytes())
    return folder


def run_command(detector: DetectionPredictor, monkeypatch: pytest.MonkeyPatch, images: list[str], output: Path) -> int:
    monkeypatch.setattr(task_module, "load_detector", lambda run, checkpoint: detector)
    return predict_command("run", images, str(output))


def test_the_command_and_its_files(
    detector: DetectionPredictor,
    images: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "new" / "out"
    assert run_command(detector, monkeypatch, [str(images), "nothing.png"], output) == 1
    told = json.loads((output / "predictions.json").read_text(encoding="utf-8"))
    assert [Path(one["file"]).name for one in told] == [
        "a.png", "b broken\n.png", "c.jpg", "C.tiff", "a.png", "\\xff.png", "nothing.png"
    ]  # fmt: skip
    assert [one.get("drawing") for one in told] == ["a.png", None, "c.png", "C-2.png", "a-2.png", "\\xff.png", None]
    assert sorted(os.listdir(os.fsencode(output))) == [
        b"C-2.png", b"a-2.png", b"a.png", b"c.png", b"predictions.json", b"\xff.png"
    ]  # fmt: skip
    assert set(told[1]) == {"file", "error"}
    assert told[6]["error"] == "nothing.png cannot be used (there is no such file or folder)"
    first = told[0]
    assert (first["width"], first["height"]) == (60, 40)
    assert [one["category"] for one in first["objects"]] == ["[bold]squäre", "disc"]
    assert set(first["objects"][0]) == {"category", "category_id", "score", "bbox", "segmentation"}
    assert first["objects"][0]["segmentation"]["size"] == [40, 60]
    assert told[4]["objects"] == []
    captured = capsys.readouterr()
    assert len(captured.err.splitlines()) == 2
    lines = captured.out.splitlines()
    assert len(lines) == 5
    assert lines[0] == f"{images}/a.png: 2 objects: [bold]squäre 90 %, disc 60 %"
    assert lines[3] == f"{images}/deep/a.png: 0 objects"
    assert Image.open(output / "c.png").size == (300, 700)
    drawn = np.array(Image.open(output / "c.png"))
    assert not np.array_equal(drawn, np.array(Image.open(images / "c.jpg")))


def test_no_image_is_written_over(detector: DetectionPredictor, images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {file: file.read_bytes() for file in images.rglob("*") if file.is_file()}
    run_command(detector, monkeypatch, [str(images)], images)
    assert {file: file.read_bytes() for file in before} == before
    assert (images / "a-2.png").is_file()


def test_names_that_clash_get_numbers(tmp_path: Path) -> None:
    files = ImageFiles(["x/a.jpg", "y/a.png", "z/A.gif", "b.jpg", "x/a-2.jpg", f"{tmp_path}/c.png"])
    names = [f"{name}.png" for name in unique_names(files, tmp_path)]
    # There are disks that take A.png for a.png.
    assert names == ["a.png", "a-2.png", "A-3.png", "b.png", "a-2-2.png", "c-2.png"]


def test_what_was_told_before_a_failure_is_whole(
    detector: DetectionPredictor, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoilt(images: list[Tensor]) -> list[dict[str, Tensor]]:
        if images[0].shape[-1] == 300:
            raise KeyboardInterrupt
        return Bright.forward(detector.model, images)

    monkeypatch.setattr(detector.model, "forward", spoilt)
    with pytest.raises(KeyboardInterrupt):
        run_command(detector, monkeypatch, [str(images)], tmp_path / "out")
    assert len(json.loads((tmp_path / "out" / "predictions.json").read_text())) == 2


def test_nothing_to_see(detector: DetectionPredictor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_command(detector, monkeypatch, [], tmp_path / "out") == 0
    assert json.loads((tmp_path / "out" / "predictions.json").read_text()) == []


def test_letters_that_the_terminal_does_not_know(
    detector: DetectionPredictor, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii"))
    assert run_command(detector, monkeypatch, [str(images / "a.png")], tmp_path / "out") == 0
    sys.stdout.flush()
    assert "squ\\xe4re" in shown.getvalue().decode()


@pytest.mark.parametrize("size", [(2, 2), (300, 3), (333, 500)])
def test_a_run_sees_images_of_any_size(size: tuple[int, int], tmp_path: Path) -> None:
    make_run(tmp_path / "run", box_score_thresh=0.0, box_detections_per_img=5)
    Image.effect_noise(size, 80).convert("RGB").save(tmp_path / "a.png")
    run, image, output = str(tmp_path / "run"), str(tmp_path / "a.png"), str(tmp_path / "out")
    assert predict_command(run, [image], output, threshold=0.0) == 0
    (told,) = json.loads((tmp_path / "out" / "predictions.json").read_text())
    assert (told["width"], told["height"]) == size
    assert {one["category"] for one in told["objects"]} <= {"disc", "square", "triangle"}
    for one in told["objects"]:
        x, y, width, height = one["bbox"]
        assert 0 <= x <= x + width <= size[0]
        assert 0 <= y <= y + height <= size[1]


def test_a_full_disk_leaves_what_was_there(
    detector: DetectionPredictor,
    images: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    file_limit: Callable[[int], AbstractContextManager[None]],
) -> None:
    output = tmp_path / "out"
    output.mkdir()
    for name in ("predictions.json", "a.png"):
        (output / name).write_text("old")
    with file_limit(16), pytest.raises(OSError, match=r"^no space left on the disk for .*out.*: free some"):
        run_command(detector, monkeypatch, [str(images / "a.png")], output)
    assert {file.name: file.read_text() for file in output.iterdir()} == {
        "predictions.json": "old",
        "a.png": "old",
    }


def test_an_interruption_leaves_the_list_before(
    detector: DetectionPredictor, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(images: object) -> None:
        raise KeyboardInterrupt

    (tmp_path / "predictions.json").write_text("old")
    monkeypatch.setattr(detector.model, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_command(detector, monkeypatch, [str(images)], tmp_path)
    assert (tmp_path / "predictions.json").read_text() == "old"


def test_an_image_with_the_name_of_the_list_is_not_written_over(
    detector: DetectionPredictor, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (images / "a.png").rename(images / "predictions.json")
    before = (images / "predictions.json").read_bytes()
    for output in (images, images / "link"):
        if output != images:
            output.symlink_to(images)
        with pytest.raises(ValueError, match=r"predictions\.json is read by this command"):
            run_command(detector, monkeypatch, [str(images / "predictions.json")], output)
    assert (images / "predictions.json").read_bytes() == before
