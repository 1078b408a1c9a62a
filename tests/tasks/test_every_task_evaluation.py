"""`eval --output` of every task, as a user calls it: predictions.csv and evaluation.html."""

import base64
import csv
import io
import json
import os
import re
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from accelerate.state import AcceleratorState
from PIL import Image

from inlinevit.cli import main
from tests.tasks.classification.test_evaluate import image_folder
from tests.tasks.runs import MAKE, make_image_run

COMMANDS = {"classification": [], "multilabel": ["multilabel"], "detection": ["detect"], "segmentation": ["segment"]}
COLUMNS = {
    "classification": ["truth", "prediction", "confidence", "correct", "loss", *["top1", "top1_probability", "top2"]],
    "multilabel": ["truth", "prediction", "correct", "f1", "loss", "top1", "top1_probability"],
    "detection": ["image_id", "objects", "detections", "tp", "fp", "fn", "precision", "recall", "f1"],
    "segmentation": ["pixels", "miou", "pixel_accuracy", "worst_class", "worst_iou"],
}
SECTIONS = {
    "classification": ["summary", "worst", "confusion", "calibration", "classes"],
    "multilabel": ["summary", "worst", "calibration", "classes"],
    "detection": ["summary", "worst", "classes"],
    "segmentation": ["summary", "worst", "confusion", "classes"],
}
# Pictures of an image.
PICTURES = {"classification": 1, "multilabel": 1, "detection": 2, "segmentation": 2}


@pytest.fixture(autouse=True)
def no_precision() -> Iterator[None]:
    """No precision of an earlier test."""
    AcceleratorState._reset_state()
    yield
    AcceleratorState._reset_state()


