"""`inlinevit reproduce`: parallel jobs, resuming, divergence, failures, signals, mistakes."""

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest

from inlinevit import cli
from inlinevit.experiments.reproduce import command, reproduce, workers
from inlinevit.experiments.reproduce.cells import Ended, train_cell
from inlinevit.experiments.reproduce.design import Run, Study
from inlinevit.experiments.reproduce.studies import STUDIES, run_config
from inlinevit.tasks.classification.config import ClassificationConfig

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def results(output: Path) -> dict[str, list[str]]:
    """Seeds of each cell that results.json has."""
    cells = read_json(output / "results.json")["cells"]
    return {key: list(cell["runs"]) for key, cell in cells.items() if cell["runs"]}


class InThisProcess(workers.Workers):
    """Trains in the process of the test: a new one takes seconds to start."""

    def run(self) -> None:
        for name, config in self.left:
            self.update(name, None)
            self.update(name, workers.train_cell(config))


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "Workers", InThisProcess)


def change_one(monkeypatch: pytest.MonkeyPatch, key: str, **optimizer: Any) -> None:
    """Give a cell's runs other settings of the optimizer."""

    def changed(run: Run, **arguments: Any) -> ClassificationConfig:
        config = run_config(run, **arguments)
        return replace(config, optimizer=replace(config.optimizer, **optimizer)) if run.cell.key == key else config

    monkeypatch.setattr(command, "run_config", changed)


