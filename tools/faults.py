"""A fault campaign: training runs that are killed, run out of disk space, are damaged or disturbed.

Every run must end just as one that nothing happened to, bit for bit, or be refused with one sentence and lose nothing.
Runs are those of `inlinevit train`, with a small model on the embedded images. Python and torch are imported once, and
each run is a forked process.

    python tools/faults.py                  # the whole campaign, as `make faults` runs it
    python tools/faults.py --kills 10       # a short one
"""

import argparse
import json
import os
import platform
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from inlinevit.cli import main
from inlinevit.cli.train import parse_config
from inlinevit.engine.checkpoints import MANIFEST, UNFINISHED, find_damage, read_manifest
from inlinevit.engine.trainer import Trainer
from inlinevit.tasks.classification.task import Classification

# 4 epochs of 16 steps; an evaluation after each.
SETTINGS = {
    "data.path": "embedded",
    "data.max_train_samples": "512",
    "data.batch_size": "32",
    "data.workers": "1",
    "model.name": "inline_deit_tiny",
    "model.img_size": "28",
    "model.in_chans": "1",
    "model.kwargs": "{patch_size: 7, embed_dim: 32, depth: 2, num_heads: 2}",
    "schedule.epochs": "4",
    "schedule.warmup": "1",
    "run.checkpoint_steps": "3",
    "run.ema_decay": "0.9",
    "run.log_every": "4",
}
# Parts of a message that only Python's own errors have.
TRACEBACK = "Traceback (most recent call last)"


@dataclass
class Row:
    """What came of one kind of fault.

    Attributes:
        fault: What was done.
        times: How often.
        same: Runs that ended just as one that nothing happened to.
        refused: Attempts that were refused with a sentence, and that lost nothing.
        failed: All others.
        seconds: How long it took.
    """

    fault: str
    times: int
    same: int
    refused: int
    failed: int
    seconds: float


