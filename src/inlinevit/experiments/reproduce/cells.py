"""The training of one run."""

import fcntl
import shutil
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ...benchmark.machine import processor_name
from ...engine.trainer import Diverged, Stopped, Trainer
from ...tasks.classification.config import ClassificationConfig
from ...tasks.classification.task import Classification
from ...utils.atomic import atomic_write_json, make_output_dir
from .outcomes import DIVERGED, TIME, read_json, read_outcome

LOCK, LOG = ".lock", "training.log"


class Ended(NamedTuple):
    """How an attempt at a run ended.

    Attributes:
        how: "elsewhere" = another process is training it.
        error: The cause if it failed.
    """

    how: Literal["finished", "elsewhere", "failed"]
    error: str = ""


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
