"""One version, exact constraints, no registry addresses, documents that name real make targets, a complete wheel."""

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from lowest_test import lower_bounds
from packaging.version import Version

import inlinevit
from tests import ROOT

CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = CONFIG["project"]
PINS = (ROOT / "constraints.txt").read_text().splitlines()

PIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==\d+(\.\d+)*((a|b|rc|\.post)\d+)?")
REGISTRY = re.compile(r"""https?://[^\s"'<>)]*(pypi|pythonhosted|npmjs|debian)""")


def canonical(requirement: str) -> str:
    """torch>=2.6 -> torch; jsonargparse[signatures] -> jsonargparse; PyYAML -> pyyaml."""
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert name is not None
    return re.sub(r"[-_.]+", "-", name[0]).lower()


def test_version_is_in_one_place() -> None:
    assert "version" in PROJECT["dynamic"]
    assert "version" not in PROJECT
    # What the build reads: a literal, in the file of the imported package.
    source = (ROOT / CONFIG["tool"]["hatch"]["version"]["path"]).read_text()
    assert re.findall(r'^__version__ = "(.+)"$', source, re.MULTILINE) == [inlinevit.__version__]


def test_constraints_are_exact_versions() -> None:
    assert [line for line in PINS if not PIN.fullmatch(line)] == []
    names = [canonical(line) for line in PINS]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("line", ["torch", "torch>=2.6", "torch==2.6+cpu", "torch @ file:///a.whl", "-e .", "# torch"])
def test_constraint_form_refuses(line: str) -> None:
    assert not PIN.fullmatch(line)


def test_constraints_pin_every_dependency() -> None:
    extras = [r for group in PROJECT["optional-dependencies"].values() for r in group]
    groups = [r for group in CONFIG["dependency-groups"].values() for r in group if isinstance(r, str)]
    asked = {canonical(r) for r in PROJECT["dependencies"] + extras + groups} - {"inlinevit"}
    assert asked - {canonical(line) for line in PINS} == set()


def test_no_registry_addresses() -> None:
    assert REGISTRY.search("see https://" + "pypi.org/simple")
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    # Tracked files, and those that would be with `git add .`
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    files = [ROOT / name for name in listing.stdout.split("\0") if name]
    assert ROOT / "pyproject.toml" in files
    found = [f for f in files if f.is_file() and REGISTRY.search(f.read_text(errors="ignore"))]
    assert found == []


def test_the_citation_has_the_version() -> None:
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {inlinevit.__version__}\n" in citation
    # Of the software, and of the nine authors of the paper.
    assert citation.count("family-names:") == 9
    assert "2412.06590" in citation


def test_lower_bounds_are_below_the_tested_versions() -> None:
    pins = {canonical(line): line.partition("==")[2] for line in PINS}
    bounds = lower_bounds()
    assert {"torch", "timm", "numpy", "jsonargparse", "accelerate"} <= bounds.keys()
    for name, bound in bounds.items():
        assert Version(bound) <= Version(pins[canonical(name)]), name


@pytest.mark.parametrize("document", sorted(p.name for p in ROOT.glob("*.md")))
def test_documents_name_real_make_targets(document: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert "help" in targets
    # Code only: a line of a block, or `make ...` in the text.
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", (ROOT / document).read_text(), re.MULTILINE))
    assert named - targets == set()


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the content of the wheel, as pip would install it."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    ended = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def test_the_wheel_holds_all_package_data(installed: Path) -> None:
    def data(home: Path) -> set[str]:
        paths = (path for path in (home / "inlinevit").rglob("*") if path.is_file())
        return {str(path.relative_to(home)) for path in paths if path.suffix != ".pyc"}

    assert data(installed) == data(ROOT / "src")
    package = installed / "inlinevit"
    for name in (
        "recipes/classification/embedded.yaml",
        "recipes/detection/_coco_swin_1x.yaml",
        "recipes/segmentation/labels/camvid.yaml",
        "report/page.html.jinja",
        "tasks/classification/embedded/fashion_mnist_train.xz",
        "models/catalog.json",
        "tasks/detection/catalog.json",
        "tasks/segmentation/catalog.json",
        "py.typed",
    ):
        assert (package / name).is_file()


@pytest.mark.integration
def test_commands_run_from_an_empty_folder_with_the_wheel_alone(installed: Path, tmp_path: Path) -> None:
    """As after `pip install`: nothing of the repository is on the path."""
    script = (
        "import os, sys, shlex, inlinevit\n"
        "from inlinevit.cli import main\n"
        "print(inlinevit.__file__)\n"
        "for line in sys.argv[1:]: main(shlex.split(line))\n"
        # Python would take a second or two to tear down all modules.
        "sys.stdout.flush(); os._exit(0)\n"
    )
    lines = (
        "recipes",
        "recipes camvid",
        "models",
        "models --task detection --json",
        "train --config embedded --schedule.steps 2 --schedule.warmup 0 --run.eval_every 2 "
        "--data.max_train_samples 100 --model.kwargs.depth 1 --model.kwargs.embed_dim 16 --model.kwargs.num_heads 2",
        "eval runs/embedded",
    )
    environment = {**os.environ, "PYTHONPATH": str(installed), "PYTHONDONTWRITEBYTECODE": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", script, *lines],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith(str(installed / "inlinevit"))
    assert str(installed / "inlinevit" / "recipes" / "segmentation" / "labels" / "camvid.yaml") in ended.stdout
    assert "done: top1" in ended.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
