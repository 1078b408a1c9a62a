"""From ONNX to OpenVINO."""

import errno
import os
import shutil
from pathlib import Path
from typing import Any

from ..engine.exported import INPUT_NAME
from ..engine.exported_model import import_openvino
from .onnx import quiet_conversion, to_bytes

# Bytes of MODEL.xml, about: some megabytes for the largest models.
STRUCTURE = 2**22


def to_openvino(model: Any, folder: Path) -> Any:
    """Convert an onnx.ModelProto to an openvino.Model.

    Args:
        model: The model.
        folder: Where a file may be written meanwhile.
    """
    openvino = import_openvino()
    file = folder / "model.onnx"
    file.write_bytes(to_bytes(model))
    with quiet_conversion():
        converted = openvino.convert_model(file)
    (images,) = converted.inputs
    images.get_tensor().set_names({INPUT_NAME})
    for output, given in zip(converted.outputs, model.graph.output, strict=True):
        output.get_tensor().set_names({given.name})
    # The weights are in memory now: the file is closed before it is removed.
    file.unlink()
    return converted


def save_openvino(model: Any, file: Path, *, half: bool) -> None:
    """Write MODEL.xml and MODEL.bin, with weights in float16 on request; OSError if they cannot be written."""
    try:
        import_openvino().save_model(model, file, compress_to_fp16=half)
    # OpenVINO does not say why it could not write ("iostream error"), and removes what it has written.
    except RuntimeError as error:
        weights = sum(node.get_byte_size() for node in model.get_ops() if node.get_type_name() == "Constant")
        needed = weights // (2 if half else 1) + STRUCTURE
        code = errno.ENOSPC if shutil.disk_usage(file.parent).free < needed else errno.EIO
        raise OSError(code, os.strerror(code), str(file)) from error
