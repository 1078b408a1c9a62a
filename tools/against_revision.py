"""Compare the speed of the models of the working tree with those of another revision, interleaved in one process.

python tools/against_revision.py d036cfb --output runs/bench

Both have the same weights and must give the same outputs. The other revision is one without native kernels, whose
operators a process can register only once.
"""

import argparse
import importlib
import importlib.util
import io
import subprocess
import sys
import tarfile
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from inlinevit.benchmark.measure import Conditions, measure
from inlinevit.benchmark.report import print_results, write_report
from inlinevit.benchmark.results import Results
from inlinevit.benchmark.runtimes import MODES
from inlinevit.benchmark.workload import Candidate, Comparison, draw_input, draw_weights

ROOT = Path(__file__).resolve().parents[1]
# Models by the module that makes them.
MODELS = {
    "inline_deit": "inline_deit_tiny",
    "inline_pvt": "inline_pvt_tiny",
    "inline_swin": "inline_swin_tiny",
    "inline_cswin": "inline_cswin_tiny",
}
BEFORE = "inlinevit_before"


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", nargs="?", default="d036cfb", help="a commit, tag or branch")
    parser.add_argument("--modules", nargs="+", choices=list(MODELS), default=list(MODELS), help="modules of models")
    parser.add_argument("--size", type=int, default=224, help="side length of the images in pixels")
    parser.add_argument("--batch", type=int, default=1, help="images per call")
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=["eager"], help="how models are run")
    parser.add_argument("--backward", action="store_true", help="forward and backward instead of forward alone")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads of torch")
    parser.add_argument("--rounds", type=int, default=50, help="timed calls of each candidate, at most")
    parser.add_argument("--patience", type=float, default=30.0, help="seconds after which no further round begins")
    parser.add_argument("--output", type=Path, help="folder for JSON, report and figure")
    parser.add_argument("--name", default="revision", help="name of the files in it")
    options = parser.parse_args()
    conditions = Conditions(
        threads=options.threads, rounds=options.rounds, patience=options.patience, backward=options.backward
    )
    results = compare(options.revision, options.modules, options.size, options.batch, options.modes, conditions)
    print_results(results, Console())
    if options.output is not None:
        print(f"the report is {write_report(results, options.output, options.name)}")


def compare(
    revision: str, modules: list[str], size: int, batch: int, modes: list[str], conditions: Conditions
) -> Results:
    """Measure the models of some modules before and now."""
    with TemporaryDirectory() as folder:
        import_revision(revision, Path(folder))
        comparisons = [
            Comparison(
                f"{MODELS[module]}, {size}², batch {batch}",
                batch,
                [candidate(module, "inlinevit", size, batch), candidate(module, BEFORE, size, batch)],
            )
            for module in modules
        ]
        settings: dict[str, Any] = {"revision": revision, "modules": modules, "size": size, "batch": batch}
        return measure("revision", comparisons, modes, conditions, **settings)


def import_revision(revision: str, folder: Path) -> ModuleType:
    """Import the package of a revision under another name, from files in a folder."""
    archive = subprocess.run(
        ["git", "archive", revision, "src/inlinevit"], cwd=ROOT, check=True, stdout=subprocess.PIPE
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, filter="data")
    package = folder / "src" / "inlinevit"
    spec = importlib.util.spec_from_file_location(
        BEFORE, package / "__init__.py", submodule_search_locations=[str(package)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[BEFORE] = module
    with warnings.catch_warnings():
        # timm warns that names of models are taken; models are built by their functions here, not by name.
        warnings.simplefilter("ignore")
        spec.loader.exec_module(module)
    return module


def candidate(module: str, package: str, size: int, batch: int) -> Candidate:
    """Return a model of a package, with the weights that draw_weights() gives to that of the working tree."""
    name = MODELS[module]

    def make(device: torch.device) -> tuple[nn.Module, Tensor]:
        model = draw_weights(make_model(module, "inlinevit", size))
        if package != "inlinevit":
            weights = model.state_dict()
            model = make_model(module, package, size)
            model.load_state_dict(weights)
        return model.to(device), draw_input(batch, 3, size, size, device=device)

    return Candidate(name if package == "inlinevit" else f"{name}, before", size, make, output_group=name)


def make_model(module: str, package: str, size: int) -> nn.Module:
    """Return a model of a package."""
    return vars(importlib.import_module(f"{package}.models.{module}"))[MODELS[module]](img_size=size)


if __name__ == "__main__":
    main()
