"""`inlinevit export`: load, record, convert, compare, and only then put the file in its place."""

import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..engine.exported import ExportedMetadata, ExportFormat, store_in_onnx, store_in_openvino
from ..engine.exported_model import import_openvino, read_metadata
from ..engine.outputs import check_output_file
from ..utils.atomic import disk_full_errors, fsync_dir, is_stream
from ..utils.extras import extras_named
from ..utils.validation import MOST_PIXELS, require
from .blocks import convert_model
from .onnx import OPSET, store_half, to_bytes
from .openvino import save_openvino, to_openvino
from .parity import measure_parity, parity_shapes
from .source import ExportSource, open_source

SUFFIXES: dict[ExportFormat, str] = {"onnx": ".onnx", "openvino": ".xml"}


@dataclass(frozen=True)
class ExportSettings:
    """How a model is exported.

    Attributes:
        format: Of the file.
        half: Store weights in float16.
        static: The shape of the input; None = any batch size, height and width.
        quantize: "int8", or None.
        data: Images for the quantization.
    """

    format: ExportFormat = "onnx"
    half: bool = False
    static: list[int] | None = None
    quantize: str | None = None
    data: str | None = None

    def __post_init__(self) -> None:
        require((self.quantize is None) == (self.data is None), "--quantize and --data need each other: give both")
        require(
            not (self.half and self.quantize), "--half and --quantize are both about weights: leave out one of them"
        )


def parse_static(text: str | None) -> list[int] | None:
    """Return the shape that --static gives, such as 1,3,224,224."""
    if text is None:
        return None
    words = text.split(",")
    is_shape = len(words) == 4 and all(word.strip().isdecimal() and 1 <= int(word) <= MOST_PIXELS for word in words)
    require(is_shape, f"--static is {text!r}: write batch, channels, height and width, such as 1,3,224,224")
    return [int(word) for word in words]


def check_export_output(output: str, format: ExportFormat, inputs: list[str]) -> Path:
    """Return the path of the file to write; refuse one that cannot be written, before anything is computed."""
    path = check_output_file(output, inputs)
    if format == "openvino":
        check_output_file(str(path.with_suffix(".bin")), inputs)
    require(not is_stream(path), f"{output} is a stream, but exported models are files: name one with --output")
    suffix = SUFFIXES[format]
    require(
        path.suffix == suffix,
        f"{output} should end in {suffix}, as files of the format {format} do: rename it, or choose another --format",
    )
    return path


def export_model(
    name: str,
    output: str,
    settings: ExportSettings,
    *,
    checkpoint: str | None = None,
    features: bool = False,
    untrained: bool = False,
) -> ExportedMetadata:
    """Export a model, and return the metadata of the file.

    Args:
        name: The folder of a run, or the name of a model.
        output: The file, MODEL.onnx or MODEL.xml.
        settings: How it is exported.
        checkpoint: As for inlinevit.load.
        features: Export the backbone alone.
        untrained: Use random weights.

    Raises:
        ModuleNotFoundError: A package of the extra `export` is missing.
        OSError: There is no such model, or the file cannot be written.
        ValueError: The model cannot be exported, or the result differs from it.
    """
    path = check_export_output(output, settings.format, [checkpoint] if checkpoint else [])
    with extras_named():
        require_packages(settings)
        source = open_source(
            name, checkpoint=checkpoint, features=features, untrained=untrained, static=settings.static
        )
        with disk_full_errors(path):
            return write_exported(source, path, settings)


def require_packages(settings: ExportSettings) -> None:
    """Import what is needed at the end, so that nothing is computed in vain."""
    import onnx  # noqa: F401
    import onnxscript  # noqa: F401

    if settings.format == "onnx":
        import onnxruntime  # noqa: F401
    else:
        import_openvino()
        if settings.quantize:
            import nncf  # noqa: F401


def write_exported(source: ExportSource, path: Path, settings: ExportSettings) -> ExportedMetadata:
    """Convert a model, compare it, and put it in its place; on an error, nothing is left there."""
    precision: Any = "float16" if settings.half else "float32"
    opset = OPSET if settings.format == "onnx" else None
    metadata = replace(source.metadata, format=settings.format, precision=precision, opset=opset)
    converted = convert_model(source.model, metadata.input.channels, metadata.outputs, settings.static)
    shapes = parity_shapes(metadata.input.channels, source.size, settings.static)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name[:100]}.", dir=path.parent) as folder:
        aside = Path(folder) / path.name
        if settings.format == "openvino":
            converted = to_openvino(converted, Path(folder))
        elif settings.half:
            store_half(converted)
        save(converted, aside, metadata, half=settings.half)
        metadata = replace(metadata, parity=measure_parity(aside, source.model, metadata, shapes))
        if settings.quantize and settings.data:
            from .quantize import quantize

            converted, figures = quantize(converted, metadata, settings.data)
            metadata = replace(metadata, precision="int8", quantization=figures)
        save(converted, aside, metadata, half=settings.half)
        require(read_metadata(aside) == metadata, f"{path} could not be written: report it, with the name of the model")
        put_in_place(Path(folder), path)
    return metadata


def put_in_place(folder: Path, path: Path) -> None:
    """Move the files of a model from a folder beside it; whoever finds the model at any time finds all of one model.

    Args:
        folder: Holds MODEL.onnx, or MODEL.xml and MODEL.bin.
        path: MODEL.onnx or MODEL.xml.
    """
    files = sorted(folder.iterdir())
    for file in files:
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
    if len(files) > 1:
        # An older .xml must not be read with the new .bin.
        path.unlink(missing_ok=True)
    # The .bin first.
    for file in files:
        os.replace(file, path.with_name(file.name))
    fsync_dir(path.parent)


def save(model: Any, file: Path, metadata: ExportedMetadata, *, half: bool) -> None:
    """Write a model with its metadata."""
    if metadata.format == "openvino":
        store_in_openvino(model, metadata)
        save_openvino(model, file, half=half)
    else:
        store_in_onnx(model, metadata)
        file.write_bytes(to_bytes(model))
