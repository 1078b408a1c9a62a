"""`inlinevit segment predict --stream` and `inlinevit.stream` of a predictor: label maps, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

import inlinevit
from inlinevit import cli
from inlinevit.tasks.segmentation.config import InferenceConfig
from inlinevit.tasks.segmentation.inference import normalize
from inlinevit.tasks.segmentation.predictor import SegmentationPredictor, load_segmenter
from tests.streaming.test_segmentation import BACKBONES, make_segmenter
from tests.tasks.segmentation.runs import make_run

tifffile = pytest.importorskip("tifffile", reason="needs inlinevit[huge]")

HEIGHT, WIDTH = 90, 131
# Of the classes of runs.CLASSES.
VALUES = np.array([7, 2, 9])


def pixels(bands: int = 3) -> Any:
    generator = np.random.default_rng(0)
    return generator.integers(0, 256, (HEIGHT, WIDTH, bands)).astype(np.uint8)


@pytest.fixture(scope="module")
def segmenter_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose own settings resize images, and whose logits differ from pixel to pixel."""
    folder = tmp_path_factory.mktemp("segmenter") / "run"
    name, kwargs = BACKBONES["pvt"]
    make_run(folder, inference=InferenceConfig(min_size=48, flip=True), backbone=name, kwargs=kwargs)
    weights = make_segmenter(channels=64).state_dict()
    weights = {
        name: value[:3].clone() if name.startswith("segmentation_head.0") else value for name, value in weights.items()
    }
    safetensors.torch.save_file(weights, folder / "model.safetensors")
    return folder


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "in" / "image.tif"
    path.parent.mkdir()
    tifffile.imwrite(path, pixels(), photometric="rgb", tile=(32, 32), compression="zlib")
    return path


def run(*arguments: object) -> None:
    cli.main([str(argument) for argument in arguments])


def plain_logits(predictor: SegmentationPredictor, values: Any) -> torch.Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(values)).permute(2, 0, 1)
    with torch.no_grad():
        return predictor.model(normalize(tensor, *predictor.mean_std)[None])[0]


