"""From graphs of torch.export to ONNX."""

import io
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any

import numpy as np
import torch
from torch.export import ExportedProgram

from ..engine.exported import INPUT_NAME
from ..utils.validation import require

# The newest operators that are used are LayerNormalization (17) and those with axes as inputs (18).
OPSET = 18
# Domains of the operators that ONNX defines.
STANDARD_DOMAINS = ("", "ai.onnx")
INPUT_DIMENSIONS = ("batch", "channels", "height", "width")
# What the exporter writes about the classes of modules, by which quantization finds those that stay in float32.
CLASSES_KEY = "pkg.torch.onnx.class_hierarchy"
# Smaller constants stay in float32: biases, norms and tables of positions cost little.
HALF_ELEMENTS = 1024
# Of the weights: protobuf's files have less than 2**31 bytes.
MOST_BYTES = 2**31 - 2**24
MOST_HALF = float(np.finfo(np.float16).max)


@contextmanager
def quiet_conversion() -> Iterator[None]:
    """A context in which converters print neither warnings nor progress."""
    names = ("torch.onnx", "torch.export", "torch.utils.cpp_extension", "onnxscript", "onnx_ir", "nncf")
    # ONNX Runtime's quantization has no logger of its own.
    loggers = [logging.getLogger(), *(logging.getLogger(name) for name in names)]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def to_onnx(program: ExportedProgram, outputs: Sequence[str]) -> Any:
    """Convert a graph to an onnx.ModelProto of standard operators.

    Args:
        program: The graph, with one input.
        outputs: Names of its outputs.
    """
    with quiet_conversion():
        converted = convert(program, outputs)
        simplify(converted)
    return finish(converted)


def convert(
    program: ExportedProgram, outputs: Sequence[str], translations: dict[Any, Any] | None = None
) -> torch.onnx.ONNXProgram:
    """Convert a graph operator by operator.

    Args:
        program: The graph, with one input.
        outputs: Names of its outputs.
        translations: What operators of torch that ONNX does not have become.
    """
    converted = torch.onnx.export(
        program,
        dynamo=True,
        opset_version=OPSET,
        input_names=[INPUT_NAME],
        output_names=list(outputs),
        custom_translation_table=translations,
        optimize=False,
        verbose=False,
    )
    assert converted is not None
    return converted


def simplify(converted: torch.onnx.ONNXProgram) -> None:
    """Optimize a graph; equal expressions are joined first, which leaves a quarter of the nodes to the slow rules."""
    join_equal(converted)
    converted.optimize()


def join_equal(converted: torch.onnx.ONNXProgram) -> None:
    """Compute constants, join equal expressions, and remove what is not used."""
    from onnx_ir.passes.common import CommonSubexpressionEliminationPass
    from onnxscript.optimizer import fold_constants, remove_unused_nodes

    fold_constants(converted.model)
    CommonSubexpressionEliminationPass()(converted.model)
    remove_unused_nodes(converted.model)


def finish(converted: torch.onnx.ONNXProgram) -> Any:
    """Return an onnx.ModelProto with names of its lengths; ValueError if it has operators that ONNX does not define."""
    model = converted.model_proto
    # The exporter's records of its own work have the paths of source files, and are longer than the graph.
    for holder in (model, model.graph, *model.graph.node, *model.graph.initializer, *model.graph.input):
        kept = [(entry.key, entry.value) for entry in holder.metadata_props if entry.key == CLASSES_KEY]
        del holder.metadata_props[:]
        for key, value in kept:
            holder.metadata_props.add(key=key, value=value)
    strange = sorted({node.op_type for node in model.graph.node if node.domain not in STANDARD_DOMAINS})
    require(not strange, f"the model needs operators that ONNX does not define ({', '.join(strange)})")
    (images,) = model.graph.input
    for dimension, name in zip(images.type.tensor_type.shape.dim, INPUT_DIMENSIONS, strict=True):
        if dimension.dim_param:
            dimension.dim_param = name
    # Names of lengths in between, such as s77, would mean others than those of the input now.
    del model.graph.value_info[:]
    for output in model.graph.output:
        for place, dimension in enumerate(output.type.tensor_type.shape.dim):
            if dimension.dim_param:
                dimension.dim_param = "batch" if place == 0 else f"{output.name}_{place}"
    return model


def store_half(model: Any) -> None:
    """Store the large weights of an onnx.ModelProto in float16, which halves the file; it computes in float32."""
    from onnx import TensorProto, helper, numpy_helper

    casts = []
    for constant in model.graph.initializer:
        values = numpy_helper.to_array(constant)
        if values.dtype != np.float32 or values.size < HALF_ELEMENTS or values.ndim < 2:
            continue
        require(
            bool(np.abs(values).max() <= MOST_HALF),
            f"{constant.name} has values beyond {MOST_HALF:.0f}, which float16 does not have: leave out --half",
        )
        name = constant.name
        constant.CopyFrom(numpy_helper.from_array(values.astype(np.float16), f"{name}.half"))
        casts.append(helper.make_node("Cast", [f"{name}.half"], [name], f"{name}.float", to=TensorProto.FLOAT))
    nodes = [*casts, *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def to_bytes(model: Any) -> bytes:
    """Serialize an onnx.ModelProto; ValueError if it is too large for one file."""
    size = sum(len(constant.raw_data) for constant in model.graph.initializer)
    require(
        size < MOST_BYTES,
        f"the model has {size / 1e9:.1f} GB of weights, but ONNX, by which all formats are made, holds less than 2 GB: "
        "export a smaller model, or, in the format onnx, use --half",
    )
    return bytes(model.SerializeToString())
