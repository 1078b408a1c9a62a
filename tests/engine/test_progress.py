"""How far a job is, on a terminal and in a log."""

import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from torch import nn

from inlinevit.data.images import ImageFiles
from inlinevit.engine import progress
from inlinevit.engine.evaluator import Evaluator, evaluate_model
from inlinevit.engine.predictor import predict, predict_command
from inlinevit.engine.progress import job_progress, nested_progress
from inlinevit.engine.setup import make_accelerator
from inlinevit.tasks.segmentation.config import InferenceOptions, SegmentationPredictOptions
from inlinevit.tasks.segmentation.task import Segmentation
from tests.tasks.segmentation.test_predict import make_predictor


class Clock:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


def test_lines_in_a_log(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with job_progress("predicting", 10, "images") as advance:
        for _ in range(10):
            clock.now += 12
            advance()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "predicting: 3 of 10 images, 0:00:36 elapsed, left 0:01:24",
        "predicting: 6 of 10 images, 0:01:12 elapsed, left 0:00:48",
        "predicting: 9 of 10 images, 0:01:48 elapsed, left 0:00:12",
        "predicting: 10 of 10 images, 0:02:00 elapsed, left 0:00:00",
    ]


def test_short_jobs_are_quiet_in_a_log(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with job_progress("predicting", 10, "images") as advance:
        for _ in range(10):
            clock.now += 2
            advance()
    assert capsys.readouterr().err == ""


def test_a_job_that_fails_tells_how_far_it_was(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        with job_progress("evaluating", None, "batches") as advance:
            advance()
            clock.now += 40
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert capsys.readouterr().err == "evaluating: 1 batches, 0:00:40 elapsed\n"
    with nested_progress("image", 3, "windows") as advance:
        clock.now += 40
        advance()
    assert capsys.readouterr().err == ""


def test_a_bar_on_a_terminal(clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys, "stderr", terminal)
    with job_progress("predicting [red]\n", 4, "images") as advance:
        advance()
        with nested_progress("image", 8, "windows") as advance_part:
            advance_part()
            assert "windows" not in terminal.getvalue()
            clock.now += 3
            advance_part()
        advance()
        print("a result")
    shown = terminal.getvalue()
    assert "predicting [red]?" in shown
    assert "2/4" in shown
    # Standard output is not a terminal here: the bar does not take what is printed.
    assert capsys.readouterr().out == "a result\n"
    assert not progress._shown


class SlowEvaluator(Evaluator):
    """Needs 20 seconds for each of three batches."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def loader(self, process: int, processes: int) -> list[int]:
        return [1, 2, 3]

    def update(self, model: nn.Module, batch: int) -> None:
        self.clock.now += 20

    def compute(self, accelerator: Any) -> str:
        return "done"


@pytest.mark.parametrize("is_shown", [True, False])
def test_evaluation(is_shown: bool, clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    accelerator = make_accelerator("no")
    assert evaluate_model(nn.Identity(), SlowEvaluator(clock), accelerator, show_progress=is_shown) == "done"
    lines = [
        "evaluating: 2 of 3 batches, 0:00:40 elapsed, left 0:00:20",
        "evaluating: 3 of 3 batches, 0:01:00 elapsed, left 0:00:00",
    ]
    assert capsys.readouterr().err.splitlines() == (lines if is_shown else [])


def test_windows_of_a_large_image_are_counted(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """100 × 200 pixels in windows of 50 every 50, also mirrored, are 16 windows."""
    segmenter = make_predictor()
    forward = segmenter.model.forward

    def slow(images: object) -> object:
        clock.now += 10
        return forward(images)

    monkeypatch.setattr(segmenter.model, "forward", slow)
    monkeypatch.setattr(Segmentation, "load_predictor", lambda model, options: segmenter)
    Image.fromarray(np.zeros((100, 200, 3), np.uint8)).save(tmp_path / "a.png")
    inference = InferenceOptions(window_size=50, stride=50, flip=True)
    options = SegmentationPredictOptions(output=str(tmp_path / "out"), inference=inference, device="cpu")
    assert predict_command(Segmentation, "run", [str(tmp_path / "a.png")], options) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "image: 3 of 16 windows, 0:00:30 elapsed, left 0:02:10"
    assert lines[-2] == "image: 16 of 16 windows, 0:02:40 elapsed, left 0:00:00"
    assert lines[-1] == "predicting: 1 of 1 images, 0:02:40 elapsed, left 0:00:00"
    # In Python, nothing is shown.
    list(predict(segmenter, ImageFiles([str(tmp_path / "a.png")]), options))
    assert capsys.readouterr().err == ""
