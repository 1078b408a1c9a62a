"""Files of exported models: what is run, and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper

from inlinevit.engine.exported import METADATA_KEY
from inlinevit.engine.exported_model import ExportedModel, _tensors, is_exported, read_metadata
from inlinevit.engine.prediction_files import job_settings
from inlinevit.tasks.classification.config import ClassificationPredictOptions
from tests.engine.exported_files import make_metadata, make_model, weights, write_model

REMEDY = "export the model again with `inlinevit export`"


def logits(images: torch.Tensor, classes: int = 2) -> torch.Tensor:
    """What the small model should give."""
    return F.conv2d(images, torch.from_numpy(weights(classes))).mean(dim=(2, 3))


def test_a_file_is_called_like_a_model(tmp_path: Path) -> None:
    model = ExportedModel(write_model(tmp_path / "model.onnx"))
    images = torch.randn(3, 3, 40, 50)
    torch.testing.assert_close(model(images), logits(images))
    assert list(model.parameters()) == []
    # Other types and layouts, gradients, other sizes.
    strided = torch.randn(50, 41, 3, 2, dtype=torch.float64, requires_grad=True).permute(3, 2, 0, 1)
    torch.testing.assert_close(model(strided), logits(strided.detach().float()))


def test_results_are_not_overwritten_by_the_next_call(tmp_path: Path) -> None:
    model = ExportedModel(write_model(tmp_path / "model.onnx"))
    first = model(torch.ones(1, 3, 8, 8))
    kept = first.clone()
    model(torch.zeros(1, 3, 8, 8))
    assert torch.equal(first, kept)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_fixed_batch_is_filled_and_repeated(count: int, tmp_path: Path) -> None:
    model = ExportedModel(write_model(tmp_path / "model.onnx", make_metadata(static=(2, 16))))
    images = torch.randn(count, 3, 16, 16)
    torch.testing.assert_close(model(images), logits(images))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, 4, 16, 16), "the model takes 3 channels, not 4"),
        ((1, 3, 16, 17), "the model takes images with a width of 16, not 17: resize them"),
        ((3, 16, 16), r"the input has the shape \(3, 16, 16\): give it images"),
        ((0, 3, 16, 16), r"the input has the shape \(0, 3, 16, 16\): give it images"),
    ],
)
def test_inputs_that_are_refused(shape: tuple[int, ...], message: str, tmp_path: Path) -> None:
    model = ExportedModel(write_model(tmp_path / "model.onnx", make_metadata(static=(2, 16))))
    with pytest.raises(ValueError, match=message):
        model(torch.zeros(shape))


def damaged(change: Any) -> Any:
    """A model that a function has changed."""

    def make(path: Path) -> Path:
        model = make_model(make_metadata())
        path.write_bytes(change(model) or model.SerializeToString())
        return path

    return make


def with_metadata(change: Any) -> Any:
    """A model whose metadata a function has changed, as plain values or as text."""

    def change_model(model: onnx.ModelProto) -> None:
        (entry,) = model.metadata_props
        plain = json.loads(entry.value)
        text = change(plain)
        entry.value = json.dumps(plain) if text is None else text

    return damaged(change_model)


def external(model: onnx.ModelProto, location: str = "../secret") -> None:
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)


def external_constant(model: onnx.ModelProto) -> None:
    tensor = TensorProto(data_type=TensorProto.FLOAT, dims=[2], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="/etc/passwd")
    inner = helper.make_graph([helper.make_node("Constant", [], ["y"], value=tensor)], "inner", [], [])
    model.graph.node.append(helper.make_node("If", ["c"], ["z"], then_branch=inner, else_branch=inner))


def renamed(port: str) -> Any:
    def change(model: onnx.ModelProto) -> None:
        for node in model.graph.node:
            for names in (node.input, node.output):
                names[:] = [f"{name}_2" if name == port else name for name in names]
        for value in (*model.graph.input, *model.graph.output):
            if value.name == port:
                value.name = f"{port}_2"

    return damaged(change)


def five_channels(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 5
    del model.graph.initializer[:]
    model.graph.initializer.append(onnx.numpy_helper.from_array(weights(2, 5), "weight"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (damaged(lambda model: b" "), "is damaged, or is not an exported model"),
        (damaged(lambda model: b"\x89PNG\r\n\x1a\n" + bytes(50)), "is damaged, or is not an exported model"),
        (damaged(lambda model: model.SerializeToString()[:300]), "is damaged, or is not an exported model"),
        (damaged(lambda model: model.metadata_props.pop() and None), "has no metadata of inlinevit"),
        (damaged(lambda model: model.graph.node.pop() and None), "is damaged, or is not an exported model"),
        (damaged(lambda model: setattr(model.graph.node[0], "op_type", "Nonsense")), "is damaged, or is not"),
        (damaged(lambda model: setattr(model.graph.node[0], "domain", "custom")), "is damaged, or is not"),
        (damaged(external), "keeps weights in other files, which are not read"),
        (damaged(external_constant), "keeps weights in other files, which are not read"),
        (damaged(five_channels), r"takes another input than float32 \(batch, 3, height, width\)"),
        (renamed("images"), r"has the inputs \['images_2'\], not images alone"),
        (renamed("logits"), r"has the outputs \['logits_2'\], but its metadata state \['logits'\]"),
        (with_metadata(lambda plain: "[" * 100_000), "metadata of inlinevit that cannot be used"),
        (with_metadata(lambda plain: '{"schema": 1e999}'), "metadata of inlinevit that cannot be used"),
        (with_metadata(lambda plain: "3"), "metadata of inlinevit that cannot be used"),
        (with_metadata(lambda plain: plain.update(classes="ab")), "classes is ab"),
        (with_metadata(lambda plain: plain.update(classes=[["a"], "b"])), "metadata of inlinevit that cannot be used"),
        (with_metadata(lambda plain: plain.pop("input") and None), "metadata of inlinevit that cannot be used"),
        (with_metadata(lambda plain: plain["input"].update(channels=10**9)), "input.channels is 1000000000"),
        (with_metadata(lambda plain: plain["preprocessing"].update(mean=[])), "mean has 0 entries for 3 channels"),
        (with_metadata(lambda plain: plain["preprocessing"].update(std=[1, 0, 1])), "preprocessing.std is"),
    ],
)
def test_files_that_are_refused(make: Any, message: str, tmp_path: Path) -> None:
    file = make(tmp_path / "model.onnx")
    with pytest.raises(ValueError, match=message) as refused:
        ExportedModel(file)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 700


def test_logits_of_other_classes_are_refused(tmp_path: Path) -> None:
    model = ExportedModel(damaged(lambda model: None)(tmp_path / "model.onnx"))
    assert model(torch.zeros(1, 3, 8, 8)).shape == (1, 2)
    names = {"classes": ["a", "b", "c"], "label_names": None}
    model = ExportedModel(with_metadata(lambda plain: plain.update(names))(tmp_path / "other.onnx"))
    with pytest.raises(ValueError, match=r"gives outputs of the shape \(1, 2\), not \(1, 3\)"):
        model(torch.zeros(1, 3, 8, 8))


def test_weights_beside_the_file_are_not_read_either(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(weights(2).tobytes())
    file = damaged(lambda model: external(model, "weights.bin"))(tmp_path / "model.onnx")
    with pytest.raises(ValueError, match="save it as one file"):
        read_metadata(file)


def test_tensors_are_found_everywhere() -> None:
    model = make_model(make_metadata())
    assert model.graph.initializer[0].name in [tensor.name for tensor in _tensors(model)]
    external_constant(model)
    assert any(tensor.data_location == TensorProto.EXTERNAL for tensor in _tensors(model))
    function = helper.make_function("d", "f", [], ["y"], [model.graph.node.pop()], [])
    assert all(tensor.data_location != TensorProto.EXTERNAL for tensor in _tensors(model))
    model.functions.append(function)
    assert any(tensor.data_location == TensorProto.EXTERNAL for tensor in _tensors(model))


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "model.onnx")
    with pytest.raises(OSError, match="is a named pipe, not a regular file"):
        ExportedModel(tmp_path / "model.onnx")
    with pytest.raises(FileNotFoundError, match=r"no file at .*other\.onnx: name the file of an exported model"):
        ExportedModel(tmp_path / "other.onnx")


def test_names_of_exported_models(tmp_path: Path) -> None:
    (tmp_path / "folder.onnx").mkdir()
    found = [name for name in ("a.onnx", "b.XML", "a.onnx.txt", "test_vit", "") if is_exported(name)]
    assert found == ["a.onnx", "b.XML"]
    assert not is_exported(str(tmp_path / "folder.onnx"))


def test_jobs_of_other_files_differ(tmp_path: Path) -> None:
    """Partial results are continued with the same file only."""
    options = ClassificationPredictOptions()
    found = []
    for place, classes in enumerate([("ant", "bee"), ("ant", "bee"), ("ant", "cat")]):
        file = write_model(tmp_path / f"{place}.onnx", make_metadata(classes=classes))
        found.append(job_settings("classification", str(file), ExportedModel(file), options))
    assert found[0] == found[1] != found[2]


def test_metadata_survive_the_file(tmp_path: Path) -> None:
    metadata = make_metadata(channels=2)
    model = make_model(metadata)
    assert [entry.key for entry in model.metadata_props] == [METADATA_KEY]
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    assert read_metadata(tmp_path / "model.onnx") == metadata
    assert ExportedModel(tmp_path / "model.onnx")(torch.from_numpy(np.ones((1, 2, 5, 5), np.float32))).shape == (1, 2)
