"""Several processes that share an image give the results of one."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from inlinevit.parallel import RowSharding
from inlinevit.streaming.shards import halo_rows, shard_rows, shifted_rows
from tests.engine.running import ENVIRONMENT
from tests.streaming.models import FAMILIES, MODELS

pytestmark = pytest.mark.integration

PROGRAM = "tests.streaming.sharing"


class Group:
    """As a SequenceGroup, without processes."""

    def __init__(self, size: int, rank: int = 0) -> None:
        self.rank, self.size = rank, size


def start(folder: Path, processes: int, job: str, *kinds: str) -> list[subprocess.Popen[str]]:
    """Start processes that share images."""
    return [
        subprocess.Popen(
            [sys.executable, "-m", PROGRAM, job, str(folder), str(rank), str(processes), *kinds],
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(processes)
    ]


def run(folder: Path, processes: int, job: str, *kinds: str) -> None:
    started = start(folder, processes, job, *kinds)
    printed = [process.communicate()[0] for process in started]
    # Of all, because others only report that they have lost the one that failed.
    assert [process.returncode for process in started] == [0] * processes, "\n".join(printed)
    assert all("shared as alone" in text for text in printed)


def test_families_and_options(tmp_path: Path) -> None:
    run(
        tmp_path,
        2,
        "options",
        *FAMILIES,
        "inline windows",
        "softmax windows",
        "reduced softmax",
        "efficient",
        "angular",
        "focused",
    )


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 3, 4])
def test_all_models(tmp_path: Path, processes: int) -> None:
    run(tmp_path, processes, "all", *MODELS)


def test_a_killed_process_ends_the_others(tmp_path: Path) -> None:
    first, second = start(tmp_path, 2, "wait")
    assert second.stdout is not None
    while "waiting" not in second.stdout.readline():
        assert second.poll() is None
    second.send_signal(signal.SIGKILL)
    started = time.monotonic()
    printed, _ = first.communicate(timeout=120)
    assert time.monotonic() - started < 60
    assert first.returncode == 1
    assert printed.splitlines()[-1] == "error: another process has ended before this one: see its message"
    assert "Traceback" not in printed
    second.communicate()


@pytest.mark.parametrize(
    ("height", "unit", "processes", "bounds"),
    [
        (10, 1, 3, (0, 3, 6, 10)),
        (30, 7, 2, (0, 14, 30)),
        # Fewer windows than processes: some have no rows.
        (7, 7, 2, (0, 0, 7)),
        (13, 7, 4, (0, 0, 7, 7, 13)),
    ],
)
def test_rows_of_processes(height: int, unit: int, processes: int, bounds: tuple[int, ...]) -> None:
    assert shard_rows(height, unit, Group(processes)).bounds == bounds


def test_rows_of_others() -> None:
    rows = RowSharding((0, 0, 7, 14, 17), Group(4))
    assert [one.tolist() for one in halo_rows(rows, 2)] == [[], [7, 8], [5, 6, 14, 15], [12, 13]]
    assert [one.tolist() for one in shifted_rows(rows, 3)] == [[], [7, 8, 9], [14, 15, 16], [0, 1, 2]]
    # Each row is computed by one process.
    assert torch.cat(shifted_rows(rows, 3)).unique().numel() == 9
