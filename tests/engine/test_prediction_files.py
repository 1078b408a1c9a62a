"""Files of predictions: a job that is stopped keeps its results, and is continued by any number of processes."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from inlinevit.cli import main
from inlinevit.data.images import ImageFiles
from inlinevit.engine import predictor as predictor_module
from inlinevit.engine.lock import RunLock
from inlinevit.engine.prediction_files import PartialResults, image_ids, job_settings
from inlinevit.engine.predictor import PredictionJob, predict
from inlinevit.tasks.classification.config import ClassificationPredictOptions
from inlinevit.tasks.classification.task import Classification
from tests.engine.running import Server
from tests.tasks.runs import make_image_run

pytestmark = pytest.mark.integration

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, and a folder of 11 images of which one is broken; nothing in them is changed."""
    home = tmp_path_factory.mktemp("home")
    make_image_run(home / "run", home, ["ant", "bee", "cat"])
    (home / "photos").mkdir()
    rng = np.random.default_rng(0)
    for number in range(10):
        Image.fromarray(rng.integers(0, 255, (40, 40, 3), np.uint8)).save(home / "photos" / f"{number}.png")
    (home / "photos" / "4 broken.png").write_text("no image")
    return home


def command(home: Path, output: Path, *options: str, photos: Path | None = None) -> list[str]:
    words = ["predict", str(home / "run"), str(photos or home / "photos"), "--output", str(output)]
    return [*words, "--batch_size", "2", "--device", "cpu", *options]


def run_command(words: list[str]) -> int:
    """Run a command line; return its exit code."""
    try:
        main(words)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1
    return 0


@pytest.fixture(scope="module")
def whole(home: Path) -> dict[str, bytes]:
    """What one process writes that is not interrupted, by format."""
    results = {}
    for format in ("csv", "jsonl", "json", "parquet"):
        assert run_command(command(home, home / f"whole.{format}")) == 1
        results[format] = (home / f"whole.{format}").read_bytes()
    assert sorted(file.name for file in home.glob("whole*")) == sorted(f"whole.{format}" for format in results)
    return results


