"""Fuzz everything that reads files of others.

Each target gets inputs that are almost right. An input must be accepted with a valid result, or refused with one
sentence (ValueError or OSError): no other error, no crash of the process, nothing slow or large, and no code that runs.
Targets run in processes of their own, so that a crash is counted. The same seed makes the same inputs.

    python tools/fuzz.py                            # 10,000 inputs for each target
    python tools/fuzz.py --inputs 300 coco images   # a short run of two targets
    python tools/fuzz.py --replay FILE weights      # one input again, with its traceback
"""

import argparse
import json
import os
import platform
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, TextIO

from fuzzing import NAMES
from fuzzing.contract import ACCEPTED, REFUSED, Outcome, Watch, judge

if TYPE_CHECKING:
    from fuzzing.targets import Target

# After so many seconds without a result, a worker hangs.
PATIENCE = 120.0
MOST_FINDINGS = 20


@dataclass
class Row:
    """What came of a target.

    Attributes:
        target: Its name.
        inputs: How many there were.
        accepted: With a valid result.
        refused: With one sentence.
        crashes: Wrong errors, wrong results, deaths of the process, hangs, and what was slow or large.
        code: Inputs that made code run.
        seconds: How long it took.
        findings: What broke the promise, by its kind.
    """

    target: str
    inputs: int = 0
    accepted: int = 0
    refused: int = 0
    crashes: int = 0
    code: int = 0
    seconds: float = 0.0
    findings: dict[str, int] = field(default_factory=dict)

    def add(self, outcome: Outcome) -> None:
        """Count an outcome."""
        self.inputs += 1
        self.accepted += outcome.kind == ACCEPTED
        self.refused += outcome.kind == REFUSED
        if outcome.is_finding:
            self.code += outcome.kind == "code"
            self.crashes += outcome.kind != "code"
            self.findings[outcome.kind] = self.findings.get(outcome.kind, 0) + 1


def make_target(name: str, folder: Path) -> "Target":
    """A target that writes into a folder."""
    from fuzzing.targets import TARGETS

    return TARGETS[name](folder)


def input_of(target: "Target", name: str, seed: int, index: int) -> bytes:
    """One input, the same each time."""
    return target.make(Random(f"{name}/{seed}/{index}"))


def work(name: str, seed: int, first: int, last: int, folder: Path) -> None:
    """Run inputs in this process, and print a line of JSON for each.

    Args:
        name: The target.
        seed: Of the inputs.
        first: The first input.
        last: The one after the last.
        folder: Where everything is written.
    """
    target = make_target(name, folder)
    # What is imported or made once is not caused by an input.
    path = folder / f"input{target.ending}"
    for content in target.good():
        path.write_bytes(content)
        outcome = judge(target.run, path)
        if outcome.kind != ACCEPTED:
            raise RuntimeError(f"a good input of {name} is not accepted: {outcome.kind} {outcome.detail}")
    watch, marker = Watch(folder), folder / "marker"
    # Payloads are relative to this folder, or name it.
    os.chdir(folder)
    for index in range(first, last):
        path.write_bytes(input_of(target, name, seed, index))
        outcome = judge(target.run, path, watch, marker)
        marker.unlink(missing_ok=True)
        print(json.dumps([index, outcome.kind, outcome.detail if outcome.is_finding else ""]), flush=True)


def fuzz(name: str, seed: int, inputs: int, findings: Path) -> Row:
    """Run a target in processes of its own; one that dies or hangs is replaced by the next.

    Args:
        name: The target.
        seed: Of the inputs.
        inputs: How many.
        findings: Folder for inputs that broke the promise.
    """
    row, start, index = Row(name), time.monotonic(), 0
    while index < inputs:
        with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
            command = [sys.executable, __file__, "--worker", name, str(seed), str(index), str(inputs), folder]
            worker = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for outcome in outcomes(worker):
                row.add(outcome)
                if outcome.is_finding and row.crashes + row.code <= MOST_FINDINGS:
                    keep(name, index, outcome, next(Path(folder).glob("input.*"), None), findings, seed)
                index += 1
                if index % 1000 == 0:
                    print(f"{name}: {index} of {inputs}", file=sys.stderr)
    row.seconds = time.monotonic() - start
    return row


