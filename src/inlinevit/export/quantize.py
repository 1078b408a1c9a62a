"""Static int8 quantization of exported models: per channel, with ranges of activations from calibration images.

Only linear layers and convolutions are quantized: products of activations, which depend on the pixels, with constant
weights. All others stay in float32: covariances and their products with queries, the dynamic kernels of the local
residual and what they are computed by, softmax attention, norms, activations and position embeddings. The layers are
found by the structure of the graph, not by names.

Weights use 7 of their 8 bits. CPUs without VNNI instructions add two products of 8 bits in 16 bits, which would
saturate otherwise.
"""

import logging
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ..engine.exported import INPUT_NAME, ExportedMetadata
from ..engine.exported_model import compile_openvino, import_openvino, onnx_session
from ..engine.progress import job_progress
from ..utils.validation import require
from .quantization_data import Inputs, open_inputs

Array = NDArray[np.float32]
# Operators that are quantized if they are linear layers or convolutions.
ONNX_TYPES = ("Conv", "Gemm", "MatMul")
OPENVINO_TYPES = ("Convolution", "GroupConvolution", "MatMul")
# Results of these depend on shapes, not on values.
SHAPE_TYPES = ("Shape", "Size", "ShapeOf")
# Modules of which nothing is quantized, whatever the structure of their graph.
FLOAT_MODULES = ("LocalResidual", "ResamplePosEmbed")
CLASSES_KEY = "pkg.torch.onnx.class_hierarchy"
# Images whose activations give the ranges, and on which the result is compared with float32.
CALIBRATION_IMAGES, EVALUATION_IMAGES = 256, 1000
# The least mean cosine between outputs in int8 and in float32; below, nothing is written.
MIN_COSINE = 0.95
NO_LAYERS = "the model has no linear layers or convolutions with constant weights that could be quantized"


def quantize(
    model: Any,
    metadata: ExportedMetadata,
    data: str,
    *,
    calibration_images: int = CALIBRATION_IMAGES,
    evaluation_images: int = EVALUATION_IMAGES,
) -> tuple[Any, dict[str, Any]]:
    """Quantize an exported model, and compare it with itself in float32 on other images than those of calibration.

    Args:
        model: An onnx.ModelProto or an openvino.Model in float32, as the format of the metadata says.
        metadata: Of the model in float32.
        data: A folder of images, or labelled images as for training a classifier.
        calibration_images: The most images for calibration.
        evaluation_images: The most images for the comparison.

    Returns:
        The quantized model, and what to store as `quantization` in its metadata: how it was calibrated, and the figures
        of compare().

    Raises:
        ValueError: The images cannot be used, or the quantized model differs too much.
    """
    calibration, evaluation = open_inputs(data, metadata, calibration_images, evaluation_images)
    is_onnx = metadata.format == "onnx"
    quantized = quantize_onnx(model, calibration) if is_onnx else quantize_openvino(model, calibration)
    runs = [(_onnx_run if is_onnx else _openvino_run)(one) for one in (model, quantized)]
    figures = compare(*runs, evaluation, metadata.task)
    least = figures["cosine"]
    # NaN does not agree with anything.
    require(
        least >= MIN_COSINE,
        f"the outputs in int8 have a mean cosine of {least:.3f} with those in float32, which is less than "
        f"{MIN_COSINE:g}: give more images that are like those of training, or export without --quantize",
    )
    tool = "onnxruntime" if is_onnx else "nncf"
    method = {
        "tool": f"{tool} {version(tool)}",
        "weights": "int8 per output channel, symmetric, 7 bits used",
        "activations": "uint8 per tensor",
        "calibration_images": len(calibration),
        "evaluation_images": len(evaluation),
        "split": evaluation.split,
    }
    return quantized, {**method, **figures}


def _onnx_run(model: Any) -> Callable[[Array], Sequence[Array]]:
    session = onnx_session(model.SerializeToString(), torch.get_num_threads())
    return lambda images: session.run(None, {INPUT_NAME: images})


