"""One version, exact constraints, no addresses of registries, and documents that name real make targets."""

import re
import subprocess
import tomllib

import pytest

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
    asked = {canonical(r) for r in PROJECT["dependencies"] + extras} - {"inlinevit"}
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


@pytest.mark.parametrize("document", sorted(p.name for p in ROOT.glob("*.md")))
def test_documents_name_real_make_targets(document: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert "help" in targets
    # Code only: a line of a block, or `make ...` in the text.
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", (ROOT / document).read_text(), re.MULTILINE))
    assert named - targets == set()
