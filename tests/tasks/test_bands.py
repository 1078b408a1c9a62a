"""Images as they are, from training to prediction: 12 bits in 16, four and six bands, by the command line."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
import yaml
from PIL import Image

from inlinevit.cli import main
from tests.tasks.detection.conftest import draw_coco
from tests.tasks.segmentation.runs import CLASSES
from tests.tasks.training import small_pvt

TINY = {"name": "inline_deit_tiny", "img_size": 16, "drop_path_rate": 0.0}
TINY["kwargs"] = {"embed_dim": 32, "depth": 1, "num_heads": 2, "patch_size": 8}
AUGMENT = {"auto_augment": None, "color_jitter": 0.0, "scale": None, "mixup": 0.0, "cutmix": 0.0, "random_erasing": 0.0}
SHORT = {"schedule": {"epochs": 3, "warmup": 0}, "optimizer": {"lr": 0.01, "lr_base_size": 0}}


def write(file: Path, values: np.ndarray) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    if values.shape[-1] == 1:
        Image.fromarray(values[..., 0]).save(file.with_suffix(".png"))
    else:
        tifffile.imwrite(file.with_suffix(".tif"), values, photometric="minisblack", planarconfig="contig")


def draw_classes(folder: Path, bands: int, kind: type, most: int) -> None:
    """Two classes that differ in the last band only."""
    noise = np.random.default_rng(0)
    for split in ("train", "val"):
        for label, name in enumerate(("dark", "light")):
            for number in range(8):
                values = noise.integers(0, most // 4, (16, 16, bands)).astype(kind)
                values[..., -1] += np.array(label * (most // 2), kind)
                values[0, 0, 0] = most
                write(folder / split / name / str(number), values)


def train(command: list[str], settings: dict[str, Any], home: Path, output: str = "run") -> dict[str, Any]:
    """Train, and return the config of the run."""
    (home / "recipe.yaml").write_text(yaml.safe_dump(settings))
    arguments = ["train", "--config", str(home / "recipe.yaml"), "--run.output", str(home / output)]
    main([*command, *arguments])
    return yaml.safe_load((home / output / "config.yaml").read_text())


def refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="1"):
        main(arguments)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("bands", "kind", "most", "expected"),
    [(1, np.uint16, 4095, 12), (4, np.uint16, 16383, 14), (6, np.uint8, 255, "auto")],
    ids=["12 bits", "four bands", "six bands"],
)
def test_classification(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], bands: int, kind: type, most: int, expected: int | str
) -> None:
    draw_classes(tmp_path / "data", bands, kind, most)
    data = {"path": str(tmp_path / "data"), "batch_size": 4, "workers": 0}
    settings = {"data": data, "model": {**TINY, "in_chans": bands}, "augment": AUGMENT, **SHORT}
    config = train([], settings, tmp_path)
    # What was found is recorded, so that evaluation and prediction do the same.
    assert config["data"]["range"] == expected
    if bands > 1:
        means = [round(float(value), 4) for value in config["data"]["mean"]]
        assert len(means) == len(config["data"]["std"]) == bands
        # The last band has a quarter of the range more than the others, on average.
        assert means[-1] - means[1] == pytest.approx(0.25, abs=0.02)
    run, image = str(tmp_path / "run"), next((tmp_path / "data" / "val" / "light").glob("0.*"))
    capsys.readouterr()
    main(["eval", run, "--output", str(tmp_path / "evaluation")])
    evaluation = json.loads((tmp_path / "evaluation" / "evaluation.json").read_text())
    assert evaluation["top1"] == 100
    capsys.readouterr()
    main(["predict", run, str(image), "--format", "json"])
    predictions = json.loads(capsys.readouterr().out)[0]["predictions"]
    assert predictions[0]["class"] == "light"
    # Bands and ranges can be overridden: with another white, all is dark.
    wider = f"[0, {most * 100}]"
    main(["predict", run, str(image), "--format", "json", "--data.range", wider])
    assert json.loads(capsys.readouterr().out)[0]["predictions"] != predictions
    first = str([0] * bands)
    main(["predict", run, str(image), "--format", "json", "--data.bands", first])
    capsys.readouterr()
    # And on other images, eval keeps the range and the mean of the run.
    main(["eval", run, "--data.path", str(tmp_path / "data" / "val"), "--output", str(tmp_path / "again")])
    again = json.loads((tmp_path / "again" / "evaluation.json").read_text())
    assert again["loss"] == pytest.approx(evaluation["loss"], rel=1e-5)


def test_a_run_is_resumed_with_what_was_found(tmp_path: Path) -> None:
    draw_classes(tmp_path / "data", 4, np.uint16, 4095)
    data = {"path": str(tmp_path / "data"), "batch_size": 4, "workers": 0}
    settings = {"data": data, "model": {**TINY, "in_chans": 4}, "augment": AUGMENT, **SHORT}
    assert train([], settings, tmp_path) == train([], settings, tmp_path)


def test_what_does_not_fit_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draw_classes(tmp_path / "data", 4, np.uint8, 255)
    common = ["train", "--data.path", str(tmp_path / "data"), "--run.output", str(tmp_path / "run")]
    for options, reason in (
        (["--model.in_chans", "4"], "changes colours of RGB or grey images, but model.in_chans is 4: set --augment."),
        (["--data.bands", "[0, 1]"], "data.bands has 2 bands, but model.in_chans is 3"),
        (["--data.bands", "[-1]"], "data.bands is [-1]: it should be at least 0"),
        (["--data.range", "7"], "data.range is 7: it should be at least 8"),
        (["--data.range", "[5, 5]"], "it should rise from black to white"),
        (["--data.mean", "[0.5, 0.5, 0.5]"], "data.mean and data.std belong together"),
        (["--data.mean", "[0.5]", "--data.std", "[0.5]"], "data.mean has 1 numbers, but model.in_chans is 3"),
        (["--max-pixels", "0"], "data.max_pixels is 0"),
    ):
        refused([*common, *options])
        assert reason in capsys.readouterr().err
    small = ["--model.name", "inline_deit_tiny", "--model.kwargs", json.dumps(TINY["kwargs"]), "--model.img_size", "16"]
    short = ["--schedule.epochs", "1", "--schedule.warmup", "0", "--data.workers", "0", "--data.batch_size", "4"]
    refused([*common, *small, *short])
    assert "it has 4 bands, but the model takes 3: choose 3 of them with --data.bands" in capsys.readouterr().err
    refused([*common, *small, *short, "--data.bands", "[3, 2, 1]", "--max-pixels", "255"])
    error = capsys.readouterr().err
    assert "256 pixels, more than the limit of 255 against" in error
    assert "if you trust it, allow more with --max-pixels 256, or cut it" in error
    main([*common, *small, *short, "--data.bands", "[3, 2, 1]", "--max-pixels", "256"])


def test_segmentation_with_six_bands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    noise = np.random.default_rng(0)
    for split in ("training", "validation"):
        for number in range(2):
            indices = noise.integers(0, 3, (4, 4)).repeat(16, axis=0).repeat(16, axis=1)
            values = np.stack([indices * 1000] * 6, -1).astype(np.uint16)
            write(tmp_path / "ade" / "images" / split / str(number), values)
            labels = np.array([7, 2, 9], np.uint8)[indices]
            write(tmp_path / "ade" / "annotations" / split / str(number), labels[..., None])
    (tmp_path / "labels.yaml").write_text(yaml.safe_dump(CLASSES))
    data = {"path": str(tmp_path / "ade"), "labels": str(tmp_path / "labels.yaml"), "batch_size": 2, "workers": 0}
    settings = {
        "data": data,
        "model": {"backbone": "inline_pvt_tiny", "kwargs": small_pvt(64, 16), "channels": 64, "in_chans": 6},
        "augment": {"min_size": 64, "crop_size": 80, "photometric_distortion": False},
        "inference": {"min_size": None},
        "schedule": {"steps": 2, "warmup": 0},
    }
    config = train(["segment"], settings, tmp_path)
    assert (config["data"]["range"], len(config["data"]["mean"])) == (12, 6)
    run, image = str(tmp_path / "run"), str(tmp_path / "ade" / "images" / "validation" / "0.tif")
    main(["segment", "eval", run])
    main(["segment", "predict", run, image, "--output", str(tmp_path / "drawn")])
    assert (tmp_path / "drawn" / "0_overlay.png").is_file()
    capsys.readouterr()
    refused(["segment", "predict", run, image, "--output", str(tmp_path / "drawn"), "--max-pixels", "4095"])
    assert "4096 pixels, more than the limit of 4095" in capsys.readouterr().err


def test_detection_with_four_bands(tmp_path: Path) -> None:
    folder = draw_coco(tmp_path / "coco", {"train2017": 2, "val2017": 1}, sizes=((64, 64),), empty=0, ending=".tif")
    for file in folder.glob("*/*.tif"):
        colours = np.asarray(Image.open(file)).astype(np.uint16) << 4
        write(file, np.concatenate([colours, colours[..., :1]], -1))
    settings = {
        "data": {"path": str(folder), "batch_size": 1, "workers": 0},
        "model": {"backbone": "inline_pvt_tiny", "kwargs": small_pvt(64, 16), "channels": 16, "box_channels": 16},
        "augment": {"min_sizes": [64], "max_size": 64, "scale_jitter": [0.5, 1.0], "jitter_size": 64},
        "schedule": {"epochs": 1, "warmup": 0, "milestones": [1]},
    }
    settings["model"] |= {"in_chans": 4, "min_size": 64, "max_size": 64, "box_score_thresh": 0.0}
    config = train(["detect"], settings, tmp_path)
    assert (config["data"]["range"], len(config["data"]["std"])) == (12, 4)
    run = str(tmp_path / "run")
    main(["detect", "eval", run])
    main(["detect", "predict", run, str(folder / "val2017"), "--output", str(tmp_path / "drawn")])
    with Image.open(tmp_path / "drawn" / "0000.png") as drawn:
        assert drawn.mode == "RGB"
    refused(["detect", "eval", "--results", "x.json", "--data.bands", "[0]"])


def test_multilabel_with_two_bands(tmp_path: Path) -> None:
    torch.manual_seed(0)
    lines = ["image,labels,split"]
    for number in range(8):
        write(tmp_path / str(number), np.full((16, 16, 2), 10 * number, np.uint8))
        lines.append(f"{number}.tif,{'odd' if number % 2 else 'even'},{'train' if number < 4 else 'val'}")
    (tmp_path / "labels.csv").write_text("\n".join(lines))
    data = {"path": str(tmp_path / "labels.csv"), "batch_size": 4, "workers": 0}
    augment = {**AUGMENT, "label_smoothing": 0.0}
    settings = {"data": data, "model": {**TINY, "in_chans": 2}, "augment": augment, **SHORT}
    assert len(train(["multilabel"], settings, tmp_path)["data"]["mean"]) == 2
    main(["multilabel", "eval", str(tmp_path / "run")])
    main(["multilabel", "predict", str(tmp_path / "run"), str(tmp_path / "0.tif")])
