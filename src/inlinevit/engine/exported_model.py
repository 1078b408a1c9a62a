"""Exported models that are ready to run: ONNX files by ONNX Runtime, OpenVINO models by OpenVINO, on the CPU.

A file is read into memory and checked before a runtime gets it: it must be one file (an OpenVINO model: two, MODEL.xml
and MODEL.bin in the same folder) with metadata of this package. Weights in further files, which ONNX allows, are
refused, because their paths could name any file.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..utils.files import read_bytes
from ..utils.validation import require, shorten
from .exported import INPUT_NAME, REMEDY, ExportedMetadata, read_from_onnx, read_from_openvino

ONNX, OPENVINO = ".onnx", ".xml"
# Files of exported models, by their extension.
EXPORTED = (ONNX, OPENVINO)

Array = NDArray[Any]
# From an input (batch, channels, height, width) to the outputs.
Run = Callable[[Array], Sequence[Array]]


def is_exported(model: str) -> bool:
    """Whether this is the file of an exported model, as opposed to a run or the name of a model."""
    return Path(model).suffix.lower() in EXPORTED and not Path(model).is_dir()


@dataclass(frozen=True)
class ModelPort:
    """An input or output as a runtime describes it.

    Attributes:
        name: Its name.
        is_float32: Whether its values are float32.
        shape: Its dimensions; None where any length is allowed.
    """

    name: str
    is_float32: bool
    shape: tuple[int | None, ...]


class ExportedModel(nn.Module):
    """An exported model, called like a model of torch: images (batch, channels, height, width) to its outputs.

    It has no parameters, and computes on the CPU without gradients, wherever its inputs are. Outputs are copies on the
    device of the inputs. A file with a fixed batch size is run as often as needed.

    Args:
        file: MODEL.onnx or MODEL.xml.
        threads: Threads of the runtime; None = as many as torch has.

    Attributes:
        metadata: What the file says about itself.
        digest: (32,) of bytes: SHA-256 of the content, by which the state dict identifies the file.

    Raises:
        ModuleNotFoundError: The runtime is not installed.
        OSError: The file cannot be read.
        ValueError: It is damaged, or not one of this package.
    """

    digest: Tensor

    def __init__(self, file: str | Path, threads: int | None = None) -> None:
        super().__init__()
        self.file = str(file)
        read = _read_file(self.file)
        self.metadata = read.metadata
        self.register_buffer("digest", torch.tensor(list(read.digest), dtype=torch.uint8))
        try:
            opened = read.open(threads or torch.get_num_threads())
        except ModuleNotFoundError:
            raise
        # Runtimes have exceptions of their own, which share no class.
        except Exception as error:
            raise _damaged(self.file, error) from error
        self.run = opened.run
        _check_ports(self.metadata, opened, self.file)

    def forward(self, images: Tensor) -> Any:
        """Return the output, or a list if there are several, of images (batch, channels, height, width)."""
        allowed = self.metadata.input
        require(images.dim() == 4 and len(images) > 0, f"the input has the shape {tuple(images.shape)}: give it images")
        size = len(images) if allowed.batch is None else allowed.batch
        allowed.check((size, *images.shape[1:]))
        array = images.detach().to("cpu", torch.float32).numpy()
        batches = [self._run_batch(array[first : first + size], size) for first in range(0, len(array), size)]
        outputs = [torch.from_numpy(np.concatenate(parts)).to(images.device) for parts in zip(*batches, strict=True)]
        return outputs[0] if len(outputs) == 1 else outputs

    def _run_batch(self, images: Array, size: int) -> list[Array]:
        """Return the outputs of at most `size` images; a smaller batch is filled up with its last image."""
        missing = size - len(images)
        filled = np.concatenate([images, images[-1:].repeat(missing, axis=0)]) if missing else images
        shown = "×".join(map(str, images.shape[2:]))
        try:
            outputs = self.run(np.ascontiguousarray(filled))
        except Exception as error:
            raise ValueError(f"{self.file} cannot be run on images of {shown} ({_cause(error)}): {REMEDY}") from error
        classes, task = len(self.metadata.classes), self.metadata.task
        wanted = (size, classes, *filled.shape[2:]) if task == "segmentation" else (size, classes)
        require(
            task == "features" or outputs[0].shape == wanted,
            f"{self.file} gives outputs of the shape {outputs[0].shape}, not {wanted}, as its metadata state: {REMEDY}",
        )
        return [output[: len(images)] for output in outputs]


@dataclass(frozen=True)
class _Opened:
    """A model in its runtime: a function that runs it, its inputs and its outputs."""

    run: Run
    inputs: Sequence[ModelPort]
    outputs: Sequence[ModelPort]


@dataclass(frozen=True)
class _ReadFile:
    """A file that is read: its metadata, a digest of its content, and a function of the threads that opens it."""

    metadata: ExportedMetadata
    digest: bytes
    open: Callable[[int], _Opened]


def read_metadata(file: str | Path) -> ExportedMetadata:
    """Return the metadata of an exported model; raises as ExportedModel does. It is not compiled or run."""
    return _read_file(str(file)).metadata


def _read_file(file: str) -> _ReadFile:
    path = Path(file)
    if not path.exists():
        raise FileNotFoundError(f"no file at {file}: name the file of an exported model, or the folder of a run")
    return _read_openvino(path) if path.suffix.lower() == OPENVINO else _read_onnx(path)


def _cause(error: Exception) -> str:
    """Return the first line of an error of a runtime that is not a place in its sources."""
    lines = (line.strip() for line in str(error).splitlines())
    return next((line for line in lines if line and not line.startswith("Exception from")), type(error).__name__)[:200]


def _damaged(file: str, error: Exception) -> ValueError:
    return ValueError(f"{file} is damaged, or is not an exported model ({_cause(error)}): {REMEDY}")


def _check_ports(metadata: ExportedMetadata, opened: _Opened, origin: str) -> None:
    """Refuse a file whose inputs and outputs are not those of its metadata."""
    names = [one.name for one in opened.inputs]
    require(names == [INPUT_NAME], f"{origin} has the inputs {shorten(names)}, not {INPUT_NAME} alone: {REMEDY}")
    (port,), allowed = opened.inputs, metadata.input
    wanted = (allowed.batch, allowed.channels, None, None)
    fits = len(port.shape) == 4 and all(
        length is None or expected in (None, length) for length, expected in zip(port.shape, wanted, strict=True)
    )
    require(
        fits and port.is_float32,
        f"{origin} takes another input than float32 (batch, {allowed.channels}, height, width), which its metadata "
        f"state: {REMEDY}",
    )
    found = [one.name for one in opened.outputs]
    require(
        found == metadata.outputs and all(one.is_float32 for one in opened.outputs),
        f"{origin} has the outputs {shorten(found)}, but its metadata state {shorten(metadata.outputs)} in float32: "
        f"{REMEDY}",
    )


def _read_onnx(path: Path) -> _ReadFile:
    import onnx

    content, origin = read_bytes(path), str(path)
    try:
        model = onnx.load_model_from_string(content)
        require(bool(model.graph.node), "it has no graph")
    # protobuf's own exceptions depend on its version.
    except Exception as error:
        raise _damaged(origin, error) from error
    require(
        all(tensor.data_location != onnx.TensorProto.EXTERNAL for tensor in _tensors(model)),
        f"{origin} keeps weights in other files, which are not read because their paths could name any file: save it "
        "as one file, as `inlinevit export` does",
    )
    metadata = read_from_onnx(model, origin)

    def open_session(threads: int) -> _Opened:
        session = onnx_session(content, threads)
        inputs, outputs = (
            [ModelPort(one.name, one.type == "tensor(float)", _lengths(one.shape)) for one in ports]
            for ports in (session.get_inputs(), session.get_outputs())
        )
        return _Opened(lambda images: session.run(None, {INPUT_NAME: images}), inputs, outputs)

    return _ReadFile(metadata, sha256(content).digest(), open_session)


def _lengths(shape: Iterable[Any]) -> tuple[int | None, ...]:
    """Return the dimensions of a shape of ONNX Runtime, which has names or None for those that vary."""
    return tuple(length if isinstance(length, int) else None for length in shape)


def onnx_session(content: bytes, threads: int) -> Any:
    """Return an onnxruntime.InferenceSession of a serialized model."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # Threads wait for work actively during a call, which is faster, but not between calls.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def _tensors(model: Any) -> Iterator[Any]:
    """Yield all tensors of an onnx.ModelProto: initializers and attributes, in all subgraphs and functions."""
    graphs = [model.graph]
    nodes = [node for function in model.functions for node in function.node]
    while graphs or nodes:
        if graphs:
            graph = graphs.pop()
            nodes += graph.node
            yield from graph.initializer
            for sparse in graph.sparse_initializer:
                yield from (sparse.values, sparse.indices)
            continue
        for attribute in nodes.pop().attribute:
            graphs += [*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])]
            yield from (attribute.t, *attribute.tensors)
            for sparse in (attribute.sparse_tensor, *attribute.sparse_tensors):
                yield from (sparse.values, sparse.indices)


