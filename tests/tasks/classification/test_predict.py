"""Prediction: which images can be used, and how the outcome is told."""

import csv
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import safetensors.torch
import timm
import torch
from PIL import Image
from torch import Tensor, nn

from inlinevit.data.images import ImageFiles
from inlinevit.engine import predictor as predictor_module
from inlinevit.engine.predictor import predict as predict_files
from inlinevit.engine.predictor import predict_command as predict_task
from inlinevit.engine.results import ClassProbability, Prediction
from inlinevit.tasks.classification.config import ClassificationPredictOptions, ModelConfig
from inlinevit.tasks.classification.predictor import ClassificationPredictor
from inlinevit.tasks.classification.task import Classification
from inlinevit.tasks.classification.transforms import InputSpec

SPEC = InputSpec(size=8, mean=(0.0,) * 3, std=(1.0,) * 3, interpolation="nearest", crop_pct=1.0, crop_mode="center")


class Quarters(nn.Module):
    """Sees which quarter of an image is the brightest: top left, top right, bottom left, bottom right."""

    def forward(self, images: Tensor) -> Tensor:
        return 20 * nn.functional.adaptive_avg_pool2d(images.mean(dim=1), 2).flatten(1)


@pytest.fixture
def classifier() -> ClassificationPredictor:
    names = ["top left", "top right", "bottom left", "bottom right"]
    return ClassificationPredictor(Quarters(), "quarters", ModelConfig(), 4, names, SPEC)


def predict(classifier: ClassificationPredictor, images: list[str], **options: Any) -> Iterator[Prediction]:
    return predict_files(classifier, ImageFiles(images), ClassificationPredictOptions(device="cpu", **options))


def predict_command(model: str, images: list[str], **options: Any) -> int:
    return predict_task(Classification, model, images, ClassificationPredictOptions(**options))


def corner(row: int, column: int) -> Image.Image:
    """A black image with a white quarter."""
    pixels = np.zeros((16, 16, 3), np.uint8)
    pixels[8 * row : 8 * row + 8, 8 * column : 8 * column + 8] = 255
    return Image.fromarray(pixels)


def seen(classifier: ClassificationPredictor, *images: object, **options: int) -> list[str | None]:
    """The best class of each image, or None if it cannot be used."""
    found = predict(classifier, [str(image) for image in images], **options)
    return [prediction.result[0].name if prediction.error is None else None for prediction in found]


def test_probabilities(classifier: ClassificationPredictor, tmp_path: Path) -> None:
    corner(0, 1).save(tmp_path / "a.png")
    (prediction,) = predict(classifier, [str(tmp_path / "a.png")], top=9)
    assert prediction.result[0].index == 1
    assert len(prediction.result) == 4
    assert sum(chosen.probability for chosen in prediction.result) == pytest.approx(1, abs=1e-5)
    assert prediction.result[0].probability == pytest.approx(np.exp(20) / (np.exp(20) + 3), abs=1e-6)
    (prediction,) = predict(classifier, [str(tmp_path / "a.png")], top=2)
    assert len(prediction.result) == 2
    with pytest.raises(ValueError, match="at least 1"):
        list(predict(classifier, [], top=0))


def test_what_pillow_reads(classifier: ClassificationPredictor, tmp_path: Path) -> None:
    """Colours, depths and formats of all kinds show the same."""
    image = corner(1, 0)
    image.save(tmp_path / "rgb.jpg", quality=95)
    image.convert("CMYK").save(tmp_path / "cmyk.jpg", quality=95)
    image.convert("L").save(tmp_path / "grey.webp")
    image.convert("1").save(tmp_path / "bilevel.bmp")
    image.convert("RGBA").save(tmp_path / "alpha.png")
    image.convert("LA").save(tmp_path / "grey_alpha.png")
    image.convert("P").save(tmp_path / "palette.png", transparency=0)
    image.save(tmp_path / "first.gif", save_all=True, append_images=[corner(0, 0), corner(0, 1)])
    image.save(tmp_path / "first.tiff", save_all=True, append_images=[corner(0, 0)])
    image.save(tmp_path / "CAPITALS.PPM")
    assert seen(classifier, tmp_path) == ["bottom left"] * 10


