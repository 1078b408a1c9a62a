"""`inlinevit features` and `inlinevit predict --stream`: results, and one sentence for what is refused."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import timm
import torch
from PIL import Image

from inlinevit import cli
from inlinevit.data.images import decode_image
from inlinevit.data.inputs import to_image
from inlinevit.data.pixels import PixelFormat
from inlinevit.tasks.classification.predictor import ClassificationPredictor
from inlinevit.tasks.classification.transforms import InputSpec, Normalized

tifffile = pytest.importorskip("tifffile", reason="needs inlinevit[huge]")
zarr = pytest.importorskip("zarr", reason="needs inlinevit[huge]")

MEAN, STD = (0.48, 0.45, 0.4), (0.22, 0.23, 0.24)
HEIGHT, WIDTH = 90, 131
SPEC = InputSpec(32, MEAN, STD, "bicubic", 1.0, "center")


def make_predictor(name: str, **arguments: Any) -> ClassificationPredictor:
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=10, **arguments).eval()
    return ClassificationPredictor(model, name, None, num_classes=10, label_names=None, spec=SPEC)


@pytest.fixture(scope="module")
def predictors() -> dict[str, ClassificationPredictor]:
    """Small models by what they are called in these tests."""
    return {
        "deit": make_predictor("inline_deit_tiny", embed_dim=32, depth=2, num_heads=2, img_size=64),
        "pvt": make_predictor(
            "inline_pvt_tiny", embed_dims=(16, 16, 32, 32), depths=(1, 1, 1, 1), num_heads=(1, 1, 2, 2)
        ),
        "other": make_predictor("vit_tiny_patch16_224"),
    }


@pytest.fixture(autouse=True)
def small_models(predictors: dict[str, ClassificationPredictor], monkeypatch: pytest.MonkeyPatch) -> None:
    def load(model: str, *given: Any, **named: Any) -> Any:
        return predictors[model]

    monkeypatch.setattr("inlinevit.tasks.streaming.load", load)
    monkeypatch.setattr("inlinevit.tasks.classification.task.Classification.load_predictor", load)


def pixels(bands: int = 3, dtype: Any = np.uint8) -> Any:
    return np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, bands)).astype(dtype)


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "in" / "image.tif"
    path.parent.mkdir()
    tifffile.imwrite(path, pixels(), photometric="rgb", tile=(32, 32), compression="zlib")
    return path


@pytest.fixture
def head(tmp_path: Path) -> Path:
    path = tmp_path / "in" / "head.safetensors"
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(5, 32, generator=generator), torch.randn(5, generator=generator)
    safetensors.torch.save_file({"weight": weight, "bias": bias}, path)
    return path


def run(*arguments: object) -> None:
    cli.main([str(argument) for argument in arguments])


def normalised(values: Any, pixel_format: PixelFormat | None = None) -> torch.Tensor:
    return Normalized(SPEC)(decode_image(to_image(values), pixel_format or PixelFormat(3)))[None]


@pytest.mark.parametrize("memory", ["2GB", "60MB"])
@pytest.mark.parametrize("model", ["deit", "pvt"])
def test_classes_are_those_of_the_plain_forward_pass(
    model: str, memory: str, predictors: Any, image: Path, tmp_path: Path
) -> None:
    (tmp_path / "spill").mkdir()
    run("predict", model, image, "--stream", "--memory", memory, "--spill", tmp_path / "spill", "--top", 10,
        "--output", tmp_path / "out.json")  # fmt: skip
    (record,) = json.loads((tmp_path / "out.json").read_text())
    with torch.no_grad():
        expected = predictors[model].model(normalised(pixels())).softmax(1)[0]
    found = {one["index"]: one["probability"] for one in record["predictions"]}
    assert [found[index] for index in range(10)] == pytest.approx(expected.tolist(), abs=2e-6)
    assert list((tmp_path / "spill").iterdir()) == []


def test_classes_are_printed(image: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("predict", "deit", image, "--stream", "--format", "csv", "--top", 1)
    header, line = capsys.readouterr().out.splitlines()
    assert header.startswith("file,rank,class")
    assert line.startswith(f"{image},1,")


@pytest.mark.parametrize(
    ("model", "place", "name"),
    [("deit", [], "norm"), ("deit", ["--block", 0], "b"), ("pvt", ["--stage", 1], "s"), ("pvt", [], "norm")],
)
@pytest.mark.parametrize("extension", [".npy", ".zarr"])
def test_features_streamed_or_not_are_those_of_timm(
    model: str, place: list[Any], name: str, extension: str, predictors: Any, image: Path, tmp_path: Path
) -> None:
    output = tmp_path / f"features{extension}"
    network = predictors[model].model
    index = {"b": 0, "s": 1, "norm": len(network.feature_info) - 1}[name]
    with torch.no_grad():
        (expected,) = network.forward_intermediates(
            normalised(pixels()), [index], norm=name == "norm", intermediates_only=True
        )
    for options in ([], ["--stream"]):
        run("features", model, image, "--output", output, *place, *options)
        values = np.load(output) if extension == ".npy" else zarr.open_array(output, mode="r")[:]
        assert np.allclose(values, expected[0].permute(1, 2, 0), atol=1e-5)
    about = json.loads((tmp_path / "features.npy.json").read_text()) if extension == ".npy" else None
    attributes = about or dict(zarr.open_array(output, mode="r").attrs)
    assert attributes["image_size"] == [WIDTH, HEIGHT]
    assert attributes["stride"] == network.feature_info[index]["reduction"]


def test_region_range_and_bands(predictors: Any, image: Path, tmp_path: Path) -> None:
    values = pixels(4, np.uint16) * 16
    tifffile.imwrite(image, values, photometric="minisblack", planarconfig="contig", tile=(32, 32))
    output = tmp_path / "features.npy"
    run("features", "deit", image, "--stream", "--region", "10,20,100,60", "--data.bands", "[3,1,0]", "--data.range",
        "[0, 3000]", "--output", output)  # fmt: skip
    image_part = values[20:80, 10:110]
    expected = predictors["deit"].model
    with torch.no_grad():
        tokens = expected.forward_features(normalised(image_part, PixelFormat(3, (3, 1, 0), (0.0, 3000.0))))
    assert np.allclose(np.load(output), tokens[0, 1:].view(4, 7, 32), atol=1e-5)
    assert json.loads((tmp_path / "features.npy.json").read_text())["origin"] == [10.0, 20.0]


def test_class_map(
    predictors: Any, image: Path, head: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, second = tmp_path / "map.tif", tmp_path / "probabilities.tif"
    run("predict", "deit", image, "--stream", "--head", head, "--output", output, "--probabilities", second)
    assert capsys.readouterr().out == f"{output}: classes of 9 × 6 tokens, one for 16 × 16 pixels\n"
    weights = safetensors.torch.load_file(head)
    with torch.no_grad():
        tokens = predictors["deit"].model.forward_features(normalised(pixels()))[0, 1:]
    logits = tokens @ weights["weight"].T + weights["bias"]
    assert np.array_equal(tifffile.imread(output), logits.argmax(1).view(6, 9))
    assert np.allclose(tifffile.imread(second), logits.softmax(1).view(6, 9, 5), atol=1e-5)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["in", "map.tif", "probabilities.tif"]


def test_masks(image: Path, head: Path, tmp_path: Path) -> None:
    mask = np.zeros((HEIGHT // 2, WIDTH // 2), np.uint8)
    mask[:16] = 1
    Image.fromarray(mask).save(tmp_path / "in" / "mask.png")
    before = tmp_path / "before.tif"
    for name in ("before.tif", "after.tif"):
        run("predict", "deit", image, "--stream", "--head", head, "--output", tmp_path / name,
            "--mask", tmp_path / "in" / "mask.png")  # fmt: skip
        # What is masked has no influence.
        changed = pixels()
        changed[32:] = 0
        tifffile.imwrite(image, changed, photometric="rgb", tile=(32, 32), compression="zlib")
    classes = tifffile.imread(before)
    assert (classes[2:] == 255).all()
    assert (classes[:2] < 5).all()
    assert np.array_equal(classes, tifffile.imread(tmp_path / "after.tif"))


def test_geotiff_in_geotiff_out(image: Path, head: Path, tmp_path: Path) -> None:
    rasterio = pytest.importorskip("rasterio", reason="needs inlinevit[geo]")
    from tests.data.test_map_files import write_geotiff

    write_geotiff(image, np.moveaxis(pixels(), 2, 0), nodata=7)
    output = tmp_path / "map.tif"
    run("predict", "deit", image, "--stream", "--head", head, "--output", output, "--mask", "nodata",
        "--region", "16,0,100,90")  # fmt: skip
    with rasterio.open(output) as dataset:
        assert dataset.crs.to_epsg() == 32633
        assert tuple(dataset.transform)[:6] == (160.0, 0.0, 500_160.0, 0.0, -160.0, 4_600_000.0)
        assert dataset.nodata == 255


def test_levels_and_resolutions(image: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with tifffile.TiffWriter(image) as writer:
        options = dict(photometric="rgb", tile=(32, 32), resolutionunit="CENTIMETER")
        writer.write(pixels(), resolution=(20_000, 20_000), subifds=1, **options)
        writer.write(pixels()[::2, ::2], subfiletype=1, **options)
    shapes = []
    for options in (["--level", 1], ["--mpp", 0.98]):
        run("features", "deit", image, "--output", tmp_path / "a.npy", *options)
        shapes.append(np.load(tmp_path / "a.npy").shape)
    assert shapes == [(3, 5, 32)] * 2
    assert (
        "level 1 has 0.9924 micrometres per pixel, 1.3% above the 0.98 that were asked for" in capsys.readouterr().err
    )


# What is refused: how the files differ, further arguments, and the message.
REFUSED: dict[str, tuple[dict[str, Any], list[Any], str]] = {
    "truncated": ({"truncate": 2000}, [], "image.tif cannot be used (it is truncated"),
    "missing": ({"remove": True}, [], "there is no file or folder"),
    "text": ({"content": b"text"}, [], "image.tif cannot be used (it is not an image)"),
    "four bands": (
        {"values": pixels(4)},
        [],
        "it has 4 bands, but the model takes 3: choose 3 of them with --data.bands",
    ),
    "32 bits": ({"values": pixels(dtype=np.uint32)}, [], "say so with --data.range"),
    "16 bits beyond the range": ({"values": pixels(dtype=np.uint16) * 99}, ["--data.range", 8], "data.range is 8 bits"),
    "no such level": ({}, ["--level", 3], "it has no level 3: there is only level 0"),
    "mpp": ({"values": pixels(), "resolutionunit": 1}, ["--mpp", 0.5], "does not say how large its pixels are"),
    "level and mpp": ({}, ["--level", 0, "--mpp", 0.5], "give one of them"),
    "region outside": ({}, ["--region", "100,0,100,10"], f"it has {WIDTH} × {HEIGHT} pixels at level 0"),
    "region of words": ({}, ["--region", "all"], "it should be X,Y,WIDTH,HEIGHT"),
    "budget": ({}, ["--memory", "10MB"], "the memory of 10 MB is too small for this image and model"),
    "budget of words": ({}, ["--memory", "much"], "memory is 'much'"),
    "spill folder": ({}, ["--spill", "nowhere"], "nowhere is not a folder"),
    "mask": ({}, ["--mask", "nothing.png"], "there is no file nothing.png"),
    "mask of another shape": ({"mask": (50, 20)}, ["--mask", "MASK"], "another aspect ratio than"),
    "mask that is empty": ({"mask": None}, ["--mask", "MASK"], "leaves nothing of"),
    "no nodata": ({}, ["--mask", "nodata"], "it has no nodata value"),
    "head": ({"head": b"nothing"}, [], "head.safetensors is not a whole safetensors file"),
    "head of other channels": ({"channels": 48}, [], "the head takes 48 channels, but the last map of"),
    "output": ({}, ["--output", "map.png"], "map.png should end in .tif, the format of class maps"),
    "format": ({}, ["--format", "csv"], "leave it out with --head"),
    "device": ({}, ["--device", "cuda"], "--stream computes on the CPU"),
    "batch size": ({}, ["--batch_size", 4], "--batch_size has no effect on a streamed image"),
    "resume": ({}, ["--resume", "never"], "see --state"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_in_one_sentence_with_nothing_left(
    kind: str, image: Path, head: Path, tmp_path: Path, refused: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes, arguments, message = REFUSED[kind]
    changes = dict(changes)
    monkeypatch.chdir(tmp_path)
    mask = tmp_path / "in" / "mask.npy"
    if "mask" in changes:
        shape = changes["mask"]
        np.save(mask, np.zeros((HEIGHT, WIDTH)) if shape is None else np.ones(shape))
    if "values" in changes:
        bands = dict(photometric="minisblack", planarconfig="contig") if changes["values"].shape[2] == 4 else {}
        more = {name: value for name, value in changes.items() if name == "resolutionunit"}
        tifffile.imwrite(image, changes["values"], **{"photometric": "rgb", "tile": (32, 32), **bands, **more})
    if "truncate" in changes:
        image.write_bytes(image.read_bytes()[: -changes["truncate"]])
    if "content" in changes:
        image.write_bytes(changes["content"])
    if "remove" in changes:
        image.unlink()
    if "head" in changes:
        head.write_bytes(changes["head"])
    if "channels" in changes:
        safetensors.torch.save_file({"weight": torch.zeros(5, changes["channels"])}, head)
    spill = tmp_path / "spill"
    spill.mkdir()
    output = [] if "--output" in arguments else ["--output", "map.tif"]
    folder = [] if "--spill" in arguments else ["--spill", spill]
    arguments = [mask if one == "MASK" else one for one in arguments]
    code, line = refused("predict", "deit", image, "--stream", "--head", head, *output, *folder, *arguments)
    assert code in (1, 2)
    assert message in line
    assert list(spill.iterdir()) == []
    assert sorted(one.name for one in tmp_path.iterdir()) == ["in", "spill"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--memory", "1GB"], "--memory apply to streamed images only: add --stream"),
        (["--stream", "--stage", 4], "there is no stage 4: the model has stages 0 to 3"),
        (["--stream", "--stage", 1, "--block", 1], "there is no block 1: stage 1 of the model has blocks 0 to 0"),
        (["--stream", "--block", 0], "give --stage, too"),
        (["--output", "features.csv"], "features.csv should end in .npy or .zarr"),
        (["--output", "IMAGE"], "is read by this command"),
    ],
)
def test_refused_features(
    arguments: list[Any], message: str, image: Path, tmp_path: Path, refused: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    output = [] if "--output" in arguments else ["--output", "features.npy"]
    given = [image if one == "IMAGE" else one for one in arguments]
    code, line = refused("features", "pvt", image, *output, *given)
    assert code in (1, 2)
    assert message in line
    assert [one.name for one in tmp_path.iterdir()] == ["in"]


def test_refused_models_and_options(image: Path, head: Path, refused: Any, tmp_path: Path) -> None:
    assert "other cannot be streamed" in refused("predict", "other", image, "--stream")[1]
    assert "--level apply to streamed images only" in refused("predict", "deit", image, "--level", 1)[1]
    assert "--stream takes one image" in refused("predict", "deit", image, image, "--stream")[1]
    assert "--head writes a map" in refused("predict", "deit", image, "--stream", "--head", head)[1]
    assert "--probabilities are those of a --head" in refused(
        "predict", "deit", image, "--stream", "--probabilities", tmp_path / "p.tif"
    )[1]  # fmt: skip


def test_a_full_spill_disk(image: Path, head: Path, tmp_path: Path, refused: Any, file_limit: Any) -> None:
    """With the least memory, tokens have to be in a file, which may not be as large as they are."""
    spill = tmp_path / "spill"
    spill.mkdir()
    tifffile.imwrite(image, np.zeros((1600, 1600, 3), np.uint8), photometric="rgb", tile=(32, 32), compression="zlib")
    arguments = [
        "predict",
        "deit",
        image,
        "--stream",
        "--spill",
        spill,
        "--head",
        head,
        "--output",
        tmp_path / "map.tif",
    ]
    _, line = refused(*arguments, "--memory", "1MB")
    least = re.search(r"allow at least (\d+) MB", line)
    assert least is not None
    with file_limit(100_000):
        code, line = refused(*arguments, "--memory", f"{least[1]}MB")
    assert code == 1
    assert "space" in line
    assert list(spill.iterdir()) == []
    assert sorted(one.name for one in tmp_path.iterdir()) == ["in", "spill"]


@pytest.mark.slow
def test_sigterm_leaves_nothing(image: Path, tmp_path: Path) -> None:
    model = timm.create_model("inline_deit_tiny")
    safetensors.torch.save_file(model.state_dict(), tmp_path / "in" / "weights.safetensors")
    tifffile.imwrite(image, np.zeros((4096, 4096, 3), np.uint8), photometric="rgb", tile=(256, 256), compression="zlib")
    weights = tmp_path / "in" / "weights.safetensors"
    command = [sys.executable, "-m", "inlinevit", "features", "inline_deit_tiny", image, "--stream", "--block", "0",
               "--checkpoint", weights, "--output", tmp_path / "features.npy"]  # fmt: skip
    process = subprocess.Popen([os.fspath(word) for word in command], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob(".*unfinished")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    if process.returncode == 0:
        pytest.skip("the command was faster than the signal")
    assert (process.returncode, errors) == (128 + signal.SIGTERM, "stopped: nothing was written\n")
    assert [one.name for one in tmp_path.iterdir()] == ["in"]


def torchrun(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a command by two processes."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
        "-m",
        "inlinevit",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [*command, *map(str, arguments)], capture_output=True, text=True, check=False, timeout=300, env=environment
    )


@pytest.mark.slow
def test_two_processes_share_one_image(image: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.undo()
    torch.manual_seed(0)
    weights = tmp_path / "in" / "weights.safetensors"
    safetensors.torch.save_file(timm.create_model("inline_pvt_tiny").state_dict(), weights)
    arguments = ["features", "inline_pvt_tiny", image, "--stream", "--checkpoint", weights, "--stage", 1]
    run(*arguments, "--output", tmp_path / "one.npy")
    shared = torchrun(*arguments, "--output", tmp_path / "two.npy")
    assert shared.returncode == 0, shared.stderr
    assert shared.stdout.count("two.npy: 17 × 12 tokens of 128 channels") == 1
    one, two = (np.load(tmp_path / f"{name}.npy") for name in ("one", "two"))
    assert np.linalg.norm(two - one) < 1e-5 * np.linalg.norm(one)

    arguments = [
        "predict",
        "inline_pvt_tiny",
        image,
        "--stream",
        "--checkpoint",
        weights,
        "--format",
        "csv",
        "--top",
        1,
    ]
    shared = torchrun(*arguments)
    assert shared.returncode == 0, shared.stderr
    assert len(shared.stdout.splitlines()) == 2

    refused_one = torchrun(*arguments, "--memory", "1MB", "--output", tmp_path / "out.csv")
    sentences = [line for line in refused_one.stderr.splitlines() if "the memory of 1 MB is too small" in line]
    assert 1 <= len(sentences) <= 2
    assert refused_one.returncode == 1
    refused_one = torchrun(
        "features", "inline_pvt_tiny", image, "--checkpoint", weights, "--output", tmp_path / "a.npy"
    )
    assert "several processes share an image that is streamed only: add --stream" in refused_one.stderr
    maps = ["one.npy", "one.npy.json", "two.npy", "two.npy.json"]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["in", *maps]
