"""What an exported model says about itself: a JSON object in the file, which is read without running any code.

An ONNX file has it in `metadata_props` under the key METADATA_KEY, an OpenVINO model in its `rt_info`.
"""

import json
import typing
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any, Literal, TypeVar, cast

from ..data.pixels import PixelRange
from ..utils.validation import MOST_CLASSES, MOST_PIXELS, Range, check_value, require, shorten

METADATA_KEY = "inlinevit"
# Increased when fields change their meaning; files of other versions are refused.
SCHEMA = 1
INPUT_NAME = "images"
# Output of models with a head: (batch, classes), or (batch, classes, height, width) for segmentation.
LOGITS_NAME = "logits"
# Output i of a backbone: (batch, channels, height, width) or, of models with a class token, as their output_fmt says.
FEATURES_NAME = "features_{}"
# Longer metadata are not ours: 10,000 classes need less than a megabyte.
MOST_CHARACTERS = 2**26

ExportTask = Literal["classification", "multilabel", "segmentation", "features"]
ExportFormat = Literal["onnx", "openvino"]
Precision = Literal["float32", "float16", "int8"]
AnySection = TypeVar("AnySection")
REMEDY = "export the model again with `inlinevit export`"
# The numbers of some fields.
RANGES = {
    "least": Range(1, MOST_PIXELS),
    "most": Range(1, MOST_PIXELS),
    "multiple": Range(1, MOST_PIXELS),
    "batch": Range(1, MOST_PIXELS),
    "channels": Range(1, 1024),
    "bands": Range(0, 1023),
    "size": Range(1, MOST_PIXELS),
    "std": Range(0, float("inf"), above_least=True),
    "crop_pct": Range(0, 100, above_least=True),
}


class ImageSizeError(ValueError):
    """An image has a height or width that the model does not take."""


@dataclass(frozen=True)
class SideRange:
    """Which heights, or widths, of images a model takes.

    Attributes:
        least: The smallest one.
        most: The largest one; None = any.
        multiple: It must be divisible by this number.
    """

    least: int = 1
    most: int | None = None
    multiple: int = 1

    def contains(self, length: int) -> bool:
        """Whether a length is allowed."""
        return self.least <= length <= (length if self.most is None else self.most) and length % self.multiple == 0

    def describe(self) -> str:
        """Describe the allowed lengths, for messages."""
        if self.least == self.most:
            return f"{self.least}"
        words = f"at least {self.least}" if self.most is None else f"from {self.least} to {self.most}"
        return words if self.multiple == 1 else f"{words}, divisible by {self.multiple}"


@dataclass(frozen=True)
class InputShape:
    """The input of a model, named INPUT_NAME: float32 (batch, channels, height, width).

    Attributes:
        channels: Of the images.
        height: Which heights it takes.
        width: Which widths it takes.
        batch: How many images it takes at a time; None = any number from 1 on.
    """

    channels: int = 3
    height: SideRange = field(default_factory=SideRange)
    width: SideRange = field(default_factory=SideRange)
    batch: int | None = None

    def check(self, shape: typing.Sequence[int]) -> None:
        """Refuse the shape of an input that the model was not exported for: ValueError, or ImageSizeError."""
        wanted = f"(batch, {self.channels}, height, width)"
        require(len(shape) == 4, f"the input has the shape {tuple(shape)}: it should be {wanted}")
        batch, channels, *sides = shape
        require(
            channels == self.channels, f"the model takes {self.channels} channels, not {channels}: give it {wanted}"
        )
        require(
            batch >= 1 and self.batch in (None, batch),
            f"the model takes {self.batch or 'at least 1'} images at a time, not {batch}: change the batch size, or "
            "export it without --static",
        )
        for name, allowed, length in zip(("height", "width"), (self.height, self.width), sides, strict=True):
            if not allowed.contains(length):
                raise ImageSizeError(
                    f"the model takes images with a {name} of {allowed.describe()}, not {length}: resize them"
                )