def evaluate(task: str, run: Path, output: Path, *options: str) -> tuple[dict[str, Any], list[dict[str, str]], str]:
    """Run the command, and return evaluation.json, predictions.csv and evaluation.html."""
    main([*COMMANDS[task], "eval", str(run), "--output", str(output), *options])
    with (output / "predictions.csv").open(newline="", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    return json.loads((output / "evaluation.json").read_text()), rows, (output / "evaluation.html").read_text()


@pytest.mark.parametrize("task", MAKE)
def test_files(task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    MAKE[task](tmp_path)
    told, rows, page = evaluate(task, tmp_path / f"{task}_run", tmp_path / "out")
    assert len(rows) == told["images"]
    assert list(rows[0])[: len(COLUMNS[task]) + 1] == ["file", *COLUMNS[task]]
    assert list(rows[0])[-1] == "error"
    assert all(Path(row["file"]).is_file() and row["error"] == "" for row in rows)
    assert [row["file"] for row in rows] == sorted(row["file"] for row in rows)
    check_numbers(task, told, rows)
    # The page: its sections, pictures of the worst images, and nothing from elsewhere.
    assert re.findall(r'<section id="([\w-]+)"', page) == SECTIONS[task]
    worst = page.partition('<section id="worst"')[2].partition("</section>")[0]
    pictures = re.findall(r'<img src="data:image/(?:png|jpeg);base64,([^"]+)"', worst)
    assert len(pictures) == PICTURES[task] * worst.count("<li>") > 0
    for picture in pictures:
        with Image.open(io.BytesIO(base64.b64decode(picture))) as image:
            assert min(image.size) >= 48
    assert not re.search(r'(?:src|href)="(?!data:|#)', page)


def check_numbers(task: str, told: dict[str, Any], rows: list[dict[str, str]]) -> None:
    """Compare the rows with the numbers of the whole evaluation."""

    def total(column: str) -> float:
        return sum(float(row[column]) for row in rows)

    if task == "classification":
        assert 100 * total("correct") / len(rows) == pytest.approx(told["top1"])
        assert total("loss") / len(rows) == pytest.approx(told["loss"], abs=1e-4)
        assert all((row["truth"] == row["prediction"]) == (row["correct"] == "1") for row in rows)
        assert all(row["top1"] == row["prediction"] and row["top1_probability"] == row["confidence"] for row in rows)
        assert sum(one["predictions"] for one in told["calibration"]) == len(rows)
    elif task == "multilabel":
        for one in told["per_class"]:
            assert sum(one["label"] in row["truth"].split(";") for row in rows) == one["images"]
            assert sum(one["label"] in row["prediction"].split(";") for row in rows) == one["predicted"]
    elif task == "detection":
        assert total("objects") == sum(one["objects"] for one in told["per_class"])
        assert all(int(row["tp"]) + int(row["fn"]) == int(row["objects"]) for row in rows)
    else:
        assert total("pixels") == sum(one["pixels"] for one in told["per_class"])
        right = sum(float(row["pixel_accuracy"]) * int(row["pixels"]) for row in rows)
        assert right / total("pixels") == pytest.approx(told["pixel_accuracy"], abs=1e-4)


def test_the_worst_mistakes_come_first(tmp_path: Path) -> None:
    MAKE["classification"](tmp_path)
    _, rows, page = evaluate("classification", tmp_path / "classification_run", tmp_path / "out")
    wrong = sorted((row for row in rows if row["correct"] == "0"), key=lambda row: -float(row["confidence"]))
    worst = page.partition('<section id="worst"')[2].partition("</section>")[0]
    assert wrong
    assert re.findall(r"<span>(/[^<]+)</span>", worst) == [row["file"] for row in wrong]
    first = f"<span>{wrong[0]['prediction']} {100 * float(wrong[0]['confidence']):.1f} %</span>"
    assert first in worst
    assert f"<span>truth: {wrong[0]['truth']}</span>" in worst


def test_names_are_escaped_and_unusable_images_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    MAKE["classification"](tmp_path)
    hostile = "<script>alert(1)<script> & $x_{"
    shutil.copytree(tmp_path / "images" / "bee", tmp_path / "images" / hostile)
    (tmp_path / "images" / hostile / "1.png").write_bytes(b"no image")
    make_image_run(tmp_path / "run", tmp_path / "images", ["ant", "bee", hostile])
    told, rows, page = evaluate("classification", tmp_path / "run", tmp_path / "out", "--data.max_unreadable", "1")
    assert "1.png cannot be used (it is not an image) and is skipped" in capsys.readouterr().err
    assert told["images"] == len(rows) - 1
    (unusable,) = (row for row in rows if row["error"])
    assert unusable["error"] == f"{unusable['file']} cannot be used (it is not an image)"
    assert (unusable["truth"], unusable["top1"]) == ("", "")
    assert {row["truth"] for row in rows} == {"", "ant", "bee", hostile}
    assert "1 image was left out" in page
    assert "&lt;script&gt;alert" in page
    assert "<script" not in page


def test_names_that_are_not_valid_text(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9")
    image_folder(tmp_path / "images", ["ant", name])
    (tmp_path / "images" / name / "0.png").write_bytes(b"no image")
    make_image_run(tmp_path / "run", tmp_path / "images", ["ant", name])
    _, rows, page = evaluate("classification", tmp_path / "run", tmp_path / "out", "--data.max_unreadable", "1")
    assert rows[2]["file"] == f"{tmp_path}/images/caf\\xe9/0.png"
    assert rows[2]["error"].startswith(rows[2]["file"])
    assert rows[3]["truth"] == "caf\\xe9"
    assert "caf\\xe9" in page


@pytest.mark.integration
def test_shards_are_recorded_in_their_order(tmp_path: Path) -> None:
    """Streams cannot be read again: pictures are made while they are evaluated."""
    MAKE["classification"](tmp_path)
    folder = tmp_path / "shards"
    folder.mkdir()
    files = sorted((tmp_path / "images").glob("*/*.png"))
    for number in range(2):
        with tarfile.open(folder / f"val-{number}.tar", "w") as archive:
            for file in files[3 * number : 3 * number + 3]:
                archive.add(file, f"{file.parent.name}{file.stem}.png")
                label = tarfile.TarInfo(f"{file.parent.name}{file.stem}.cls")
                label.size = 1
                archive.addfile(label, io.BytesIO(str(number).encode()))
    run = tmp_path / "classification_run"
    _, expected, _ = evaluate("classification", run, tmp_path / "folder")
    options = ("--data.path", f"wds/{folder}", "--data.workers", "2", "--data.batch_size", "1")
    _, rows, page = evaluate("classification", run, tmp_path / "out", *options)
    names = [f"{file.parent.name}{file.stem} in {folder}/val-{number // 3}.tar" for number, file in enumerate(files)]
    assert [row.pop("file") for row in rows] == names
    for row in expected:
        row.pop("file")
    same = ("truth", "prediction", "correct")
    for row, other in zip(rows, expected, strict=True):
        assert row.keys() == other.keys()
        assert [row[name] for name in same] == [other[name] for name in same]
        assert float(row["confidence"]) == pytest.approx(float(other["confidence"]), abs=2e-5)
    assert page.count('<img src="data:image/png') == sum(row["correct"] == "0" for row in rows)


def test_the_threshold_of_detections(tmp_path: Path) -> None:
    MAKE["detection"](tmp_path)
    run = tmp_path / "detection_run"
    _, rows, _ = evaluate("detection", run, tmp_path / "out", "--threshold", "0.3")
    told, everything, _ = evaluate("detection", run, tmp_path / "out", "--threshold", "0")
    results = json.loads((tmp_path / "out" / "results_bbox.json").read_text())
    assert sum(int(row["detections"]) for row in everything) == len(results)
    assert sum(int(row["detections"]) for row in rows) == sum(one["score"] >= 0.3 for one in results)
    assert told["threshold"] == 0
    # Images are not read to evaluate stored results: if they cannot be, their pictures are blank.
    for file in (tmp_path / "coco" / "val2017").iterdir():
        file.write_bytes(b"no image")
    stored = ["--results", str(tmp_path / "out" / "results_bbox.json"), "--threshold", "0"]
    _, again, page = evaluate("detection", run, tmp_path / "stored", *stored)
    assert again == everything
    assert page.count("<figcaption>prediction</figcaption>") == 5


def test_a_threshold_without_files_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["detect", "eval", "nothing", "--threshold", "0.3"])
    assert "--threshold is for the files of an evaluation: name a folder with --output" in capsys.readouterr().err
