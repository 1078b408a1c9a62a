"""The toy job in processes of their own, and what tests ask about its results."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from tests import ROOT

TOY = Path(__file__).with_name("toy.py")
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
}


class Forked:
    """Processes that run a job.

    Args:
        server: Who forked them.
        ids: Their ids.
        output: What they print goes here.
    """

    def __init__(self, server: subprocess.Popen[str], ids: list[int], output: Path) -> None:
        self.server, self.ids, self.output = server, ids, output
        self.codes: list[int] | None = None

    def kill(self, number: signal.Signals, *, workers: bool = False, process: int = 0) -> None:
        """Send a signal to a process, and to its workers if so."""
        if workers:
            os.killpg(self.ids[process], number)
        else:
            os.kill(self.ids[process], number)

    def wait(self) -> int:
        """The exit code, -9 after SIGKILL; that of the first process that did not end well, if there are several."""
        if self.codes is None:
            assert self.server.stdout is not None
            self.codes = json.loads(self.server.stdout.readline())
        return next((code for code in self.codes if code != 0), 0)

    @property
    def printed(self) -> str:
        return self.output.read_text()


class Server:
    """Forks processes that have everything imported."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(TOY)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
        )

    def start(self, settings: dict[str, Any], *, job: str = "train", processes: int = 1) -> Forked:
        """Start processes; one call after another."""
        folder = Path(settings["run"]["output"])
        return self._start(job, settings, folder.with_name(f"{folder.name}.log"), processes)

    def script(
        self, code: str, arguments: list[str], output: Path, *, modules: tuple[str, ...] = (), processes: int = 1
    ) -> Forked:
        """Start processes that run code.

        Args:
            code: Python.
            arguments: `sys.argv` from 1 on.
            output: What they print goes here.
            modules: What the server imports first, once, so that the processes need not.
            processes: Their number; with several, they have the environment that torchrun gives.
        """
        return self._start("script", {"code": code, "arguments": arguments}, output, processes, modules)

    def _start(
        self, job: str, settings: dict[str, Any], output: Path, processes: int, modules: tuple[str, ...] = ()
    ) -> Forked:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        output.unlink(missing_ok=True)
        request = {"job": job, "settings": settings, "processes": processes, "modules": modules, "output": str(output)}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return Forked(self.process, json.loads(self.process.stdout.readline()), output)

    def run(self, settings: dict[str, Any], *, job: str = "train", processes: int = 1) -> Forked:
        """Start processes and see them end well."""
        forked = self.start(settings, job=job, processes=processes)
        assert forked.wait() == 0, forked.printed
        return forked


def final_tensors(output: Path) -> dict[str, torch.Tensor]:
    """All that the last checkpoint and the exported weights of a run hold, by name."""
    last = sorted((output / "checkpoints").glob("step-*"))[-1]
    tensors = {f"export {k}": v for k, v in safetensors.torch.load_file(output / "model.safetensors").items()}
    for file in sorted(last.glob("*.safetensors")):
        tensors |= {f"{file.stem} {name}": value for name, value in safetensors.torch.load_file(file).items()}
    return tensors


def metric_lines(output: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what the clock decides."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "images_per_second"} for line in lines]


def assert_same_run(output: Path, reference: Path) -> None:
    """Two runs came to the same end, bit for bit, and tell the same."""
    ours, theirs = final_tensors(output), final_tensors(reference)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert metric_lines(output) == metric_lines(reference)
    assert (output / "results.json").read_text() == (reference / "results.json").read_text()