@pytest.mark.parametrize("ending", ["png", "tiff"])
def test_sixteen_bits_are_not_clipped(ending: str, classifier: ClassificationPredictor, tmp_path: Path) -> None:
    pixels = np.full((16, 16), 30_000, np.uint16)
    pixels[:8, 8:] = 60_000
    Image.fromarray(pixels).save(tmp_path / f"deep.{ending}")
    (prediction,) = predict(classifier, [str(tmp_path / f"deep.{ending}")])
    assert prediction.result[0].name == "top right"
    # Twice as bright as the others, of which each is at 30,000 of 65,535.
    others = np.exp(20 * 117 / 255) / np.exp(20 * 234 / 255)
    assert prediction.result[1].probability == pytest.approx(others / (1 + 3 * others), rel=1e-2)


@pytest.mark.parametrize(
    ("orientation", "expected"), [(1, "top left"), (3, "bottom right"), (6, "top right"), (8, "bottom left")]
)
@pytest.mark.parametrize("ending", ["jpg", "png", "tiff"])
def test_images_are_turned_upright(
    orientation: int, expected: str, ending: str, classifier: ClassificationPredictor, tmp_path: Path
) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    corner(0, 0).save(tmp_path / f"a.{ending}", exif=exif)
    assert seen(classifier, tmp_path / f"a.{ending}") == [expected]