@dataclass(frozen=True)
class Preprocessing:
    """How an image file becomes the input of a model; docs/export.md describes the steps.

    Attributes:
        mean: By channel, of values from 0 to 1.
        std: By channel.
        bands: Which bands of images it gets; see PixelFormat.
        range: Which values of images become black and white; see PixelFormat.
        size: Side of the square input; None = images keep their shape.
        interpolation: How images are resized; None = they keep their shape.
        crop_pct: Side of the centre crop, relative to the resized image's; None = they keep their shape.
        crop_mode: timm's name of how to crop: center, squash or border; None = they keep their shape.
        max_pixels: Images with more pixels are refused; None = the default limit.
    """

    mean: list[float]
    std: list[float]
    bands: list[int] | None = None
    range: PixelRange = "auto"
    size: int | None = None
    interpolation: str | None = None
    crop_pct: float | None = None
    crop_mode: str | None = None
    max_pixels: int | None = None


@dataclass(frozen=True)
class Parity:
    """How far the exported file is from the model in float32 torch, measured before the file was put in its place.

    Attributes:
        runtime: What ran the file, with its version: onnxruntime or openvino.
        difference: The largest difference of outputs, relative to the largest output of each image.
        tolerance: The most that was allowed.
        shapes: The shapes of the inputs, each (batch, channels, height, width).
    """

    runtime: str
    difference: float
    tolerance: float
    shapes: list[list[int]]


@dataclass(frozen=True)
class ExportedMetadata:
    """What an exported model says about itself.

    Attributes:
        task: What it does; "features" is a backbone without a head.
        model: Name of the model, or of the backbone of a segmentation model.
        model_config: Its arguments: the section `model` of a run, without paths.
        input: The input, and which sizes are valid.
        outputs: Names of the outputs, in order.
        preprocessing: How images become inputs.
        label_names: Names of the classes in the training data, such as WordNet ids; None if they are not known.
        classes: Readable names of the classes, by index; empty for features.
        labels: Segmentation: classes with values and colours, the content of labels.json in a run.
        inference: Segmentation: the section `inference` of the run.
        window_size: Segmentation: the side of windows for images that are too large to be processed at once.
        precision: Of the weights. Inputs and outputs are float32.
        format: Of the file.
        opset: ONNX: version of the operator set; None for other formats.
        parity: The measured difference from the model; None while it is not measured.
        quantization: int8: how it was calibrated and what it changed; None otherwise.
        license: Of the weights, as an SPDX identifier where there is one; "unknown" if nothing is stated.
        package_version: Of inlinevit.
        schema: Version of these fields.
    """

    task: ExportTask
    model: str
    model_config: dict[str, Any]
    input: InputShape
    outputs: list[str]
    preprocessing: Preprocessing
    classes: list[str]
    package_version: str
    label_names: list[str] | None = None
    labels: dict[str, Any] | None = None
    inference: dict[str, Any] | None = None
    window_size: int | None = None
    precision: Precision = "float32"
    format: ExportFormat = "onnx"
    opset: int | None = None
    parity: Parity | None = None
    quantization: dict[str, Any] | None = None
    license: str = "unknown"
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        channels = self.input.channels
        for name in ("mean", "std"):
            values = getattr(self.preprocessing, name)
            require(len(values) == channels, f"preprocessing.{name} has {len(values)} entries for {channels} channels")
        require(bool(self.outputs), "outputs is empty")
        require(len(self.classes) <= MOST_CLASSES, f"classes has more than {MOST_CLASSES} entries")
        count = len(self.classes)
        require((self.task == "features") == (count == 0), f"a model for {self.task} has {count} classes")
        names = self.label_names
        require(
            names is None or len(names) == count,
            f"label_names has {len(names or ())} entries for {count} classes",
        )

    def to_json(self) -> str:
        """Return the metadata as a JSON object on one line, in ASCII."""
        return json.dumps(asdict(self), allow_nan=False)

    @classmethod
    def from_json(cls, text: str, origin: str) -> "ExportedMetadata":
        """Read metadata, and check the type of every field.

        Args:
            text: What to_json has written.
            origin: The file that it is from, for messages.

        Raises:
            ValueError: They are damaged, or of another version.
        """
        try:
            require(len(text) <= MOST_CHARACTERS, "they are too long")
            try:
                content = json.loads(text)
            except RecursionError as error:
                raise ValueError("nested too deeply") from error
            require(isinstance(content, dict), f"found {shorten(content)} in place of an object")
            schema = content.get("schema")
            require(schema == SCHEMA, f"schema is {shorten(schema)}, but this version of inlinevit reads {SCHEMA}")
            return _parse_section(cls, content, "")
        except ValueError as error:
            problem = " ".join(str(error).split())[:300]
            raise ValueError(f"{origin} has metadata of inlinevit that cannot be used ({problem}): {REMEDY}") from error


