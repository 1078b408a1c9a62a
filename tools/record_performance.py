"""Make the measurements of docs/performance.md: python tools/record_performance.py [NAME ...] [--again].

Each is a separate command of a few minutes. Existing records in docs/performance/ are kept unless --again is given, so
that an interrupted recording resumes. `make bench` then puts the records into the page.
"""

import argparse
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "docs" / "performance"
RAW = ROOT / "runs" / "performance"

BENCH = "-m inlinevit bench"
# The last revision without native kernels.
BEFORE_KERNELS = "d036cfb"


@dataclass(frozen=True)
class Record:
    """A measurement.

    Attributes:
        command: The words after `python`.
        minutes: About how long it takes on two cores.
        threads: Threads of each runtime; None = those of --threads.
    """

    command: str
    minutes: int
    threads: int | None = None


# The most important ones first.
RESOLUTION = f"{BENCH} resolution --sizes 224 384 640 1024"
PVT = "--models inline_pvt_small pvt_small --sizes 224 512 --batches 1"
# Softmax by the same native blocks.
NATIVE_SOFTMAX = " ".join(
    f"inline_deit_tiny{attention}@{mode}"
    for attention in ("", ":attention=softmax")
    for mode in ("optimized", "optimized-int8")
)
# Files as `inlinevit export` writes them, of the same architecture with InLine and with softmax attention.
EXPORTED = "--models inline_deit_tiny inline_deit_tiny:attention=softmax --sizes 224 640 1024 --batches 1"
EXPORTED_MODES = " ".join(
    f"exported-{name}" for name in ("onnxruntime", "onnxruntime-int8", "openvino", "openvino-int8")
)
ALL_RUNTIMES = "eager compiled optimized optimized-int8 openvino openvino-int8 onnxruntime"
COMMANDS = {
    "resolution": Record(
        f"{RESOLUTION} --batches 1 --modes eager compiled optimized openvino --rounds 40 --patience 15", 6
    ),
    "resolution-int8": Record(
        f"{RESOLUTION} --batches 1 --modes optimized optimized-int8 openvino-int8 --rounds 40 --patience 12", 5
    ),
    "resolution-batch8": Record(
        f"{RESOLUTION} --batches 8 --modes eager optimized openvino --rounds 20 --patience 12", 5
    ),
    "native-softmax": Record(
        f"{BENCH} model --models {NATIVE_SOFTMAX} --sizes 224 384 640 1024 --batches 1 --rounds 30 --patience 10", 2
    ),
    "pvt": Record(f"{BENCH} model {PVT} --modes eager optimized openvino --rounds 30 --patience 12", 2),
    "window": Record(f"{BENCH} window --windows 56 28 14 7 --modes optimized openvino --rounds 15 --patience 15", 4),
    "layer": Record(f"{BENCH} layer --tokens 196 4096 16384 --modes eager compiled --rounds 30 --patience 10", 3),
    "training": Record(
        f"tools/against_revision.py {BEFORE_KERNELS} --batch 8 --backward --modes eager --rounds 10 --patience 15", 2
    ),
    # One thread: one that waits for another takes processor time as well.
    "training-step": Record(
        "tools/training_step.py cifar10 --attentions inline softmax --modes eager compiled --rounds 150", 5, threads=1
    ),
    "accuracy": Record(f"{BENCH} accuracy --modes optimized openvino --rounds 10 --patience 5", 6),
    "runtimes": Record(f"{BENCH} model --sizes 224 --batches 1 --modes {ALL_RUNTIMES} --rounds 50 --patience 15", 2),
    "export": Record(f"{BENCH} model {EXPORTED} --modes {EXPORTED_MODES} --rounds 20 --patience 12", 12),
    # For docs/choosing_attention.md: accuracy over time.
    "attentions": Record(f"{BENCH} attentions --modes eager optimized --rounds 20 --patience 20", 5),
    "detection": Record(f"{BENCH} detection --rounds 3", 4),
    "detection-training": Record(f"{BENCH} detection --backward --rounds 2", 12),
}


def main() -> None:
    """Make the missing measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(COMMANDS)}; all by default")
    parser.add_argument("--again", action="store_true", help="measure again what is recorded")
    parser.add_argument("--threads", type=int, default=2, help="threads of each runtime")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in COMMANDS]
    if unknown:
        parser.error(f"there is no measurement {unknown[0]!r}: choose among {', '.join(COMMANDS)}")
    names = [name for name in options.names or COMMANDS if options.again or not (RECORDS / f"{name}.json").exists()]
    for name in options.names or COMMANDS:
        if name not in names:
            print(f"{name}: kept")
    print(f"{len(names)} to measure, in about {sum(COMMANDS[name].minutes for name in names)} minutes", flush=True)
    for name in names:
        threads = COMMANDS[name].threads or options.threads
        words = [*shlex.split(COMMANDS[name].command), "--threads", str(threads)]
        words += ["--output", str(RAW), "--name", name]
        print(f"{name}, about {COMMANDS[name].minutes} minutes: {shlex.join(['python', *words])}", flush=True)
        started = time.monotonic()
        subprocess.run([sys.executable, *words], cwd=ROOT, check=True)
        RECORDS.mkdir(parents=True, exist_ok=True)
        shutil.copy(RAW / f"{name}.json", RECORDS / f"{name}.json")
        print(f"{name}: recorded in {(time.monotonic() - started) / 60:.1f} minutes", flush=True)


if __name__ == "__main__":
    main()