def read_lines(stream: TextIO, lines: "queue.Queue[str]") -> None:
    """Pass on lines as they come, then an empty one."""
    for line in stream:
        lines.put(line)
    lines.put("")


def outcomes(worker: "subprocess.Popen[str]") -> Iterator[Outcome]:
    """The outcomes that a worker prints and, if it dies or hangs, one for the input that was to blame."""
    lines: queue.Queue[str] = queue.Queue()
    errors: list[str] = []
    assert worker.stdout is not None
    assert worker.stderr is not None
    out, err = worker.stdout, worker.stderr
    readers = [
        threading.Thread(target=read_lines, args=(out, lines)),
        threading.Thread(target=lambda: errors.extend(err.readlines())),
    ]
    for reader in readers:
        reader.start()
    hung = False
    while True:
        try:
            line = lines.get(timeout=PATIENCE)
        except queue.Empty:
            hung = True
            worker.kill()
            break
        if not line:
            break
        _, kind, detail = json.loads(line)
        yield Outcome(kind, detail)
    code = worker.wait()
    for reader in readers:
        reader.join()
    if hung:
        yield Outcome("hang", f"no result after {PATIENCE:.0f} seconds")
    elif code < 0:
        yield Outcome(f"death by signal {-code}", "".join(errors)[-3000:])
    elif code > 0:
        raise RuntimeError("a worker has failed: " + "".join(errors)[-3000:])


def keep(name: str, index: int, outcome: Outcome, file: Path | None, findings: Path, seed: int) -> None:
    """Save an input that broke the promise, and what came of it."""
    folder = findings / name
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{seed}-{index}-{''.join(letter if letter.isalnum() else '-' for letter in outcome.kind)}"
    with tempfile.TemporaryDirectory(prefix="fuzz-") as aside:
        content = input_of(make_target(name, Path(aside)), name, seed, index)
    (folder / f"{stem}{file.suffix if file else ''}").write_bytes(content)
    (folder / f"{stem}.txt").write_text(f"{outcome.kind}\n{outcome.detail}\n", errors="backslashreplace")
    print(f"{name}: input {index}: {outcome.kind}: see {folder / stem}.txt", file=sys.stderr)


def table(rows: list[Row]) -> str:
    """The rows as a Markdown table."""
    lines = [
        "| target | inputs | accepted | refused | crashes | code runs | seconds |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        counts = (row.inputs, row.accepted, row.refused, row.crashes, row.code)
        lines.append(f"| {row.target} | {' | '.join(f'{count:,}' for count in counts)} | {row.seconds:,.0f} |")
    return "\n".join(lines)


def main() -> int:
    """Fuzz the targets that are named, and print a table; 1 if anything was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"any of {', '.join(NAMES)}; all by default")
    parser.add_argument("--inputs", type=int, default=10_000, help="inputs for each target")
    parser.add_argument("--seed", type=int, default=0, help="another one makes other inputs")
    parser.add_argument("--findings", type=Path, default=Path("runs/fuzz"), help="folder for inputs that are findings")
    parser.add_argument("--replay", type=Path, help="run this one input of the target that is named")
    settings = parser.parse_args()
    unknown = [name for name in settings.targets if name not in NAMES]
    if unknown or (settings.replay and len(settings.targets) != 1):
        parser.error(f"there is no target {unknown[0]}" if unknown else "name the target of the input")
    if settings.replay:
        with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
            outcome = judge(make_target(settings.targets[0], Path(folder)).run, settings.replay, Watch(Path(folder)))
        print(f"{outcome.kind}\n{outcome.detail}")
        return int(outcome.is_finding)
    rows = [
        fuzz(name, settings.seed, settings.inputs, settings.findings.resolve()) for name in settings.targets or NAMES
    ]
    print(table(rows))
    print(f"\nseed {settings.seed}, Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}")
    for row in rows:
        for kind, count in sorted(row.findings.items()):
            print(f"finding: {row.target}: {kind} ({count})")
    return int(any(row.findings for row in rows))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker_name, worker_seed, first_input, last_input, worker_folder = sys.argv[2:]
        work(worker_name, int(worker_seed), int(first_input), int(last_input), Path(worker_folder))
    else:
        sys.exit(main())
