"""Masks of tokens: from files, from nodata, of tissue."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from inlinevit.data.array_regions import ArrayRegions
from inlinevit.data.image_source import Box, RegionSource, open_regions
from inlinevit.data.pixels import PixelFormat
from inlinevit.data.token_masks import make_token_mask


def source_of(reader: Any, box: Box | None = None, channels: int = 3) -> RegionSource:
    return RegionSource(reader, PixelFormat(channels), [0.0] * channels, [1.0] * channels, box=box)


def slide(height: int = 200, width: int = 300) -> Any:
    """White glass, pink tissue in the right half of the upper half, and a black border on the left."""
    values = np.full((height, width, 3), 240, np.uint8)
    values[: height // 2, width // 2 :] = (230, 150, 190)
    values[:, :16] = 0
    return values


@pytest.mark.parametrize("suffix", [".png", ".tif", ".npy"])
@pytest.mark.parametrize("scale", [1, 4, 50])
def test_files_of_any_lower_resolution(suffix: str, scale: int, tmp_path: Path) -> None:
    pytest.importorskip("tifffile", reason="needs inlinevit[huge]")
    mask = np.zeros((200 // scale, 300 // scale), np.uint8)
    mask[: 100 // scale, 150 // scale :] = 255
    path = tmp_path / f"mask{suffix}"
    np.save(path, mask) if suffix == ".npy" else Image.fromarray(mask).save(path)
    tokens = make_token_mask(path, source_of(ArrayRegions(slide())), 10, None)
    expected = np.zeros((20, 30), bool)
    expected[:10, 15:] = True
    assert np.array_equal(tokens, expected)
    # A mask is of the whole image, whatever the region.
    part = make_token_mask(path, source_of(ArrayRegions(slide()), Box(100, 50, 105, 95)), 10, None)
    assert part.shape == (10, 11)
    assert np.array_equal(part[:9, :10], expected[5:14, 10:20])


def test_masks_that_are_refused(tmp_path: Path) -> None:
    source, path = source_of(ArrayRegions(slide())), tmp_path / "mask.npy"
    with pytest.raises(ValueError, match=r"there is no file .*mask.npy: --mask takes a file, tissue or nodata"):
        make_token_mask(path, source, 16, None)
    np.save(path, np.ones((20, 20)))
    with pytest.raises(ValueError, match="20 × 20 pixels, which is another aspect ratio than 300 × 200"):
        make_token_mask(path, source, 16, None)
    np.save(path, np.ones((400, 600)))
    with pytest.raises(ValueError, match="600 × 400 pixels, more than the 300 × 200"):
        make_token_mask(path, source, 16, None)
    np.save(path, np.zeros((20, 30)))
    with pytest.raises(ValueError, match="leaves nothing of the image"):
        make_token_mask(path, source, 16, None)
    # Sides of smaller copies are rounded.
    np.save(path, np.ones((7, 10)))
    assert make_token_mask(path, source, 16, None).all()


def test_tissue() -> None:
    tokens = make_token_mask("tissue", source_of(ArrayRegions(slide())), 10, None)
    expected = np.zeros((20, 30), bool)
    expected[:10, 15:] = True
    assert np.array_equal(tokens, expected)
    # Large images are thinned out first.
    tokens = make_token_mask("tissue", source_of(ArrayRegions(slide(1200, 3000))), 100, None)
    assert tokens[:6, 15:].all()
    assert tokens.sum() == 6 * 15
    with pytest.raises(ValueError, match="tissue is found by its colour"):
        make_token_mask("tissue", source_of(ArrayRegions(slide()[..., 0])), 10, None)


def test_nodata(tmp_path: Path) -> None:
    pytest.importorskip("rasterio", reason="needs inlinevit[geo]")
    from tests.data.test_map_files import write_geotiff

    values = np.full((3, 100, 130), 7, np.uint8)
    values[:, 32:, 40:] = 9
    # One band with data is enough.
    values[0, 0, 129] = 9
    write_geotiff(tmp_path / "field.tif", values, nodata=7)
    with open_regions(tmp_path / "field.tif") as reader:
        tokens = make_token_mask("nodata", source_of(reader), 16, None)
    expected = np.zeros((7, 9), bool)
    expected[2:, 2:] = True
    expected[0, 8] = True
    assert np.array_equal(tokens, expected)
    with pytest.raises(ValueError, match="it has no nodata value"):
        make_token_mask("nodata", source_of(ArrayRegions(slide())), 16, None)
