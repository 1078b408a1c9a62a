"""Small exported models, made by hand: a convolution of which the mean over the image, or each pixel, is a class."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from inlinevit.engine.exported import ExportedMetadata, InputShape, Preprocessing, SideRange, store_in_onnx

MEAN, STD = [0.4, 0.5, 0.6], [0.2, 0.25, 0.3]
INFERENCE: dict[str, Any] = {"min_size": 32, "window_size": None, "stride": None, "scales": [1.0], "flip": False}


def weights(classes: int, channels: int = 3) -> np.ndarray:
    """The convolution's: (classes, channels, 1, 1)."""
    return np.random.default_rng(0).standard_normal((classes, channels, 1, 1)).astype(np.float32)


def make_metadata(task: str = "classification", classes: tuple[str, ...] = ("ant", "bee"), **changes: Any) -> Any:
    """Metadata of a small model."""
    channels = changes.pop("channels", 3)
    static = changes.pop("static", None)
    side = SideRange() if static is None else SideRange(static[1], static[1])
    dense = task == "segmentation"
    resizing: dict[str, Any] = {"size": 32, "interpolation": "bicubic", "crop_pct": 0.9, "crop_mode": "center"}
    preprocessing = Preprocessing(MEAN[:channels], STD[:channels], **({} if dense else resizing))
    options = {
        "task": task,
        "model": "test_vit",
        "model_config": {"backbone": "inline_pvt_tiny"} if dense else {"name": "test_vit", "img_size": 32},
        "input": InputShape(channels, side, side, None if static is None else static[0]),
        "outputs": ["logits"],
        "preprocessing": preprocessing,
        "classes": list(classes),
        "label_names": list(classes),
        "package_version": "0.1.0",
        "opset": 18,
    }
    if dense:
        labels = [{"name": name, "values": [place + 1]} for place, name in enumerate(classes)]
        options |= {"labels": {"ignored": [0], "classes": labels}, "inference": INFERENCE, "window_size": 32}
    return ExportedMetadata(**{**options, **changes})


def make_model(metadata: ExportedMetadata) -> onnx.ModelProto:
    """The model, with its metadata."""
    shape, classes = metadata.input, len(metadata.classes)
    dense = metadata.task == "segmentation"
    nodes = [helper.make_node("Conv", ["images", "weight"], ["logits" if dense else "map"])]
    if not dense:
        nodes += [
            helper.make_node("GlobalAveragePool", ["map"], ["mean"]),
            helper.make_node("Flatten", ["mean"], ["logits"], axis=1),
        ]
    graph = helper.make_graph(
        nodes,
        "model",
        [
            helper.make_tensor_value_info(
                "images", TensorProto.FLOAT, [shape.batch or "batch", shape.channels, "height", "width"]
            )
        ],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(weights(classes, shape.channels), "weight")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    store_in_onnx(model, metadata)
    return model


def write_model(path: Path, metadata: ExportedMetadata | None = None) -> Path:
    """Write the model to a file, and return its path."""
    path.write_bytes(make_model(metadata or make_metadata()).SerializeToString())
    return path
