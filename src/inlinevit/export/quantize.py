"""Quantized models on images: calibration, and the comparison with float32."""

from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ..engine.exported import INPUT_NAME, ExportedMetadata
from ..engine.exported_model import compile_openvino, onnx_session
from ..engine.progress import job_progress
from ..utils.validation import require
from .int8 import quantize_onnx, quantize_openvino
from .quantization_data import Inputs, open_inputs

Array = NDArray[np.float32]
# Images whose activations give the ranges, and on which the result is compared with float32.
CALIBRATION_IMAGES, EVALUATION_IMAGES = 256, 1000
# The least mean cosine between outputs in int8 and in float32; below, nothing is written.
MIN_COSINE = 0.95


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
    open_model = _onnx_run if is_onnx else _openvino_run
    figures = compare(open_model(model), open_model(quantized), evaluation, metadata.task)
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
