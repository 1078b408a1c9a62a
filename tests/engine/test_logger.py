from pathlib import Path
from typing import Any

import pytest

from inlinevit.engine.trainer import Stopped
from tests.engine.running import metric_lines
from tests.engine.toy import make_trainer, settings


def test_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    make_trainer(settings(tmp_path / "run", run__trackers=["tensorboard"])).run()
    folder = next((tmp_path / "run").rglob("events.out.tfevents*")).parent
    events = EventAccumulator(str(folder))
    events.Reload()
    lines = metric_lines(tmp_path / "run")
    for name in ("loss", "lr", "eval_error"):
        expected = {line["step"]: line[name] for line in lines if name in line}
        assert {event.step: event.value for event in events.Scalars(name)} == pytest.approx(expected)


@pytest.mark.parametrize(
    ("tracker", "message"),
    [("tensorbord", "tensorbord"), ("wandb", r"run\.trackers names wandb, which is not installed: pip install it")],
)
@pytest.mark.filterwarnings("ignore:.log_with")
def test_tracker_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tracker: str, message: str) -> None:
    monkeypatch.setattr("accelerate.tracking._available_trackers", [])
    with pytest.raises(ValueError, match=message):
        make_trainer(settings(tmp_path / "run", run__trackers=[tracker]))


def test_a_line_an_epoch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_trainer(settings(tmp_path / "run", schedule__epochs=3)).run()
    printed = capsys.readouterr().err
    for epoch, step in ((1, 6), (2, 12), (3, 18)):
        line = next(text for text in printed.splitlines() if text.startswith(f"epoch {epoch} ") and str(step) in text)
        assert all(word in line for word in ("loss", "lr", "error", "images_per_second", "left"))


def test_the_log_has_the_effective_settings_of_each_start(tmp_path: Path) -> None:
    output = tmp_path / "run"
    with pytest.raises(Stopped):
        make_trainer(settings(output, run__log_every=1, toy__events={"5": "SIGTERM"})).run()
    make_trainer(settings(output, run__log_every=1)).run()
    lines = (output / "train.log").read_text().splitlines()
    starts = [number for number, line in enumerate(lines) if "  started" in line or "  resumed at step" in line]
    assert len(starts) == 2
    first, second = (lines[start + 1 : start + 5] for start in starts)
    assert first == second
    assert first[0] == "a toy"
    for line, words in zip(first[1:], ("total batch", "learning rate", "schedule"), strict=True):
        assert words in line


@pytest.mark.parametrize("rest", ['{"step": 1, "lo', "[]", "\x00\x00", '{"loss": 1}'])
def test_unfinished_lines_are_dropped(tmp_path: Path, rest: str) -> None:
    output = tmp_path / "run"
    with pytest.raises(Stopped):
        make_trainer(settings(output, run__log_every=1, toy__events={"5": "SIGTERM"})).run()
    with (output / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 4, "loss": 100.0}\n' + rest)
    make_trainer(settings(output, run__log_every=1)).run()
    lines: list[dict[str, Any]] = [line for line in metric_lines(output) if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, 25))
    assert all(line["loss"] < 100 for line in lines)