def _parse_section(kind: type[AnySection], content: Any, prefix: str) -> AnySection:
    """Return a dataclass with values from JSON; refuse unknown and missing fields, and values of other types.

    Args:
        kind: The dataclass.
        content: Its fields by name.
        prefix: The name of the section with a dot, for messages; "" = the whole.
    """
    require(isinstance(content, dict), f"{prefix.removesuffix('.')} is {shorten(content)}: it should hold fields")
    hints = typing.get_type_hints(kind)
    names = [one.name for one in fields(cast(Any, kind))]
    for name in content:
        require(name in names, f"there is no field {shorten(prefix + name)}")
    for name in names:
        require(name in content, f"{prefix}{name} is missing")
    values: dict[str, Any] = {}
    for name in names:
        value, hint = content[name], hints[name]
        section = next((one for one in (hint, *typing.get_args(hint)) if is_dataclass(one)), None)
        if section is not None and not (value is None and section is not hint):
            value = _parse_section(cast(Any, section), value, f"{prefix}{name}.")
        else:
            check_value(f"{prefix}{name}", value, hint, RANGES.get(name))
        values[name] = value
    return kind(**values)


def store_in_onnx(model: Any, metadata: ExportedMetadata) -> None:
    """Store metadata in an onnx.ModelProto, in place of those it had under the same key."""
    kept = [entry for entry in model.metadata_props if entry.key != METADATA_KEY]
    others = [(entry.key, entry.value) for entry in kept]
    del model.metadata_props[:]
    for key, value in (*others, (METADATA_KEY, metadata.to_json())):
        model.metadata_props.add(key=key, value=value)


def store_in_openvino(model: Any, metadata: ExportedMetadata) -> None:
    """Store metadata in an openvino.Model."""
    model.set_rt_info(metadata.to_json(), [METADATA_KEY])


def read_from_onnx(model: Any, origin: str) -> ExportedMetadata:
    """Read the metadata of an onnx.ModelProto; ValueError if there are none, or they are damaged."""
    return _read(next((entry.value for entry in model.metadata_props if entry.key == METADATA_KEY), None), origin)


def read_from_session(session: Any, origin: str) -> ExportedMetadata:
    """Read the metadata of an onnxruntime.InferenceSession; ValueError if there are none, or they are damaged."""
    text = session.get_modelmeta().custom_metadata_map.get(METADATA_KEY)
    return _read(text, origin)


def read_from_openvino(model: Any, origin: str) -> ExportedMetadata:
    """Read the metadata of an openvino.Model; ValueError if there are none, or they are damaged."""
    text = model.get_rt_info([METADATA_KEY]).astype(str) if model.has_rt_info([METADATA_KEY]) else None
    return _read(text, origin)


def _read(text: str | None, origin: str) -> ExportedMetadata:
    if text is None:
        raise ValueError(f"{origin} has no metadata of inlinevit, so it is not known what it predicts: {REMEDY}")
    return ExportedMetadata.from_json(text, origin)
