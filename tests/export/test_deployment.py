"""From a run to files, and from files to the results of the run, in both runtimes and in int8."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import timm
import torch

import inlinevit
from inlinevit.cli import main
from inlinevit.engine.exported_model import import_openvino, read_metadata
from inlinevit.export.int8 import openvino_layers
from tests.tasks.classification.test_evaluate import image_folder

# They need all runtimes, which the fast tests hide (tests/conftest.py).
pytestmark = pytest.mark.slow

KWARGS = {"embed_dim": 32, "depth": 2, "num_heads": 2}
FORMATS = {"onnx": "onnx", "openvino": "xml"}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, its images, and its exported models: float32 and int8, in both formats."""
    folder = tmp_path_factory.mktemp("deployment")
    image_folder(folder / "images", ["ant", "bee"], images=12)
    torch.manual_seed(0)
    model = timm.create_model("inline_deit_tiny", num_classes=2, img_size=64, **KWARGS)
    run = folder / "run"
    run.mkdir()
    safetensors.torch.save_file(model.state_dict(), run / "model.safetensors")
    config = f"model: {{name: inline_deit_tiny, img_size: 64, kwargs: {json.dumps(KWARGS)}}}\n"
    (run / "config.yaml").write_text(f"{config}data: {{path: {folder / 'images'}, workers: 0}}\n")
    (run / "classes.json").write_text('["ant", "bee"]')
    (run / "task.json").write_text('{"name": "classification", "command": "inlinevit", "files": ["classes.json"]}')
    for format, suffix in FORMATS.items():
        words = ["export", str(run), "--format", format]
        main([*words, "--output", str(folder / f"float32.{suffix}")])
        quantize = ["--quantize", "int8", "--data", str(folder / "images")]
        main([*words, "--output", str(folder / f"int8.{suffix}"), *quantize])
    return folder


@pytest.mark.parametrize("suffix", FORMATS.values())
def test_predictions_are_those_of_the_run(suffix: str, home: Path) -> None:
    models = [inlinevit.load(home / name) for name in ("run", f"float32.{suffix}")]
    assert models[0].classes == models[1].classes
    for first, second in zip(*(model(home / "images") for model in models), strict=True):
        assert torch.equal(*(model.transform(first.file) for model in models))
        assert [one.name for one in first.result] == [one.name for one in second.result]
        assert first.result[0].probability == pytest.approx(second.result[0].probability, abs=1e-4)


@pytest.mark.parametrize("suffix", FORMATS.values())
def test_int8(suffix: str, home: Path) -> None:
    metadata = read_metadata(home / f"int8.{suffix}")
    figures: Any = metadata.quantization
    assert metadata.precision == "int8"
    assert figures["cosine"] > 0.99
    assert {"top1_float32", "top1_int8", "agreement", "calibration_images"} <= figures.keys()
    sizes = [sum(file.stat().st_size for file in home.glob(f"{name}.*")) for name in ("int8", "float32")]
    assert sizes[0] < sizes[1]
    images = torch.randn(2, 3, 70, 90, generator=torch.Generator().manual_seed(0))
    outputs = [inlinevit.load(home / f"{name}.{suffix}").model(images) for name in ("int8", "float32")]
    assert torch.cosine_similarity(*outputs).min() > 0.95


def test_the_same_layers_are_quantized_by_both(home: Path) -> None:
    """The patch embedding, four layers in each block, and the head; no covariance and no kernels."""
    model = import_openvino().Core().read_model(str(home / "float32.onnx"))
    assert len(openvino_layers(model)) == 1 + 4 * KWARGS["depth"] + 1
    quantized = import_openvino().Core().read_model(str(home / "int8.xml"))
    kinds = [node.get_type_name() for node in quantized.get_ordered_ops()]
    # Weights are stored in int8, so that these are the activations.
    assert kinds.count("FakeQuantize") == 1 + 4 * KWARGS["depth"] + 1


@pytest.mark.parametrize("suffix", FORMATS.values())
def test_eval_with_workers(suffix: str, home: Path, tmp_path: Path) -> None:
    """Workers are forked while the runtime is loaded."""
    numbers = []
    for place, name in enumerate(("run", f"float32.{suffix}")):
        words = [sys.executable, "-m", "inlinevit", "eval", str(home / name), "--data.path", str(home / "images")]
        output = tmp_path / str(place)
        subprocess.run([*words, "--data.workers", "2", "--output", str(output)], check=True, timeout=300)
        numbers.append(json.loads((output / "evaluation.json").read_text()))
    assert numbers[0]["top1"] == numbers[1]["top1"]
    assert numbers[0]["loss"] == pytest.approx(numbers[1]["loss"], abs=1e-4)