def _openvino_run(model: Any) -> Callable[[Array], Sequence[Array]]:
    compiled = compile_openvino(model, torch.get_num_threads())
    return lambda images: [np.array(one) for one in compiled([images]).to_tuple()]


def compare(
    float32: Callable[[Array], Sequence[Array]],
    int8: Callable[[Array], Sequence[Array]],
    inputs: Inputs,
    task: str = "classification",
) -> dict[str, float]:
    """Compare a model in float32 and in int8.

    Args:
        float32: From an input to the outputs in float32.
        int8: The same in int8.
        inputs: Images.
        task: Of the model.

    Returns:
        cosine and lowest_cosine: mean and smallest over the images of the cosine between outputs. Of all tasks but
        features, agreement: the share of equal predictions (classes, labels from a probability of 0.5 on, classes of
        pixels) in percent. With labels, top1_float32 and top1_int8 in percent.
    """
    cosines, agreements, right = [], [], [0, 0]
    with job_progress("comparing", len(inputs), "images") as advance:
        for place, image in enumerate(inputs):
            outputs = [[torch.from_numpy(output[:1]).float() for output in run(image)] for run in (float32, int8)]
            pairs = list(zip(*outputs, strict=True))
            cosines.append(min(F.cosine_similarity(a.flatten(), b.flatten(), dim=0).item() for a, b in pairs))
            if task != "features":
                guesses = [_predictions(logits, task) for logits in pairs[0]]
                agreements.append((guesses[0] == guesses[1]).double().mean().item())
                if inputs.labels is not None:
                    right = [n + int(one == inputs.labels[place]) for n, one in zip(right, guesses, strict=True)]
            advance()
    figures = {"cosine": float(np.mean(cosines)), "lowest_cosine": min(cosines)}
    if agreements:
        figures["agreement"] = 100 * float(np.mean(agreements))
    if inputs.labels is not None:
        figures |= {name: 100 * n / len(inputs) for name, n in zip(("top1_float32", "top1_int8"), right, strict=True)}
    return {name: round(value, 6) for name, value in figures.items()}


def _predictions(logits: Tensor, task: str) -> Tensor:
    """Return what is predicted, from logits (1, classes, …)."""
    return logits > 0 if task == "multilabel" else logits.argmax(dim=1)


def quantize_onnx(model: Any, images: Iterable[Array]) -> Any:
    """Quantize an ONNX model.

    Args:
        model: An onnx.ModelProto in float32.
        images: Inputs for calibration, each (batch, channels, height, width).

    Returns:
        An onnx.ModelProto with QuantizeLinear and DequantizeLinear nodes, and the metadata of the model.
    """
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        """Passes the calibration images on."""

        def __init__(self) -> None:
            self.images = iter(images)

        def get_next(self) -> dict[str, Array] | None:
            """See CalibrationDataReader."""
            found = next(self.images, None)
            return None if found is None else {INPUT_NAME: found}

    original = onnx.ModelProto()
    original.CopyFrom(model)
    _name_nodes(original.graph.node)
    layers = onnx_layers(original.graph)
    require(bool(layers), NO_LAYERS)
    _separate_inputs(original.graph, layers)
    options = {
        # Products go on in float32, where they are added to biases and skip connections.
        "OpTypesToExcludeOutputQuantization": ["Gemm", "MatMul"],
        # Ranges are means over the images: the outliers of single images would cost all others precision.
        "CalibMovingAverage": True,
    }
    with tempfile.TemporaryDirectory() as folder, _quiet("root"):
        file = Path(folder) / "int8.onnx"
        quantize_static(
            original,
            file,
            Reader(),
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=list(ONNX_TYPES),
            nodes_to_quantize=layers,
            per_channel=True,
            reduce_range=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            extra_options=options,
        )
        return onnx.load_model(file)