@pytest.mark.slow
def test_two_jobs_train_what_is_missing(
    small_studies: dict[str, Study],
    data: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    change_one(monkeypatch, "linear", lr=1e30, clip_grad=None)
    assert reproduce(["first"], data=data, output=str(tmp_path), jobs=2, steps=2, select=False) == 0
    assert results(tmp_path) == {"softmax": ["0"], "linear": ["0"]}
    record = read_json(tmp_path / "results.json")
    assert record["settings"] == {"jobs": 2, "select": False, "seeds": {"softmax": 1, "linear": 1, "inline": 2}}
    assert (record["cells"]["softmax"]["steps"], record["cells"]["softmax"]["batch_size"]) == (2, 64)
    assert record["machine"]["threads"] == 1
    run = record["cells"]["softmax"]["runs"]["0"]
    times = {"seconds", "cpu_seconds", "processor"}
    assert set(run) == {"top1", "loss", *times}
    assert record["cells"]["softmax"]["parameters"] > 1000
    diverged = record["cells"]["linear"]["runs"]["0"]
    assert set(diverged) == {"diverged_step", "diverged_what", *times}
    assert diverged["diverged_step"] == 2
    printed = capfd.readouterr()
    assert "0 of 2 runs are finished" in printed.err
    assert "linear-seed0: diverged in step 2" in printed.err
    assert "Traceback" not in printed.err
    assert "diverged in 1 of 1 seeds (step 2)" in printed.out
    assert "holds; linear diverged in 1 of 1" in printed.out
    # Everything is there now, so nothing is trained, and no data are needed.
    monkeypatch.setattr(workers, "get_context", None)
    assert reproduce(["first"], output=str(tmp_path), steps=2, select=False) == 0
    assert "2 of 2 runs are finished" in capfd.readouterr().err
    after = read_json(tmp_path / "results.json")
    assert after["cells"] == record["cells"]


@pytest.mark.usefixtures("in_this_process")
def test_failed_run_does_not_stop_the_others(
    small_studies: dict[str, Study],
    data: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        change_one(patch, "softmax", name="no-such-optimizer")
        assert reproduce(["first"], data=data, output=str(tmp_path), steps=1, select=False) == 1
    printed = capfd.readouterr()
    assert "softmax-seed0 failed: " in printed.err
    assert "1 failed: softmax-seed0" in printed.err
    assert results(tmp_path) == {"linear": ["0"]}
    assert "unknown; runs are missing" in printed.out


@pytest.mark.usefixtures("in_this_process")
def test_chosen_studies_and_seeds_only(
    small_studies: dict[str, Study], data: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    cli.main(
        [
            "reproduce",
            "first",
            "--data",
            data,
            "--output",
            str(tmp_path),
            "--seeds",
            "2",
            "--steps",
            "1",
            "--select",
            "false",
        ]
    )
    assert results(tmp_path) == {"softmax": ["0", "1"], "linear": ["0", "1"]}
    assert read_json(tmp_path / "results.json")["settings"]["seeds"] == {"softmax": 2, "linear": 2, "inline": 2}
    assert "Second" not in capfd.readouterr().out
    # Without data, what is there is shown.
    cli.main(["reproduce", "second", "--output", str(tmp_path), "--steps", "1", "--select", "false"])
    assert "2 are not trained without --data" in capfd.readouterr().err


@pytest.mark.usefixtures("in_this_process")
def test_single_cells_and_their_page(
    small_studies: dict[str, Study], data: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    cli.main(["reproduce", "--list", "second/inline"])
    listed = capfd.readouterr().out
    assert re.search(r"  second/inline, 2 seeds, \d+\.\d\d core-hours: InLine", listed)
    assert "all: 1 different cells, 2 runs" in listed
    places = ["--data", data, "--output", str(tmp_path), "--steps", "1", "--device", "cpu:0", "--select", "false"]
    cli.main(["reproduce", "second/inline", "first/linear", "--seeds", "1", *places])
    assert results(tmp_path) == {"linear": ["0"], "inline": ["0"]}
    printed = capfd.readouterr()
    assert "softmax" not in printed.out
    assert f"the plots are in {tmp_path / 'report.html'}" in printed.err
    assert "device: cpu:0" in (tmp_path / "inline-seed0" / "config.yaml").read_text()
    cli.main(["reproduce", "second/inline", *places])
    page = (tmp_path / "report.html").read_text()
    assert page.count("data:image/svg+xml") >= 2
    assert "unknown; runs are missing" in page
    sections = read_json(tmp_path / "report.json")["sections"]
    assert list(sections) == ["first", "second"]
    assert len(sections["second"]["cells"]["inline"]["top1"]) == 2
    assert sections["first"]["claims"]["softmax wins"]["word"] == "unknown"


@pytest.mark.usefixtures("in_this_process")
def test_rates_are_chosen_on_held_out_images_and_kept(
    small_studies: dict[str, Study],
    data: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accuracies = {0.001: 20.0, 0.002: 50.0, 0.004: 50.0}
    evaluated = []

    def trained(config: ClassificationConfig) -> Ended:
        """Train nothing, and find accuracies that depend on the rate."""
        folder = Path(config.run.output)
        folder.mkdir(parents=True)
        evaluated.append((folder.name, Path(config.data.path).name, config.schedule.steps))
        (folder / "classes.json").write_text(json.dumps(["a", "b"]))
        metrics = {"top1": accuracies[config.optimizer.lr], "loss": 1.0}
        (folder / "results.json").write_text(json.dumps({"metrics": metrics}))
        return Ended("finished")

    monkeypatch.setattr(workers, "train_cell", trained)
    assert reproduce(["first/softmax"], data=data, output=str(tmp_path), steps=16) == 0
    name = Path(data).name
    assert evaluated == [*((f"softmax-lr{rate:g}", "train", 2) for rate in accuracies), ("softmax-seed0", name, 16)]
    found = read_json(tmp_path / "results.json")["cells"]["softmax"]
    # The smaller one of two that are equally good.
    assert (found["lr"], found["rates"]) == (0.002, {"0.001": 20.0, "0.002": 50.0, "0.004": 50.0})
    assert "3 of 3 runs that choose learning rates are finished" in capfd.readouterr().err
    # Nothing is trained again.
    assert reproduce(["first/softmax"], data=data, output=str(tmp_path), steps=16) == 0
    assert len(evaluated) == 4


@pytest.mark.usefixtures("in_this_process")
def test_a_whole_study_with_rates_in_tiny_runs(small_studies: dict[str, Study], data: str, tmp_path: Path) -> None:
    assert reproduce(["first/softmax"], data=data, output=str(tmp_path), steps=1) == 0
    found = read_json(tmp_path / "results.json")["cells"]["softmax"]
    assert sorted(found["rates"]) == ["0.001", "0.002", "0.004"]
    assert f"lr: {found['lr']}" in (tmp_path / "softmax-seed0" / "config.yaml").read_text()
    # Of 8 training images of each class, one is held out.
    log = (tmp_path / "rates" / "softmax-lr0.001" / "training.log").read_text()
    assert "70 images for training, 10 for evaluation" in log
    with pytest.raises(ValueError, match=r"(optimizer\.lr was|name another folder with --output)"):
        reproduce(["first/softmax"], data=data, output=str(tmp_path), steps=2)


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("select", [True, False])
def test_runs_of_a_record_count_as_finished(
    small_studies: dict[str, Study], data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, select: bool
) -> None:
    def outcomes(folder: Path) -> dict[str, Any]:
        return {key: (cell["runs"], cell["rates"]) for key, cell in read_json(folder / "results.json")["cells"].items()}

    arguments: dict[str, Any] = {"data": data, "steps": 1, "select": select}
    reproduce(["first/softmax"], output=str(tmp_path / "old"), **arguments)
    old = read_json(tmp_path / "old" / "results.json")
    record = str(tmp_path / "old" / "results.json")
    trained = []

    def counted(config: ClassificationConfig) -> Ended:
        trained.append(Path(config.run.output).name)
        return train_cell(config)

    monkeypatch.setattr(workers, "train_cell", counted)
    for _ in range(2):
        reproduce(["second"], output=str(tmp_path / "new"), record=record, **arguments)
        # Seed 0 of the cell of both studies is not trained again.
        rates = [f"inline-lr{rate:g}" for rate in (0.001, 0.002, 0.004)] if select else []
        assert trained == [*rates, "inline-seed0", "softmax-seed1", "inline-seed1"]
    new = read_json(tmp_path / "new" / "results.json")
    softmax = new["cells"]["softmax"]
    assert softmax["runs"]["0"] == old["cells"]["softmax"]["runs"]["0"]
    for name in ("rates", "lr", "parameters", "options", "recipe"):
        assert softmax[name] == old["cells"]["softmax"][name]
    assert softmax["rate_seconds"] == pytest.approx(old["cells"]["softmax"]["rate_seconds"])
    # Runs that the folder has are kept.
    (tmp_path / "changed.json").write_text(json.dumps(old).replace('"top1": ', '"top1": 1'))
    reproduce(["second"], output=str(tmp_path / "new"), record=str(tmp_path / "changed.json"), **arguments)
    assert outcomes(tmp_path / "new") == {key: (cell["runs"], cell["rates"]) for key, cell in new["cells"].items()}


@pytest.mark.usefixtures("in_this_process")
def test_a_record_of_another_recipe_is_not_taken_over(
    small_studies: dict[str, Study], data: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    reproduce(["first/softmax"], data=data, output=str(tmp_path / "old"), steps=1, select=False)
    record = str(tmp_path / "old" / "results.json")
    with pytest.warns(UserWarning, match="other recipes, lengths or learning rates, .* not taken over: softmax"):
        reproduce(["first/softmax"], data=data, output=str(tmp_path / "new"), steps=2, select=False, record=record)
    # It was trained instead.
    assert (tmp_path / "new" / "softmax-seed0" / "training.log").exists()
    # The learning rate was not chosen.
    with pytest.warns(UserWarning, match="not taken over: softmax"):
        reproduce(["first/softmax"], data=data, output=str(tmp_path / "chosen"), steps=1, record=record)
    for text, problem in ((None, "there is no record"), ("{", "is not a record of runs"), ("[1]", "is not a record")):
        if text is not None:
            (tmp_path / "bad.json").write_text(text)
        command = ["reproduce", "--record", str(tmp_path / "bad.json"), "--output", str(tmp_path / "bad")]
        with pytest.raises(SystemExit):
            cli.main(command)
        assert problem in capfd.readouterr().err


@pytest.mark.usefixtures("in_this_process")
def test_generated_images_need_no_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from inlinevit.experiments.reproduce import studies
    from inlinevit.experiments.reproduce.design import Cell
    from inlinevit.tasks.classification import diagnostics
    from tests.experiments.reproduce.conftest import SMALL

    monkeypatch.setitem(diagnostics.SAMPLES, "test", 20)
    monkeypatch.setitem(diagnostics.SAMPLES, "val", 20)
    drawn = Cell("drawn", "drawn", {**SMALL, "patch_size": 2}, "recall", is_generated=True)
    stored = Cell("stored", "stored", SMALL)
    monkeypatch.setattr(studies, "STUDIES", {"small": Study("Small", "?", (drawn, stored))})
    for module in (studies, command):
        monkeypatch.setattr(module, "STUDIES", studies.STUDIES)
    monkeypatch.setattr("inlinevit.experiments.reproduce.record.STUDIES", studies.STUDIES)
    monkeypatch.setattr("inlinevit.experiments.reproduce.page.STUDIES", studies.STUDIES)
    assert reproduce(["small"], data="generated", output=str(tmp_path), steps=1, select=False) == 0
    assert results(tmp_path) == {"drawn": ["0"]}


@pytest.mark.usefixtures("in_this_process")
def test_runs_of_another_command_are_left_to_it(
    small_studies: dict[str, Study], data: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "softmax-seed0").mkdir()
    with (tmp_path / "softmax-seed0" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert reproduce(["first"], data=data, output=str(tmp_path), steps=1, select=False) == 0
    assert results(tmp_path) == {"linear": ["0"]}
    assert "1 are being trained by another process: softmax-seed0" in capfd.readouterr().err


def test_progress_on_a_terminal(small_studies: dict[str, Study]) -> None:
    runs = command.plan({"first": small_studies["first"]}, 2)
    progress = command.ProgressTable(runs, {run.name: None for run in runs})
    progress.update(runs[0].name, None, None)
    progress.update(runs[1].name, Ended("failed", "why"), None)
    progress.update(runs[2].name, Ended("finished"), command.Outcome(top1=12.5))
    table = progress.table()
    assert [list(column.cells) for column in table.columns] == [
        ["softmax", "linear"],
        ["training", "failed"],
        ["12.50", ""],
    ]
    assert table.caption == "top-1 %; 1 of 4 runs finished, 1 running"


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["firs"], "there is no study called 'firs': did you mean first?"),
        (["zzz"], "there is no study called 'zzz': choose among first, second"),
        ([], "no results yet, and no data to train on: name the folder of CIFAR-10's"),
        (["first/linea"], "study first has no cell called 'linea': did you mean linear?"),
        (["first/zzz"], "study first has no cell called 'zzz': choose among softmax, linear"),
        (["--device", "cpu"], "device has no effect without data: give --data, too"),
        (["--device", "cuda:77", "--data", "/nowhere"], "device 'cuda:77' cannot be used here"),
        (["--data", "/nowhere"], "there is no folder /nowhere: name the folder of CIFAR-10's"),
        (["--steps", "0"], "steps is 0: it should be at least 1"),
        (["--jobs", "0"], "jobs is 0: it should be at least 1"),
        (["--seeds", "-1"], "seeds is -1: it should be at least 1"),
        (["--steps", "few"], "Given value: few"),
    ],
)
def test_mistakes_get_a_sentence(
    small_studies: dict[str, Study], words: list[str], remedy: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["reproduce", *words, "--output", str(tmp_path / "new")])
    assert caught.value.code in (1, 2)
    printed = capfd.readouterr().err
    assert remedy in printed
    assert printed.count("\n") == 1
    assert not (tmp_path / "new").exists()


@pytest.mark.usefixtures("in_this_process")
def test_folder_with_other_settings_is_refused(small_studies: dict[str, Study], data: str, tmp_path: Path) -> None:
    reproduce(["first"], data=data, output=str(tmp_path), steps=1, select=False)
    before = (tmp_path / "results.json").read_text()
    # Even by a study that has no run of it: all runs of a folder share one record.
    with pytest.raises(ValueError, match=r"schedule\.steps was 1 and is 2.*: name another folder with --output, or"):
        reproduce(["second"], data=data, output=str(tmp_path), steps=2, select=False)
    assert (tmp_path / "results.json").read_text() == before


@pytest.mark.parametrize("name", ["injektivity", "injectivity/inline"])
def test_list_refuses_wrong_names(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["reproduce", "--list", name])
    printed = capfd.readouterr()
    assert printed.err.startswith(("error: there is no study called", "error: study injectivity has no cell called"))
    assert printed.out == ""


def test_list_trains_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    cli.main(["reproduce", "--list"])
    assert "injectivity: " in capfd.readouterr().out


def test_list_is_readable_in_80_columns(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    cli.main(["reproduce", "--list"])
    lines = capfd.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    # The name, the number of runs and their time are on one line, which grep finds.
    cells = sum(len(study.cells) for study in STUDIES.values())
    assert sum(bool(re.match(r"  [\w-]+/\S+, \d+ seeds?, \d+\.\d\d core-hours:", line)) for line in lines) == cells


def test_worker_ends_when_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = Pipe()
    ours.close()
    monkeypatch.setattr(workers, "train_cell", lambda config: Ended("finished"))
    workers.work(theirs, ClassificationConfig())


@pytest.mark.slow
def test_process_that_dies_is_one_failed_run() -> None:
    updates: list[tuple[str, Ended | None]] = []
    group = workers.Workers({"a": Deadly(), "b": Deadly()}, 1, lambda name, ended: updates.append((name, ended)))  # type: ignore[dict-item]
    group.run()
    code = Ended("failed", "its process ended with code 3")
    assert updates == [("a", None), ("a", code), ("b", None), ("b", code)]


class Deadly:
    """Ends the process that unpickles it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (3,)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_stopped_by_a_signal(number: signal.Signals, data: str, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "inlinevit", "reproduce", "softmax", "--data", data, "--output", str(tmp_path)]
    # Without the runs that choose learning rates, which come before those that count.
    words += ["--jobs", "2", "--seeds", "1", "--select", "false", "--steps"]
    process = subprocess.Popen(
        [*words, "100000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    )
    runs = [tmp_path / "softmax-seed0", tmp_path / "softmax-unit-seed0"]
    deadline = time.monotonic() + 120
    # A schedule of steps leaves no checkpoint for ten minutes, so what is there in the end was saved by the signal.
    while not all((run / "metrics.jsonl").exists() and (run / "metrics.jsonl").stat().st_size > 0 for run in runs):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert not any(list(run.glob("checkpoints/step-*")) for run in runs)
    process.send_signal(number)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 128 + number
    assert said.splitlines() == ["0 of 2 runs are finished", "stopped: run the same command again to resume"]
    for run in runs:
        assert not (run / "results.json").exists()
        assert len(list(run.glob("checkpoints/step-*"))) == 1
        with (run / ".lock").open("w") as lock:
            # Nobody holds it any more.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
