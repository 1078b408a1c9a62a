"""The example package: installed with pip, found by its entry point, used by commands, checked by its own tests."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from PIL import Image

from inlinevit import cli
from inlinevit.utils.modules import import_modules
from tests import ROOT

pytestmark = pytest.mark.integration

EXAMPLE = ROOT / "examples" / "inlinevit-cosine-attention"
MODULE = "inlinevit_cosine_attention"
TRAIN = (
    "train --config embedded --model.kwargs.attention cosine --run.output runs/cosine --schedule.warmup 0 "
    "--data.path images --data.batch_size 4 --model.kwargs.depth 1 --data.workers 0 "
    "--schedule.steps 1"
)
# Commands in one process, each after a line with its name; then the tests of the package.
SCRIPT = """
import shlex, sys
import pytest
from inlinevit.cli import main
for line in sys.argv[2:]:
    print(">", line, flush=True)
    try:
        main(shlex.split(line))
    except SystemExit as ended:
        sys.exit(f"{line} ended with {ended.code}")
assert "MODULE" in sys.modules
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", sys.argv[1], sys.argv[1]]))
""".replace("MODULE", MODULE)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was trained with the installed package, which is not installed here."""
    folder = tmp_path_factory.mktemp("example")
    # A copy, because the build writes into the folder.
    shutil.copytree(EXAMPLE, folder / "source")
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    quiet = ["--disable-pip-version-check", "--no-compile", "--target", str(folder / "site"), str(folder / "source")]
    subprocess.run([*install, *quiet], check=True, timeout=120)
    for number, name in enumerate(("train/a/1", "train/a/2", "train/b/1", "train/b/2", "val/a/1", "val/b/1")):
        (folder / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (28, 28), 40 * number).save(folder / "images" / f"{name}.png")
    lines = [
        "models --attentions --markdown",
        TRAIN,
        "eval runs/cosine",
        "predict runs/cosine images/val",
        "bench model --models inline_deit_tiny:attention=cosine,depth=1 --sizes 32 --batches 1 --modes eager "
        "--rounds 2",
    ]
    path = os.pathsep.join([str(folder / "site"), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder / "source" / "tests"), *lines],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"| cosine | {MODULE}.CosineAttention |" in ended.stdout
    assert "done: top1" in ended.stdout
    assert " passed" in ended.stdout
    return folder / "runs" / "cosine"


def test_the_installed_package_is_found_and_passes_its_tests(run):
    """And the run has recorded where its attention comes from."""
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["model"]["kwargs"]["attention"] == "cosine"
    assert config["run"]["attention_modules"] == {"cosine": MODULE}


@pytest.mark.parametrize(
    "line",
    ["eval {run}", "predict {run} images/val", "analyze {run} --output {run}/../analysis", TRAIN],
)
def test_without_the_package_a_command_says_what_to_import(run, line, monkeypatch, capsys):
    monkeypatch.chdir(run.parents[1])
    with pytest.raises(SystemExit) as ended:
        cli.main(line.format(run=run).split())
    assert ended.value.code == 1
    message = capsys.readouterr().err.splitlines()[-1]
    name = "runs/cosine" if line.startswith("train") else str(run)
    assert message == (
        f"error: {name} needs attention 'cosine' of the module {MODULE}, which is not imported: add --import {MODULE}, "
        "or import it in Python first, if you trust that module"
    )
    assert MODULE not in sys.modules


@pytest.fixture
def importable(monkeypatch):
    """A process that can import the example package, but in which it is not installed."""
    monkeypatch.syspath_prepend(EXAMPLE / "src")
    yield
    sys.modules.pop(MODULE, None)
    import_modules([])


def test_with_import_the_commands_work(run, importable, monkeypatch, capsys):
    monkeypatch.chdir(run.parents[1])
    for line in (f"eval {run}", f"predict {run} images/val", TRAIN):
        sys.modules.pop(MODULE, None)
        cli.main([*line.split(), "--import", MODULE])
    assert "done: top1" in capsys.readouterr().out
