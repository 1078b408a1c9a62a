"""Exported models in `eval`, `predict` and `inlinevit.load`: the same inputs, formats and refusals as for runs."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import inlinevit
from inlinevit.cli import main
from inlinevit.engine.exported import InputShape, Preprocessing, SideRange
from inlinevit.engine.exported_run import check_exported_device
from tests.engine.exported_files import INFERENCE, make_metadata, make_model, write_model
from tests.tasks.runs import make_classification, make_segmentation
from tests.tasks.segmentation.runs import CLASSES, draw_data

COMMANDS = {"classification": [], "multilabel": ["multilabel"], "segmentation": ["segment"]}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Exported models of all tasks that have some, TASK.onnx, and photos."""
    folder = tmp_path_factory.mktemp("exported")
    for task in COMMANDS:
        write_model(folder / f"{task}.onnx", make_metadata(task))
    generator = np.random.default_rng(0)
    (folder / "photos").mkdir()
    for name, size in (("a.png", (60, 80)), ("c.png", (70, 50))):
        Image.fromarray(generator.integers(0, 256, (*size, 3), dtype=np.uint8)).save(folder / "photos" / name)
    (folder / "photos" / "b.png").write_text("broken")
    return folder


def run(*words: Any) -> int:
    try:
        main([str(word) for word in words])
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


@pytest.mark.parametrize("task", ["classification", "multilabel"])
def test_predict_writes_what_calls_return(task: str, home: Path, tmp_path: Path) -> None:
    file = home / f"{task}.onnx"
    threshold = ["--threshold", "0"] if task == "multilabel" else []
    # One image is broken.
    assert run(*COMMANDS[task], "predict", file, home / "photos", "--output", tmp_path / "out.json", *threshold) == 1
    records = json.loads((tmp_path / "out.json").read_text())
    options = {"threshold": 0.0} if task == "multilabel" else {}
    model = inlinevit.load(file)
    called = model(home / "photos", **options)
    assert [Path(record["file"]).name for record in records] == ["a.png", "b.png", "c.png"]
    for record, one in zip(records, called, strict=True):
        if one.error is not None:
            assert record["error"] == one.error
        else:
            assert record["predictions"][0]["probability"] == one.result[0].probability
    assert model.classes == ["ant", "bee"]
    # The predictions are those of the model on the inputs of the transform.
    logits = model.model(model.transform(home / "photos" / "a.png")[None])[0]
    wanted = logits.softmax(0) if task == "classification" else logits.sigmoid()
    assert called[0].result[0].probability == pytest.approx(wanted.max().item(), abs=1e-6)


def test_segment_predict(home: Path, tmp_path: Path) -> None:
    file = home / "segmentation.onnx"
    assert run("segment", "predict", file, home / "photos" / "a.png", "--output", tmp_path) == 0
    labels = np.array(Image.open(tmp_path / "a_labels.png"))
    assert labels.shape == (60, 80)
    assert set(np.unique(labels)) <= {1, 2}
    np.testing.assert_array_equal(labels, inlinevit.load(file)(home / "photos" / "a.png").result + 1)


def test_eval_of_a_classifier(home: Path, tmp_path: Path) -> None:
    make_classification(tmp_path)
    words = ["eval", home / "classification.onnx", "--data.path", tmp_path / "images", "--data.workers", 0]
    assert run(*words, "--output", tmp_path / "out") == 0
    found = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert found["images"] > 0
    assert found["model"].endswith("classification.onnx")
    assert (tmp_path / "out" / "evaluation.html").exists()


