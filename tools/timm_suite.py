"""Run timm's own tests/test_models.py on the models of inlinevit.

The tests come with timm's source archive, not with its wheel: the archive of the installed version is fetched once into
.cache/. Arguments are passed to pytest: `python tools/timm_suite.py -x -k "swin and fxforward"`.

This file is both the command and the pytest plugin (-p timm_suite) that selects the tests of our models. The tests of
TorchScript are left out: it is deprecated, and our models do not support it.
"""

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import timm
from timm.models import list_models, model_entrypoint

import inlinevit  # noqa: F401  registers the models

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache" / f"timm-{timm.__version__}"

# Models whose features are (B, N, C) or have a class token. timm tests these apart.
TOKEN_FEATURES = ["*_deit_tiny", "inline_deit*", "pvt_tiny", "pvt_small", "pvt_medium", "pvt_large"]

# Tests that download weights, and those of TorchScript.
LEFT_OUT = {"test_model_load_pretrained", "test_model_features_pretrained", "test_model_inference"}
TORCHSCRIPT = "torchscript"

PYTEST_INI = """[pytest]
markers =
    base
    cfg
    cfg_nonstd
    torchscript
    features
    fxforward
    fxbackward
"""


def our_models() -> dict[str, str]:
    """Map the name of each registered model of inlinevit to the name of its module, as timm keys it."""
    modules = {name: model_entrypoint(name).__module__ for name in list_models()}
    return {name: module.split(".")[-1] for name, module in modules.items() if module.startswith("inlinevit.models.")}


def fetch_tests() -> str:
    """Return the text of timm's tests/test_models.py, fetching timm's source archive if .cache/ lacks it."""
    archive = CACHE / f"timm-{timm.__version__}.tar.gz"
    if not archive.exists():
        # pip also prepares the archive's metadata, with timm's build backend as a wheel: hence not `--no-binary :all:`.
        command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
        command += ["--no-binary", "timm", "-d", str(CACHE), f"timm=={timm.__version__}"]
        if subprocess.run(command).returncode != 0 or not archive.exists():
            sys.exit(f"Could not fetch timm's source archive. Put {archive.name} into {CACHE} and run again.")
    with tarfile.open(archive) as tar:
        member = tar.extractfile(f"timm-{timm.__version__}/tests/test_models.py")
        assert member is not None
        return member.read().decode()


def extend_list(source: str, name: str, items: list[str]) -> str:
    """Add items to the list `name` of a Python source, right where its literal ends."""
    head, opening, rest = source.partition(f"\n{name} = [\n")
    body, closing, tail = rest.partition("\n]\n")
    if not (opening and closing):
        sys.exit(f"timm {timm.__version__} has no list {name} in tests/test_models.py: adapt tools/timm_suite.py.")
    return f"{head}{opening}{body}{closing}{name} += {items!r}\n{tail}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of our models, except those of TorchScript and those that download weights."""
    names = our_models()
    kept: list[pytest.Item] = []
    dropped: list[pytest.Item] = []
    for item in items:
        assert isinstance(item, pytest.Function)
        params = item.callspec.params if hasattr(item, "callspec") else {}
        # Some tests add the tag of the weights: inline_swin_tiny.in1k
        ours = str(params.get("model_name", "")).split(".")[0] in names
        left_out = item.originalname in LEFT_OUT or TORCHSCRIPT in item.originalname
        (kept if ours and not left_out else dropped).append(item)
    config.hook.pytest_deselected(items=dropped)
    items[:] = kept


def main() -> int:
    """Write the patched tests and run them; return pytest's exit code."""
    source = extend_list(fetch_tests(), "FEAT_INTER_FILTERS", sorted(set(our_models().values())))
    source = extend_list(source, "NON_STD_FILTERS", TOKEN_FEATURES)
    tests, ini = CACHE / "test_timm_models.py", CACHE / "pytest.ini"
    tests.write_text(source)
    ini.write_text(PYTEST_INI)
    # An ini and rootdir of its own: the options of our pyproject.toml are not for timm's tests.
    command = [sys.executable, "-m", "pytest", "-c", str(ini), "--rootdir", str(CACHE), "-p", "no:cacheprovider"]
    command += ["-p", "inlinevit", "-p", "timm_suite", "-n", "2", "-q", str(tests), *sys.argv[1:]]
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path}
    return subprocess.run(command, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
