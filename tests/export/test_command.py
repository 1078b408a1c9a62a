"""`inlinevit export`: refusals without partial files, and files that agree with the model.

The runtimes are imported by one child process, since a process that has loaded all of them may abort when it forks
data-loader workers later.
"""

import errno
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from unittest.mock import Mock

import pytest
import torch

from inlinevit.cli import main
from inlinevit.engine.exported_model import ExportedModel, read_metadata
from inlinevit.export import command, openvino
from inlinevit.export import onnx as onnx_module
from inlinevit.export import parity as parity_module
from inlinevit.export.command import parse_static, put_in_place
from inlinevit.export.onnx import to_bytes
from inlinevit.export.parity import least_size, measure_parity, parity_shapes, relative_difference
from inlinevit.export.source import ExportSource
from tests.engine.exported_files import make_metadata, make_model, weights, write_model
from tests.tasks.detection.runs import make_run

# Exports a model of one block in all formats and precisions, in the folder of the first argument.
CHILD = """
import sys
from pathlib import Path

import timm
import torch

from inlinevit.engine.exported_model import ExportedModel, read_metadata
from inlinevit.export.command import ExportSettings, write_exported
from inlinevit.export.source import ExportSource, open_source

folder = Path(sys.argv[1])
torch.manual_seed(0)
metadata = open_source("inline_deit_tiny", checkpoint=None, features=False, untrained=True, static=None).metadata
model = timm.create_model("inline_deit_tiny", depth=1).eval()
for name, settings in {
    "float32.onnx": ExportSettings(),
    "half.onnx": ExportSettings(half=True),
    "float32.xml": ExportSettings(format="openvino"),
}.items():
    written = write_exported(ExportSource(model, metadata, 224), folder / name, settings)
    assert read_metadata(folder / name) == written
    assert written.parity.difference <= written.parity.tolerance
    images = torch.randn(2, 3, 70, 333)
    with torch.no_grad():
        expected = model(images)
    found = ExportedModel(folder / name)(images)
    assert (found - expected).abs().max() <= written.parity.tolerance * expected.abs().max(), name
assert sorted(file.name for file in folder.iterdir()) == ["float32.bin", "float32.onnx", "float32.xml", "half.onnx"]
assert (folder / "half.onnx").stat().st_size < 0.6 * (folder / "float32.onnx").stat().st_size
"""


