"""Masks of tokens for streamed images: from a file, from pixels without data, or by a simple detection of tissue.

A masked token is background: it is kept out of every mean and sum of the attention and of the pooling.
"""

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..utils.validation import require
from .image_source import RegionSource, name_of, open_regions
from .pixels import PixelFormat, convert_pixels, image_to_tensor, without_data
from .regions import RegionReader, readable

TISSUE, NODATA = "tissue", "nodata"
# Tissue is where the saturation of the colour, (max - min) / max of red, green and blue, is at least this. Glass is
# nearly white, stained tissue is not.
TISSUE_SATURATION = 0.08
# Darker pixels, as fractions of white, are borders and pen marks: their saturation says nothing.
TISSUE_LEAST_VALUE = 0.1
# Tissue is searched on the smallest level whose longer side has so many pixels, of which so many are used.
TISSUE_SIDE = 1024

Mask = NDArray[np.bool_]


def make_token_mask(mask: str | os.PathLike[str], source: RegionSource, stride: int, max_pixels: int | None) -> Mask:
    """Return which tokens are not background, (height, width), rounded up, for tokens of `stride` × `stride` pixels.

    Args:
        mask: "tissue", "nodata", or a file: a mask of the whole image, of any lower resolution, where 0 is background.
        source: The image.
        stride: Pixels of a token along a side.
        max_pixels: As for open_regions.

    Raises:
        ValueError: The mask cannot be used, or leaves no token.
    """
    if mask == TISSUE:
        tokens = _sample(detect_tissue(source), source, stride)
    elif mask == NODATA:
        tokens = _tokens_with_data(source, stride)
    else:
        tokens = _sample(_read_mask(mask, source, max_pixels), source, stride)
    require(bool(tokens.any()), f"the mask {os.fspath(mask)} leaves nothing of {source.name}: choose another --mask")
    return tokens


def _read_mask(file: str | os.PathLike[str], source: RegionSource, max_pixels: int | None) -> Mask:
    """Return the mask of the whole image in a file."""
    require(
        Path(file).exists(),
        f"there is no file {os.fspath(file)}: --mask takes a file, {TISSUE} or {NODATA}",
    )
    name = name_of(file)
    with open_regions(file, max_pixels) as reader, readable(name):
        (width, height), (full_width, full_height) = reader.dimensions, source.reader.dimensions
        require(
            width <= full_width and height <= full_height,
            f"it has {width} × {height} pixels, more than the {full_width} × {full_height} of {source.name}: make it "
            "smaller",
        )
        # The sides of a smaller copy are rounded.
        require(
            abs(width * full_height / full_width - height) <= 1 or abs(height * full_width / full_height - width) <= 1,
            f"it has {width} × {height} pixels, which is another aspect ratio than {full_width} × {full_height} of "
            f"{source.name}: make a mask of the whole image",
        )
        return (_thinned(reader, 0, 1) != 0).any(axis=2)


def _thinned(reader: RegionReader, level: int, step: int) -> NDArray:
    """Return every step-th pixel of a level in both directions, (height, width, bands)."""
    width, height = reader.level_dimensions[level]
    factor = reader.dimensions[1] / height
    rows_at_once = max(1, reader.band_height(level) // step) * step
    parts = []
    for top in range(0, height, rows_at_once):
        size = (width, min(rows_at_once, height - top))
        parts.append(reader.read_region((0, round(top * factor)), level, size)[::step, ::step].copy())
    return np.concatenate(parts)


def detect_tissue(source: RegionSource) -> Mask:
    """Return where an image in colour is tissue, at low resolution: see TISSUE_SATURATION."""
    reader = source.reader
    with readable(source.name):
        require(
            source.channels == 3 and reader.kind.bands - reader.kind.has_alpha == 3 and reader.kind.is_rgb,
            "tissue is found by its colour, but it has no red, green and blue: give a file to --mask",
        )
        sides = [max(size) for size in reader.level_dimensions]
        level = max((one for one, side in enumerate(sides) if side >= TISSUE_SIDE), default=0)
        values = _thinned(reader, level, max(1, sides[level] // TISSUE_SIDE))
        image = convert_pixels(reader.kind.wrap(values), PixelFormat(3, range=source.pixel_format.range))
    colors = image_to_tensor(image).numpy().astype(np.float32) / 255
    most, least = colors.max(axis=0), colors.min(axis=0)
    return (most - least >= TISSUE_SATURATION * most) & (most >= TISSUE_LEAST_VALUE)


def _sample(mask: Mask, source: RegionSource, stride: int) -> Mask:
    """Return the entries of a mask of the whole image that are nearest to the centres of tokens."""
    places = []
    for first, length, whole, entries in (
        (source.box.top, source.box.height, source.level_size[1], mask.shape[0]),
        (source.box.left, source.box.width, source.level_size[0], mask.shape[1]),
    ):
        starts = np.arange(0, length, stride)
        centres = first + (starts + np.minimum(starts + stride, length)) / 2
        places.append(np.minimum((centres * entries / whole).astype(np.int64), entries - 1))
    return mask[np.ix_(*places)]


def _tokens_with_data(source: RegionSource, stride: int) -> Mask:
    """Return the tokens with at least one pixel that has data: one with another value than nodata in some band."""
    nodata = source.reader.kind.nodata
    with readable(source.name):
        require(nodata is not None, "it has no nodata value, which --mask nodata needs: give a file to --mask")
        rows = []
        starts = np.arange(0, source.box.width, stride)
        for top in range(0, source.box.height, stride):
            values = source.read(top, min(top + stride, source.box.height))
            is_empty = without_data(values, nodata)
            assert is_empty is not None
            rows.append(np.logical_or.reduceat((~is_empty).any(axis=(0, 2)), starts))
    return np.stack(rows)
