"""Files of maps that are written by rows."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from inlinevit.data.array_regions import ArrayRegions
from inlinevit.data.image_source import Box, RegionSource, open_regions
from inlinevit.data.map_files import (
    ClassMapSink,
    Coordinates,
    FileSink,
    check_head,
    feature_sink,
    read_head,
)
from inlinevit.data.pixels import PixelFormat
from inlinevit.data.regions import GeoReference

tifffile = pytest.importorskip("tifffile", reason="needs inlinevit[huge]")
zarr = pytest.importorskip("zarr", reason="needs inlinevit[huge]")

WHERE = Coordinates(1, (8.0, 16.0), (2.0, 2.0), (100, 90), (0.5, 0.5))
GEO = GeoReference("EPSG:32633", (10.0, 0.0, 500_000.0, 0.0, -10.0, 4_600_000.0))


def write_geotiff(path: Path, values: Any, nodata: float | None = None) -> None:
    """Write values (bands, height, width) as a GeoTIFF file."""
    import rasterio

    bands, height, width = values.shape
    profile = dict(driver="GTiff", count=bands, height=height, width=width, dtype=values.dtype.name, nodata=nodata)
    transform = rasterio.Affine(*GEO.transform)
    options = dict(tiled=True, blockxsize=64, blockysize=64)
    with rasterio.open(path, "w", crs="EPSG:32633", transform=transform, **profile, **options) as dataset:
        dataset.write(values)


def write(sink: FileSink, features: torch.Tensor, stride: int = 16, step: int = 7, stop_at: int | None = None) -> None:
    sink.begin(tuple(features.shape), stride)
    for top in range(0, len(features) if stop_at is None else stop_at, step):
        sink.write_rows(top, features[top : top + step])
    if stop_at is None:
        sink.close()


@pytest.mark.parametrize("name", ["map.npy", "map.zarr"])
def test_features(name: str, tmp_path: Path) -> None:
    features = torch.randn(45, 33, 5)
    path = tmp_path / "new" / name
    # What is there is replaced.
    for values in (features + 1, features):
        write(feature_sink(path, WHERE), values)
    if name == "map.npy":
        written = np.load(path)
        about = json.loads((path.parent / "map.npy.json").read_text())
        assert sorted(one.name for one in path.parent.iterdir()) == ["map.npy", "map.npy.json"]
    else:
        array = zarr.open_array(path, mode="r")
        written, about = array[:], dict(array.attrs)
        assert sorted(one.name for one in path.parent.iterdir()) == ["map.zarr"]
    assert np.array_equal(written, features.numpy())
    assert about == WHERE.to_plain(16)
    assert about["origin"] == [8.0, 16.0]
    assert (about["stride"], about["level"], about["crs"]) == (16, 1, None)
    # The image could be streamed again.
    assert open_regions(path).level_dimensions == ((33, 45),)


@pytest.mark.parametrize("name", ["map.npy", "map.zarr", "map.tif"])
def test_nothing_is_left_of_a_map_that_is_not_complete(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    sink: FileSink = ClassMapSink(path, WHERE) if name == "map.tif" else feature_sink(path, WHERE)
    sink.abort()
    write(sink, torch.randn(45, 33, 5), stop_at=20)
    assert not path.exists()
    assert list(tmp_path.iterdir()) != []
    sink.abort()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["map.npy", "map.zarr"])
def test_what_was_there_stays(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    write(feature_sink(path, WHERE), torch.zeros(20, 20, 3))
    sink = feature_sink(path, WHERE)
    write(sink, torch.ones(20, 20, 3), stop_at=14)
    sink.abort()
    assert open_regions(path).read_region((0, 0), 0, (20, 20)).max() == 0


@pytest.mark.parametrize("name", ["map.npy", "map.zarr", "map.tif"])
def test_a_full_disk(name: str, tmp_path: Path, file_limit: Any) -> None:
    path = tmp_path / name
    sink: FileSink = ClassMapSink(path, WHERE) if name == "map.tif" else feature_sink(path, WHERE)
    with file_limit(2000), pytest.raises(OSError, match=f"no space left on the disk for .*{name}"):
        write(sink, torch.randn(64, 100, 5))
    sink.abort()
    assert not path.exists()
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_too_small(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"would have 4000000.* GB, but .* GB are free: name another disk"):
        feature_sink(tmp_path / "a.npy", WHERE).begin((10**6, 10**6, 10**3), 16)


def test_names_of_features(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a\.csv should end in \.npy or \.zarr"):
        feature_sink(tmp_path / "a.csv", WHERE)
    (tmp_path / "a.zarr").mkdir()
    (tmp_path / "a.zarr" / "precious.txt").touch()
    with pytest.raises(ValueError, match=r"a\.zarr exists and is not a Zarr folder"):
        feature_sink(tmp_path / "a.zarr", WHERE)


@pytest.mark.parametrize("classes", [3, 300])
def test_class_maps(classes: int, tmp_path: Path) -> None:
    logits = torch.randn(300, 270, classes)
    mask = np.ones((300, 270), bool)
    mask[:10] = False
    path, second = tmp_path / "map.tif", tmp_path / "probabilities.tif"
    sink = ClassMapSink(path, WHERE, probabilities=second if classes == 3 else None, mask=mask)
    write(sink, logits)
    with tifffile.TiffFile(path) as file:
        page = file.pages[0]
        assert page.is_tiled
        values = page.asarray()
        assert json.loads(page.description) == WHERE.to_plain(16)
        assert page.nodata == (255 if classes == 3 else 65535)
    assert values.dtype == (np.uint8 if classes == 3 else np.uint16)
    assert np.array_equal(values[10:], logits.argmax(2)[10:])
    assert (values[:10] == np.iinfo(values.dtype).max).all()
    if classes == 3:
        found = tifffile.imread(second)
        assert np.allclose(found[10:], logits.softmax(2)[10:], atol=1e-6)
        assert np.isnan(found[:10]).all()
    assert len(list(tmp_path.iterdir())) == (2 if classes == 3 else 1)


def test_masks_of_earlier_stages(tmp_path: Path) -> None:
    mask = np.zeros((8, 12), bool)
    mask[5, 7] = True
    write(ClassMapSink(tmp_path / "map.tif", WHERE, mask=mask, mask_stride=8), torch.zeros(4, 6, 2))
    values = tifffile.imread(tmp_path / "map.tif")
    assert np.argwhere(values == 0).tolist() == [[2, 3]]


def test_geotiff_maps_keep_crs_transform_and_nodata(tmp_path: Path) -> None:
    rasterio = pytest.importorskip("rasterio", reason="needs inlinevit[geo]")
    write_geotiff(tmp_path / "field.tif", np.full((3, 200, 300), 9, np.uint8), nodata=7)
    with open_regions(tmp_path / "field.tif") as reader:
        box = Box(20, 40, 280, 160)
        where = Coordinates.of(RegionSource(reader, PixelFormat(3), [0.0] * 3, [1.0] * 3, box=box))
    logits = torch.randn(10, 18, 3)
    second = tmp_path / "probabilities.tif"
    write(ClassMapSink(tmp_path / "map.tif", where, probabilities=second), logits)
    with rasterio.open(tmp_path / "map.tif") as dataset:
        assert dataset.crs.to_epsg() == 32633
        assert tuple(dataset.transform)[:6] == (160.0, 0.0, 500_200.0, 0.0, -160.0, 4_599_600.0)
        assert dataset.nodata == 255
        assert dataset.profile["tiled"]
        assert np.array_equal(dataset.read(1), logits.argmax(2))
    with rasterio.open(second) as dataset:
        assert np.allclose(dataset.read(), logits.softmax(2).permute(2, 0, 1), atol=1e-6)
    assert where.to_plain(16)["crs"].startswith("PROJCS")


def save_head(path: Path, **tensors: torch.Tensor) -> Path:
    safetensors.torch.save_file(tensors, path)
    return path


def test_heads(tmp_path: Path) -> None:
    path = save_head(tmp_path / "head.safetensors", weight=torch.randn(4, 8), bias=torch.randn(4).half())
    head = read_head(path)
    assert (head.weight.shape, head.bias.dtype) == ((4, 8), torch.float32)
    assert not read_head(save_head(tmp_path / "b.safetensors", weight=torch.randn(4, 8))).bias.any()
    check_head(head, 8, "the map")
    with pytest.raises(ValueError, match="the head takes 8 channels, but the map has 9: choose a head"):
        check_head(head, 9, "the map")


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"kernel": torch.zeros(4, 8)}, "holds kernel in place of weight and bias"),
        ({"weight": torch.zeros(4, 8, 1, 1)}, r"has the shape \(4, 8, 1, 1\)"),
        ({"weight": torch.zeros(4, 8), "bias": torch.zeros(5)}, "malformed head"),
        ({"weight": torch.zeros(4, 8, dtype=torch.int64)}, "malformed head"),
        ({"weight": torch.full((4, 8), float("nan"))}, "not finite"),
    ],
)
def test_heads_that_are_refused(tensors: dict[str, torch.Tensor], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        read_head(save_head(tmp_path / "head.safetensors", **tensors))


def test_files_that_are_no_heads(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="check the path"):
        read_head(tmp_path / "head.safetensors")
    (tmp_path / "head.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="is not a whole safetensors file"):
        read_head(tmp_path / "head.safetensors")
    with pytest.raises(ValueError, match=r"head\.pth is not a \.safetensors file"):
        read_head(tmp_path / "head.pth")


def test_coordinates_of_an_array() -> None:
    reader = ArrayRegions(np.zeros((100, 80, 3), np.uint8))
    where = Coordinates.of(RegionSource(reader, PixelFormat(3), [0.0] * 3, [1.0] * 3, box=Box(8, 16, 32, 48)))
    assert where == Coordinates(0, (8.0, 16.0), (1.0, 1.0), (32, 48))
