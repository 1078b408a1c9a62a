"""What is exported: a model with its weights, and its metadata without what depends on the file."""

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from timm.models import get_pretrained_cfg
from torch import nn

from .. import __version__
from ..engine.config import to_plain
from ..engine.exported import (
    FEATURES_NAME,
    LOGITS_NAME,
    ExportedMetadata,
    InputShape,
    Preprocessing,
    SideRange,
)
from ..engine.runs import has_config, task_of
from ..models import load_checkpoint
from ..models.factory import check_model_name, create_model, create_published, is_ours
from ..models.hub import fetch_source
from ..tasks.classification.config import ModelConfig
from ..tasks.classification.model import build_model
from ..tasks.classification.predictor import (
    ClassificationPredictor,
    ImagePredictor,
    find_classification_run,
    imagenet_classes,
)
from ..tasks.classification.transforms import InputSpec, input_spec
from ..tasks.loading import load
from ..utils.validation import require
from .parity import least_size

if TYPE_CHECKING:
    from ..tasks.segmentation.predictor import SegmentationPredictor

# Paths in the configuration of a model; they mean nothing elsewhere.
PATH_FIELDS = ("checkpoint",)
DETECTION = (
    "detectors cannot be exported: torchvision's code for them branches on how many boxes are left, which torch.export "
    "refuses, and fixes the number of proposals to that of one image size; export the backbone by name, with --features"
)
# What a user of published or trained weights is told about their licence, where nothing is stated.
UNKNOWN = "unknown"


@dataclass
class ExportSource:
    """A model to export.

    Attributes:
        model: In evaluation mode, on the CPU.
        metadata: Of the file, in float32 and without parity.
        size: The training size.
    """

    model: nn.Module
    metadata: ExportedMetadata
    size: int


def open_source(
    name: str, *, checkpoint: str | None, features: bool, untrained: bool, static: list[int] | None
) -> ExportSource:
    """Load the model to export.

    Args:
        name: The folder of a run, or the name of a model.
        checkpoint: As for inlinevit.load.
        features: Export the backbone alone.
        untrained: Use random weights, of a model that is given by name.
        static: The shape of the input, if it is fixed.
    """
    name = fetch_source(name)
    require(not (untrained and checkpoint), "--untrained means random weights: leave out --checkpoint, or --untrained")
    require(not (untrained and has_config(name)), f"{name} is a training run, with weights: leave out --untrained")
    if features:
        return _open_features(name, checkpoint, untrained, static)
    predictor = _untrained(name) if untrained else load(name, checkpoint=checkpoint, device="cpu")
    if isinstance(predictor, ImagePredictor):
        return _image_source(predictor, static, untrained)
    require(task_of(type(predictor.config)) == "segmentation", DETECTION)
    return segmentation_source(cast("SegmentationPredictor", predictor), static)


def _untrained(name: str) -> ClassificationPredictor:
    """Return a classifier with random weights."""
    config = ModelConfig(name=name, drop_path_rate=0.0)
    require(find_classification_run(name) is None, f"{name} is a training run, with weights: leave out --untrained")
    made_for = get_pretrained_cfg(name)
    classes = made_for.num_classes if made_for is not None else 1000
    model = build_model(config, classes).eval()
    return ClassificationPredictor(model, name, config, classes, imagenet_classes(classes), input_spec(config))


def _image_source(predictor: ImagePredictor, static: list[int] | None, untrained: bool) -> ExportSource:
    is_single = isinstance(predictor, ClassificationPredictor)
    config: Any = predictor.config if isinstance(predictor.config, ModelConfig) else predictor.config.model
    spec = predictor.spec
    plain = {**_plain_model(config), "num_classes": predictor.num_classes, "img_size": spec.size}
    metadata = ExportedMetadata(
        task="classification" if is_single else "multilabel",
        model=config.name,
        model_config=plain,
        input=_input_shape(len(spec.mean), spec.size, static),
        outputs=[LOGITS_NAME],
        preprocessing=_preprocessing(spec, predictor.max_pixels),
        classes=list(predictor.classes),
        label_names=predictor.label_names,
        package_version=__version__,
        license=_license(config.name, is_published=isinstance(predictor.config, ModelConfig) and not untrained),
    )
    return ExportSource(predictor.model, metadata, spec.size)


