"""Images and their label maps in ADE20K's layout: found, paired, and read one at a time."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL.ImageFile import ImageFile
from torch import Tensor

from ...data.images import (
    check_size,
    decompression_bomb_limit,
    describe_image_error,
    find_images,
    open_image,
)
from ...data.pixels import AnyImage, BandArray, PixelFormat, convert_pixels
from ..pixels import make_pixel_format
from .config import SegmentationDataConfig
from .labels import LabelMap

MASK_ENDING = ".png"
# Pillow stretches grey values of 2 and 4 bits to a byte, but leaves indices into a palette as they are.
STRETCHED_BY = {"L;2": 85, "L;4": 17}


class AdeSource:
    """Images of a split, each with a label map of the same name: images/SPLIT/*.jpg and annotations/SPLIT/*.png.

    Files may lie in folders inside of these two. That every image has its label map is checked when it is opened.

    Args:
        folder: The folder of images/ and annotations/.
        split: The split.
        labels: What values of pixels mean.
        limit: Take so many images, the first by name; None = all.
        max_pixels: Images with more pixels are refused; None = Pillow's limit.

    Attributes:
        pixel_format: The bands and values of images that the model gets.
        stems: The name that each image shares with its label map: the path inside of their folders, without ending.
    """

    def __init__(
        self, folder: Path, split: str, labels: LabelMap, limit: int | None = None, max_pixels: int | None = None
    ) -> None:
        self.labels, self.max_pixels = labels, max_pixels
        self.pixel_format = PixelFormat()
        self.images_folder = folder / "images" / split
        self.masks_folder = folder / "annotations" / split
        images = _by_stem(self.images_folder)
        masks = _by_stem(self.masks_folder, MASK_ENDING)
        if not images:
            raise ValueError(f"{self.images_folder} holds no images: name another folder or split")
        self.stems = sorted(images)[:limit]
        missing = [stem for stem in self.stems if stem not in masks]
        if missing:
            raise FileNotFoundError(
                f"{len(missing)} of {len(self.stems)} images have no label map, such as {images[missing[0]]}: add "
                f"{self.masks_folder / missing[0]}{MASK_ENDING}, or remove the image"
            )
        # Label maps without images are not used; images may have been lost.
        alone = sorted(masks.keys() - images.keys())
        if alone:
            warnings.warn(
                f"{len(alone)} label maps in {self.masks_folder} have no image, such as {masks[alone[0]]}: they are "
                f"left out; are images missing in {self.images_folder}?",
                stacklevel=2,
            )
        self.image_files = [images[stem] for stem in self.stems]
        self.mask_files = [masks[stem] for stem in self.stems]

    def __len__(self) -> int:
        return len(self.stems)

    def open_image(self, index: int) -> AnyImage:
        """Open an image; it is not decoded yet."""
        return open_image(self.image_files[index])

    def read_image(self, index: int) -> AnyImage:
        """Return an image, not rotated by its EXIF data: its label map is for the pixels as they are stored."""
        with self._opened(self.image_files[index]) as image:
            check_size(image)
            return convert_pixels(image, self.pixel_format)

    def read_labels(self, index: int) -> Tensor:
        """Return the label map of an image, (height, width) of bytes: indices of classes, IGNORED where none counts."""
        file = self.mask_files[index]
        with self._opened(file) as mask:
            values = _values(mask)
        if values is None:
            raise ValueError(
                f"{file} is not a label map (it is a {mask.format} of the colours {mask.mode}): convert it to a PNG of "
                "one channel, whose values are the numbers of classes"
            )
        # It is not decoded for this.
        with self._opened(self.image_files[index]) as image:
            size = image.size
        if size != mask.size:
            raise ValueError(
                f"{file} has {mask.width} × {mask.height} pixels, but its image {self.image_files[index]} has "
                f"{size[0]} × {size[1]}: label the image as it is stored, or remove both"
            )
        try:
            return self.labels.to_indices(values)
        except ValueError as error:
            raise ValueError(
                f"{describe_image_error(file, error)}: fix it, or say what the value means, with --model.num_classes "
                "or a file for --data.labels"
            ) from error

    @contextmanager
    def _opened(self, file: str) -> Iterator[ImageFile | BandArray]:
        """An image file, not yet decoded; whatever goes wrong with it comes out with its name."""
        try:
            with decompression_bomb_limit(self.max_pixels), open_image(file) as image:
                yield image
        # A broken file can make Pillow raise anything.
        except Exception as error:
            raise ValueError(
                f"{describe_image_error(file, error)}: copy it again, or remove it and what goes with it"
            ) from error


def open_ade(config: SegmentationDataConfig, labels: LabelMap, training: bool, channels: int = 3) -> AdeSource:
    """Open the images and label maps for training or for evaluation of a model with this number of channels."""
    prefix = "train" if training else "eval"
    split, limit = vars(config)[f"{prefix}_split"], vars(config)[f"max_{prefix}_samples"]
    home = Path(config.path).expanduser()
    for kind in ("images", "annotations"):
        place = home / kind / split
        if not place.is_dir():
            found = [folder.name for folder in sorted(place.parent.glob("*")) if folder.is_dir()]
            splits = f"the splits are {', '.join(found)}" if found else "there are no splits"
            raise FileNotFoundError(
                f"no folder of {kind} at {place} ({splits}): check --data.path and --data.{prefix}_split"
            )
    source = AdeSource(home, split, labels, limit, config.max_pixels)
    source.pixel_format = make_pixel_format(config, channels)
    return source


def _by_stem(folder: Path, ending: str | None = None) -> dict[str, str]:
    """Return the image files in a folder, all or those with an ending, by their paths inside of it without endings."""
    found: dict[str, str] = {}
    for file, problem in find_images([str(folder)]).items():
        stem, own_ending = os.path.splitext(os.path.relpath(file, folder))
        if file == str(folder) or ending not in (None, own_ending.lower()):
            continue
        if problem:
            raise ValueError(f"{file} cannot be used ({problem}): copy it again, or remove it")
        if stem in found:
            raise ValueError(f"{found[stem]} and {file} have one name, so they cannot be told apart: rename one")
        found[stem] = file
    return found


def _values(mask: ImageFile | BandArray) -> NDArray[Any] | None:
    """The values of a label map as they are stored, (height, width); None if it holds colours, or is no PNG.

    Palettes are fine: what is stored are indices into them. Other formats than PNG might not keep values exactly.
    """
    if isinstance(mask, BandArray) or mask.format != "PNG" or len(mask.getbands()) != 1:
        return None
    # How pixels are stored is no longer known when they have been read.
    stored_as = mask.tile[0][3] if mask.tile else None
    return np.array(mask) // STRETCHED_BY.get(str(stored_as), 1)