def test_images_of_sizes_that_the_file_does_not_take_are_reported(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As broken images are, while the others are predicted."""
    # Shorter sides become 32.
    metadata = replace(make_metadata("segmentation"), input=InputShape(3, SideRange(32), SideRange(36)))
    file = write_model(tmp_path / "model.onnx", metadata)
    assert run("segment", "predict", file, home / "photos", "--output", tmp_path / "out") == 1
    records = json.loads((tmp_path / "out" / "predictions.json").read_text())
    assert ["error" in record for record in records] == [False, True, True]
    assert records[2]["error"].endswith(
        "c.png is not predicted: the model takes images with a width of at least 36, not 32: resize them"
    )
    called = inlinevit.load(file)(home / "photos")
    assert [one.error for one in called] == [record.get("error") for record in records]
    with pytest.raises(ValueError, match="with a width of at least 36"):
        inlinevit.load(file)(home / "photos" / "c.png")


def test_eval_of_a_segmentation_model(home: Path, tmp_path: Path) -> None:
    draw_data(tmp_path / "ade", 2)
    names = tuple(record["name"] for record in CLASSES["classes"])
    file = write_model(tmp_path / "model.onnx", make_metadata("segmentation", classes=names, labels=CLASSES))
    words = [
        "segment",
        "eval",
        file,
        "--data.path",
        tmp_path / "ade",
        "--data.workers",
        0,
        "--output",
        tmp_path / "out",
    ]
    assert run(*words) == 0
    assert 0 <= json.loads((tmp_path / "out" / "evaluation.json").read_text())["miou"] <= 1


def test_inputs_equal_those_of_the_run(tmp_path: Path) -> None:
    """To the pixel: both have the same transform."""
    make_classification(tmp_path)
    spec = inlinevit.load(tmp_path / "classification_run", task="classification").spec
    names = ("size", "interpolation", "crop_pct", "crop_mode", "range")
    preprocessing = Preprocessing(list(spec.mean), list(spec.std), **{name: vars(spec)[name] for name in names})
    check_inputs(tmp_path, "classification", replace(make_metadata(), preprocessing=preprocessing))


def test_inputs_equal_those_of_a_segmentation_run(tmp_path: Path) -> None:
    make_segmentation(tmp_path)
    own = inlinevit.load(tmp_path / "segmentation_run", task="segmentation")
    preprocessing = Preprocessing(list(own.mean_std[0]), list(own.mean_std[1]))
    inference = {**INFERENCE, "min_size": own.config.inference.min_size}
    metadata = replace(make_metadata("segmentation"), preprocessing=preprocessing, inference=inference)
    check_inputs(tmp_path, "segmentation", metadata)


def check_inputs(folder: Path, task: str, metadata: Any) -> None:
    file = write_model(folder / "model.onnx", metadata)
    models = [inlinevit.load(folder / f"{task}_run", task=task), inlinevit.load(file)]
    generator = np.random.default_rng(0)
    for shape, kind, most in (((45, 70, 3), np.uint8, 256), ((33, 90), np.uint16, 4096), ((64, 31), np.uint8, 256)):
        image = generator.integers(0, most, shape, dtype=kind)
        first, second = (model.transform(image) for model in models)
        assert torch.equal(first, second)


def test_images_of_another_size_and_crop(home: Path, tmp_path: Path) -> None:
    file = home / "classification.onnx"
    assert inlinevit.load(file, img_size=48).transform(np.zeros((60, 60, 3), np.uint8)).shape == (3, 48, 48)
    with pytest.raises(ValueError, match="img_size does not apply to semantic segmentation"):
        inlinevit.load(home / "segmentation.onnx", img_size=48)
    fixed = write_model(tmp_path / "fixed.onnx", make_metadata(static=(1, 32)))
    with pytest.raises(ValueError, match="takes images with a height of 32, not 48"):
        inlinevit.load(fixed, img_size=48)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["predict", "segmentation.onnx", "photos"], "is a model for segmentation, not for classification"),
        (
            ["multilabel", "predict", "classification.onnx", "photos"],
            "is a model for classification, not for multilabel",
        ),
        (
            ["detect", "predict", "classification.onnx", "photos", "--output", "out"],
            "name the folder of a detection run",
        ),
        (["predict", "classification.onnx", "photos", "--checkpoint", "best"], "--checkpoint is for training runs"),
        (["predict", "classification.onnx", "photos", "--output", "classification.onnx"], "is read by this command"),
        (["predict", "none.onnx", "photos"], "no file at none.onnx: name the file of an exported model"),
        (["eval", "classification.onnx"], "does not store the data of its run: name those to evaluate on"),
        (["eval", "classification.onnx", "--data.path", "photos", "--precision", "bf16"], "--precision does not apply"),
    ],
)
def test_refusals(
    words: list[str], message: str, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(home)
    if "bf16" in words:
        (home / "ant").mkdir(exist_ok=True)
        Image.new("RGB", (40, 40)).save(home / "ant" / "a.png")
        words = [str(home) if word == "photos" else word for word in words]
    assert run(*words) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_arguments_of_load_that_are_refused(home: Path, tmp_path: Path) -> None:
    file = home / "classification.onnx"
    with pytest.raises(ValueError, match="is a model for classification, not for detection"):
        inlinevit.load(file, task="detection")
    with pytest.raises(ValueError, match="--checkpoint is for training runs"):
        inlinevit.load(file, checkpoint="best")
    with pytest.raises(ValueError, match="is an exported model, which runs on the CPU: leave out the device"):
        check_exported_device(str(file), "cuda")
    features = make_metadata(task="features", classes=(), label_names=None, outputs=["features_0"])
    model = make_model(replace(make_metadata(), label_names=None))
    del model.metadata_props[:]
    model.metadata_props.add(key="inlinevit", value=features.to_json())
    (tmp_path / "features.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(ValueError, match="is a backbone without a head, which predicts nothing"):
        inlinevit.load(tmp_path / "features.onnx")


@pytest.mark.parametrize(
    "change",
    [
        {"model_config": {"name": 3}},
        {"model_config": {"nonsense": {"deep": [1]}}},
        {"model_config": {"name": "test_vit", "in_chans": 1}},
        {"preprocessing": {"interpolation": "nonsense"}},
        {"preprocessing": {"size": None}},
        {"preprocessing": {"range": [5.0, 1.0]}},
    ],
)
def test_metadata_that_make_no_configuration(change: dict[str, Any], tmp_path: Path) -> None:
    metadata = json.loads(make_metadata().to_json())
    for name, value in change.items():
        metadata[name] = {**metadata[name], **value} if name == "preprocessing" else value
    model = make_model(make_metadata())
    model.metadata_props[0].value = json.dumps(metadata)
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(ValueError, match="export the model again") as refused:
        inlinevit.load(tmp_path / "model.onnx")
    assert "\n" not in str(refused.value)
