"""Images for the calibration of quantized models, and others to compare them with float32."""

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from ..data.images import (
    ImageFiles,
    decode_image,
    decompression_bomb_limit,
    describe_image_error,
    image_extensions,
)
from ..data.pixels import AnyImage, PixelFormat
from ..engine.exported import ExportedMetadata
from ..engine.predictor import InputTransform
from ..tasks.classification.config import ClassificationDataConfig
from ..tasks.classification.predictor import exported_spec
from ..tasks.classification.shards import ShardSource
from ..tasks.classification.sources import DEFAULT_EVAL_SHARE, SubsetSource, labels_by_name, open_source
from ..tasks.classification.transforms import evaluation_transform
from ..utils.validation import require

Array = NDArray[np.float32]
# Opens the image at a place.
Open = Callable[[int], AbstractContextManager[AnyImage]]
ALTERNATING = "every second image of the folder, by name; the others are for calibration"


@dataclass
class Inputs(Sequence[Array]):
    """Inputs of a model, which are read when they are needed: (batch, channels, height, width) of one image each.

    Attributes:
        read: From a place to the input.
        places: The places of the images.
        split: How these images were chosen.
        labels: The class of each image for the model; None if they are not known.
    """

    read: Callable[[int], Array]
    places: Sequence[int]
    split: str
    labels: Sequence[int] | None = None

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, index: int) -> Array: ...
    @overload
    def __getitem__(self, index: slice) -> list[Array]: ...
    def __getitem__(self, index: int | slice) -> Array | list[Array]:
        if isinstance(index, slice):
            return [self.read(place) for place in self.places[index]]
        return self.read(self.places[index])

    def __iter__(self) -> Iterator[Array]:
        return (self.read(place) for place in self.places)


def open_inputs(data: str, metadata: ExportedMetadata, calibration: int, evaluation: int) -> tuple[Inputs, Inputs]:
    """Return images for calibration and other images for evaluation, at most so many, evenly spaced in the data.

    A classifier gets labelled data, if there are: calibration takes images of the training split, or those that
    training would not hold out. All other images are taken alternately for calibration and for evaluation.

    Args:
        data: A folder of images, or what --data.path takes when a classifier is trained.
        metadata: Of the exported model.
        calibration: The most images for calibration.
        evaluation: The most images for evaluation.
    """
    transform = make_transform(metadata)
    batch = metadata.input.batch or 1

    def read(open_one: Open, name: Callable[[int], str], place: int) -> Array:
        try:
            with decompression_bomb_limit(transform.max_pixels), open_one(place) as image:
                pixels = transform.to_tensor(decode_image(image, transform.pixel_format))
        # A damaged file can make Pillow raise anything.
        except Exception as error:
            raise ValueError(f"{describe_image_error(name(place), error)}: remove it from {data}") from error
        return np.repeat(pixels.numpy()[None], batch, axis=0)

    if metadata.task == "classification" and not _has_loose_images(data):
        labelled = _open_labelled(data, metadata)
        if labelled is not None:
            sources, labels, split = labelled
            chosen = [
                spaced(len(source), most) for source, most in zip(sources, (calibration, evaluation), strict=True)
            ]
            found = [
                Inputs(partial(read, partial(_open_from, source), source.name), places, split)
                for source, places in zip(sources, chosen, strict=True)
            ]
            found[1].labels = [labels[sources[1].read(place)[1]] for place in chosen[1]]
            return found[0], found[1]
    files = ImageFiles([data])
    require(len(files) > 1, f"{data} holds one image, but one is needed for calibration and another for comparison")
    halves = [range(start, len(files), 2) for start in (0, 1)]
    parts = [
        Inputs(partial(read, files.open, files.name), [half[one] for one in spaced(len(half), most)], ALTERNATING)
        for half, most in zip(halves, (calibration, evaluation), strict=True)
    ]
    return parts[0], parts[1]


def make_transform(metadata: ExportedMetadata) -> InputTransform:
    """Return the transform from an image to the input of an exported model, without the batch."""
    own = metadata.preprocessing
    if own.size is not None:
        spec = exported_spec(metadata, "the model")
        return InputTransform(spec.pixel_format, own.max_pixels, evaluation_transform(spec))
    # Here, because it needs the packages of segmentation.
    from ..tasks.segmentation.predictor import resized_tensor

    bands = None if own.bands is None else tuple(own.bands)
    pixel_range: Any = tuple(own.range) if isinstance(own.range, list | tuple) else own.range
    min_size = (metadata.inference or {}).get("min_size")
    resize = partial(resized_tensor, min_size=min_size, mean_std=(tuple(own.mean), tuple(own.std)))
    return InputTransform(PixelFormat(metadata.input.channels, bands, pixel_range), own.max_pixels, resize)


def spaced(count: int, most: int) -> list[int]:
    """Return at most so many indices below a count, evenly spaced."""
    return [place * count // most for place in range(most)] if count > most else list(range(count))


def _has_loose_images(data: str) -> bool:
    """Whether a folder holds images directly, so that they have no class."""
    if not os.path.isdir(data):
        return False
    extensions = image_extensions()
    return any(Path(name).suffix.lower() in extensions for name in os.listdir(data))


def _open_labelled(data: str, metadata: ExportedMetadata) -> tuple[list[Any], Any, str] | None:
    """Return labelled images for training and evaluation, the model's label of each of theirs, and how they are split.

    None if they are folders of images that have other names than the classes of the model.
    """
    config = ClassificationDataConfig(path=data)
    training = open_source(config, training=True)
    if isinstance(training, SubsetSource):
        config = replace(config, eval_share=DEFAULT_EVAL_SHARE)
        split = f"{DEFAULT_EVAL_SHARE:.0%} of each class, held out by the names of the files; calibration has others"
    else:
        split = "the evaluation split; calibration has images of the training split"
    evaluation = open_source(config, training=False)
    require(
        not isinstance(training, ShardSource) and not isinstance(evaluation, ShardSource),
        f"{data} is read sequentially, but calibration needs images at any place: name a folder or a tar file",
    )
    assert not isinstance(evaluation, ShardSource)
    try:
        labels = labels_by_name(evaluation.classes, metadata.classes, metadata.label_names)
    except ValueError:
        warnings.warn(f"the folders of {data} are not the model's classes: its labels are not used", stacklevel=2)
        return None
    return [training, evaluation], labels or range(len(metadata.classes)), split


def _open_from(source: Any, place: int) -> AbstractContextManager[AnyImage]:
    return source.read(place)[0]
