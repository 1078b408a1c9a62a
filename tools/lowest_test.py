"""Run a part of the tests with the oldest versions that pyproject.toml allows: `make test-lowest`.

Direct dependencies get the versions of their lower bounds; what these need in turn is chosen by pip. The environment is
build/lowest. `--print` prints the constraints only. Arguments after -- are passed to pytest.
"""

import argparse
import os
import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HOME = ROOT / "build" / "lowest"
EXTRAS = ("cli", "train")
# A part that touches every direct dependency of these extras, in a few minutes.
TESTS = (
    "tests/test_import.py",
    "tests/ops/test_inline.py",
    "tests/layers/test_inline_attention.py",
    "tests/models/test_golden.py",
    "tests/models/test_checkpoint.py",
    "tests/cli/test_models.py",
    "tests/engine/test_trainer.py",
)
BOUND = re.compile(r"([A-Za-z0-9._-]+)(\[[a-z,]+\])?>=([0-9.]+)")


def lower_bounds() -> dict[str, str]:
    """Return the lower bound of each direct dependency of the package and of the extras that are tested."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(one for extra in EXTRAS for one in project["optional-dependencies"][extra])]
    found = (BOUND.fullmatch(one) for one in wanted if not one.startswith("inlinevit["))
    return {match[1]: match[3] for match in found if match is not None}


def main() -> None:
    """Install and test."""
    parser = argparse.ArgumentParser(description="Test with the oldest dependencies that are allowed.")
    parser.add_argument("--print", action="store_true", help="print the constraints only")
    parser.add_argument("tests", nargs="*", help="arguments of pytest, after --")
    settings = parser.parse_args()
    constraints = "".join(f"{name}=={version}.*\n" for name, version in lower_bounds().items())
    if settings.print:
        print(constraints, end="")
        return
    HOME.mkdir(parents=True, exist_ok=True)
    (HOME / "constraints.txt").write_text(constraints)
    environment = HOME / "venv"
    if not environment.exists():
        venv.create(environment, with_pip=True)
    python = str(environment / "bin" / "python")
    pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    tests = ["pytest>=8", "pytest-timeout>=2.3", "pytest-xdist>=3.5", "hypothesis>=6.100"]
    subprocess.run([*pip, "-c", str(HOME / "constraints.txt"), f"{ROOT}[{','.join(EXTRAS)}]", *tests], check=True)
    subprocess.run([python, "-m", "pip", "list", "--format", "freeze"], check=True)
    # The installed package, not the folder src.
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(settings.tests or TESTS)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    environ.pop("PYTHONPATH", None)
    sys.exit(subprocess.run(command, cwd=ROOT, env=environ).returncode)


if __name__ == "__main__":
    main()
