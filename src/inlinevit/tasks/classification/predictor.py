"""Classifiers that are ready to use: from a training run, from a file, or published."""

import dataclasses
import re
import warnings
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from timm.data import ImageNetInfo, infer_imagenet_subset
from timm.models import get_pretrained_cfg, is_model
from torch import Tensor

from ...data.pixels import AnyImage, PixelFormat
from ...engine.config import CommandOptions
from ...engine.evaluator import EvalData
from ...engine.exported import REMEDY, ExportedMetadata
from ...engine.exported_run import load_exported
from ...engine.predictor import Predictor
from ...engine.results import ClassProbability, shorten_list
from ...engine.runs import RUN_CONFIG, Run, has_config, open_run
from ...models._weight_files import read_state_dict, require_finite
from ...models.factory import check_model_name, classes_of_weights
from ...utils.memory import require_memory_for_images
from ...utils.validation import has_type, require, shorten
from ..pixels import MeanStd
from .config import ClassificationConfig, ClassificationPredictOptions, ModelConfig
from .metrics import ClassificationEvaluator
from .model import build_model, channels_of_weights
from .published import is_published, read_published
from .sources import labels_by_name
from .transforms import InputSpec, evaluation_transform, input_spec

CLASSES_JSON = "classes.json"
WORDNET_ID = re.compile(r"n\d{8}")
DIGITS = 6
# timm's names, as they may be in metadata of exported models.
INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos")
CROP_MODES = ("center", "squash", "border")


@dataclass
class ImagePredictor(Predictor[list[ClassProbability]]):
    """A model that predicts classes of whole images.

    Attributes:
        num_classes: Width of its head.
        label_names: Names of its classes in its data, by index, such as WordNet ids; None if they are not known.
        spec: Its input.
    """

    num_classes: int
    label_names: list[str] | None
    spec: InputSpec

    @property
    def pixel_format(self) -> PixelFormat:
        return self.spec.pixel_format

    @property
    def mean_std(self) -> MeanStd:
        """What its images are normalised by."""
        return tuple(self.spec.mean), tuple(self.spec.std)

    @cached_property
    def classes(self) -> list[str]:
        """The names of the classes, by index: words for WordNet ids, the index where no name is known."""
        if self.label_names is None:
            return [str(index) for index in range(self.num_classes)]
        return wordnet_names(self.label_names)

    @property
    def to_tensor(self) -> Callable[[AnyImage], Tensor]:
        return evaluation_transform(self.spec)

    @abstractmethod
    def rank(self, logits: Tensor, options: Any) -> list[list[ClassProbability] | None]:
        """Return the predicted classes of images, from logits (images, classes); None where a value is not finite."""

    def predict_images(
        self, images: list[AnyImage], options: Any, device: torch.device
    ) -> list[list[ClassProbability] | None]:
        """See Predictor.predict_images; classes with their probabilities, the most probable first."""
        to_tensor = self.to_tensor
        inputs = torch.stack([to_tensor(image) for image in images])
        return self.rank(self.model(inputs.to(device)).float().cpu(), options)

    def top_classes(
        self, probabilities: Tensor, top: int, threshold: float = 0.0
    ) -> list[list[ClassProbability] | None]:
        """Return the most probable classes of images, the most probable first; None where a value is not finite.

        Args:
            probabilities: (images, classes).
            top: The largest number of classes of an image.
            threshold: Classes with lower probabilities are left out.
        """
        names = self.classes
        results: list[list[ClassProbability] | None] = []
        for values, indices in zip(*probabilities.topk(min(top, len(names)), dim=1), strict=True):
            is_kept = values >= threshold
            chosen = zip(values[is_kept].tolist(), indices[is_kept].tolist(), strict=True)
            classes = [ClassProbability(names[index], index, round(value, DIGITS)) for value, index in chosen]
            results.append(classes if bool(values.isfinite().all()) else None)
        return results

    def description(self, options: Any) -> str:
        return f"{self.name}, {self.spec.size} × {self.spec.size} pixels"

    def settings(self, options: Any) -> dict[str, Any]:
        return {"img_size": self.spec.size, "classes": self.label_names}

    def check_memory(self, batch_size: int) -> None:
        check_batch_memory(self.spec, batch_size)


