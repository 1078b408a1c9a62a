"""Static int8 quantization: which layers, which images, which figures."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from inlinevit.engine.exported import store_in_onnx
from inlinevit.engine.exported_model import ExportedModel
from inlinevit.export import quantize as module
from inlinevit.export.int8 import CLASSES_KEY, onnx_layers, quantize_onnx
from inlinevit.export.quantization_data import ALTERNATING, Inputs, make_transform, open_inputs, spaced
from inlinevit.export.quantize import compare, quantize
from tests.engine.exported_files import make_metadata, make_model

CLASSES = ("ant", "bee")


def draw(folder: Path, names: list[str]) -> Path:
    generator = np.random.default_rng(0)
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 256, (40, 50, 3), dtype=np.uint8)).save(folder / name)
    return folder


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    names = [f"{name}/{place}.png" for name in CLASSES for place in range(10)]
    return draw(tmp_path_factory.mktemp("labelled"), names)


def attention_graph() -> onnx.ModelProto:
    """A block with one of each kind of product: layers, a covariance, kernels, a position embedding of the shape."""
    generator = np.random.default_rng(0)

    def constant(name: str, *shape: int) -> Any:
        return numpy_helper.from_array(generator.standard_normal(shape).astype(np.float32), name)

    def node(kind: str, inputs: str, output: str, **attributes: Any) -> Any:
        return helper.make_node(kind, inputs.split(), [output], name=output, **attributes)

    nodes = [
        node("Conv", "images embed", "map", kernel_shape=[4, 4], strides=[4, 4]),
        node("Reshape", "map tokens_shape", "flat"),
        node("Transpose", "flat", "tokens", perm=[0, 2, 1]),
        node("Shape", "map", "shape"),
        node("Cast", "shape", "lengths", to=TensorProto.FLOAT),
        node("Unsqueeze", "lengths zero", "coordinates"),
        node("MatMul", "coordinates table", "positions"),
        node("ReduceMean", "positions", "position", keepdims=0),
        node("Add", "tokens position", "placed"),
        node("MatMul", "placed qkv", "keys"),
        node("Transpose", "keys", "keys_t", perm=[0, 2, 1]),
        node("MatMul", "keys_t placed", "covariance"),
        node("MatMul", "placed covariance", "attended"),
        node("MatMul", "attended per_head", "kernels"),
        node("MatMul", "kernels mlp", "hidden"),
        node("ReduceMean", "hidden axis", "mean", keepdims=0),
        node("Gemm", "mean head", "logits"),
    ]
    nodes[14].metadata_props.add(key=CLASSES_KEY, value="['', 'inlinevit.layers.inline_attention.LocalResidual']")
    graph = helper.make_graph(
        nodes,
        "block",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, ["batch", 3, "height", "width"])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 2])],
        [
            constant("embed", 8, 3, 4, 4),
            constant("table", 1, 8),
            constant("qkv", 8, 8),
            constant("per_head", 1, 8, 8),
            constant("mlp", 8, 8),
            constant("head", 8, 2),
            numpy_helper.from_array(np.array([0, 8, -1]), "tokens_shape"),
            numpy_helper.from_array(np.array([1]), "axis"),
            numpy_helper.from_array(np.array([1]), "zero"),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def test_only_layers_with_constant_weights_are_quantized() -> None:
    model = attention_graph()
    assert onnx_layers(model.graph) == ["map", "keys", "logits"]
    # Without what the exporter says about modules, the structure decides.
    del model.graph.node[14].metadata_props[:]
    assert onnx_layers(model.graph) == ["map", "keys", "hidden", "logits"]


def test_int8_weights_per_channel_and_float32_elsewhere() -> None:
    model = attention_graph()
    model.metadata_props.add(key="kept", value="yes")
    before = model.SerializeToString()
    images = [np.random.default_rng(place).standard_normal((1, 3, 16, 16)).astype(np.float32) for place in range(3)]
    quantized = quantize_onnx(model, images)
    assert model.SerializeToString() == before
    assert [(entry.key, entry.value) for entry in quantized.metadata_props if entry.key == "kept"] == [("kept", "yes")]
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in quantized.graph.initializer}
    is_int8 = {
        name.removesuffix("_quantized") for name, value in stored.items() if value.dtype == np.int8 and value.ndim > 1
    }
    assert is_int8 == {"embed", "qkv", "head"}
    assert stored["embed_scale"].shape == (8,)
    assert stored["head_scale"].shape == (2,)
    # 7 of 8 bits.
    assert max(np.abs(stored[f"{name}_quantized"].astype(int)).max() for name in is_int8) <= 64
    assert all(stored[name].dtype == np.float32 for name in ("table", "per_head", "mlp"))
    fed = {name for node in quantized.graph.node if node.op_type == "MatMul" for name in node.input}
    assert {"keys_t", "covariance", "placed"} <= fed


def test_calibration_and_comparison_have_different_images(labelled: Path, tmp_path: Path) -> None:
    calibration, evaluation = open_inputs(str(labelled), make_metadata(), 100, 100)
    seen = [{image.tobytes() for image in some} for some in (calibration, evaluation)]
    assert seen[0].isdisjoint(seen[1])
    assert (len(calibration), len(evaluation), evaluation.labels) == (16, 4, [0, 0, 1, 1])
    assert "held out by the names" in evaluation.split
    loose = draw(tmp_path, [f"{place}.png" for place in range(5)])
    calibration, evaluation = open_inputs(str(loose), make_metadata(), 2, 100)
    assert (calibration.places, evaluation.places) == ([0, 2], [1, 3])
    assert (evaluation.labels, evaluation.split) == (None, ALTERNATING)


def test_splits_of_the_data_are_used(tmp_path: Path) -> None:
    names = [f"{split}/{name}/{place}.png" for split in ("train", "val") for name in CLASSES for place in range(3)]
    calibration, evaluation = open_inputs(str(draw(tmp_path, names)), make_metadata(classes=("bee", "ant")), 4, 100)
    assert (len(calibration), len(evaluation)) == (4, 6)
    # Classes are matched by name.
    assert evaluation.labels == [1, 1, 1, 0, 0, 0]
    assert "training split" in evaluation.split


def test_folders_that_are_not_classes_are_not_labels(labelled: Path) -> None:
    with pytest.warns(UserWarning, match="are not the model's classes: its labels are not used"):
        _, evaluation = open_inputs(str(labelled), make_metadata(classes=("cat", "dog")), 8, 8)
    assert evaluation.labels is None
    _, evaluation = open_inputs(str(labelled), make_metadata("multilabel", classes=CLASSES), 8, 8)
    assert evaluation.labels is None


@pytest.mark.parametrize(("count", "most", "expected"), [(3, 5, [0, 1, 2]), (10, 5, [0, 2, 4, 6, 8]), (7, 2, [0, 3])])
def test_images_are_evenly_spaced(count: int, most: int, expected: list[int]) -> None:
    assert spaced(count, most) == expected


def test_inputs_are_those_of_the_model(labelled: Path) -> None:
    metadata = make_metadata(static=(2, 32))
    calibration, _ = open_inputs(str(labelled), metadata, 1, 1)
    image = calibration[0]
    assert image.shape == (2, 3, 32, 32)
    np.testing.assert_array_equal(image[0], make_transform(metadata)(labelled / "ant" / "0.png").numpy())
    np.testing.assert_array_equal(image[0], image[1])


def test_images_that_cannot_be_used(tmp_path: Path) -> None:
    folder = draw(tmp_path, ["a.png", "c.png"])
    (folder / "b.png").write_text("broken")
    _, evaluation = open_inputs(str(folder), make_metadata(), 2, 2)
    with pytest.raises(ValueError, match=r"b\.png .*: remove it from"):
        list(evaluation)
    with pytest.raises(ValueError, match="holds one image, but one is needed for calibration and another"):
        open_inputs(str(draw(tmp_path / "one", ["a.png"])), make_metadata(), 2, 2)


def test_a_quantized_file_is_run_like_any_other(labelled: Path, tmp_path: Path) -> None:
    metadata = make_metadata()
    quantized, figures = quantize(make_model(metadata), metadata, str(labelled), calibration_images=4)
    assert figures["cosine"] > 0.99
    assert (figures["calibration_images"], figures["evaluation_images"]) == (4, 4)
    assert figures["tool"].startswith("onnxruntime ")
    assert {figures["top1_float32"], figures["top1_int8"]} <= {0.0, 25.0, 50.0, 75.0, 100.0}
    store_in_onnx(quantized, make_metadata(precision="int8", quantization=figures))
    (tmp_path / "int8.onnx").write_bytes(quantized.SerializeToString())
    model = ExportedModel(tmp_path / "int8.onnx")
    assert model.metadata.quantization == figures
    assert model(torch.randn(2, 3, 20, 30)).shape == (2, 2)


def test_a_model_that_differs_too_much_is_refused(labelled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def negated(model: Any, images: Any) -> Any:
        model = onnx.ModelProto.FromString(model.SerializeToString())
        weight = model.graph.initializer[0]
        weight.CopyFrom(numpy_helper.from_array(-numpy_helper.to_array(weight), weight.name))
        return model

    monkeypatch.setattr(module, "quantize_onnx", negated)
    with pytest.raises(ValueError, match=r"in int8 have a mean cosine of -1\.000 with those in float32"):
        quantize(make_model(make_metadata()), make_metadata(), str(labelled))


def test_a_model_without_layers_is_refused() -> None:
    model = make_model(make_metadata())
    model.graph.initializer[0].name = "other"
    with pytest.raises(ValueError, match="has no linear layers or convolutions with constant weights"):
        quantize_onnx(model, [])


def constant_runs(*outputs: list[float]) -> Any:
    return [lambda images, values=values: [np.array([values], np.float32)] for values in outputs]


def test_figures() -> None:
    inputs = Inputs(lambda place: np.zeros((1, 3, 4, 4), np.float32), [0, 1], "", labels=[1, 0])
    found = compare(*constant_runs([1.0, 2.0], [2.0, 1.0]), inputs)
    expected = {"cosine": 0.8, "lowest_cosine": 0.8, "agreement": 0.0, "top1_float32": 50.0, "top1_int8": 50.0}
    assert found == pytest.approx(expected)
    inputs.labels = None
    found = compare(*constant_runs([1.0, -2.0], [2.0, -1.0]), inputs, "multilabel")
    assert found == pytest.approx({"cosine": 0.8, "lowest_cosine": 0.8, "agreement": 100.0})
    assert compare(*constant_runs([1.0, 2.0], [2.0, 1.0]), inputs, "features").keys() == {"cosine", "lowest_cosine"}
