"""One run: trained, interrupted, diverged, failed, locked."""

import fcntl
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from inlinevit.engine.trainer import Stopped, Trainer
from inlinevit.experiments.reproduce import cells
from inlinevit.experiments.reproduce.cells import Ended, train_cell
from inlinevit.experiments.reproduce.design import Run, Study
from inlinevit.experiments.reproduce.outcomes import read_outcome
from inlinevit.experiments.reproduce.studies import run_config
from inlinevit.tasks.classification.config import ClassificationConfig

STEPS = 3


@pytest.fixture
def config(small_studies: dict[str, Study], data: str, tmp_path: Path) -> ClassificationConfig:
    return run_config(Run(small_studies["first"].cells[0], 0), data=data, output=str(tmp_path), steps=STEPS)


def test_finished_run_is_read_and_not_trained_again(
    config: ClassificationConfig, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = Path(config.run.output)
    assert read_outcome(folder) is None
    assert train_cell(config) == Ended("finished")
    outcome = read_outcome(folder)
    assert outcome is not None
    results = json.loads((folder / "results.json").read_text())["metrics"]
    assert (outcome.top1, outcome.loss) == (results["top1"], results["loss"])
    assert outcome.seconds is not None
    assert outcome.seconds > 0
    assert outcome.diverged_step is None
    # Messages of the training go to a file, and checkpoints are removed.
    assert "evaluation: top1" in (folder / "training.log").read_text()
    assert capfd.readouterr().err == ""
    assert not (folder / "checkpoints").exists()
    assert (folder / "model.safetensors").exists()
    monkeypatch.setattr(cells, "Trainer", None)
    assert train_cell(config) == Ended("finished")
    assert read_outcome(folder) == outcome


def test_interrupted_run_resumes(config: ClassificationConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_cell(config)
    whole = read_outcome(Path(config.run.output))
    config.run.output = str(tmp_path / "again")
    train_step, trained = Trainer.train_step, []

    def interrupted(self: Trainer, step: int, batches: Any) -> float:
        trained.append(step)
        if len(trained) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return train_step(self, step, batches)

    monkeypatch.setattr(Trainer, "train_step", interrupted)
    with pytest.raises(Stopped):
        train_cell(config)
    assert read_outcome(tmp_path / "again") is None
    before = json.loads((tmp_path / "again" / "time.json").read_text())["seconds"]
    assert train_cell(config) == Ended("finished")
    assert trained == [0, 1, 2]
    outcome = read_outcome(tmp_path / "again")
    assert whole is not None
    assert outcome is not None
    assert (outcome.top1, outcome.loss) == (whole.top1, whole.loss)
    assert outcome.seconds is not None
    assert outcome.seconds > before


def test_divergence_is_a_result(config: ClassificationConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(config.run.output)
    loss = cells.Classification.loss
    monkeypatch.setattr(cells.Classification, "loss", lambda *arguments: loss(*arguments) * float("nan"))
    assert train_cell(config) == Ended("finished")
    outcome = read_outcome(folder)
    assert outcome is not None
    assert (outcome.diverged_step, outcome.diverged_what, outcome.top1) == (1, "the loss is nan", None)
    assert outcome.words == "diverged in step 1"
    monkeypatch.setattr(cells, "Trainer", None)
    assert train_cell(config) == Ended("finished")
    (folder / "diverged-step-1-process-0" / "report.json").unlink()
    with pytest.raises(ValueError, match="remove it to train the run again"):
        read_outcome(folder)


def test_other_errors_are_told_and_tried_again(config: ClassificationConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no such\n  luck.")

    with monkeypatch.context() as patch:
        patch.setattr(cells.Classification, "loss", fail)
        ended = train_cell(config)
    log = Path(config.run.output) / "training.log"
    assert ended == Ended("failed", f"RuntimeError: no such luck (see {log})")
    assert "Traceback" in log.read_text()
    assert read_outcome(log.parent) is None
    assert train_cell(config) == Ended("finished")


def test_run_of_another_process_is_left_alone(config: ClassificationConfig) -> None:
    folder = Path(config.run.output)
    folder.mkdir()
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert train_cell(config) == Ended("elsewhere")
    assert [path.name for path in folder.iterdir()] == [".lock"]
    assert train_cell(config) == Ended("finished")


def test_outcome_without_times(config: ClassificationConfig) -> None:
    folder = Path(config.run.output)
    folder.mkdir()
    (folder / "results.json").write_text('{"metrics": {"top1": 50.0, "loss": 1.5}}')
    outcome = read_outcome(folder)
    assert outcome is not None
    assert (outcome.top1, outcome.seconds, outcome.words) == (50.0, None, "50.00")


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text('{"metrics": {"top1"')
    with pytest.raises(ValueError, match=r"results\.json is damaged: remove the folder"):
        read_outcome(tmp_path)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("results.json", '{"metrics": {"accuracy": 50.0}}'),
        ("recorded.json", '{"outcome": {"top1": 50.0, "joules": 3.5}, "parameters": 7}'),
        ("recorded.json", '{"parameters": 7}'),
    ],
)
def test_fields_of_another_version_are_named(file: str, content: str, tmp_path: Path) -> None:
    (tmp_path / file).write_text(content)
    with pytest.raises(ValueError, match=r"other fields than this version.*use the version that wrote them, or remove"):
        read_outcome(tmp_path)