class ClassificationPredictor(ImagePredictor):
    """A classifier that is ready to use; it returns the most probable classes of images."""

    options_class = ClassificationPredictOptions

    def rank(self, logits: Tensor, options: ClassificationPredictOptions) -> list[list[ClassProbability] | None]:
        return self.top_classes(logits.softmax(dim=1), options.top)

    def match_classes(self, classes: Sequence[str] | None) -> list[int] | None:
        """Return the model's label for each class of some images, which are matched by name.

        If it knows none of the names and there are as many as it has classes, the order decides.

        Args:
            classes: Names of the images' classes; None = not known, so the labels are used as they are.
        """
        known = {*self.classes, *(self.label_names or ())}
        if classes is not None and len(classes) == self.num_classes and known.isdisjoint(classes):
            if self.label_names is not None:
                warnings.warn(
                    f"the model knows other names than {shorten_list(classes)}: classes are matched by their order",
                    stacklevel=2,
                )
            return list(range(len(classes)))
        remedy = f"name images of its {self.num_classes} classes with --data.path or --data.eval_path, or another model"
        return labels_by_name(classes, self.classes, self.label_names, remedy=remedy)

    def make_evaluator(self, data: EvalData, options: Any) -> ClassificationEvaluator:
        """See Predictor.make_evaluator; the classes of the images are matched by name."""
        labels = self.match_classes(data.source.classes)
        spec = self.spec.with_pixels(data.config)
        return ClassificationEvaluator(
            data.source, spec, data.config, self.num_classes, labels=labels, classes=self.classes
        )


def check_batch_memory(spec: InputSpec, batch_size: int) -> None:
    """Refuse batches of images that do not fit into memory."""
    remedy = "choose a smaller batch_size" if batch_size > 1 else "choose a smaller img_size"
    require_memory_for_images(batch_size, len(spec.mean), spec.size, spec.size, remedy)


def load_classifier(
    model: str, *, checkpoint: str | None = None, img_size: int | None = None, crop_pct: float | None = None
) -> ClassificationPredictor:
    """Load a model with its weights and the names of its classes.

    Args:
        model: The folder of a training run or of a model in timm's format for the hub, or the name of a model of this
            library or of timm.
        checkpoint: With a name, the file of its weights; None = the published ones are downloaded. With a run, "best"
            for its best checkpoint, the folder of another one, or a file; None = the final weights.
        img_size: Side of its input; None = what it was trained for.
        crop_pct: Side of the centre crop, relative to the image's; None = what it was trained for.
    """
    run = find_classification_run(model)
    classes: list[str] | None = None
    made_for: dict[str, Any] | None = None
    if run is None and is_published(model):
        published = read_published(model)
        config, file = published.config, checkpoint or published.config.checkpoint
        classes, made_for = published.label_names, published.made_for
    elif run is None:
        config, file = ModelConfig(name=model), checkpoint
    else:
        check_model_name(run.config.model.name)
        config, file = run.config.model, str(run.weights(checkpoint))
        if (run.folder / CLASSES_JSON).is_file():
            classes = run.metadata(CLASSES_JSON, parse_classes)
    config = dataclasses.replace(
        config,
        checkpoint=file,
        pretrained=file is None,
        drop_path_rate=0.0,
        img_size=config.img_size if img_size is None else img_size,
        crop_pct=config.crop_pct if crop_pct is None else crop_pct,
    )
    registered = get_pretrained_cfg(config.name)
    num_classes = config.num_classes or (registered.num_classes if registered is not None else 0)
    if file is not None:
        weights = read_state_dict(file)
        require_finite(weights, file)
        num_classes = classes_of_weights(config.name, weights, file) or num_classes
        channels = channels_of_weights(config.name, weights)
        if run is None and channels is not None:
            config = dataclasses.replace(config, in_chans=channels)
        del weights
    if num_classes < 2:
        raise ValueError(f"{model} has no classification head: name a checkpoint that has one")
    return ClassificationPredictor(
        model=build_model(
            config, num_classes, new_head=False, option="--checkpoint FILE, or checkpoint=FILE in Python"
        ).eval(),
        name=config.name,
        config=config if run is None else run.config,
        num_classes=num_classes,
        label_names=_complete(classes, num_classes) if classes else imagenet_classes(num_classes),
        spec=input_spec(config, None if run is None else run.config.data, made_for),
        max_pixels=None if run is None else run.config.data.max_pixels,
    )