@pytest.mark.parametrize("memory", ["2GB", "60MB"])
def test_the_label_map_is_that_of_the_plain_forward_pass(
    memory: str, segmenter_run: Path, image: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, second, spill = tmp_path / "map.tif", tmp_path / "probabilities.tif", tmp_path / "spill"
    spill.mkdir()
    run("segment", "predict", segmenter_run, image, "--stream", "--memory", memory, "--spill", spill,
        "--output", output, "--probabilities", second)  # fmt: skip
    logits = plain_logits(load_segmenter(str(segmenter_run)), pixels())
    expected = logits.argmax(dim=0).numpy()
    assert len(np.unique(expected)) > 1
    labels = tifffile.imread(output)
    assert labels.dtype == np.uint8
    assert np.array_equal(labels, VALUES[expected])
    assert np.allclose(tifffile.imread(second), logits.softmax(dim=0).permute(1, 2, 0), atol=1e-5)
    line = capsys.readouterr().out
    assert line.startswith(f"{output}: labels of {WIDTH} × {HEIGHT} pixels: ")
    assert "%" in line
    assert sorted(one.name for one in tmp_path.iterdir()) == ["in", "map.tif", "probabilities.tif", "spill"]
    assert list(spill.iterdir()) == []


def test_geotiff_in_geotiff_out(segmenter_run: Path, image: Path, tmp_path: Path) -> None:
    rasterio = pytest.importorskip("rasterio", reason="needs inlinevit[geo]")
    from tests.data.test_map_files import GEO, write_geotiff

    write_geotiff(image, np.moveaxis(pixels(), 2, 0), nodata=7)
    output = tmp_path / "map.tif"
    run("segment", "predict", segmenter_run, image, "--stream", "--output", output, "--region", "16,5,100,70")
    expected = plain_logits(load_segmenter(str(segmenter_run)), pixels()[5:75, 16:116]).argmax(dim=0)
    with rasterio.open(output) as dataset:
        assert dataset.crs.to_epsg() == 32633
        side = GEO.transform[0]
        corner = (GEO.transform[2] + 16 * side, GEO.transform[5] - 5 * side)
        assert tuple(dataset.transform)[:6] == pytest.approx((side, 0.0, corner[0], 0.0, -side, corner[1]))
        # The value of pixels that do not count, in the data that the model was trained on.
        assert dataset.nodata == 0
        assert dataset.is_tiled
        assert np.array_equal(dataset.read(1), VALUES[expected.numpy()])


def test_a_predictor_knows_how_its_images_are_normalised(segmenter_run: Path, image: Path) -> None:
    predictor = inlinevit.load(str(segmenter_run), device="cpu")
    expected = plain_logits(predictor, pixels()[..., ::-1])
    logits = inlinevit.stream(predictor, image, bands=[2, 1, 0])
    assert torch.allclose(logits[0], expected, atol=1e-4)
    assert torch.allclose(inlinevit.stream(predictor, pixels()[..., ::-1].copy())[0], expected, atol=1e-4)


def test_a_job_is_continued(segmenter_run: Path, image: Path, tmp_path: Path, monkeypatch: Any) -> None:
    from inlinevit.data.map_files import LabelMapSink

    def fail(self: Any, top: int, rows: Any) -> None:
        raise KeyboardInterrupt

    arguments = ["segment", "predict", segmenter_run, image, "--stream", "--state", tmp_path / "state"]
    with monkeypatch.context() as patched:
        patched.setattr(LabelMapSink, "write", fail)
        with pytest.raises(SystemExit):
            run(*arguments, "--output", tmp_path / "map.tif")
    assert (tmp_path / "state" / "stream.json").exists()
    assert not (tmp_path / "map.tif").exists()
    run(*arguments, "--output", tmp_path / "map.tif")
    expected = plain_logits(load_segmenter(str(segmenter_run)), pixels()).argmax(dim=0)
    assert np.array_equal(tifffile.imread(tmp_path / "map.tif"), VALUES[expected.numpy()])
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--inference.min_size", 512], "--inference.min_size has no effect on a streamed image"),
        (["--inference.window_size", 64], "--inference.window_size has no effect on a streamed image"),
        (["--inference.flip", "true"], "--inference.flip has no effect on a streamed image"),
        (["--device", "cuda"], "--stream computes on the CPU"),
        (["--resume", "never"], "--resume has no effect on a streamed image: see --state"),
        (["--probabilities", "OUTPUT"], "both name"),
        (["--output", "labels.png"], "labels.png should end in .tif"),
        (["--memory", "10MB"], "the memory of 10 MB is too small for this image and model"),
        (["--region", "0,0,1000,1000"], f"it has {WIDTH} × {HEIGHT} pixels at level 0"),
        (["--level", 3], "it has no level 3"),
    ],
)
def test_what_is_refused(
    arguments: list[Any], message: str, segmenter_run: Path, image: Path, tmp_path: Path, refused: Any
) -> None:
    output = tmp_path / "map.tif"
    given = [output if argument == "OUTPUT" else argument for argument in arguments]
    _, line = refused("segment", "predict", segmenter_run, image, "--stream", "--output", output, *given)
    assert message in line
    assert sorted(one.name for one in tmp_path.iterdir()) == ["in"]


def test_other_commands_are_refused(
    segmenter_run: Path, image: Path, tmp_path: Path, refused: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["segment", "predict", segmenter_run, image, "--output", tmp_path / "map.tif"]
    assert "--memory apply to streamed images only" in refused(*command, "--memory", "1GB")[1]
    assert "--stream takes one image" in refused(*command[:3], image, *command[3:], "--stream")[1]
    make_run(tmp_path / "convnext")
    assert "cannot be streamed" in refused(*command[:2], tmp_path / "convnext", *command[3:], "--stream")[1]
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "several processes cannot share" in refused(*command, "--stream")[1]


def test_nan_is_reported_and_nothing_is_written(
    segmenter_run: Path, image: Path, tmp_path: Path, refused: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = load_segmenter

    def load_broken(*arguments: Any, **options: Any) -> SegmentationPredictor:
        predictor = load(*arguments, **options)
        model: Any = predictor.model
        with torch.no_grad():
            model.segmentation_head[0].bias[1] = float("nan")
        return predictor

    monkeypatch.setattr("inlinevit.tasks.segmentation.task.load_segmenter", load_broken)
    line = refused("segment", "predict", segmenter_run, image, "--stream", "--output", tmp_path / "map.tif")[1]
    assert "gives NaN or infinite values" in line
    assert sorted(one.name for one in tmp_path.iterdir()) == ["in"]