def stop_after(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let predictions fail after some images."""

    def stopped(*arguments: Any) -> Iterator[Any]:
        for number, prediction in enumerate(predict(*arguments)):
            if number == count:
                raise OSError("the power is gone")
            yield prediction

    monkeypatch.setattr(predictor_module, "predict", stopped)


@pytest.mark.parametrize("seed", range(4))
def test_parts_of_any_processes_make_the_whole(
    seed: int, home: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three attempts of which two are stopped at random, each with another number of processes."""
    rng = random.Random(seed)
    format = ("csv", "jsonl", "json", "parquet")[seed]
    output = tmp_path / f"out.{format}"
    options = ClassificationPredictOptions(output=str(output), batch_size=2, device="cpu")
    predictor = Classification.load_predictor(str(home / "run"), options)
    partial = PartialResults(output)
    job = PredictionJob(predictor, ImageFiles([str(home / "photos")]), options, partial)
    settings = job_settings("classification", str(home / "run"), predictor.model, options)
    left = []
    for is_last in (False, False, True):
        processes = rng.randint(1, 4)
        with partial.open(settings, {}, start_over=False):
            plan = job.make_plan()
            left.append(len(plan.batches))
            parts = []
            for process in range(processes):
                with monkeypatch.context() as patched:
                    if is_last:
                        parts.append(job.write_part(plan, CPU, process, processes))
                        continue
                    # A process with few images may finish them.
                    stop_after(rng.randint(1, 4), patched)
                    with suppress(OSError):
                        job.write_part(plan, CPU, process, processes)
            if is_last:
                assert partial.merge(plan.ids, format, parts) == 1
            else:
                # The last line was not finished.
                (partial.folder / "part-00000-00099.jsonl").write_text(f'{{"id": "{plan.ids[-1]}", "file": ')
                assert not output.exists()
    assert left[0] == 6
    assert left == sorted(left, reverse=True)
    assert left[-1] < 6
    assert output.read_bytes() == whole[format]
    assert not partial.folder.exists()


# What the commands import.
MODULES = ("inlinevit.cli.predict", "inlinevit.tasks.classification.task", "inlinevit.tasks.classification.config")
SLOW = """
import sys, time
from inlinevit.cli import main
from inlinevit.engine import predictor
read = predictor.decode_image
def slow(*arguments):
    time.sleep(0.2)
    return read(*arguments)
predictor.decode_image = slow
main(sys.argv[1:])
"""


def lines_of(partial: Path) -> int:
    return sum(part.read_bytes().count(b"\n") for part in partial.glob("part-*.jsonl"))


@pytest.fixture(scope="module")
def killed(home: Path, whole: dict[str, bytes], server: Server) -> Path:
    """What a job that got SIGKILL has left."""
    output = home / "killed.csv"
    forked = server.script(SLOW, command(home, output), home / "killed.log", modules=MODULES)
    partial = output.with_name("killed.csv.partial")
    deadline = time.monotonic() + 120
    while lines_of(partial) < 4:
        assert time.monotonic() < deadline, forked.printed
        time.sleep(0.02)
    forked.kill(signal.SIGKILL)
    assert forked.wait() == -signal.SIGKILL
    assert not output.exists()
    return partial


def test_a_job_that_was_killed_is_continued(
    killed: Path, home: Path, whole: dict[str, bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(killed, tmp_path / "out.csv.partial")
    assert run_command(command(home, tmp_path / "out.csv")) == 1
    captured = capsys.readouterr()
    assert "is stale: process" in captured.err
    assert "resuming: " in captured.err
    assert captured.out == ""
    assert (tmp_path / "out.csv").read_bytes() == whole["csv"]
    assert os.listdir(tmp_path) == ["out.csv"]


def test_two_processes_continue_what_one_has_begun(
    killed: Path, home: Path, whole: dict[str, bytes], server: Server, tmp_path: Path
) -> None:
    output = tmp_path / "out.csv"
    shutil.copytree(killed, tmp_path / "out.csv.partial")
    code = "import sys; from inlinevit.cli import main; main(sys.argv[1:])"
    log = tmp_path / "printed"
    words = [word for word in command(home, output) if word not in ("--device", "cpu")]
    forked = server.script(code, words, log, modules=MODULES, processes=2)
    # One image is broken.
    assert forked.wait() == 1, forked.printed
    assert "resuming: " in forked.printed
    log.unlink()
    assert output.read_bytes() == whole["csv"]
    assert os.listdir(tmp_path) == ["out.csv"]


@pytest.mark.slow
def test_torchrun_continues_what_one_process_has_begun(
    killed: Path, home: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    """The command of docs/predict.md, with fewer processes."""
    shutil.copytree(killed, tmp_path / "out.csv.partial")
    page = (ROOT / "docs" / "predict.md").read_text()
    documented = next(line for line in page.splitlines() if line.startswith("torchrun"))
    words = documented.replace("runs/photos.parquet", str(tmp_path / "out.csv")).replace("runs/first", f"{home}/run")
    words = words.replace("photos/", f"{home}/photos").replace("--nproc_per_node 8", "--standalone --nproc_per_node 2")
    launcher = [sys.executable, "-m", "torch.distributed.run", *words.split()[1:], "--batch_size", "2"]
    ended = subprocess.run(launcher, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    # One image is broken.
    assert ended.returncode == 1, ended.stderr
    assert "resuming: " in ended.stderr
    assert ended.stdout == ""
    assert (tmp_path / "out.csv").read_bytes() == whole["csv"]
    assert os.listdir(tmp_path) == ["out.csv"]


@pytest.fixture
def stopped(killed: Path, tmp_path: Path) -> Path:
    """The output of a job that was stopped."""
    shutil.copytree(killed, tmp_path / "out.csv.partial")
    (tmp_path / "out.csv.partial" / ".lock").unlink()
    return tmp_path / "out.csv"


def test_other_settings_are_refused(
    stopped: Path, home: Path, whole: dict[str, bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    before = {file: file.read_bytes() for file in stopped.parent.rglob("*") if file.is_file()}
    assert run_command(command(home, stopped, "--top", "2")) == 1
    assert capsys.readouterr().err == (
        f"error: {stopped}.partial holds results of a job with other settings (options.top was 5 and is 2): finish "
        "that one, name another --output, or start over with --resume never\n"
    )
    assert {file: file.read_bytes() for file in stopped.parent.rglob("*") if file.is_file()} == before
    # What does not change the results may change.
    assert run_command(command(home, stopped, "--format", "json")) == 1
    assert "resuming" in capsys.readouterr().err
    assert stopped.read_bytes() == whole["json"]


def test_other_weights_are_refused(
    stopped: Path, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    make_image_run(other, home, ["ant", "bee", "cat"])
    weights = other / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert run_command(command(home, stopped, "--checkpoint", str(weights))) == 1
    assert "with other settings (weights was " in capsys.readouterr().err


def test_a_job_is_started_over(
    stopped: Path, home: Path, whole: dict[str, bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(command(home, stopped, "--resume", "never")) == 1
    assert "resuming" not in capsys.readouterr().err
    assert stopped.read_bytes() == whole["csv"]
    assert run_command(["predict", str(home / "run"), str(home / "photos"), "--resume", "never"]) == 1
    assert "--resume never has no effect on results that are printed" in capsys.readouterr().err


def test_images_that_came_changed_or_went(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    photos, output = tmp_path / "photos", tmp_path / "out.jsonl"
    shutil.copytree(home / "photos", photos)
    with monkeypatch.context() as patched:
        stop_after(8, patched)
        assert run_command(command(home, output, photos=photos)) == 1
    assert capsys.readouterr().err.endswith("error: the power is gone\n")
    (photos / "0.png").unlink()
    Image.new("RGB", (40, 40), "red").save(photos / "1.png")
    Image.new("RGB", (40, 40), "red").save(photos / "1b.png")
    assert run_command(command(home, output, photos=photos)) == 1
    assert "resuming: 6 of 11 images are done" in capsys.readouterr().err
    again = tmp_path / "again.jsonl"
    assert run_command(command(home, again, photos=photos)) == 1
    ours, theirs = ([json.loads(line) for line in file.read_text().splitlines()] for file in (output, again))
    assert [one["file"] for one in ours] == [one["file"] for one in theirs]
    assert ours[0] == theirs[0]
    assert ours[1]["predictions"] == ours[0]["predictions"]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("file", r"where partial results would be, is not a folder: remove it"),
        ("link", r"where partial results would be, is not a folder: remove it"),
        ("photos", r"where partial results would be, has other files \(a\.png\): remove it"),
        ("damaged", r"job\.json is damaged: name another --output, or start over with --resume never"),
        ("in use", r"is in use by another run of this process: wait for its end, or choose another --output"),
    ],
)
def test_folders_that_cannot_be_used(kind: str, message: str, tmp_path: Path) -> None:
    partial = PartialResults(tmp_path / "out.csv")

    def use() -> None:
        lock = RunLock(partial.folder) if kind == "in use" else nullcontext()
        with lock, partial.open({"a": 1}, {}, start_over=False):
            pass

    if kind == "file":
        partial.folder.touch()
    elif kind == "link":
        partial.folder.symlink_to(tmp_path)
    else:
        partial.folder.mkdir()
        (partial.folder / {"photos": "a.png"}.get(kind, "job.json")).write_text("[]")
    with pytest.raises(ValueError, match=message):
        use()


def test_machines_without_a_shared_folder_are_refused(tmp_path: Path) -> None:
    partial = PartialResults(tmp_path / "out.csv")
    with pytest.raises(ValueError, match="all machines need a shared folder"), partial.write_part(1):
        pass
    with partial.open({}, {}, start_over=False):
        with partial.write_part(0) as (_, write):
            write("a", {"file": "a"})
        with pytest.raises(ValueError, match=r"the results of 1 images are not in .*: run the same command again"):
            partial.merge(["a", "b"], "json")
    assert len(partial.lines()) == 1


def test_ids_tell_files_and_drawings_apart(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_text("x")
    files = ImageFiles([str(tmp_path), "missing.png"])
    assert len({*image_ids(files, ["", "", ""]), *image_ids(files, ["a", "b", ""])}) == 5


def test_several_processes_need_an_output(home: Path) -> None:
    options = ClassificationPredictOptions()
    with pytest.raises(ValueError, match="several processes cannot print their results together: name a file"):
        predictor_module._check_output_format(options, "table", is_printed=True, processes=2)
