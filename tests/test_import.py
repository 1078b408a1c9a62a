"""`import inlinevit` costs little, and registers the models with timm whichever is imported first."""

import pickle
import subprocess
import sys

import pytest
import timm
import torch

import inlinevit  # noqa: F401
from tests import slow_except

pytestmark = pytest.mark.integration

# Ends a process without the second or two that it takes to tear down the modules of torch.
LEAVE = "import os, sys; sys.stdout.flush(); os._exit(0)"


def run(code: str, given: bytes = b"") -> str:
    """Run code in a process of its own that reads what it is given; return what it prints."""
    command = [sys.executable, "-W", "ignore", "-c", f"{code}\n{LEAVE}"]
    ended = subprocess.run(command, input=given, capture_output=True, timeout=120)
    assert ended.returncode == 0, ended.stderr.decode()
    return ended.stdout.decode()


CREATE = "assert type(timm.create_model('inline_deit_tiny', device='meta')).__name__ == 'InLineDeiT'"


@pytest.mark.parametrize(
    "imports",
    slow_except(
        [
            "import inlinevit, timm",
            "import timm, inlinevit",
            "import timm.models, inlinevit",
            "import inlinevit.models, timm",
            "from inlinevit import InLineAttention; import timm",
        ],
        "import inlinevit, timm",
    ),
)
def test_models_are_registered_in_any_order(imports: str) -> None:
    run(f"{imports}\n{CREATE}")


def test_importing_the_package_imports_no_slow_packages() -> None:
    code = "import sys, inlinevit; print({'torch', 'timm', 'numpy', 'jsonargparse', 'yaml'} & set(sys.modules))"
    assert run(code) == "set()\n"


@pytest.mark.slow
def test_importing_costs_little_beyond_torch_and_timm() -> None:
    code = (
        "import time, torch, torchvision, timm, timm.models\n"
        "started = time.process_time()\n"
        "import inlinevit\n"
        "inlinevit.models, inlinevit.layers, inlinevit.ops, inlinevit.optimize_for_inference\n"
        "print(time.process_time() - started)"
    )
    # Other processes on the same cores make this slower: the best of several counts.
    assert any(float(run(code)) < 0.3 for _ in range(3))


def test_public_names_can_be_imported() -> None:
    """They are lazy, and the models are registered when timm comes after them."""
    run(
        "import inlinevit\n"
        "from inlinevit import InLineAttention, layers, load_checkpoint, models, ops, optimize_for_inference\n"
        "from inlinevit import replace_attention\n"
        "from inlinevit import *\n"
        "assert set(inlinevit.__all__) <= set(dir(inlinevit))\n"
        "assert InLineAttention is layers.InLineAttention and load_checkpoint is models.load_checkpoint\n"
        f"import timm\n{CREATE}"
    )


def test_a_pickled_model_is_read_by_a_process_that_has_imported_nothing() -> None:
    model = timm.create_model("inline_deit_tiny", img_size=32, embed_dim=16, depth=1, num_heads=2).eval()
    image = torch.linspace(0, 1, 3 * 32 * 32).reshape(1, 3, 32, 32)
    code = "import pickle, sys; model, image = pickle.load(sys.stdin.buffer); print(model(image).sum().item())"
    assert float(run(code, pickle.dumps((model, image)))) == pytest.approx(model(image).sum().item(), rel=1e-5)
