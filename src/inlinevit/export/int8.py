"""Static int8 quantization of graphs: per channel, with ranges of activations from calibration images.

Only linear layers and convolutions are quantized: products of activations, which depend on the pixels, with constant
weights. All others stay in float32: covariances and their products with queries, the dynamic kernels of the local
residual and what they are computed by, softmax attention, norms, activations and position embeddings. The layers are
found by the structure of the graph, not by names.

Weights use 7 of their 8 bits. CPUs without VNNI instructions add two products of 8 bits in 16 bits, which would
saturate otherwise.
"""

import logging
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..engine.exported import INPUT_NAME
from ..engine.exported_model import import_openvino
from ..utils.validation import require
from .onnx import CLASSES_KEY, quiet_conversion

Array = NDArray[np.float32]
# Operators that are quantized if they are linear layers or convolutions.
ONNX_TYPES = ("Conv", "Gemm", "MatMul")
OPENVINO_TYPES = ("Convolution", "GroupConvolution", "MatMul")
# Results of these depend on shapes, not on values.
SHAPE_TYPES = ("Shape", "Size", "ShapeOf")
# Modules of which nothing is quantized, whatever the structure of their graph.
FLOAT_MODULES = ("LocalResidual", "ResamplePosEmbed", "ResampleByProducts", "AdaptivePoolByProducts")
NO_LAYERS = "the model has no linear layers or convolutions with constant weights that could be quantized"


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

    class Reader(CalibrationDataReader):
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
    with tempfile.TemporaryDirectory() as folder, quiet_conversion():
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
    with quiet_conversion():
        import nncf
        from nncf.quantization.advanced_parameters import AdvancedQuantizationParameters, OverflowFix

        layers = openvino_layers(model)
        require(bool(layers), NO_LAYERS)
        # Everything else that NNCF could quantize is left as it is.
        names = (node.get_friendly_name() for node in model.get_ordered_ops())
        others = [name for name in names if name not in layers]
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