def load_exported_classifier(
    file: str, options: CommandOptions, *, img_size: int | None = None, crop_pct: float | None = None
) -> ClassificationPredictor:
    """Load an exported classifier; arguments as for load_classifier()."""
    model, run = load_exported(ClassificationConfig, file, options)
    metadata = model.metadata
    return ClassificationPredictor(
        model=model,
        name=metadata.model,
        config=run.config,
        num_classes=len(metadata.classes),
        label_names=metadata.label_names,
        spec=exported_spec(metadata, file, img_size=img_size, crop_pct=crop_pct),
        max_pixels=metadata.preprocessing.max_pixels,
    )


def exported_spec(
    metadata: ExportedMetadata, file: str, *, img_size: int | None = None, crop_pct: float | None = None
) -> InputSpec:
    """Return the input of an exported model, with a side or a crop in place of its own unless they are None."""
    own = metadata.preprocessing
    size, interpolation, crop_mode = img_size or own.size, own.interpolation, own.crop_mode
    crop_pct = own.crop_pct if crop_pct is None else crop_pct
    if size is None or interpolation is None or crop_pct is None or crop_mode is None:
        raise ValueError(f"{file} does not say how images are resized and cropped: {REMEDY}")
    require(
        interpolation in INTERPOLATIONS and crop_mode in CROP_MODES,
        f"{file} has metadata that cannot be used ({shorten(interpolation)}, {shorten(crop_mode)}): {REMEDY}",
    )
    metadata.input.check((metadata.input.batch or 1, metadata.input.channels, size, size))
    bands = None if own.bands is None else tuple(own.bands)
    pixel_range: Any = tuple(own.range) if isinstance(own.range, list | tuple) else own.range
    return InputSpec(size, tuple(own.mean), tuple(own.std), interpolation, crop_pct, crop_mode, bands, pixel_range)


def find_classification_run(model: str) -> Run[ClassificationConfig] | None:
    """Open a training run; None if this is the name of a model, or a folder in timm's format.

    Raises:
        OSError: There is neither a folder nor a model of this name.
        ValueError: The folder holds no run.
    """
    require(bool(model.strip()), "the model is empty: name the folder of a training run, or a model")
    if has_config(model):
        return open_run(ClassificationConfig, model)
    if is_published(model):
        return None
    if Path(model).is_dir() and not is_model(model):
        raise ValueError(f"{model} holds no {RUN_CONFIG}: name the folder of a training run, or a model")
    if Path(model).name != model:
        raise FileNotFoundError(f"no folder at {model}: name the folder of a training run, or a model")
    check_model_name(model)
    return None


def parse_classes(content: Any) -> list[str] | None:
    """Return the class names that a run has stored; None if it did not know them."""
    require(has_type(content, list[str] | None), "it is not a list of class names")
    return content


def _complete(classes: list[str], num_classes: int) -> list[str]:
    """Return names for all classes of a head, which may be wider than the data had classes."""
    if len(classes) > num_classes:
        raise ValueError(
            f"{CLASSES_JSON} names {len(classes)} classes, but the weights are for {num_classes}: choose weights of "
            "this run"
        )
    return classes + [str(index) for index in range(len(classes), num_classes)]


def imagenet_classes(num_classes: int) -> list[str] | None:
    """Return the WordNet ids of ImageNet's classes, if one of its versions has this number of classes."""
    subset = infer_imagenet_subset({"num_classes": num_classes})
    return None if subset is None else list(ImageNetInfo(subset).label_names())


def wordnet_names(classes: Sequence[str]) -> list[str]:
    """Return words for WordNet ids, which are the names of ImageNet's folders; other names as they are."""
    if not all(WORDNET_ID.fullmatch(name) for name in classes):
        return list(classes)
    info = ImageNetInfo()
    try:
        return [info.label_name_to_description(name) for name in classes]
    except KeyError:
        return list(classes)