def _separate_inputs(graph: Any, layers: Sequence[str]) -> None:
    """Give layers copies of their inputs, so that others that read these, such as a covariance, get them in float32.

    ONNX Runtime removes the copies again when it loads the model.
    """
    from onnx import helper

    copies: dict[str, Any] = {}
    for node in graph.node:
        if node.name in layers:
            source = node.input[0]
            if source not in copies:
                copies[source] = helper.make_node("Identity", [source], [f"{source}_int8"], name=f"copy_of_{source}")
            node.input[0] = copies[source].output[0]
    # Each copy follows the node that computes its source.
    nodes = [copies.pop(INPUT_NAME)] if INPUT_NAME in copies else []
    for node in graph.node:
        nodes += [node, *(copies[name] for name in node.output if name in copies)]
    del graph.node[:]
    graph.node.extend(nodes)


def _name_nodes(nodes: Sequence[Any]) -> None:
    """Give a name to nodes that have none."""
    for place, node in enumerate(nodes):
        node.name = node.name or f"node_{place}"


def onnx_layers(graph: Any) -> list[str]:
    """Return the names of the nodes of an onnx.GraphProto that are linear layers or convolutions."""
    dimensions = {tensor.name: len(tensor.dims) for tensor in graph.initializer}
    from_pixels = {INPUT_NAME}
    found = []
    for node in graph.node:
        if node.op_type in SHAPE_TYPES or from_pixels.isdisjoint(node.input):
            continue
        from_pixels.update(node.output)
        if node.op_type not in ONNX_TYPES:
            continue
        activations, weights = node.input[:2]
        wanted = range(3, 6) if node.op_type == "Conv" else range(2, 3)
        classes = next((entry.value for entry in node.metadata_props if entry.key == CLASSES_KEY), "")
        is_float = any(name in classes for name in FLOAT_MODULES)
        if activations in from_pixels and dimensions.get(weights) in wanted and not is_float:
            found.append(node.name)
    return found


def quantize_openvino(model: Any, images: Sequence[Array]) -> Any:
    """Quantize an openvino.Model by NNCF, and return another one.

    Args:
        model: In float32; it is not changed.
        images: Inputs for calibration, each (batch, channels, height, width).
    """
    import_openvino()
    import nncf
    from nncf.quantization.advanced_parameters import AdvancedQuantizationParameters, OverflowFix

    layers = openvino_layers(model)
    require(bool(layers), NO_LAYERS)
    # Everything else that NNCF could quantize is left as it is.
    others = [one.get_friendly_name() for one in model.get_ordered_ops() if one.get_friendly_name() not in layers]
    with _quiet("nncf"), redirect_stdout(StringIO()):
        nncf.set_log_level(logging.ERROR)
        return nncf.quantize(
            model,
            nncf.Dataset(images),
            subset_size=len(images),
            model_type=nncf.ModelType.TRANSFORMER,
            ignored_scope=nncf.IgnoredScope(names=others, validate=False),
            advanced_parameters=AdvancedQuantizationParameters(overflow_fix=OverflowFix.ENABLE),
        )


def openvino_layers(model: Any) -> set[str]:
    """Return the friendly names of the nodes of an openvino.Model that are linear layers or convolutions."""
    from_pixels: set[str] = set()
    constant: dict[str, int] = {}
    found = set()
    for node in model.get_ordered_ops():
        name, kind = node.get_friendly_name(), node.get_type_name()
        sources = [node.input_value(place).get_node().get_friendly_name() for place in range(node.get_input_size())]
        if kind == "Constant" or (sources and all(source in constant for source in sources)):
            rank = node.output(0).get_partial_shape().rank
            constant[name] = rank.get_length() if rank.is_static else -1
        elif kind == "Parameter":
            from_pixels.add(name)
        elif kind not in SHAPE_TYPES and not from_pixels.isdisjoint(sources):
            from_pixels.add(name)
            if kind in OPENVINO_TYPES and sources[0] in from_pixels:
                wanted = range(2, 3) if kind == "MatMul" else range(3, 7)
                if constant.get(sources[1]) in wanted:
                    found.add(name)
    return found


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """A context in which a logger reports errors only."""
    logger = logging.getLogger(None if name == "root" else name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