@pytest.mark.slow
def test_files_of_all_formats_agree_with_the_model(tmp_path: Path) -> None:
    words = [sys.executable, "-W", "ignore", "-c", CHILD, str(tmp_path)]
    ended = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert ended.returncode == 0, ended.stderr[-2000:]


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["export", *words])
    assert ended.value.code not in (0, None)
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["inline_deit_tiny", "--static", "1,3,224"], "--static is '1,3,224'"),
        (["inline_deit_tiny", "--static", "1,3,0,224"], "--static is"),
        (["inline_deit_tiny", "--output", "{}/model.xml"], "should end in .onnx"),
        (["inline_deit_tiny", "--format", "openvino", "--output", "{}/model.onnx"], "should end in .xml"),
        (["inline_deit_tiny", "--output", "{}"], "is a folder"),
        (["inline_deit_tiny", "--output", "/dev/null"], "is a stream"),
        (["inline_deit_tiny", "--output", "{}/file/model.onnx"], "cannot be a folder of results"),
        (["inline_deit_tiny", "--quantize", "int8"], "--quantize and --data need each other"),
        (["inline_deit_tiny", "--half", "--quantize", "int8", "--data", "x"], "leave out one of them"),
    ],
)
def test_wrong_options_are_refused_in_one_sentence(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    error = refusal(capsys, *(word.format(tmp_path) for word in words))
    assert message in error
    assert len(error.strip().splitlines()) == 1
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_static_shapes_are_parsed() -> None:
    assert parse_static(None) is None
    assert parse_static("1,3,224,192") == [1, 3, 224, 192]


@pytest.mark.parametrize("size", [32, 224, 384, 512])
def test_parity_is_measured_at_three_sizes_with_one_image_and_three(size: int) -> None:
    shapes = parity_shapes(3, size, None)
    sizes = {(height, width) for *_, height, width in shapes}
    assert len(sizes) == 3
    assert shapes == [
        [batch, 3, *one] for one in dict.fromkeys(tuple(shape[2:]) for shape in shapes) for batch in (1, 3)
    ]
    assert (size, size) in sizes
    # Not square, divided by no patch, and larger than in training.
    assert any(height != width and height % 4 and width % 4 and height > size for height, width in sizes)
    assert all(side >= least_size(size) for one in sizes for side in one)
    assert parity_shapes(3, size, [1, 3, 64, 32]) == [[1, 3, 64, 32]]


def test_every_batch_and_size_is_compared(tmp_path: Path) -> None:
    """A file that is wrong for one shape only is refused; shapes are those of the metadata."""
    from torch import nn

    metadata = make_metadata()
    file = write_model(tmp_path / "model.onnx", metadata)
    right = nn.Sequential(nn.Conv2d(3, 2, 1, bias=False), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    right[0].weight = nn.Parameter(torch.from_numpy(weights(2)))
    shapes = parity_shapes(3, 32, None)
    parity = measure_parity(file, right, metadata, shapes)
    assert parity.difference <= parity.tolerance == 1e-4
    assert parity.shapes == shapes
    for shape in shapes:

        class WrongOnce(ExportedModel):
            def forward(self, images: torch.Tensor, wrong: list[int] = shape) -> torch.Tensor:
                outputs: torch.Tensor = super().forward(images)
                if list(images.shape) == wrong:
                    outputs[-1] *= 1.01
                return outputs

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(parity_module, "ExportedModel", WrongOnce)
            with pytest.raises(ValueError, match="×".join(map(str, shape))):
                measure_parity(file, right, metadata, shapes)


@pytest.mark.parametrize(
    ("package", "options"),
    [
        ("onnx", []),
        ("onnxscript", []),
        ("onnxruntime", []),
        ("openvino", ["--format", "openvino"]),
        ("nncf", ["--format", "openvino", "--quantize", "int8", "--data", "photos"]),
    ],
)
def test_missing_packages_are_reported_before_anything_is_computed(
    package: str,
    options: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("onnx", "onnxscript", "onnxruntime", "openvino", "nncf"):
        monkeypatch.setitem(sys.modules, name, None if name == package else ModuleType(name))
    monkeypatch.setattr("inlinevit.export.command.open_source", lambda *_, **__: pytest.fail("the model was loaded"))
    file = tmp_path / ("model.xml" if "openvino" in options else "model.onnx")
    error = refusal(capsys, "inline_deit_tiny", "--untrained", "--output", str(file), *options)
    assert f"{package} halted; None in sys.modules: pip install 'inlinevit[export]'" in error
    assert not list(tmp_path.iterdir())


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace what is loaded and converted by a small model, so that only writing is tested."""
    from torch import nn

    metadata = make_metadata()
    model = nn.Sequential(nn.Conv2d(3, 2, 1, bias=False), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model[0].weight = nn.Parameter(torch.from_numpy(weights(2)))
    monkeypatch.setattr(command, "require_packages", lambda _: None)
    monkeypatch.setattr(command, "open_source", lambda *_, **__: ExportSource(model, metadata, 32))
    monkeypatch.setattr(command, "convert_model", lambda *_: make_model(metadata))


def test_a_full_disk_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(monkeypatch)
    file, write = tmp_path / "model.onnx", Path.write_bytes
    file.write_text("before")

    for failing in (1, 2):
        calls = []

        def write_until_full(path: Path, content: bytes, last: int = failing, calls: list[Path] = calls) -> int:
            calls.append(path)
            if len(calls) == last:
                write(path, content[:100])
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(path, content)

        monkeypatch.setattr(Path, "write_bytes", write_until_full)
        error = refusal(capsys, "inline_deit_tiny", "--untrained", "--output", str(file))
        assert "no space left on the disk" in error
        assert len(calls) == failing
        assert [one.name for one in tmp_path.iterdir()] == ["model.onnx"]
        assert file.read_text() == "before"
    monkeypatch.setattr(Path, "write_bytes", write)
    main(["export", "inline_deit_tiny", "--untrained", "--output", str(file)])
    assert read_metadata(file).parity is not None
    assert [one.name for one in tmp_path.iterdir()] == ["model.onnx"]


def test_detectors_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "require_packages", lambda _: None)
    make_run(tmp_path / "run")
    error = refusal(capsys, str(tmp_path / "run"), "--output", str(tmp_path / "model.onnx"))
    assert "branches on how many boxes are left" in error
    assert len(error.strip().splitlines()) == 1
    assert [one.name for one in tmp_path.iterdir()] == ["run"]


def test_an_older_xml_is_never_beside_a_newer_bin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between both renames, there is no model."""
    folder = tmp_path / "aside"
    folder.mkdir()
    for name in ("model.xml", "model.bin"):
        (tmp_path / name).write_text("old")
        (folder / name).write_text("new")
    states, replace = [], os.replace

    def observe(source: Path, target: Path) -> None:
        replace(source, target)
        states.append(
            {name: (tmp_path / name).read_text() for name in ("model.xml", "model.bin") if (tmp_path / name).exists()}
        )

    monkeypatch.setattr(os, "replace", observe)
    put_in_place(folder, tmp_path / "model.xml")
    assert states == [{"model.bin": "new"}, {"model.xml": "new", "model.bin": "new"}]


def test_a_folder_in_place_of_the_bin_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.bin").mkdir()
    words = ["inline_deit_tiny", "--format", "openvino", "--output", str(tmp_path / "model.xml")]
    assert "model.bin is a folder" in refusal(capsys, *words)


@pytest.mark.parametrize("free", [2**29, 2**30])
def test_openvino_is_told_apart_from_a_full_disk(free: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenVINO reports both as an error of its streams."""
    runtime = ModuleType("openvino")
    runtime.save_model = Mock(side_effect=RuntimeError("basic_ios::clear: iostream error"))  # type: ignore[attr-defined]
    monkeypatch.setattr(openvino, "import_openvino", lambda: runtime)
    monkeypatch.setattr(openvino.shutil, "disk_usage", lambda _: Mock(free=free))
    weights_node = Mock(get_type_name=lambda: "Constant", get_byte_size=lambda: 2**29)
    with pytest.raises(OSError, match=os.strerror(errno.EIO if free > 2**29 else errno.ENOSPC)):
        openvino.save_openvino(Mock(get_ops=lambda: [weights_node]), tmp_path / "model.xml", half=False)


def test_models_beyond_the_limit_of_onnx_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(make_metadata())
    assert len(to_bytes(model)) > 100
    monkeypatch.setattr(onnx_module, "MOST_BYTES", 10)
    with pytest.raises(ValueError, match="ONNX, by which"):
        to_bytes(model)


def test_nan_and_other_shapes_differ_infinitely() -> None:
    expected = torch.tensor([[1.0, -4.0]])
    assert relative_difference(torch.tensor([[1.0, -3.0]]), expected) == pytest.approx(0.25)
    assert relative_difference(torch.tensor([[float("nan"), -4.0]]), expected) == float("inf")
    assert relative_difference(torch.zeros(1, 3), expected) == float("inf")
