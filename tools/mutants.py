"""Check that the tests notice mistakes: make one deliberate mistake at a time, and run the tests that should fail.

    python tools/mutants.py                  # all mutants, and a table
    python tools/mutants.py covariance ema   # those whose names contain one of these words
    python tools/mutants.py --list

A mutant is killed if a test fails. One that survives shows a gap in the tests. The working tree is not touched: each
mutant is made in a copy of src/.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIST = ROOT / "tools" / "mutants.toml"


@dataclass
class Mutant:
    """A deliberate mistake.

    Attributes:
        name: What is wrong.
        file: The file below src/inlinevit.
        old: The code; it occurs once in the file.
        new: What it is replaced with.
        tests: The test files or folders, below tests/, that should notice.
    """

    name: str
    file: str
    old: str
    new: str
    tests: list[str]

    def apply(self, source: Path) -> None:
        """Make the mistake in a copy of src/."""
        path = source / "inlinevit" / self.file
        text = path.read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.old!r} occurs {text.count(self.old)} times in {self.file}, not once")
        path.write_text(text.replace(self.old, self.new))


def read_mutants() -> list[Mutant]:
    """The mutants of the list."""
    return [Mutant(**record) for record in tomllib.loads(LIST.read_text())["mutant"]]


def is_killed(mutant: Mutant, jobs: int) -> bool:
    """Whether a test fails."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        mutant.apply(source)
        tests = [str(ROOT / "tests" / name) for name in mutant.tests]
        options = ["-x", "-q", "-n", str(jobs), "-p", "no:cacheprovider", "-m", "not slow"]
        environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "pytest", *options, *tests]
        ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    # 1: tests failed; 2: a test file could not be imported, which a mutant may cause as well.
    if ended.returncode not in (0, 1, 2):
        raise RuntimeError(f"{mutant.name}: pytest ended with {ended.returncode}\n{ended.stdout[-2000:]}{ended.stderr}")
    return ended.returncode != 0


def main() -> int:
    """Run the mutants; returns 1 if one survives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="WORD", help="only mutants whose names contain one of these")
    parser.add_argument("--list", action="store_true", help="list the mutants, check that they apply, run nothing")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="test processes")
    parser.add_argument("--output", type=Path, help="JSON file for the outcome; what it has already is not run again")
    options = parser.parse_args()
    mutants = [one for one in read_mutants() if not options.words or any(word in one.name for word in options.words)]
    if options.list:
        for mutant in mutants:
            with tempfile.TemporaryDirectory() as folder:
                shutil.copytree(ROOT / "src", Path(folder) / "src", ignore=shutil.ignore_patterns("__pycache__"))
                mutant.apply(Path(folder) / "src")
            print(f"{mutant.file}: {mutant.name}")
        return 0
    done = json.loads(options.output.read_text()) if options.output and options.output.exists() else {}
    for mutant in mutants:
        if mutant.name not in done:
            started = time.monotonic()
            killed = is_killed(mutant, options.jobs)
            done[mutant.name] = {**asdict(mutant), "killed": killed, "seconds": round(time.monotonic() - started, 1)}
            if options.output:
                options.output.write_text(json.dumps(done, indent=1))
        outcome = done[mutant.name]
        print(f"{'killed' if outcome['killed'] else 'SURVIVED'} in {outcome['seconds']} s: {mutant.name}", flush=True)
    survivors = [mutant.name for mutant in mutants if not done[mutant.name]["killed"]]
    print(f"{len(mutants) - len(survivors)} of {len(mutants)} mutants are killed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
