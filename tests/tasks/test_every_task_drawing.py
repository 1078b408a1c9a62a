"""What `predict` of every task that draws its results leaves in its folder, whatever the images."""

import io
import json
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from inlinevit.data.images import ImageFiles, unique_names
from inlinevit.engine.prediction_files import PartialResults
from inlinevit.engine.predictor import DrawingPredictor, PredictionJob, predict, predict_command
from inlinevit.tasks import TASKS
from tests.tasks.detection.test_predict import make_predictor as make_detector
from tests.tasks.runs import MAKE
from tests.tasks.segmentation.test_predict import make_predictor as make_segmenter

MAKE_PREDICTOR: dict[str, Callable[[], DrawingPredictor[Any]]] = {
    "detection": make_detector,
    "segmentation": make_segmenter,
}


def patch(width: int = 60, height: int = 40) -> Image.Image:
    """A black image with a white patch near its top left."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[4:10, 6:18] = 255
    return Image.fromarray(pixels)


class Case:
    """A task and a predictor of it, which its command loads."""

    def __init__(self, task: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.task = TASKS[task].load_task()
        self.options = TASKS[task].load_predict_options()
        self.predictor = MAKE_PREDICTOR[task]()
        self.suffixes = tuple(self.predictor.drawing_suffixes.values())
        monkeypatch.setattr(self.task, "load_predictor", lambda model, options: self.predictor)

    def command(self, images: list[str], output: Path) -> int:
        return predict_command(self.task, "run", images, self.options(output=str(output), device="cpu"))


@pytest.fixture(params=MAKE_PREDICTOR)
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Case:
    return Case(request.param, monkeypatch)


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


def test_the_command_and_its_files(
    case: Case, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "new" / "out"
    assert case.command([str(images), "nothing.png"], output) == 1
    told = json.loads((output / "predictions.json").read_text(encoding="utf-8"))
    assert [Path(one["file"]).name for one in told] == [
        "a.png", "b broken\n.png", "c.jpg", "C.tiff", "a.png", "\\xff.png", "nothing.png"
    ]  # fmt: skip
    names = ["a", None, "c", "C-2", "a-2", "\\xff", None]
    for key, suffix in case.predictor.drawing_suffixes.items():
        assert [one.get(key) for one in told] == [name and f"{name}{suffix}" for name in names]
    written = set(os.listdir(os.fsencode(output)))
    stems = (b"a", b"c", b"C-2", b"a-2", b"\xff")
    assert written == {b"predictions.json", *(stem + os.fsencode(end) for stem in stems for end in case.suffixes)}
    assert set(told[1]) == {"file", "error"}
    assert told[6]["error"] == "nothing.png cannot be used (there is no such file or folder)"
    assert (told[0]["width"], told[0]["height"]) == (60, 40)
    captured = capsys.readouterr()
    assert len(captured.err.splitlines()) == 2
    assert len(captured.out.splitlines()) == 5
    # All but legends have the width of the image.
    drawings = [suffix for suffix in case.suffixes if suffix != "_legend.png"]
    assert all(Image.open(output / f"c{suffix}").width == 300 for suffix in drawings)


def test_images_are_turned_upright(case: Case, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    patch().save(tmp_path / "a.png", exif=exif)
    patch().transpose(Image.Transpose.ROTATE_270).save(tmp_path / "b.png")
    options = case.options(output="unused")
    turned, upright = predict(case.predictor, ImageFiles([str(tmp_path)]), options, "cpu")
    assert turned.image is not None
    assert turned.image.size == (40, 60)
    assert case.predictor.render(turned.image, turned.result).record == (
        case.predictor.render(turned.image, upright.result).record
    )


def test_no_image_is_written_over(case: Case, images: Path) -> None:
    patch().save(images / f"a{case.suffixes[-1]}")
    before = {file: file.read_bytes() for file in images.rglob("*") if file.is_file()}
    case.command([str(images)], images)
    assert {file: file.read_bytes() for file in before} == before
    # All files of an image go by one name.
    assert all((images / f"a-2{suffix}").is_file() for suffix in case.suffixes)


def test_names_that_clash_get_numbers(tmp_path: Path) -> None:
    files = ImageFiles(["x/a.jpg", "y/a.png", "z/A.gif", "b.jpg", "x/a-2.jpg", f"{tmp_path}/c.png"])
    names = [f"{name}.png" for name in unique_names(files, tmp_path)]
    # There are disks that take A.png for a.png.
    assert names == ["a.png", "a-2.png", "A-3.png", "b.png", "a-2-2.png", "c-2.png"]


def test_what_was_written_before_a_failure_is_kept(
    case: Case, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same command draws only the other images, and the list is as if nothing had happened."""
    case.command([str(images)], tmp_path / "whole")
    forward = case.predictor.model.forward

    def interrupted(images: Any, **options: Any) -> Any:
        if images[0].shape[-1] == 300:
            raise KeyboardInterrupt
        return forward(images, **options)

    output = tmp_path / "out"
    with monkeypatch.context() as patched:
        patched.setattr(case.predictor.model, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            case.command([str(images)], output)
    assert not (output / "predictions.json").exists()
    (part,) = (output / "predictions.json.partial").glob("part-*.jsonl")
    assert ["error" in json.loads(line) for line in part.read_text().splitlines()] == [False, True]
    capsys.readouterr()
    (output / f"a{case.suffixes[0]}").unlink()
    assert case.command([str(images)], output) == 1
    captured = capsys.readouterr()
    # The broken image is done; the drawing that is missing is not.
    assert "resuming: 1 of 6 images are done" in captured.err
    assert len(captured.out.splitlines()) == 5
    whole = {file.name: file.read_bytes() for file in (tmp_path / "whole").iterdir()}
    assert {file.name: file.read_bytes() for file in output.iterdir()} == whole


def test_several_processes_draw_what_one_draws(case: Case, images: Path, tmp_path: Path) -> None:
    case.command([str(images)], tmp_path / "whole")
    output = tmp_path / "out"
    partial = PartialResults(output / "predictions.json")
    job = PredictionJob(case.predictor, ImageFiles([str(images)]), case.options(output=str(output)), partial)
    with partial.open({}, {}, start_over=False):
        plan = job.make_plan()
        parts = [job.write_part(plan, torch.device("cpu"), process, 3) for process in range(3)]
        assert [len((partial.folder / part).read_text().splitlines()) for part in parts] == [2, 2, 2]
        assert partial.merge(plan.ids, "records", parts) == 1
    whole = {file.name: file.read_bytes() for file in (tmp_path / "whole").iterdir()}
    assert {file.name: file.read_bytes() for file in output.iterdir()} == whole


def test_a_model_that_gives_no_numbers_is_reported(case: Case, images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = case.predictor.model.forward

    def spoilt(images: Any, **options: Any) -> Any:
        answer = forward(images, **options)
        if isinstance(answer, Tensor):
            return answer * torch.nan
        return [{**one, "scores": one["scores"] * torch.nan} for one in answer]

    monkeypatch.setattr(case.predictor.model, "forward", spoilt)
    files = ImageFiles([str(images / "a.png")])
    (found,) = predict(case.predictor, files, case.options(output="unused"), "cpu")
    assert found.error == f"{images / 'a.png'} gives NaN or infinite values: check the model's weights"


def test_no_images(case: Case, tmp_path: Path) -> None:
    assert case.command([], tmp_path / "out") == 0
    assert json.loads((tmp_path / "out" / "predictions.json").read_text()) == []


def test_letters_that_the_terminal_does_not_know(
    case: Case, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (images / "ä.png").write_bytes((images / "a.png").read_bytes())
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii"))
    assert case.command([str(images / "ä.png")], tmp_path / "out") == 0
    sys.stdout.flush()
    assert "\\xe4.png: " in shown.getvalue().decode()


def test_a_full_disk_leaves_what_was_there(
    case: Case, images: Path, tmp_path: Path, file_limit: Callable[[int], AbstractContextManager[None]]
) -> None:
    output = tmp_path / "out"
    output.mkdir()
    before = {"predictions.json": "old", f"a{case.suffixes[0]}": "old"}
    for name, content in before.items():
        (output / name).write_text(content)
    with file_limit(16), pytest.raises(OSError, match=r"^no space left on the disk for .*out.*: free some"):
        case.command([str(images / "a.png")], output)
    assert {file.name: file.read_text() for file in output.iterdir()} == before


def test_an_interruption_leaves_the_list_before(
    case: Case, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(images: object, **options: Any) -> None:
        raise KeyboardInterrupt

    (tmp_path / "predictions.json").write_text("old")
    monkeypatch.setattr(case.predictor.model, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        case.command([str(images)], tmp_path)
    assert (tmp_path / "predictions.json").read_text() == "old"


def test_an_image_with_the_name_of_the_list_is_not_written_over(case: Case, images: Path) -> None:
    (images / "a.png").rename(images / "predictions.json")
    before = (images / "predictions.json").read_bytes()
    for output in (images, images / "link"):
        if output != images:
            output.symlink_to(images)
        with pytest.raises(ValueError, match=r"predictions\.json is read by this command"):
            case.command([str(images / "predictions.json")], output)
    assert (images / "predictions.json").read_bytes() == before


@pytest.mark.parametrize("task", MAKE_PREDICTOR)
def test_a_run_takes_images_of_any_size(task: str, tmp_path: Path) -> None:
    MAKE[task](tmp_path)
    sizes = [(2, 2), (300, 3), (333, 500)]
    for number, size in enumerate(sizes):
        Image.effect_noise(size, 80).convert("RGB").save(tmp_path / f"{number}.png")
    options = TASKS[task].load_predict_options()(output=str(tmp_path / "out"), device="cpu")
    files = [str(tmp_path / f"{number}.png") for number in range(len(sizes))]
    assert predict_command(TASKS[task].load_task(), str(tmp_path / f"{task}_run"), files, options) == 0
    told = json.loads((tmp_path / "out" / "predictions.json").read_text())
    assert [(one["width"], one["height"]) for one in told] == sizes
