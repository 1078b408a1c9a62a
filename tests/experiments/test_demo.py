"""The demo: three models, one report; interrupted, repeated, misused."""

import contextlib
import gzip
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from inlinevit.engine.config import flattened, to_plain
from inlinevit.engine.trainer import Stopped, Trainer
from inlinevit.experiments.demo import ATTENTIONS, compare, demo, demo_config, resolution
from inlinevit.experiments.demo.resolution import (
    Cost,
    expected_seconds,
    measure_resolutions,
    resolution_section,
    resolution_verdict,
)
from inlinevit.experiments.demo.sections import TrainedModel, verdict
from inlinevit.report import STYLES, Report, blocks, style
from inlinevit.tasks.classification.metrics import ClassificationEvaluation

pytestmark = pytest.mark.integration

STEPS = 4
TEST_IMAGES = 30


@pytest.fixture(scope="module", autouse=True)
def few_rounds() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare, "TIMED_ROUNDS", 3)
        patch.setattr(style, "PNG_DPI", 20)
        patch.setattr(compare, "IMAGE_SIDES", (32, 48))
        patch.setattr(
            compare,
            "ANALYSIS_SETTINGS",
            compare.AnalysisSettings(images=TEST_IMAGES, confusion_images=2, batch_size=30),
        )
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Fashion-MNIST of a few images of noise."""
    folder = tmp_path_factory.mktemp("fashion-mnist")
    generator = np.random.default_rng(0)
    for part, count in (("train", 120), ("t10k", TEST_IMAGES)):
        images = generator.integers(0, 256, (count, 28, 28), np.uint8)
        labels = np.resize(np.arange(10, dtype=np.uint8), count)
        heads = {
            "images-idx3": np.array([2051, count, 28, 28], ">i4").tobytes() + images.tobytes(),
            "labels-idx1": np.array([2049, count], ">i4").tobytes() + labels.tobytes(),
        }
        for kind, content in heads.items():
            (folder / f"{part}-{kind}-ubyte.gz").write_bytes(gzip.compress(content))
    return f"fashion-mnist:{folder}"


@dataclass
class Finished:
    """A demo that ran through, and what it said."""

    folder: Path
    said: str

    @property
    def report(self) -> dict[str, Any]:
        return json.loads((self.folder / "report.json").read_text())


@pytest.fixture(scope="module")
def finished(data: str, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("demo") / "runs"
    with contextlib.redirect_stderr(io.StringIO()) as said:
        demo(str(folder), data, steps=STEPS)
    return Finished(folder, said.getvalue())


def test_report_has_all_it_should(finished: Finished) -> None:
    sections = finished.report["sections"]
    measured = ["results", "training", "speed", "images", "confusions", "resolution"]
    assert list(sections) == [*measured, "confusion", "locality", "masking", "maps", "settings", "explore"]
    costs = sections["resolution"]["costs"]
    assert [(cost["attention"], cost["side"]) for cost in costs] == [
        ("softmax", 32), ("inline", 32), ("softmax", 48), ("inline", 48),
    ]  # fmt: skip
    assert all(cost["seconds"] > 0 and cost["memory"] > 0 for cost in costs)
    assert sections["explore"]["command"] == f"inlinevit explore {finished.folder}"
    assert sections["results"]["test_images"] == TEST_IMAGES
    for attention in ATTENTIONS:
        result = sections["results"]["models"][attention]
        assert 0 <= result["top1"] <= 100
        assert result["parameters"] > 10_000
        assert result["median_step_seconds"] > 0
        assert sections["training"][attention]["training"]["step"][-1] == STEPS
        assert sections["training"][attention]["test"]["top1"][-1] == pytest.approx(result["top1"])
        assert np.sum(sections["confusions"]["confusion"][attention]) == TEST_IMAGES
        assert (finished.folder / attention / "model.safetensors").is_file()
        name = STYLES[attention].name
        assert all(name in sections[key]["models"] for key in ("confusion", "locality", "masking", "maps"))
        assert sections["masking"]["models"][name]["images"] == TEST_IMAGES
    figures = {path.stem for path in (finished.folder / "figures").iterdir()}
    assert figures == {
        "training",
        "speed",
        "confusions",
        "resolution",
        "confusion",
        "locality",
        "masking",
        "maps-1",
        "maps-2",
        "maps-3",
    }
    page = (finished.folder / "report.html").read_text()
    assert all(f'id="{key}"' in page for key in sections)
    assert page.count("<img") > 20


def test_progress_and_the_path_of_the_report_are_printed(finished: Finished) -> None:
    lines = finished.said.splitlines()
    assert lines[0].startswith("Three small vision transformers")
    assert all(f"{number} of 3: training with {name}" in finished.said for number, name in enumerate(ATTENTIONS, 1))
    assert "Timing steps" in finished.said
    assert lines[-2].endswith(f"The report is in {finished.folder / 'report.html'}")
    assert lines[-1].endswith(f"inlinevit explore {finished.folder}")


def test_large_images_are_compared_in_words() -> None:
    costs = [
        Cost("softmax", 224, 196, 0.01, 10**6), Cost("inline", 224, 196, 0.01, 10**6),
        Cost("softmax", 1024, 4096, 2.0, 10**8), Cost("inline", 1024, 4096, 0.25, 10**8),
    ]  # fmt: skip
    text = resolution_verdict(costs)
    assert "At 1024 × 1024 pixels, softmax attention takes 8.0 times as long as InLine (2000 and 250 ms)" in text
    assert "21 times as many tokens; softmax takes 200 times as long, InLine 25 times" in text
    assert "InLine attention takes 2.0 times as long as softmax (20 and 10 ms)" in resolution_verdict(
        [costs[0], Cost("inline", 224, 196, 0.02, 10**6)]
    )
    assert "does not show how the times grow" in resolution_verdict(costs[:2])
    # Slow machines leave out sizes that would take too long, and the report says so.
    assert expected_seconds(costs, 2048) == pytest.approx(5 * (8 * 2.0 + 4 * 0.25))
    assert "1280 × 1280 and more would have taken too long here" in str(resolution_section(costs, (224, 1024, 1280)))


def test_sizes_that_take_too_long_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolution, "BUDGET", 0.0)
    costs = measure_resolutions(torch.device("cpu"), Console(quiet=True), (32, 64))
    assert {cost.side for cost in costs} == {32}


def numbers(report: dict[str, Any]) -> dict[str, Any]:
    """What must not depend on when, and how often interrupted, a demo ran."""
    sections = report["sections"]
    return {name: sections[name] for name in ("training", "images", "confusions", "confusion", "locality", "masking")}


@pytest.mark.slow
def test_interrupted_demo_resumes(
    finished: Finished, data: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    train_step, trained = Trainer.train_step, []

    def counted(self: Trainer, step: int, batches: Iterator[Any]) -> float:
        trained.append((Path(self.config.run.output).name, step))
        if trained[-1] == ("linear", 1) and len(trained) < 7:
            os.kill(os.getpid(), signal.SIGTERM)
        return train_step(self, step, batches)

    monkeypatch.setattr(Trainer, "train_step", counted)
    monkeypatch.setattr(Report, "save_figures", lambda report, folder: None)
    monkeypatch.setattr(blocks, "svg_bytes", lambda figure: b"")
    with pytest.raises(Stopped):
        demo(str(tmp_path), data, steps=STEPS)
    assert not (tmp_path / "report.html").exists()
    assert trained == [*(("softmax", step) for step in range(STEPS)), ("linear", 0), ("linear", 1)]
    trained.clear()
    trained += [("", 0)] * 7
    demo(str(tmp_path), data, steps=STEPS)
    assert "which resumes" in capfd.readouterr().err
    assert trained[7:] == [("linear", 2), ("linear", 3), *(("inline", step) for step in range(STEPS))]
    assert numbers(Finished(tmp_path, "").report) == numbers(finished.report)


@pytest.mark.slow
def test_finished_demo_starts_again(
    data: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Report, "save_figures", lambda report, folder: folder.mkdir())
    for name in ("comparison_sections", "analysis_sections"):
        monkeypatch.setattr(compare, name, lambda *_: [])
    monkeypatch.setattr(compare, "analyze", lambda *_: None)
    demo(str(tmp_path), data, steps=1)
    leftovers = [tmp_path / "softmax" / "leftover", tmp_path / "figures" / "leftover.png"]
    for leftover in leftovers:
        leftover.touch()

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(compare, "interleave", stop)
    with pytest.raises(KeyboardInterrupt):
        demo(str(tmp_path), data, steps=1)
    assert "it starts again" in capfd.readouterr().err
    # Neither the old report nor anything else of the old results can be taken for new.
    assert not any(leftover.exists() for leftover in leftovers)
    assert not (tmp_path / "report.html").exists()
    assert not (tmp_path / "report.json").exists()


def test_other_settings_start_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def begin(seed: int) -> str:
        settings = {name: to_plain(demo_config(name, seed=seed)) for name in ATTENTIONS}
        compare.prepare_folder(tmp_path, settings, compare.Console(stderr=True))
        (tmp_path / "inline").mkdir(exist_ok=True)
        (tmp_path / "inline" / "metrics.jsonl").write_text("{}")
        return capfd.readouterr().err

    assert begin(0) == ""
    assert "resumes" in begin(0)
    assert "starts again" in begin(1)
    assert "resumes" in begin(1)


def test_killed_while_clearing_clears_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {name: {} for name in ATTENTIONS}
    console = compare.Console(quiet=True)
    compare.prepare_folder(tmp_path, {"inline": {"old": 1}}, console)
    (tmp_path / "inline").mkdir()

    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(compare.shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            compare.prepare_folder(tmp_path, settings, console)
    compare.prepare_folder(tmp_path, settings, console)
    assert not (tmp_path / "inline").exists()


def test_folder_with_other_files_is_left_alone(data: str, tmp_path: Path) -> None:
    (tmp_path / "linear").mkdir()
    (tmp_path / "linear" / "thesis.txt").write_text("precious")
    with pytest.raises(ValueError, match="name a new folder"):
        demo(str(tmp_path), data, steps=1)
    assert (tmp_path / "linear" / "thesis.txt").read_text() == "precious"
    assert [path.name for path in tmp_path.iterdir()] == ["linear"]


@pytest.mark.parametrize("content", ["{", "[]", '{"state": 1}', "é"])
def test_a_file_called_as_ours_makes_no_demo(content: str, tmp_path: Path) -> None:
    (tmp_path / "linear").mkdir()
    (tmp_path / "demo.json").write_text(content, encoding="latin-1")
    with pytest.raises(ValueError, match="name a new folder"):
        compare.prepare_folder(tmp_path, {"linear": {}}, compare.Console(quiet=True))
    assert (tmp_path / "linear").is_dir()


@pytest.mark.parametrize(
    ("data", "error", "remedy"),
    [
        ("fashion-mnist:/nowhere", FileNotFoundError, r"Fashion-MNIST's four \.gz files"),
        ("fashion-mnist:", FileNotFoundError, r"Fashion-MNIST's four \.gz files"),
        ("cifar10", ValueError, "fashion-mnist:FOLDER"),
    ],
)
def test_bad_data(data: str, error: type[Exception], remedy: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=remedy):
        demo(str(tmp_path / "new"), data, steps=1)
    assert not (tmp_path / "new").exists()


def test_bad_steps(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        demo(str(tmp_path / "new"), steps=0)


def test_runs_differ_in_attention_only() -> None:
    softmax, linear, inline = (flattened(to_plain(demo_config(attention, output="x"))) for attention in ATTENTIONS)
    assert {name for name in inline if inline[name] != softmax[name]} == {"model.kwargs.attention"}
    assert {name for name in inline if inline[name] != linear[name]} == {"model.kwargs.attention"}


def test_importing_the_demo_is_light() -> None:
    script = (
        "import sys, inlinevit; before = set(sys.modules); import inlinevit.experiments.demo\n"
        "print(*{'accelerate', 'matplotlib', 'torchmetrics', 'jinja2.environment'} & (set(sys.modules) - before))"
    )
    assert (
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip() == ""
    )


def model(right: int, seconds: float, parameters: int) -> TrainedModel:
    """Return a model that is correct on the first `right` of 1,000 images of class 0."""
    predictions = np.where(np.arange(1000) < right, 0, 1)
    evaluation = ClassificationEvaluation(right / 10, 100.0, 0.0, 1.0, torch.tensor([[right, 1000 - right], [0, 0]]))
    return TrainedModel(parameters, evaluation, predictions, [], 50, [seconds] * 4)


@pytest.mark.parametrize(
    ("inline", "softmax", "sentence"),
    [
        (900, 800, "InLine is 10.0 points above softmax, more than chance in the choice of test images (±1.9)"),
        (800, 900, "InLine is 10.0 points below softmax, more than chance in the choice of test images (±1.9)"),
        (912, 900, "InLine is 1.2 points above softmax, more than chance in the choice of test images (±0.7)"),
        (901, 900, "InLine and softmax differ by 0.1 points, not more than chance in the choice of test images (±0.2)"),
        (900, 900, "InLine and softmax differ by 0.0 points, not more than chance in the choice of test images (±0.0)"),
    ],
)
def test_verdict_follows_from_the_numbers(inline: int, softmax: int, sentence: str) -> None:
    models = {"softmax": model(softmax, 0.1, 100), "inline": model(inline, 0.15, 120)}
    text = verdict(models, np.zeros(1000, np.int64))
    assert sentence in text
    assert "takes 1.50 times as long, and it has 1.20 times as many parameters." in text
    assert "one seed" in text
    best = "InLine" if inline > softmax else "softmax"
    assert f"images: {best} {max(inline, softmax) / 10:.1f} %" in text


@pytest.mark.slow
def test_all_three_learn(tmp_path: Path) -> None:
    demo(str(tmp_path))
    results = Finished(tmp_path, "").report["sections"]["results"]["models"]
    assert min(result["top1"] for result in results.values()) > 70