def import_openvino() -> Any:
    """Import OpenVINO."""
    # Without this package, OpenVINO and NNCF do not report their use to their makers.
    cast(dict[str, Any], sys.modules).setdefault("openvino_telemetry", None)
    import openvino

    return openvino


def compile_openvino(model: Any, threads: int) -> Any:
    """Compile an openvino.Model for the shortest time of one call at a time."""
    # By default, OpenVINO computes in bfloat16 on CPUs that can.
    config = {
        "INFERENCE_NUM_THREADS": threads,
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "f32",
    }
    return import_openvino().Core().compile_model(model, "CPU", config)


def _read_openvino(path: Path) -> _ReadFile:
    openvino = import_openvino()
    structure, weights = (read_bytes(file) for file in (path, path.with_suffix(".bin")))
    try:
        model = openvino.Core().read_model(structure, openvino.Tensor(np.frombuffer(weights, np.uint8)))
        metadata = read_from_openvino(model, str(path))
    except ValueError:
        raise
    except Exception as error:
        raise _damaged(str(path), error) from error

    def open_compiled(threads: int) -> _Opened:
        compiled = compile_openvino(model, threads)
        inputs, outputs = (
            [
                ModelPort(
                    one.get_any_name() if one.get_names() else "",
                    one.get_element_type() == openvino.Type.f32,
                    tuple(side.get_length() if side.is_static else None for side in one.get_partial_shape()),
                )
                for one in ports
            ]
            for ports in (model.inputs, model.outputs)
        )
        # Results are views of memory that the next call overwrites.
        return _Opened(lambda images: [np.array(one) for one in compiled([images]).to_tuple()], inputs, outputs)

    return _ReadFile(metadata, sha256(structure + weights).digest(), open_compiled)
