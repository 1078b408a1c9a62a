"""`inlinevit export`: a model as an ONNX file or an OpenVINO model, for any batch and image size."""

from typing import Literal

from jsonargparse import ArgumentParser, Namespace

from .parsing import add_import, add_options, new_parser

FLAGS = {
    "features": "export the backbone alone, with the maps of its stages as outputs",
    "half": "store weights in float16; inputs, outputs and sums stay in float32",
    "untrained": "use random weights",
}


def export(
    model: str,
    output: str = "model.onnx",
    format: Literal["onnx", "openvino"] = "onnx",
    checkpoint: str | None = None,
    features: bool = False,
    half: bool = False,
    static: str | None = None,
    quantize: Literal["int8"] | None = None,
    data: str | None = None,
    untrained: bool = False,
) -> None:
    """Export a model as one file that runs without Python, and check it against the model.

    Args:
        model: Folder of a training run, or name of a model.
        output: The file to write: MODEL.onnx or, with --format openvino, MODEL.xml, beside which is MODEL.bin.
        format: onnx or openvino.
        checkpoint: As for inlinevit predict.
        features: Export the backbone alone, with the maps of its stages as outputs.
        half: Store weights in float16; inputs, outputs and sums stay in float32.
        static: Fix the shape of the input, as in 1,3,224,224; null = any batch size, height and width.
        quantize: int8, calibrated on the images of --data; null = float32.
        data: Images for --quantize: a folder, or labelled images as for inlinevit train.
        untrained: Use random weights.
    """
    from ..export.command import ExportSettings, export_model, parse_static

    metadata = export_model(
        model,
        output,
        ExportSettings(format, half, parse_static(static), quantize, data),
        checkpoint=checkpoint,
        features=features,
        untrained=untrained,
    )
    parity = metadata.parity
    assert parity is not None
    opset = "" if metadata.opset is None else f", opset {metadata.opset}"
    print(f"{output}: {metadata.model} for {metadata.task}, {metadata.format}{opset}, {metadata.precision}")
    shapes = ", ".join("×".join(map(str, shape)) for shape in parity.shapes)
    print(f"largest relative difference from torch {parity.difference:.1e}, by {parity.runtime}, for inputs {shapes}")
    sides = metadata.input
    print(f"valid heights: {sides.height.describe()}; valid widths: {sides.width.describe()}")
    for name, value in (metadata.quantization or {}).items():
        print(f"{name}: {value}")


def make_parser() -> ArgumentParser:
    """Return the parser: the arguments of export()."""
    description = "Export a model as one file that runs without Python, and check it against the model."
    parser = new_parser("export", description, "MODEL [options]")
    about = "folder of a training run, or name of a model"
    parser.add_argument("model", type=str, metavar="MODEL", help=about)
    for name, help in FLAGS.items():
        parser.add_argument(f"--{name}", action="store_true", help=help)
    add_import(parser)
    add_options(parser, export, skip=["model", *FLAGS])
    return parser


def run(settings: Namespace) -> None:
    """Export the model."""
    export(**vars(settings))
