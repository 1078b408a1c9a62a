"""The example of ONNX Runtime, in an environment without torch."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import inlinevit
from tests import ROOT
from tests.engine.exported_files import make_metadata, write_model

EXAMPLE = ROOT / "examples" / "classify_onnx.py"
# All that the example needs.
PACKAGES = ("numpy", "PIL", "onnxruntime")
SCRIPT = """
import importlib.util, runpy, sys
sys.path.insert(0, sys.argv.pop(1))
assert all(importlib.util.find_spec(name) is None for name in ("torch", "torchvision", "timm", "inlinevit"))
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with these packages and their libraries, but no others."""
    folder = tmp_path_factory.mktemp("site")
    for name in PACKAGES:
        spec = find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        home = Path(spec.origin).parent
        for found in (home, home.with_name(f"{name.replace('PIL', 'pillow')}.libs")):
            if found.exists():
                (folder / found.name).symlink_to(found)
    return folder


@pytest.mark.parametrize(
    ("channels", "crop_pct", "size"), [(3, 0.9, (61, 80)), (1, 0.875, (70, 45)), (3, 1.0, (32, 32))]
)
def test_the_example_gives_what_predict_gives(
    channels: int, crop_pct: float, size: tuple[int, int], site: Path, tmp_path: Path
) -> None:
    metadata = make_metadata(classes=("ant", "bee", "cat"), channels=channels)
    object.__setattr__(metadata.preprocessing, "crop_pct", crop_pct)
    object.__setattr__(metadata, "model_config", {**metadata.model_config, "in_chans": channels})
    model = write_model(tmp_path / "model.onnx", metadata)
    pixels = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    image = tmp_path / "photo.png"
    Image.fromarray(pixels).save(image)
    # -S leaves out the installed packages, -I what the environment adds.
    command = [sys.executable, "-I", "-S", "-c", SCRIPT, str(site), str(EXAMPLE), str(model), str(image)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    (best, *_) = inlinevit.load(model)(image, top=1).result
    assert done.stdout.split() == [str(image), best.name, f"{best.probability:.4f}"]


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 30
