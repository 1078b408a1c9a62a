"""The direction of imports: ops ← layers ← models ← tasks ← demo ← cli."""

import ast
import itertools
from pathlib import Path

import pytest

from tests import ROOT

SRC = ROOT / "src" / "inlinevit"
FILES = sorted(SRC.rglob("*.py"))
FRONT_DOOR = SRC / "__init__.py"

TASKS = ("training", "classification", "detection", "segmentation", "analysis", "benchmark", "report")
RANKS = {
    "checks": 0,
    "files": 0,
    "ops": 0,
    "layers": 1,
    "models": 2,
    "inference": 2,
    "images": 2,
    "lettering": 2,
    **dict.fromkeys(TASKS, 3),
    "demo": 4,
    "reproduce": 4,
    "cli": 5,
    "__main__": 5,
}
# The front door imports the models, so only what stands above them may import it.
FRONT_DOOR_RANK = 3


def module_name(path: Path) -> str:
    """inlinevit/ops/inline.py -> inlinevit.ops.inline; a package keeps its `__init__`."""
    return ".".join(("inlinevit", *path.relative_to(SRC).with_suffix("").parts))


def imported(source: str, module: str) -> list[str]:
    """Absolute names of everything that `source`, the text of `module`, imports, wherever the statement stands."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            # One dot is the package of the module, each further dot its parent.
            base = module.split(".")[: -node.level] if node.level else []
            base += node.module.split(".") if node.module else []
            names += [".".join([*base, alias.name]) for alias in node.names]
    return names


def rank(name: str) -> int:
    """Rank of an absolute name in inlinevit. A name that is no room comes from the front door: `__version__`."""
    room = name.split(".")[1:2]
    return RANKS.get(room[0], FRONT_DOOR_RANK) if room else FRONT_DOOR_RANK


def violations(source: str, module: str) -> list[str]:
    """Imports of `module` that reach into a higher room."""
    ours = [name for name in imported(source, module) if name.split(".")[0] == "inlinevit"]
    return [name for name in ours if rank(name) > rank(module)]


@pytest.mark.parametrize("path", [f for f in FILES if f != FRONT_DOOR], ids=module_name)
def test_imports_go_down(path: Path) -> None:
    module = module_name(path)
    assert module.split(".")[1] in RANKS, f"{module} stands in no known room: give it a rank in this file"
    assert violations(path.read_text(), module) == []


def test_every_lower_room_is_read() -> None:
    assert {"ops", "layers", "models"} <= {module_name(f).split(".")[1] for f in FILES}


UPWARD = [
    "import inlinevit",
    "import inlinevit.models",
    "import torch, inlinevit.models.inline_swin as swin",
    "from inlinevit import models",
    "from inlinevit import __version__",
    "from inlinevit import *",
    "from inlinevit.models import inline_swin",
    "from inlinevit.models.inline_swin import InlineSwin as Swin",
    "from .. import models",
    "from ..models import inline_swin",
    "from ..cli import main",
    "def f():\n    from ..training import loop",
    "if TYPE_CHECKING:\n    from ..models import inline_swin",
    "try:\n    import inlinevit.benchmark\nexcept ImportError:\n    pass",
]


@pytest.mark.parametrize("source", UPWARD)
@pytest.mark.parametrize("module", ["inlinevit.layers.mixer", "inlinevit.layers.__init__"])
def test_checker_catches_upward_imports(source: str, module: str) -> None:
    assert len(violations(source, module)) == 1


DOWNWARD = [
    "import torch",
    "import timm.models",
    "from timm import models",
    "import inlinevit.ops.inline",
    "from inlinevit import ops",
    "from ..ops import inline_attention",
    "from .. import ops",
    "from . import models",
    "from .models import swin",
]


@pytest.mark.parametrize("source", DOWNWARD)
@pytest.mark.parametrize("module", ["inlinevit.layers.mixer", "inlinevit.layers.__init__"])
def test_checker_allows_own_and_lower_rooms(source: str, module: str) -> None:
    assert violations(source, module) == []


def test_each_room_may_not_import_the_next() -> None:
    rooms = ["ops", "layers", "models", "training", "demo", "cli"]
    for lower, higher in itertools.pairwise(rooms):
        assert violations(f"import inlinevit.{higher}", f"inlinevit.{lower}.x") == [f"inlinevit.{higher}"]
        assert violations(f"import inlinevit.{lower}", f"inlinevit.{higher}.x") == []
    assert violations("from inlinevit import __version__", "inlinevit.cli") == []
    assert violations("from .training import loop", "inlinevit.cli") == []
