"""One run: its training, and its results in its folder."""

import fcntl
import json
import shutil
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ...benchmark.machine import processor_name
from ...engine.trainer import Diverged, Stopped, Trainer
from ...tasks.classification.config import ClassificationConfig
from ...tasks.classification.task import Classification
from ...utils.atomic import atomic_write_json, make_output_dir

RESULTS, DIVERGED, TIME, LOCK, LOG = "results.json", "diverged.json", "time.json", ".lock", "training.log"
# In place of all others, for a run that is taken over from a record.
RECORDED = "recorded.json"


@dataclass(frozen=True)
class Outcome:
    """The result of a run.

    Attributes:
        top1: Final top-1 accuracy on the test images in percent; None if it diverged.
        loss: Mean loss on the test images; None if it diverged.
        diverged_step: The step in which it diverged; None if it did not, or if it is not known.
        diverged_what: What was not finite.
        seconds: Wall time; None if unknown.
        cpu_seconds: Processor time.
        processor: The processor that it was trained on; None if unknown, or if there were several.
    """

    top1: float | None = None
    loss: float | None = None
    diverged_step: int | None = None
    diverged_what: str | None = None
    seconds: float | None = None
    cpu_seconds: float | None = None
    processor: str | None = None

    @property
    def words(self) -> str:
        """The accuracy or the step of divergence, for a table."""
        if self.top1 is not None:
            return f"{self.top1:.2f}"
        return "diverged" if self.diverged_step is None else f"diverged in step {self.diverged_step}"


class Ended(NamedTuple):
    """How an attempt at a run ended.

    Attributes:
        how: "elsewhere" = another process is training it.
        error: The cause if it failed.
    """

    how: Literal["finished", "elsewhere", "failed"]
    error: str = ""


def read_outcome(folder: Path) -> Outcome | None:
    """Return the outcome of the run in a folder; None if it is not finished."""
    if (folder / RECORDED).exists():
        return Outcome(**read_json(folder / RECORDED)["outcome"])
    times = read_json(folder / TIME) if (folder / TIME).exists() else {}
    if (folder / RESULTS).exists():
        metrics = read_json(folder / RESULTS)["metrics"]
        return Outcome(metrics["top1"], metrics["loss"], **times)
    if not (folder / DIVERGED).exists():
        return None
    reports = sorted(folder.glob("diverged-step-*/report.json"))
    if not reports:
        raise ValueError(f"{folder / DIVERGED} exists without the report of its step: remove it to train the run again")
    report = read_json(reports[0])
    return Outcome(diverged_step=report["step"], diverged_what=report["what"], **times)


def read_json(file: Path) -> dict[str, Any]:
    """Return the content of a JSON file of a run."""
    try:
        return json.loads(file.read_text())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file} is damaged: remove the folder {file.parent} to train this run again") from error


def train_cell(config: ClassificationConfig) -> Ended:
    """Train or resume a run, unless it is finished or another process is training it.

    Raises:
        Stopped: A signal arrived; there is a checkpoint to resume from.
    """
    folder = Path(config.run.output)
    make_output_dir(folder)
    with (folder / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return Ended("elsewhere")
        if read_outcome(folder) is not None:
            return Ended("finished")
        # Parallel runs would overwrite each other on the terminal.
        with (folder / LOG).open("a") as log, redirect_stderr(log), timed(folder / TIME):
            try:
                Trainer(Classification(config), config).run()
            except Stopped:
                raise
            except Diverged as error:
                atomic_write_json(folder / DIVERGED, {"what": str(error)})
            except Exception as error:
                traceback.print_exc()
                message = " ".join(str(error).split()).removesuffix(".")
                return Ended("failed", f"{type(error).__name__}: {message} (see {folder / LOG})")
        # A finished run keeps its weights, but needs no checkpoints.
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return Ended("finished")


@contextmanager
def timed(file: Path) -> Iterator[None]:
    """Add the wall time and processor time of a context to those in a file, and name the processor."""
    wall, cpu = time.monotonic(), time.process_time()
    try:
        yield
    finally:
        spent: dict[str, Any] = {"seconds": time.monotonic() - wall, "cpu_seconds": time.process_time() - cpu}
        processor: str | None = processor_name()
        if file.exists():
            before = read_json(file)
            spent = {name: before[name] + value for name, value in spent.items()}
            processor = processor if before.get("processor") == processor else None
        atomic_write_json(file, {**spent, "processor": processor})
