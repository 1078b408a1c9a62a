"""The library itself: what it says about itself, threads, processes, compilation and installation."""

import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from inlinevit import kernels
from inlinevit.kernels import _library, build
from inlinevit.kernels.packing import has_wide_sums
from inlinevit.layers.layouts import WholeMap
from tests import ROOT

WINDOWS = WholeMap()((32, 32))[0]


def attend(qkv: Tensor) -> Tensor:
    return kernels.inline_attention(qkv, WINDOWS, 4)


@pytest.fixture
def qkv() -> Tensor:
    return torch.randn(1, 1024, 3 * 128, generator=torch.Generator().manual_seed(0))


def python(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own."""
    environment = {**os.environ, **variables}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=300, env=environment
    )


def test_status() -> None:
    status = kernels.status()
    assert status.variant in status.supported
    assert "generic" in status.supported
    assert status.library.exists()


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"INLINEVIT_KERNELS": "off"}, "switched off"),
        ({"INLINEVIT_KERNELS": "mmx"}, "is not one of"),
        ({"INLINEVIT_KERNELS_LIBRARY": "/nowhere.so"}, "no C++20 compiler"),
        ({"INLINEVIT_KERNELS_LIBRARY": __file__}, "cannot be loaded"),
    ],
)
def test_unavailable(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], reason: str) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    # As in a new process.
    unavailable = _library.load.__wrapped__()
    monkeypatch.setattr(_library, "load", lambda: unavailable)
    assert not kernels.available()
    assert kernels.status().variant is None
    with pytest.raises(RuntimeError, match=re.escape(reason)):
        kernels.inline_attention(torch.zeros(1, 1, 3), (1, 1, 1, 1, 0, 0, 0, 1), 1)


@pytest.mark.integration
@pytest.mark.parametrize("variant", _library.status().supported)
def test_every_variant_gives_the_same_result(variant: str, qkv: Tensor, tmp_path: Path) -> None:
    layer = nn.Linear(100, 70)
    x = torch.randn(9, 100)
    torch.save((qkv, x, layer.weight.detach(), layer.bias.detach()), tmp_path / "inputs.pt")
    code = (
        "import sys, torch\n"
        "from inlinevit import kernels\n"
        "qkv, x, *layer = torch.load(sys.argv[1] + '/inputs.pt')\n"
        "packed = [kernels.pack_linear(*layer, int8=int8) for int8 in (False, True)]\n"
        "outputs = [kernels.linear(x, one, 70) for one in packed]\n"
        "outputs = kernels.inline_attention(qkv, (32, 32, 32, 32, 0, 0, 0, 1), 4), *outputs\n"
        "torch.save((kernels.status().variant, *outputs), sys.argv[1] + '/outputs.pt')"
    )
    code = code.replace("sys.argv[1]", repr(str(tmp_path)))
    ended = python(code, INLINEVIT_KERNELS=variant)
    assert ended.returncode == 0, ended.stderr
    used, attended, linear, int8 = torch.load(tmp_path / "outputs.pt")
    assert used == variant
    torch.testing.assert_close(attended, attend(qkv), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(linear, layer(x).detach(), rtol=1e-5, atol=1e-5)
    if variant.endswith("vnni") != has_wide_sums():
        # Weights and inputs have other steps.
        assert (int8 - linear).norm() < 0.02 * linear.norm()
    else:
        # Sums of integers are exact; only the scaling is rounded.
        packed = kernels.pack_linear(layer.weight, layer.bias, int8=True)
        torch.testing.assert_close(int8, kernels.linear(x, packed, 70), rtol=1e-6, atol=1e-6)


def work_in_child(qkv: Tensor, expected: Tensor) -> None:
    # By numpy: torch's own OpenMP threads do not survive a fork.
    assert (attend(qkv).numpy() == expected.numpy()).all()


def test_forked_processes(qkv: Tensor) -> None:
    """As in data-loader workers: the child has none of the parent's threads, and may fork while they work."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        expected = attend(qkv)
        stop = threading.Event()
        busy = threading.Thread(target=lambda: [attend(qkv) for _ in iter(stop.is_set, True)])
        busy.start()
        context = multiprocessing.get_context("fork")
        children = [context.Process(target=work_in_child, args=(qkv, expected)) for _ in range(3)]
        for child in children:
            child.start()
        for child in children:
            child.join(60)
        exit_codes = [child.exitcode for child in children]
        for child in children:
            child.kill()
        stop.set()
        busy.join()
        assert exit_codes == [0, 0, 0]
    finally:
        torch.set_num_threads(before)


def test_threads_sleep_between_calls(qkv: Tensor) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        attend(qkv)
        started = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - started < 0.05
    finally:
        torch.set_num_threads(before)


class Attend(nn.Module):
    def forward(self, qkv: Tensor) -> Tensor:
        return kernels.inline_attention(qkv, WINDOWS, 4)


def test_export(qkv: Tensor) -> None:
    exported = torch.export.export(Attend(), (qkv,))
    assert torch.equal(exported.module()(qkv), attend(qkv))


@pytest.mark.slow
def test_compile(qkv: Tensor) -> None:
    compiled = torch.compile(Attend(), fullgraph=True)
    ours, theirs = qkv.clone().requires_grad_(), qkv.clone().requires_grad_()
    out, expected = compiled(ours), attend(theirs)
    assert torch.equal(out, expected)
    out.sum().backward()
    expected.sum().backward()
    assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.slow
def test_avx512_variants_with_avx2_instructions(tmp_path: Path) -> None:
    """The source of the 512-bit variants on a CPU without AVX-512: wide vectors are lowered to narrower ones."""
    library = tmp_path / "emulated.so"
    build.build(library, emulate=True)
    for variant in build.X86_VARIANTS:
        environment = {**os.environ, "INLINEVIT_KERNELS_LIBRARY": str(library), "INLINEVIT_KERNELS": variant}
        tests = [str(ROOT / "tests" / "kernels" / name) for name in ("test_attention.py", "test_block.py")]
        command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", *tests]
        ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=3000)
        assert ended.returncode == 0, ended.stdout
        assert "skipped" not in ended.stdout


def make_wheel(folder: Path, **variables: str) -> Path:
    """Build a wheel of a copy of the sources, and return it."""
    sources = folder / "sources"
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        sources.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, sources)
    ignored = shutil.ignore_patterns("*.so", "*.dylib", "__pycache__", "embedded")
    shutil.copytree(ROOT / "src", sources / "src", ignore=ignored)
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    environment = {**os.environ, **variables}
    ended = subprocess.run(command, cwd=sources, env=environment, capture_output=True, text=True, timeout=900)
    assert ended.returncode == 0, ended.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


def test_wheel_without_a_compiler(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, CXX="", PATH="/nowhere")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert "inlinevit/kernels/native/api.h" in names
    assert not any(name.endswith(build.LIBRARY.suffix) for name in names)


@pytest.mark.slow
def test_wheel_with_a_compiler(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path)
    assert "-py3-none-" in wheel.name
    assert not wheel.name.endswith("-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert f"inlinevit/kernels/{build.LIBRARY.name}" in archive.namelist()