def segmentation_source(predictor: "SegmentationPredictor", static: list[int] | None) -> ExportSource:
    config, pixels = predictor.config, predictor.pixel_format
    mean, std = predictor.mean_std
    size = config.augment.crop_size
    metadata = ExportedMetadata(
        task="segmentation",
        model=config.model.backbone,
        model_config={**_plain_model(config.model), "num_classes": len(predictor.classes)},
        input=_input_shape(pixels.channels, size, static),
        outputs=[LOGITS_NAME],
        preprocessing=Preprocessing(
            list(mean),
            list(std),
            None if pixels.bands is None else list(pixels.bands),
            pixels.range,
            max_pixels=predictor.max_pixels,
        ),
        classes=list(predictor.classes),
        labels=predictor.labels.to_plain(),
        inference=to_plain(config.inference),
        window_size=size,
        package_version=__version__,
    )
    return ExportSource(predictor.model, metadata, size)


def _open_features(name: str, checkpoint: str | None, untrained: bool, static: list[int] | None) -> ExportSource:
    """Return the backbone of a classifier, given by its name or its run: timm's features_only."""
    run = find_classification_run(name)
    config = ModelConfig(name=name) if run is None else run.config.model
    file = checkpoint if run is None else str(run.weights(checkpoint))
    check_model_name(config.name)
    require(is_ours(config.name), f"{config.name} is a model of timm: --features is for those of `inlinevit models`")

    def create(**weights: Any) -> nn.Module:
        return create_model(
            config.name,
            {"features_only": True, "in_chans": config.in_chans, **weights},
            optional={"img_size": config.img_size},
            options=config.kwargs,
            config_fields={},
        )

    if file is None and not untrained:
        model = create_published(config.name, lambda: create(pretrained=True), "--checkpoint FILE")
    else:
        model = create()
        if file is not None:
            load_checkpoint(model, file)
    spec = input_spec(config, None if run is None else run.config.data)
    levels = len(cast(Any, model).feature_info.channels())
    metadata = ExportedMetadata(
        task="features",
        model=config.name,
        model_config={**_plain_model(config), "img_size": spec.size},
        input=_input_shape(len(spec.mean), spec.size, static),
        outputs=[FEATURES_NAME.format(level) for level in range(levels)],
        preprocessing=_preprocessing(spec, None if run is None else run.config.data.max_pixels),
        classes=[],
        package_version=__version__,
        license=_license(config.name, is_published=run is None and not untrained),
    )
    return ExportSource(model.eval(), metadata, spec.size)


def _plain_model(config: Any) -> dict[str, Any]:
    """Return the section `model` of a configuration, without paths and initial weights."""
    changed: dict[str, Any] = {**dict.fromkeys(PATH_FIELDS), "pretrained": False}
    return to_plain(dataclasses.replace(config, **changed))


def _preprocessing(spec: InputSpec, max_pixels: int | None) -> Preprocessing:
    return Preprocessing(
        list(spec.mean),
        list(spec.std),
        None if spec.bands is None else list(spec.bands),
        spec.range,
        spec.size,
        spec.interpolation,
        spec.crop_pct,
        spec.crop_mode,
        max_pixels,
    )


def _input_shape(channels: int, size: int, static: list[int] | None) -> InputShape:
    if static is None:
        sides = SideRange(least_size(size))
        return InputShape(channels, sides, sides)
    batch, given, height, width = static
    require(given == channels, f"--static has {given} channels, but the model takes {channels}: give it so many")
    return InputShape(channels, SideRange(height, height), SideRange(width, width), batch)


def _license(name: str, *, is_published: bool) -> str:
    """Return the licence of published weights; that of others is not known."""
    made_for = get_pretrained_cfg(name)
    return (made_for.license if is_published and made_for is not None else None) or UNKNOWN
