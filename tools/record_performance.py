"""Make the measurements of docs/performance.md: python tools/record_performance.py [NAME ...] [--again].

Each is a separate command. Existing records in docs/performance/ are kept unless --again is given, so that an
interrupted recording resumes. `make bench` then puts the records into the page.
"""

import argparse
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "docs" / "performance"
RAW = ROOT / "runs" / "performance"

BENCH = "-m inlinevit bench"
COMMANDS = {
    "resolution": f"{BENCH} resolution",
    "window": f"{BENCH} window --windows 56 7",
    "pvt": f"{BENCH} model --models inline_pvt_small pvt_small --sizes 224 512 --batches 1",
    "layer": f"{BENCH} layer --tokens 196 576 1600 4096 16384",
    "revision": "tools/against_revision.py",
    "revision-training": "tools/against_revision.py --backward --modes eager",
    "scaling": f"{BENCH} scaling --sizes 224 448 1024 2048 --modes eager",
    "accuracy": f"{BENCH} accuracy --modes eager",
    "detection": f"{BENCH} detection",
    "detection-training": f"{BENCH} detection --backward",
}


def main() -> None:
    """Make the missing measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(COMMANDS)}; all by default")
    parser.add_argument("--again", action="store_true", help="measure again what is recorded")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch")
    parser.add_argument("--rounds", type=int, default=10, help="timed calls of each candidate, at most")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in COMMANDS]
    if unknown:
        parser.error(f"there is no measurement {unknown[0]!r}: choose among {', '.join(COMMANDS)}")
    for name in options.names or COMMANDS:
        record = RECORDS / f"{name}.json"
        if record.exists() and not options.again:
            print(f"{name}: kept")
            continue
        words = [*shlex.split(COMMANDS[name]), "--threads", str(options.threads), "--rounds", str(options.rounds)]
        words += ["--output", str(RAW), "--name", name]
        print(f"{name}: {shlex.join(['python', *words])}", flush=True)
        subprocess.run([sys.executable, *words], cwd=ROOT, check=True)
        RECORDS.mkdir(parents=True, exist_ok=True)
        shutil.copy(RAW / record.name, record)


if __name__ == "__main__":
    main()