class Process:
    """A forked process that trains.

    Args:
        output: Folder of the run.
        changes: Settings that differ from SETTINGS.
        file_limit: Bytes that a file may have; 0 = any number.
    """

    def __init__(self, output: Path, changes: dict[str, str] | None = None, file_limit: int = 0) -> None:
        self.log = output.with_name(f"{output.name}.log")
        arguments = command(output, changes)
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            stream = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(stream, 1)
            os.dup2(stream, 2)
            torch.set_num_threads(1)
            if file_limit:
                resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            code = 1
            try:
                main(arguments)
                code = 0
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 1
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)

    def running(self) -> bool:
        """Whether it has not ended yet."""
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return False
        return state != "Z"

    def kill(self, with_workers: bool) -> None:
        """SIGKILL, to its data workers too if so."""
        if with_workers:
            os.killpg(self.pid, signal.SIGKILL)
        else:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """The exit code."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    @property
    def printed(self) -> str:
        """What it has printed."""
        return self.log.read_text(errors="replace")

    def is_refused(self) -> bool:
        """Whether it ended with one sentence."""
        lines = [line for line in self.printed.splitlines() if line.startswith("error: ")]
        return len(lines) == 1 and TRACEBACK not in self.printed


def command(output: Path, changes: dict[str, str] | None = None) -> list[str]:
    """The arguments of `inlinevit` for a run."""
    settings = {**SETTINGS, "run.output": str(output), **(changes or {})}
    return ["train", *(word for name, value in settings.items() for word in (f"--{name}", value))]


def contents(output: Path) -> dict[str, Any]:
    """What a finished run has left: weights, the last checkpoint, metrics without what the clock decides."""
    last = max((output / "checkpoints").glob("step-*"))
    found: dict[str, Any] = {"results.json": (output / "results.json").read_bytes()}
    # Shards hold their tensors in any order.
    for file in (output / "model.safetensors", *last.glob("*.safetensors")):
        for name, tensor in safetensors.torch.load_file(file).items():
            found[f"{file.relative_to(output)} {name}"] = tensor.dtype, tensor.shape, tensor.numpy().tobytes()
    for file in last.glob("*.json"):
        if file.name != MANIFEST:
            found[str(file.relative_to(output))] = file.read_bytes()
    found["metrics"] = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    for line in found["metrics"]:
        line.pop("images_per_second", None)
    return found


class Campaign:
    """The faults, one kind after another.

    Args:
        folder: For the runs.
        kills: How many SIGKILLs there are in all.
        seed: Decides when and where.
    """

    def __init__(self, folder: Path, kills: int, seed: int) -> None:
        self.folder, self.kills, self.random = folder, kills, random.Random(seed)
        self.runs = 0
        reference = self.new_run()
        if Process(reference).wait() != 0:
            raise SystemExit("the run without any fault has failed")
        self.reference = contents(reference)

    def new_run(self) -> Path:
        """The folder of another run."""
        self.runs += 1
        return self.folder / f"run-{self.runs}"

    def ends_well(self, output: Path) -> bool:
        """Whether the same command, without faults, ends just as the run that nothing happened to."""
        process = Process(output)
        if process.wait() != 0:
            print(process.printed[-2000:], file=sys.stderr)
            return False
        return contents(output) == self.reference

    def killed(self, kind: str, moment: Callable[[Path], bool], share: float) -> Row:
        """SIGKILL, again and again, until a run has come to its end; as many runs as it takes.

        Args:
            kind: What to call it.
            moment: Whether it is the moment, given the folder of the run.
            share: Of all kills.
        """
        started, kills, same, failed = time.monotonic(), 0, 0, 0
        wanted = round(self.kills * share)
        while kills < wanted:
            output, at_once = self.new_run(), 0
            # A run is killed up to eight times, then it may end.
            while kills < wanted and at_once < 8:
                process, before = Process(output), newest(output)
                # At least one checkpoint further than last time, so that this comes to an end.
                while process.running() and not (newest(output) > before and moment(output)):
                    time.sleep(0.0005)
                if not process.running():
                    process.wait()
                    break
                process.kill(with_workers=self.random.random() < 0.5)
                process.wait()
                kills, at_once = kills + 1, at_once + 1
            if self.ends_well(output):
                same += 1
            else:
                failed += 1
        return Row(f"SIGKILL {kind}", kills, same, 0, failed, time.monotonic() - started)

    def random_moment(self) -> Row:
        """SIGKILL at any moment."""
        when = 0.0

        def moment(output: Path) -> bool:
            nonlocal when
            if when == 0.0:
                when = time.monotonic() + self.random.uniform(0, 0.4)
            if time.monotonic() < when:
                return False
            when = 0.0
            return True

        return self.killed("at a random moment", moment, 0.4)

    def while_saving(self) -> Row:
        """SIGKILL while a checkpoint is written."""
        return self.killed("while a checkpoint is written", is_saving, 0.3)

    def while_evaluating(self) -> Row:
        """SIGKILL during an evaluation."""
        return self.killed("during an evaluation", is_evaluating, 0.3)

    def full_disk(self) -> Row:
        """The disk is full for files of more than a certain size: checkpoints, logs or weights cannot be written."""
        started, same, refused, failed = time.monotonic(), 0, 0, 0
        sizes = [200, 400, 900, 2_000, 5_000, 20_000, 60_000, 100_000, 150_000, 200_000]
        for size in sizes:
            output = self.new_run()
            # Half of them happen to a run that has checkpoints already.
            if self.random.random() < 0.5:
                process = Process(output)
                while process.running() and newest(output) < 6:
                    time.sleep(0.005)
                process.kill(with_workers=True)
                process.wait()
            # Without data workers, whose shared memory would be limited, too.
            process = Process(output, {"data.workers": "0"}, file_limit=size)
            code = process.wait()
            if code != 0 and not process.is_refused():
                print(process.printed[-2000:], file=sys.stderr)
                failed += 1
                continue
            refused += code != 0
            if self.ends_well(output):
                same += 1
            else:
                failed += 1
        return Row("full disk", len(sizes), same, refused, failed, time.monotonic() - started)

    def bit_flips(self) -> Row:
        """A flipped bit in each file of the newest checkpoint: found, and the one before is resumed."""
        started, same, refused, failed, times = time.monotonic(), 0, 0, 0, 0
        output = self.new_run()
        process = Process(output, {"run.keep_checkpoints": "3"})
        # Three checkpoints or more, the newest of which has an evaluation.
        while process.running() and not is_evaluated(output / "checkpoints" / "step-00000032"):
            time.sleep(0.001)
        time.sleep(0.02)
        process.kill(with_workers=True)
        process.wait()
        path = output / "checkpoints" / "step-00000032"
        for later in (path for path in (output / "checkpoints").glob("step-*") if path.name > "step-00000032"):
            shutil.rmtree(later)
        files = sorted(file.name for file in path.iterdir())
        for name in files:
            content = (path / name).read_bytes()
            for _ in range(200):
                spoilt = bytearray(content)
                place = self.random.randrange(len(spoilt))
                spoilt[place] ^= 1 << self.random.randrange(8)
                (path / name).write_bytes(spoilt)
                times += 1
                # White space of a manifest that became other white space changes nothing.
                is_same = name == MANIFEST and same_json(bytes(spoilt), content)
                if find_damage(path) is None and not is_same:
                    failed += 1
            (path / name).write_bytes(content)
        assert find_damage(path) is None
        for name in files:
            copy = self.new_run()
            shutil.copytree(output, copy, symlinks=True)
            damaged = bytearray((checkpoint(copy) / name).read_bytes())
            damaged[self.random.randrange(len(damaged))] ^= 1 << self.random.randrange(7)
            (checkpoint(copy) / name).write_bytes(damaged)
            process = Process(copy, {"run.keep_checkpoints": "3"})
            if process.wait() == 0 and contents(copy) == self.reference:
                same += 1
            else:
                failed += 1
        copy = self.new_run()
        shutil.copytree(output, copy, symlinks=True)
        for path in (copy / "checkpoints").glob("step-*"):
            (path / "model.safetensors").write_bytes(b"")
        before = sorted(os.listdir(copy / "checkpoints"))
        process = Process(copy)
        if process.wait() == 1 and process.is_refused() and sorted(os.listdir(copy / "checkpoints")) == before:
            refused += 1
        else:
            failed += 1
        return Row(
            f"bit flips in {len(files)} files of a checkpoint", times, same, refused, failed, time.monotonic() - started
        )

    def concurrent_runs(self) -> Row:
        """Other runs are started in the folder of one: they are refused, and the first does not notice."""
        started, same, refused, failed, times = time.monotonic(), 0, 0, 0, 0
        for _ in range(3):
            output = self.new_run()
            first = Process(output)
            while first.running() and newest(output) < 3:
                time.sleep(0.002)
            for resume in ("auto", "never"):
                if not first.running():
                    break
                other = Process(self.folder / "link", {"run.resume": resume, "run.output": str(output)})
                times += 1
                if other.wait() == 1 and other.is_refused():
                    refused += 1
                else:
                    failed += 1
            if first.wait() == 0 and contents(output) == self.reference:
                same += 1
            else:
                failed += 1
        return Row("a second run in the same folder", times, same, refused, failed, time.monotonic() - started)

    def killed_ranks(self, sharded: bool) -> Row:
        """SIGKILL to a rank of a job under torchrun, which starts all of them again."""
        started, kills = time.monotonic(), 0
        changes = {"data.batch_size": "16", "run.ema_decay": "null", "run.fsdp": str(sharded).lower()}
        first, second = self.new_run(), self.new_run()
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        launcher += ["--max-restarts", "20", "-m", "inlinevit"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        failed = (
            subprocess.run([*launcher, *command(first, changes)], env=environment, capture_output=True).returncode != 0
        )
        job = subprocess.Popen(
            [*launcher, *command(second, changes)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        before = -1
        while job.poll() is None and kills < max(2, self.kills // 20):
            ranks = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
            if len(ranks) == 2 and newest(second) > before:
                before = newest(second)
                os.kill(int(ranks[self.random.randrange(2)]), signal.SIGKILL)
                kills += 1
            time.sleep(0.01)
        output, _ = job.communicate()
        if job.returncode != 0:
            print(output.decode(errors="replace")[-3000:], file=sys.stderr)
        same = not failed and job.returncode == 0 and contents(first) == contents(second)
        name = "SIGKILL to a rank of a sharded job" if sharded else "SIGKILL to a rank of a job"
        return Row(
            f"{name} under torchrun --max-restarts", kills, int(same), 0, int(not same), time.monotonic() - started
        )


def checkpoint(output: Path) -> Path:
    """The newest checkpoint of a run."""
    return max((output / "checkpoints").glob("step-*"))


def newest(output: Path) -> int:
    """The step of the newest checkpoint of a run; -1 if there is none."""
    names = os.listdir(output / "checkpoints") if (output / "checkpoints").is_dir() else []
    return max((int(name.removeprefix("step-")) for name in names if name.startswith("step-")), default=-1)


def is_saving(output: Path) -> bool:
    """Whether a checkpoint is being written."""
    return any(name.startswith(UNFINISHED) for name in os.listdir(output / "checkpoints"))


def is_evaluating(output: Path) -> bool:
    """Whether the newest checkpoint is one of the end of an epoch, and has no evaluation yet."""
    step = newest(output)
    folder = output / "checkpoints" / f"step-{step:08d}"
    return step > 0 and step % 16 == 0 and not is_evaluated(folder)


def is_evaluated(checkpoint: Path) -> bool:
    """Whether a checkpoint has the evaluation of its step."""
    try:
        progress, _ = read_manifest(checkpoint)
    except (ValueError, OSError):
        return False
    return progress.evaluated_step == progress.step


def same_json(one: bytes, other: bytes) -> bool:
    """Whether two files mean the same."""
    try:
        return bool(json.loads(one) == json.loads(other))
    except ValueError:
        return False


def table(rows: list[Row]) -> str:
    """The rows as Markdown."""
    lines = ["| fault | count | runs that ended bit-equal | refused with a message | failed | seconds |"]
    lines.append("|---|---:|---:|---:|---:|---:|")
    for row in rows:
        lines.append(f"| {row.fault} | {row.times:,} | {row.same} | {row.refused} | {row.failed} | {row.seconds:.0f} |")
    total = sum(row.seconds for row in rows)
    lines.append(
        f"| **all** | {sum(row.times for row in rows):,} | {sum(row.same for row in rows)} | "
        f"{sum(row.refused for row in rows)} | {sum(row.failed for row in rows)} | {total:.0f} |"
    )
    return "\n".join(lines)


def run() -> int:
    """Run the campaign; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="SIGKILLs in all")
    parser.add_argument("--seed", type=int, default=0, help="decides when and where")
    parser.add_argument("--output", type=Path, default=None, help="JSON file for the table")
    options = parser.parse_args()
    # What is imported here need not be imported by each run.
    Trainer, Classification, parse_config(command(Path("unused"))[1:])
    with tempfile.TemporaryDirectory() as folder:
        campaign = Campaign(Path(folder), options.kills, options.seed)
        rows = []
        for fault in (
            campaign.random_moment,
            campaign.while_saving,
            campaign.while_evaluating,
            campaign.full_disk,
            campaign.bit_flips,
            campaign.concurrent_runs,
            lambda: campaign.killed_ranks(sharded=False),
            lambda: campaign.killed_ranks(sharded=True),
        ):
            rows.append(fault())
            print(f"{rows[-1].fault}: {rows[-1].times} times, {rows[-1].failed} failed", file=sys.stderr, flush=True)
    print(table(rows))
    if options.output is not None:
        facts = {"seed": options.seed, "python": platform.python_version(), "torch": torch.__version__}
        options.output.write_text(json.dumps({**facts, "rows": [asdict(row) for row in rows]}, indent=2) + "\n")
    return 1 if any(row.failed for row in rows) else 0


if __name__ == "__main__":
    sys.exit(run())