def test_bad_files_are_named_and_the_others_go_on(
    classifier: ClassificationPredictor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corner(0, 0).save(tmp_path / "a.png")
    (tmp_path / "b_truncated.jpg").write_bytes(truncated_jpeg())
    (tmp_path / "c_text.png").write_text("no image")
    (tmp_path / "d_empty.gif").touch()
    Image.new("RGB", (1, 1)).save(tmp_path / "e_tiny.png")
    Image.new("RGB", (40, 40)).save(tmp_path / "f_large.png")
    Image.new("RGB", (60, 60)).save(tmp_path / "g_bomb.png")
    corner(1, 1).save(tmp_path / "z.png")
    # Pillow warns from this number of pixels on, and refuses twice as many.
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    found = list(predict(classifier, [str(tmp_path)], batch_size=3))
    names = [Path(prediction.file).name for prediction in found]
    assert names == sorted(names)
    failed = [Path(prediction.file).name[0] for prediction in found if prediction.error]
    assert failed == ["b", "c", "d", "e", "f", "g"]
    assert all(prediction.file in prediction.error for prediction in found if prediction.error)
    assert [prediction.result[0].name for prediction in found if not prediction.error] == ["top left", "bottom right"]


def truncated_jpeg() -> bytes:
    buffer = io.BytesIO()
    Image.effect_noise((30, 30), 50).save(buffer, "JPEG")
    return buffer.getvalue()[:-200]


def test_batches_do_not_change_predictions(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = timm.create_model("test_resnet", num_classes=10).eval()
    classifier = ClassificationPredictor(model, "test_resnet", ModelConfig(), 10, None, SPEC)
    rng = np.random.default_rng(0)
    for number in range(7):
        Image.fromarray(rng.integers(0, 255, (20, 20, 3), np.uint8)).save(tmp_path / f"{number}.png")
    (tmp_path / "3b.png").write_text("broken")

    def probabilities(batch_size: int) -> list[list[float]]:
        found = predict(classifier, [str(tmp_path)], top=10, batch_size=batch_size)
        return [
            [chosen.probability for chosen in sorted(prediction.result or [], key=lambda chosen: chosen.index)]
            for prediction in found
        ]

    together = probabilities(32)
    assert [len(row) for row in together] == [10, 10, 10, 10, 0, 10, 10, 10]
    for batch_size in (1, 3):
        for row, expected in zip(probabilities(batch_size), together, strict=True):
            assert row == pytest.approx(expected, abs=2e-6)


def test_predictions_come_as_images_are_read(classifier: ClassificationPredictor, tmp_path: Path) -> None:
    for name in "abcd":
        corner(0, 0).save(tmp_path / f"{name}.png")
    found = predict(classifier, [str(tmp_path)], batch_size=1)
    assert next(found).error is None
    (tmp_path / "d.png").write_text("spoilt after the first was told")
    assert [prediction.error is None for prediction in found] == [True, True, False]


def test_a_model_that_gives_no_numbers_is_told(classifier: ClassificationPredictor, tmp_path: Path) -> None:
    corner(0, 0).save(tmp_path / "a.png")
    classifier.spec = InputSpec(8, (0.0,) * 3, (float("nan"),) * 3, "nearest", 1.0, "center")
    (prediction,) = predict(classifier, [str(tmp_path)])
    assert prediction.result is None
    assert prediction.error == f"{tmp_path / 'a.png'} gives NaN or infinite values: check the model's weights"


@pytest.fixture
def run(tmp_path: Path) -> str:
    """A training run with three classes, whose names are hard to write."""
    folder = tmp_path / "run"
    folder.mkdir()
    torch.manual_seed(0)
    model = timm.create_model("test_vit", num_classes=3, img_size=32)
    safetensors.torch.save_file(model.state_dict(), folder / "model.safetensors")
    (folder / "config.yaml").write_text("model: {name: test_vit, img_size: 32}\n")
    (folder / "classes.json").write_text(json.dumps(['a "dog", big', "[bold]cät[/bold]", "x\ny"]))
    (folder / "task.json").write_text(json.dumps({"name": "classification", "files": ["classes.json"]}))
    return str(folder)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    folder.mkdir()
    corner(0, 0).save(folder / 'é, "1" [red].png')
    (folder / "broken\n.png").write_text("no image")
    Path(os.fsdecode(os.fsencode(folder) + b"/\xff.png")).write_bytes((folder / 'é, "1" [red].png').read_bytes())
    return folder


def test_json(run: str, images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert predict_command(run, [str(images), "nothing.png"], format="json", top=2) == 1
    captured = capsys.readouterr()
    told = json.loads(captured.out)
    assert [Path(item["file"]).name for item in told] == [
        "broken\n.png",
        'é, "1" [red].png',
        "\\xff.png",
        "nothing.png",
    ]
    assert [("error" in item, "predictions" in item) for item in told] == [
        (True, False), (False, True), (False, True), (True, False)
    ]  # fmt: skip
    assert set(told[1]["predictions"][0]) == {"class", "index", "probability"}
    assert len(told[1]["predictions"]) == 2
    assert told[1]["predictions"] == told[2]["predictions"]
    lines = captured.err.splitlines()
    assert len(lines) == 2
    assert lines[1] == "nothing.png cannot be used (there is no such file or folder)"


def test_csv(run: str, images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert predict_command(run, [str(images)], format="csv") == 1
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out, newline="")))
    assert len(rows) == 1 + 3 + 3
    assert Path(rows[0]["file"]).name == "broken\n.png"
    assert rows[0]["error"]
    assert {row["class"] for row in rows[1:4]} == {'a "dog", big', "[bold]cät[/bold]", "x\ny"}
    assert [row["rank"] for row in rows[1:4]] == ["1", "2", "3"]
    assert sum(float(row["probability"]) for row in rows[1:4]) == pytest.approx(1, abs=1e-5)


def test_table(run: str, images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert predict_command(run, [str(images / "é*")]) == 0
    captured = capsys.readouterr()
    assert "[red]" in captured.out
    assert "[bold]cät[/bold]" in captured.out
    assert captured.err == ""


@pytest.mark.parametrize("format", ["table", "json", "csv", "jsonl"])
def test_output_goes_to_a_file(format: str, run: str, images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same as is printed, but for the lines of a table, which may be as wide as the terminal."""
    file = Path(run) / "new" / "out"
    assert predict_command(run, [str(images)], format=format, output=str(file)) == 1
    assert capsys.readouterr().out == ""
    assert "cät" in file.read_text(encoding="utf-8")
    assert predict_command(run, [str(images)], format=format) == 1
    assert capsys.readouterr().out.encode() == file.read_bytes()


@pytest.mark.parametrize(
    ("name", "format", "first"),
    [
        ("out.csv", "auto", b"file,rank,"),
        ("out.jsonl", "auto", b'{"file": '),
        ("out.JSON", "auto", b"[\n"),
        ("out.parquet", "auto", b"PAR1"),
        ("out.txt", "auto", "┏".encode()),
        ("out.csv", "json", b"[\n"),
    ],
)
def test_the_extension_chooses_the_format(name: str, format: str, first: bytes, run: str, images: Path) -> None:
    assert predict_command(run, [str(images / "é*")], format=format, output=str(images.parent / name)) == 0
    assert (images.parent / name).read_bytes().startswith(first)


def test_parquet(run: str, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the rows of CSV."""
    for format in ("csv", "parquet"):
        assert predict_command(run, [str(images)], output=str(tmp_path / f"out.{format}")) == 1
    with (tmp_path / "out.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    table = pyarrow.parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert [{key: "" if cell is None else str(cell) for key, cell in row.items()} for row in table] == rows
    assert {type(row["probability"]) for row in table} == {float, type(None)}
    with pytest.raises(ValueError, match="Parquet cannot be printed: name a file"):
        predict_command(run, [str(images)], format="parquet")
    monkeypatch.setattr(predictor_module, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'inlinevit\[data\]', or choose --format csv"):
        predict_command(run, [str(images)], output=str(tmp_path / "out.parquet"))


def test_nothing_found_is_an_empty_list(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert predict_command(run, [], format="json") == 0
    assert json.loads(capsys.readouterr().out) == []


def test_no_table_where_nothing_was_seen(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert predict_command(run, ["nothing.png"]) == 1
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("format", ["table", "json", "csv"])
def test_letters_that_the_terminal_does_not_know(
    format: str, run: str, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii"))
    assert predict_command(run, [str(images / "é*")], format=format) == 0
    sys.stdout.flush()
    expected = "c\\xe4t" if format == "table" else "cät"
    assert expected in shown.getvalue().decode()


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """Images whose predictions take more than 4096 bytes."""
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(40):
        corner(0, 0).save(folder / f"{number}.png")
    return folder


@pytest.mark.parametrize(("format", "is_new"), [("table", True), ("json", False), ("csv", True), ("parquet", False)])
def test_a_full_disk_leaves_no_half_results(
    format: str, is_new: bool, run: str, many: Path, file_limit: Callable[[int], AbstractContextManager[None]]
) -> None:
    """What was there before stays, and the results so far are kept: the same command predicts the others."""
    file = Path(run).parent / "results" / "out"
    if not is_new:
        file.parent.mkdir()
        file.write_text("old")
    with file_limit(4096), pytest.raises(OSError, match=r"^no space left on the disk for .*out: free some"):
        predict_command(run, [str(many)], format=format, output=str(file))
    assert sorted(one.name for one in file.parent.iterdir()) == ["out"] * (not is_new) + ["out.partial"]
    assert is_new or file.read_text() == "old"
    assert predict_command(run, [str(many)], format=format, output=str(file)) == 0
    assert [one.name for one in file.parent.iterdir()] == ["out"]
    whole = file.parent / "whole"
    assert predict_command(run, [str(many)], format=format, output=str(whole)) == 0
    assert file.read_bytes() == whole.read_bytes()


def test_an_interruption_leaves_the_results_before(
    run: str, many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> Iterator[Prediction]:
        yield Prediction("a.png", result=[ClassProbability("a", 0, 1.0)])
        raise KeyboardInterrupt

    (tmp_path / "out.json").write_text("old")
    monkeypatch.setattr(predictor_module, "predict", interrupted)
    with pytest.raises(KeyboardInterrupt):
        predict_command(run, [str(many)], format="json", output=str(tmp_path / "out.json"))
    assert (tmp_path / "out.json").read_text() == "old"
    assert not list(tmp_path.glob(".*"))
    (part,) = (tmp_path / "out.json.partial").glob("part-*.jsonl")
    assert json.loads(part.read_text())["file"] == "a.png"
    assert f"results so far are kept in {part.parent}: run the same command again" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["itself", "symbolic link", "hard link", "link to folder", "weights", "class names"])
def test_what_is_read_is_not_written_over(
    kind: str, run: str, many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused before the model is loaded."""
    photo, link = many / "0.png", tmp_path / "link"
    output, options = link, {}
    if kind == "itself":
        output = photo
    elif kind == "symbolic link":
        link.symlink_to(photo)
    elif kind == "hard link":
        link.hardlink_to(photo)
    elif kind == "link to folder":
        link.symlink_to(many)
        output = link / "0.png"
    elif kind == "weights":
        output = tmp_path / "weights.safetensors"
        output.write_text("weights")
        options = {"checkpoint": str(output)}
    else:
        output = Path(run) / "classes.json"
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    monkeypatch.setattr(Classification, "load_predictor", None)
    with pytest.raises(ValueError, match=r"is read by this command|belongs to a training run"):
        predict_command(run, [str(many)], format="json", output=str(output), **options)
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before
