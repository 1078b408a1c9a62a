"""Build the wheel and the sdist, install the wheel into an empty environment, and try it: `make dist-test`.

The environment is build/dist-test; it has the package, its extra `explore`, and nothing of this repository. The sdist
must hold what its own tests and documentation need. Takes some minutes, most of them to install torch.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
HOME = ROOT / "build" / "dist-test"
SMALL = [
    *("--schedule.steps", "2", "--schedule.warmup", "0", "--data.max_train_samples", "100", "--data.workers", "0"),
    *("--model.kwargs.depth", "1", "--model.kwargs.embed_dim", "16", "--model.kwargs.num_heads", "2"),
]
# What a user tries first; the working directory is an empty folder.
COMMANDS = (
    ["--version"],
    ["info"],
    ["models"],
    ["recipes"],
    ["train", "--config", "embedded", "--run.output", "run", *SMALL],
    ["eval", "run"],
    ["hub", "run", "--output", "shared"],
    ["predict", "local-dir:shared", "photo.png"],
    ["explore", "run", "local-dir:shared", "--images", "photo.png", "--static", "site"],
)
SCRIPT = """
import inlinevit, numpy, timm, torch
from PIL import Image
assert "site-packages" in inlinevit.__file__, inlinevit.__file__
Image.fromarray(numpy.zeros((40, 50, 3), numpy.uint8)).save("photo.png")
model = timm.create_model("inline_deit_tiny")
assert model(torch.randn(1, 3, 64, 96)).shape == (1, 1000)
print("inlinevit", inlinevit.__version__, "of", inlinevit.__file__)
"""
# Files of the page that the last command writes.
PAGES = ("site/index.html", "site/web/app.js", "site/web/style.css", "site/state.json")
# Files of the sdist that are not code.
NEEDED = ("README.md", "CHANGELOG.md", "CITATION.cff", "LICENSE", "Makefile", "constraints.txt", "mkdocs.yml", "docs")


def run(command: list[str], **options: object) -> None:
    """Print and run a command; end if it fails."""
    print("+", " ".join(command), flush=True)
    if subprocess.run(command, **options).returncode != 0:  # type: ignore[call-overload]
        sys.exit(f"failed: {' '.join(command)}")


def build() -> tuple[Path, Path]:
    """Build both archives, and return them."""
    shutil.rmtree(DIST, ignore_errors=True)
    run([sys.executable, "-m", "hatchling", "build", "-d", str(DIST)], cwd=ROOT)
    (wheel,), (sdist,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    return wheel, sdist


def check_sdist(sdist: Path) -> None:
    """Refuse an sdist that lacks files, or holds some of this machine."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    missing = [name for name in NEEDED if not any(one == name or one.startswith(f"{name}/") for one in names)]
    foreign = [name for name in names if name.startswith(("runs", "build", ".venv")) or name.endswith((".so", ".pyc"))]
    if missing or foreign:
        sys.exit(f"the sdist lacks {missing or 'nothing'} and holds {foreign or 'nothing'} that does not belong there")
    print(f"{sdist.name}: {len(names)} files, {sdist.stat().st_size / 2**20:.1f} MB")


def main() -> None:
    """Build, install, try."""
    parser = argparse.ArgumentParser(description="Build the package, install it into an empty environment, and try it.")
    parser.add_argument("--keep", action="store_true", help="use the environment of the last time again")
    settings = parser.parse_args()
    wheel, sdist = build()
    check_sdist(sdist)
    environment = HOME / "venv"
    if not settings.keep:
        shutil.rmtree(HOME, ignore_errors=True)
    if not environment.exists():
        venv.create(environment, with_pip=True)
    python = str(environment / "bin" / "python")
    pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "-c", str(ROOT / "constraints.txt")]
    run([*pip, "--force-reinstall", "--no-deps", str(wheel)])
    run([*pip, f"{wheel}[explore]"])
    place = HOME / "place"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    run([python, "-c", SCRIPT], cwd=place, env=clean)
    for arguments in COMMANDS:
        run([str(environment / "bin" / "inlinevit"), *arguments], cwd=place, env=clean)
    missing = [name for name in PAGES if not (place / name).is_file()]
    if missing:
        sys.exit(f"the wheel lacks the page of the explorer: {', '.join(missing)}")
    print(f"{wheel.name} works in an empty environment")


if __name__ == "__main__":
    main()
