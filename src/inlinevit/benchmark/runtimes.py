"""How a candidate is run: each mode is a runtime with a precision.

All use as many threads as the benchmark was given. None may keep a thread busy between calls, which would slow down the
candidates beside it: ONNX Runtime's threads are told to sleep when a call ends, and OpenVINO's do so by themselves.
Those of torch (OpenMP) wait actively for a millisecond or so, which is why short calls are rehearsed before each is
timed.
"""

import inspect
import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..engine.exported import INPUT_NAME, LOGITS_NAME
from ..engine.exported_model import compile_openvino, import_openvino, onnx_session
from ..export.blocks import convert_model
from ..export.int8 import quantize_onnx, quantize_openvino
from ..export.onnx import quiet_conversion
from ..export.openvino import to_openvino
from ..models._inline_vit import InLineViT
from ..models.inference import optimize_for_inference
from ..utils.validation import require
from .workload import SEED, LeftOut

# Returns the outputs for the input that it was made for, which the next call may overwrite.
Call = Callable[[], Tensor | Sequence[Tensor]]
# Files for images of any size, as onnx.ModelProto, by their modules: the modes of a candidate share one.
EXPORTED: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
# Inputs by which NNCF chooses the ranges of int8 activations.
CALIBRATION_INPUTS = 2
# Side of those of models for images of any size, in pixels.
CALIBRATION_SIDE = 224


@dataclass(frozen=True)
class Mode:
    """A way to run a module.

    Attributes:
        runtime: What runs it.
        prepare: From a module, its input and a number of threads to a call; None if the mode is not for such modules.
            Raises LeftOut if the module cannot be converted.
        precision: "float32" or "int8".
        packages: What has to be installed, all of it in the extra `bench`.
        has_gradients: Whether the call can be followed by a backward pass.
        min_cosine: The least cosine between outputs in int8 and in float32; below, nothing is reported.
    """

    runtime: str
    prepare: Callable[[nn.Module, Tensor, int], Call | None]
    precision: str = "float32"
    packages: tuple[str, ...] = ()
    has_gradients: bool = False
    min_cosine: float = 0.9

    @property
    def missing(self) -> list[str]:
        """The packages that are not installed."""
        return [name for name in self.packages if find_spec(name) is None]


def prepare_eager(module: nn.Module, x: Tensor, threads: int) -> Call:
    """Call a module as it is."""
    return lambda: module(x)


def prepare_compiled(module: nn.Module, x: Tensor, threads: int) -> Call:
    """Compile a module for one input size."""
    # Compilations of one module must not count against the limit of another; older versions of torch lack the option.
    has_option = "isolate_recompiles" in inspect.signature(torch.compile).parameters
    isolated = {"isolate_recompiles": True} if has_option else {}
    compiled = cast(Any, torch.compile)(module, dynamic=False, **isolated)
    return lambda: compiled(x)


def prepare_optimized(module: nn.Module, x: Tensor, threads: int) -> Call | None:
    """Optimize a model of this package for inference."""
    if not isinstance(module, InLineViT):
        return None
    optimized = optimize_for_inference(module)
    return lambda: optimized(x)


def prepare_optimized_int8(module: nn.Module, x: Tensor, threads: int) -> Call | None:
    """Optimize a model of this package for inference with int8 products."""
    if not isinstance(module, InLineViT):
        return None
    optimized = cast(Any, optimize_for_inference)(module, dtype="int8")
    return lambda: optimized(x)


def prepare_openvino(module: nn.Module, x: Tensor, threads: int) -> Call:
    """Convert a module to OpenVINO."""
    with conversion("OpenVINO"):
        return openvino_call(openvino_model(module, x), x, threads)


def prepare_openvino_int8(module: nn.Module, x: Tensor, threads: int) -> Call:
    """Convert a module to OpenVINO and quantize it after training by NNCF."""
    with conversion("OpenVINO and NNCF"):
        model = openvino_model(module, x)
        import nncf

        nncf.set_log_level(logging.ERROR)
        dataset = nncf.Dataset(calibration_inputs(x))
        quantized = nncf.quantize(model, dataset, subset_size=CALIBRATION_INPUTS, model_type=nncf.ModelType.TRANSFORMER)
        return openvino_call(quantized, x, threads)


def calibration_inputs(x: Tensor, dynamic: bool = False) -> list[Any]:
    """Return random arrays of the shape of an input, for calibration.

    Args:
        x: The input.
        dynamic: Whether the model takes images of any size. Small ones do then: calibration keeps the activations of
            all layers, which are gigabytes where softmax attention has thousands of tokens.
    """
    side = CALIBRATION_SIDE if dynamic else max(x.shape[-2:])
    generator = torch.Generator().manual_seed(SEED + 1)
    shape = x[..., :side, :side].shape
    return [torch.randn(shape, generator=generator).numpy() for _ in range(CALIBRATION_INPUTS)]


def openvino_model(module: nn.Module, x: Tensor) -> Any:
    """Return a model of OpenVINO for inputs of one shape."""
    openvino = import_openvino()
    # The check would trace a second time, and compare graphs in which constants have other names.
    traced = torch.jit.trace(module, x, check_trace=False)
    return openvino.convert_model(traced, example_input=x, input=[tuple(x.shape)])


