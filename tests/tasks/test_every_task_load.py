"""`inlinevit.load` and the predictors that it returns, for every task."""

import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import timm
import torch
import torch.nn.functional as F
from PIL import Image
from torchvision.transforms.functional import pil_to_tensor

import inlinevit
from inlinevit.cli import main
from inlinevit.engine.checkpoints import CheckpointFolder, Progress, pack_state, pack_weights
from inlinevit.engine.predictor import DrawingPredictor
from inlinevit.tasks import TASKS
from tests.tasks.runs import MAKE

every_task = pytest.mark.parametrize("task", MAKE)
# What a call takes, with values that are not the defaults.
OPTIONS: dict[str, dict[str, Any]] = {
    "classification": {"data": {"range": "type"}, "batch_size": 2, "top": 1},
    "multilabel": {"data": {"range": "type"}, "batch_size": 2, "threshold": 0.1},
    "detection": {"data": {"range": "type"}, "threshold": 0.01},
    "segmentation": {"data": {"range": "type"}, "inference": {"window_size": 32, "flip": True}},
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of all tasks, and some photos, one of which is broken."""
    folder = tmp_path_factory.mktemp("load")
    for task, make in MAKE.items():
        make(folder)
        stored = {"name": task, "command": f"inlinevit {TASKS[task].command}", "files": []}
        (folder / f"{task}_run" / "task.json").write_text(json.dumps(stored))
    generator = np.random.default_rng(0)
    (folder / "photos").mkdir()
    for name, size in (("a.png", (60, 80)), ("c.png", (70, 50))):
        pixels = generator.integers(0, 256, (*size, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "photos" / name)
    (folder / "photos" / "b.png").write_text("broken")
    return folder


@pytest.fixture
def run(home: Path, task: str) -> Path:
    return home / f"{task}_run"


def command_line(options: dict[str, Any], prefix: str = "--") -> list[str]:
    words: list[str] = []
    for name, value in options.items():
        nested = isinstance(value, dict)
        words += command_line(value, f"{prefix}{name}.") if nested else [f"{prefix}{name}", str(value).lower()]
    return words


def written(predictor: Any, predictions: list[Any], wanted: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What `predict` writes about predictions, but for the names of drawings."""
    records = []
    for one, other in zip(predictions, wanted, strict=True):
        if one.error is not None:
            record = {"error": one.error}
        elif isinstance(predictor, DrawingPredictor):
            record = predictor.render(one.image, one.result).record
            record |= {name: value for name, value in other.items() if name in ("width", "height", "drawing")}
            record |= {name: other[name] for name in ("labels", "overlay", "legend") if name in other}
        else:
            classes = [{"class": e.name, "index": e.index, "probability": e.probability} for e in one.result]
            assert [predictor.classes[e.index] for e in one.result] == [e.name for e in one.result]
            record = {"predictions": classes}
        records.append({"file": one.file, **record})
    return records


@every_task
@pytest.mark.parametrize("has_options", [False, True])
def test_results_are_those_of_the_command(
    task: str, run: Path, home: Path, tmp_path: Path, has_options: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    options = OPTIONS[task] if has_options else {}
    words = [*TASKS[task].command_line("predict").split(), str(run), str(home / "photos"), *command_line(options)]
    if task in ("classification", "multilabel"):
        output = tmp_path / "out.json"
        words += ["--format", "json", "--output", str(output)]
    else:
        output = tmp_path / "out" / "predictions.json"
        words += ["--output", str(output.parent)]
    with pytest.raises(SystemExit):
        main([*words, "--device", "cpu"])
    wanted = json.loads(output.read_text())
    predictor = inlinevit.load(run, device="cpu")
    predictions = predictor(home / "photos", **options)
    assert json.loads(json.dumps(written(predictor, predictions, wanted))) == wanted
    assert "error" in wanted[1]
    streamed = list(predictor.stream([home / "photos"], **options))
    assert json.loads(json.dumps(written(predictor, streamed, wanted))) == wanted
    capsys.readouterr()


def assert_same(first: Any, second: Any) -> None:
    assert np.array_equal(first, second) if isinstance(first, np.ndarray) else first == second


@every_task
def test_images_in_memory_give_the_results_of_files(task: str, run: Path, home: Path) -> None:
    predictor = inlinevit.load(str(run))
    options = {"threshold": 0.01} if "threshold" in OPTIONS[task] else {}
    file = home / "photos" / "a.png"
    result = predictor(file, **options).result
    assert len(result) > 0
    image = Image.open(file)
    array, tensor = np.asarray(image), pil_to_tensor(image)
    for one in (str(file), image, array, array / 255, tensor, tensor.float() / 255):
        assert_same(predictor(one, **options).result, result)
    assert [one.file for one in predictor([array, file, file])] == ["images[0]", str(file), str(file)]


@every_task
def test_images_that_cannot_be_used(task: str, run: Path, home: Path) -> None:
    predictor = inlinevit.load(run)
    broken = home / "photos" / "b.png"
    with pytest.raises(ValueError, match=r"b\.png cannot be used"):
        predictor(broken)
    with pytest.raises(FileNotFoundError, match=r"nothing\.png cannot be used \(there is no such file or folder\)"):
        predictor("nothing.png")
    with pytest.raises(ValueError, match=r"the image cannot be used \(it has 7 bands, but the model takes"):
        predictor(np.zeros((5, 5, 7)))
    failed, good = predictor([broken, home / "photos" / "a.png"])
    assert (failed.result, good.error) == (None, None)
    assert "b.png cannot be used" in failed.error
    with pytest.raises(TypeError, match=r"images\[1\] is of type int"):
        predictor([broken, 3])
    assert predictor([]) == []


@every_task
def test_options(task: str, run: Path, home: Path) -> None:
    predictor = inlinevit.load(run)
    file = home / "photos" / "a.png"
    for name in OPTIONS[task]:
        with pytest.raises(TypeError, match=f"there is no option {name}s: did you mean {name}?"):
            predictor(file, **{f"{name}s": 1})
    with pytest.raises(TypeError, match=f"no option nothing: the options are {', '.join(OPTIONS[task])}$"):
        predictor(file, nothing=1)
    for name in ("checkpoint", "device", "output"):
        with pytest.raises(TypeError, match=rf"{name} is not an option of a call: inlinevit\.load"):
            predictor.stream(file, **{name: "cpu"})
    name, value = ("inference", {"window_size": -1}) if task == "segmentation" else (list(OPTIONS[task])[1], -1)
    with pytest.raises(ValueError, match="is -1: it should be at least"):
        predictor(file, **{name: value})


def test_options_of_a_section(home: Path) -> None:
    segmenter = inlinevit.load(home / "segmentation_run")
    with pytest.raises(TypeError, match="there is no option windowsize: did you mean window_size"):
        segmenter(home / "photos" / "a.png", inference={"windowsize": 32})


def test_the_transform_of_a_classifier(home: Path) -> None:
    classifier = inlinevit.load(home / "classification_run")
    file = home / "photos" / "a.png"
    transform = pickle.loads(pickle.dumps(classifier.transform))
    inputs = transform(file)
    assert (inputs.shape, inputs.dtype) == ((3, 32, 32), torch.float32)
    for image in (Image.open(file), np.asarray(Image.open(file))):
        assert torch.equal(classifier.transform(image), inputs)
    with torch.no_grad():
        probabilities = classifier.model(inputs[None]).softmax(dim=1)[0]
    for one in classifier(file).result:
        assert probabilities[one.index].item() == pytest.approx(one.probability, abs=1e-6)
    with pytest.raises(ValueError, match=r"b\.png cannot be used"):
        transform(home / "photos" / "b.png")
    with pytest.raises(ValueError, match="transform takes one image"):
        transform(home / "photos")


def test_the_transform_of_a_detector(home: Path) -> None:
    detector = inlinevit.load(home / "detection_run")
    file = home / "photos" / "a.png"
    with torch.no_grad():
        (answer,) = detector.model([detector.transform(file)])
    objects = detector(file, threshold=0.0).result
    assert [one["score"] for one in objects] == pytest.approx(answer["scores"].tolist())
    assert [one["category"] for one in objects] == [detector.classes[label - 1] for label in answer["labels"]]


def test_the_transform_of_a_segmenter(home: Path) -> None:
    segmenter = inlinevit.load(home / "segmentation_run")
    file = home / "photos" / "a.png"
    with torch.no_grad():
        logits = segmenter.model(segmenter.transform(file)[None])
    whole = F.interpolate(logits, (60, 80), mode="bilinear")[0].argmax(dim=0)
    agreement = (whole.numpy() == segmenter(file).result).mean()
    assert agreement > 0.999


CLASSES = {
    "classification": ["ant", "bee"],
    "multilabel": ["blue", "green", "red"],
    "detection": ["disc", "square", "triangle"],
    "segmentation": ["red", "green [b]", "blue"],
}


@every_task
def test_what_a_predictor_has(task: str, run: Path) -> None:
    predictor = inlinevit.load(run)
    assert predictor.classes == CLASSES[task]
    assert isinstance(predictor.config, TASKS[task].load_config())
    assert not predictor.model.training
    assert predictor.to("cpu") is predictor
    assert predictor.device == torch.device("cpu")
    with pytest.raises(ValueError, match="device 'nowhere' cannot be used here"):
        predictor.to("nowhere")


@pytest.mark.integration
@every_task
def test_checkpoints(task: str, tmp_path: Path) -> None:
    weights = MAKE[task](tmp_path)
    run = tmp_path / f"{task}_run"
    others = {name: value + 1 for name, value in weights.items()}
    progress = Progress(step=1, best=1.0, best_step=1)
    folder = CheckpointFolder(run / "checkpoints")
    path = folder.save(progress, {"model.safetensors": pack_weights(others), **pack_state({})})
    folder.mark_best(progress)
    name = next(iter(weights))

    def loaded(*names: Any, **options: Any) -> torch.Tensor:
        return inlinevit.load(*names, task=task, **options).model.state_dict()[name]

    assert torch.equal(loaded(run), weights[name])
    assert torch.equal(loaded(run / "model.safetensors"), weights[name])
    for checkpoint in (path, path / "model.safetensors", folder.best):
        assert torch.equal(loaded(checkpoint), others[name])
        assert torch.equal(loaded(run, checkpoint=checkpoint), others[name])
    assert torch.equal(loaded(run, checkpoint="best"), others[name])
    with pytest.raises(ValueError, match="is a checkpoint: leave out checkpoint=best, or name the run"):
        loaded(path, checkpoint="best")


def test_the_name_of_a_model(tmp_path: Path, home: Path) -> None:
    file = tmp_path / "weights.safetensors"
    safetensors.torch.save_file(timm.create_model("test_vit").state_dict(), file)
    classifier = inlinevit.load("test_vit", checkpoint=file, img_size=64)
    assert classifier.classes[1] == "goldfish, Carassius auratus"
    assert (classifier.config.name, classifier.config.img_size) == ("test_vit", 64)
    assert len(classifier(home / "photos" / "a.png").result) == 5
    assert classifier.transform(home / "photos" / "a.png").shape == (3, 64, 64)
    with pytest.raises(ValueError, match="test_vitt"):
        inlinevit.load("test_vitt", checkpoint=file)
    with pytest.raises(FileNotFoundError, match="no folder at test_vit: name the folder of a detection run"):
        inlinevit.load("test_vit", task="detection")


def test_the_task_of_a_run_that_does_not_store_it(tmp_path: Path, home: Path) -> None:
    for task in ("detection", "segmentation"):
        MAKE[task](tmp_path)
        assert inlinevit.load(tmp_path / f"{task}_run").classes == CLASSES[task]
    MAKE["multilabel"](tmp_path)
    run = tmp_path / "multilabel_run"
    with pytest.raises(ValueError, match="does not store its task: give it as task, one of classification, multilabel"):
        inlinevit.load(run)
    assert inlinevit.load(run, task="multilabel").classes == CLASSES["multilabel"]
    (run / "config.yaml").write_text("model: {nonsense: 3}")
    with pytest.raises(ValueError, match=r"config\.yaml is not the configuration of a classification run"):
        inlinevit.load(run)
    (run / "task.json").write_text(json.dumps({"name": "depth"}))
    with pytest.raises(ValueError, match="holds a run of the task depth, which is not known: update inlinevit"):
        inlinevit.load(run)


def touch(name: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (folder / name).touch()
        return folder

    return make


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda folder: folder, {}, r"holds no config\.yaml: name the folder of a training run, or a model"),
        (lambda folder: folder / "nothing", {}, "no folder at .*nothing: name the folder"),
        (lambda folder: " ", {}, "the name is empty: name the folder of a training run, or a model"),
        (touch("model.onnx"), {}, r"is a folder: name the exported model in it, .*model\.onnx"),
        (lambda folder: folder / "model.onnx", {}, r"no file at .*model\.onnx: name the file of an exported model"),
        (lambda folder: folder / "model.pt2", {}, r"is a program of torch\.export, which is not loaded here"),
        (lambda folder: "test_vit", {"task": "detecton"}, "there is no task detecton: did you mean detection?"),
        (lambda folder: "test_vit", {"task": "x"}, "there is no task x: choose one of classification, multilabel"),
        (lambda folder: "test_vit", {"device": "nowhere"}, "device 'nowhere' cannot be used here"),
    ],
)
def test_names_that_are_refused(
    make: Callable[[Path], Any], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        inlinevit.load(make(tmp_path), **options)


@every_task
def test_arguments_that_do_not_fit_the_run(task: str, run: Path) -> None:
    other = "detection" if task == "classification" else "classification"
    with pytest.raises(ValueError, match=f"holds a {task} run, not a {other} run: leave out task='{other}'"):
        inlinevit.load(run, task=other)
    if task == "classification":
        assert inlinevit.load(run, img_size=48).transform(np.zeros((9, 9), np.uint8)).shape == (3, 48, 48)
    else:
        with pytest.raises(ValueError, match="img_size does not apply to"):
            inlinevit.load(run, img_size=48)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("task", "package", "extra"),
    [
        ("classification", "accelerate", "train"),
        pytest.param("detection", "pycocotools", "detection", marks=pytest.mark.slow),
    ],
)
def test_a_missing_package_is_named_with_its_extra(run: Path, package: str, extra: str) -> None:
    code = f"import sys, inlinevit; sys.modules[{package!r}] = None; inlinevit.load({str(run)!r})"
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120)
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("ModuleNotFoundError: ")
    assert last.endswith(f"{package} halted; None in sys.modules: pip install 'inlinevit[{extra}]'")