def openvino_call(model: Any, x: Tensor, threads: int) -> Call:
    """Compile a model of OpenVINO for the shortest time of one call at a time."""
    request = compile_openvino(model, threads).create_infer_request()
    request.set_input_tensor(import_openvino().Tensor(x.numpy(), shared_memory=True))
    outputs = range(len(model.outputs))

    def call() -> list[Tensor]:
        request.infer()
        return [torch.from_numpy(request.get_output_tensor(place).data) for place in outputs]

    return call


def prepare_onnxruntime(
    module: nn.Module, x: Tensor, threads: int, *, dynamic: bool = False, int8: bool = False
) -> Call:
    """Export a module to ONNX and run it by ONNX Runtime.

    Args:
        module: The module.
        x: Its input.
        threads: Threads of ONNX Runtime.
        dynamic: Whether the file takes inputs of any size, as `inlinevit export` writes it.
        int8: Whether it is quantized.
    """
    with conversion("ONNX"):
        model = onnx_model(module, x, dynamic)
        model = quantize_onnx(model, calibration_inputs(x, dynamic)) if int8 else model
        session = onnx_session(model.SerializeToString(), threads)
    inputs = {INPUT_NAME: x.numpy()}
    return lambda: [torch.from_numpy(output) for output in session.run(None, inputs)]


def prepare_exported_openvino(module: nn.Module, x: Tensor, threads: int, *, int8: bool = False) -> Call:
    """Export a module for inputs of any size, as `inlinevit export` does, and run it by OpenVINO."""
    with conversion("OpenVINO"):
        with tempfile.TemporaryDirectory() as folder:
            model = to_openvino(onnx_model(module, x, dynamic=True), Path(folder))
        model = quantize_openvino(model, calibration_inputs(x, dynamic=True)) if int8 else model
        return openvino_call(model, x, threads)


def onnx_model(module: nn.Module, x: Tensor, dynamic: bool) -> Any:
    """Return an onnx.ModelProto of a module for inputs of one shape, or for images of any size."""
    if dynamic:
        if module not in EXPORTED:
            EXPORTED[module] = convert_model(module, x.shape[1], [LOGITS_NAME])
        return EXPORTED[module]
    program = torch.onnx.export(module, (x,), dynamo=True, verbose=False, input_names=[INPUT_NAME])
    assert program is not None
    return program.model_proto


@contextmanager
def conversion(target: str) -> Iterator[None]:
    """A context for the conversion of a module to another runtime: without gradients, warnings and progress bars."""
    try:
        with torch.no_grad(), quiet_conversion():
            yield
    # Converters raise exceptions of many types for operators that they do not know.
    except Exception as error:
        cause = str(error).strip().partition("\n")[0]
        raise LeftOut(f"it cannot be converted to {target} ({cause or type(error).__name__})") from error


ONNX_PACKAGES = ("onnxruntime", "onnx", "onnxscript")
MODES = {
    "eager": Mode("eager", prepare_eager, has_gradients=True),
    "compiled": Mode("compiled", prepare_compiled, has_gradients=True),
    # For models of this package only.
    "optimized": Mode("optimized", prepare_optimized),
    "optimized-int8": Mode("optimized", prepare_optimized_int8, "int8"),
    "openvino": Mode("openvino", prepare_openvino, packages=("openvino",)),
    # NNCF has one range for all tokens, which is inaccurate with random weights that are larger than trained ones. The
    # time does not depend on that, and the cosine is recorded; that of unrelated outputs is about 0.
    "openvino-int8": Mode("openvino", prepare_openvino_int8, "int8", packages=("openvino", "nncf"), min_cosine=0.3),
    "onnxruntime": Mode("onnxruntime", prepare_onnxruntime, packages=ONNX_PACKAGES),
    "onnxruntime-int8": Mode(
        "onnxruntime", partial(prepare_onnxruntime, int8=True), "int8", packages=ONNX_PACKAGES, min_cosine=0.3
    ),
    # Models as `inlinevit export` writes them: for images of any size.
    "exported-onnxruntime": Mode("onnxruntime", partial(prepare_onnxruntime, dynamic=True), packages=ONNX_PACKAGES),
    "exported-onnxruntime-int8": Mode(
        "onnxruntime",
        partial(prepare_onnxruntime, dynamic=True, int8=True),
        "int8",
        packages=ONNX_PACKAGES,
        min_cosine=0.3,
    ),
    "exported-openvino": Mode("openvino", prepare_exported_openvino, packages=("openvino", "onnx", "onnxscript")),
    "exported-openvino-int8": Mode(
        "openvino",
        partial(prepare_exported_openvino, int8=True),
        "int8",
        packages=("openvino", "nncf", "onnx", "onnxscript"),
        min_cosine=0.3,
    ),
}


def package_versions(modes: Sequence[str]) -> dict[str, str]:
    """Return the versions of the packages that modes use."""
    return {package: version(package) for mode in modes for package in MODES[mode].packages}


def refusal(name: str, *, device: str, backward: bool) -> str:
    """Return why a mode cannot be used here, with the remedy, or "" if it can."""
    mode = MODES[name]
    if backward and not mode.has_gradients:
        return f"mode {name} is for inference, not for --backward: leave it out"
    if device != "cpu" and mode.packages:
        return f"mode {name} runs on the CPU, not on {device}: leave it out"
    if mode.missing:
        return f"mode {name} needs {' and '.join(mode.missing)}: pip install 'inlinevit[bench]'"
    return ""


def require_modes(names: Sequence[str], *, device: str, backward: bool) -> None:
    """Raise a ValueError for modes that cannot be used here."""
    for name in names:
        reason = refusal(name, device=device, backward=backward)
        require(not reason, reason)
