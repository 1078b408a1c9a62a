"""Models to share: a run as a folder for timm and inlinevit, by `hf-hub:` and `local-dir:` names; no code is read."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import safetensors.torch
import timm
import torch
import yaml
from PIL import Image
from timm.data import create_transform, resolve_data_config

import inlinevit
from inlinevit import cli
from inlinevit.models.hub import fetch_source
from tests.tasks.detection.runs import make_run as make_detection_run
from tests.tasks.segmentation.runs import make_run as make_segmentation_run

from .hub_server import COMMIT, TOKEN, Hub, serve_hub

SMALL = [
    *("--schedule.steps", "2", "--schedule.warmup", "0", "--data.max_train_samples", "100", "--data.workers", "0"),
    *("--model.kwargs.depth", "1", "--model.kwargs.embed_dim", "16", "--model.kwargs.num_heads", "2"),
]
FILES = {
    "README.md",
    "classes.json",
    "config.json",
    "config.yaml",
    "model.safetensors",
    "results.json",
    "task.json",
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run, a photo, and the run as a model to share."""
    folder = tmp_path_factory.mktemp("hub")
    pixels = np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / "photo.png")
    cli.main(["train", "--config", "embedded", "--run.output", str(folder / "run"), *SMALL])
    cli.main(["hub", str(folder / "run"), "--output", str(folder / "shared"), "--license", "cc-by-4.0"])
    return folder


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub on this machine, that huggingface_hub uses with an empty cache and without a token."""
    with serve_hub() as server:
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        constants = huggingface_hub.constants
        template = f"{server.endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        for name, value in {
            "HF_HUB_CACHE": str(tmp_path / "cache"),
            "HF_TOKEN_PATH": str(tmp_path / "token"),
            "HF_STORED_TOKENS_PATH": str(tmp_path / "tokens"),
            "ENDPOINT": server.endpoint,
            "HUGGINGFACE_CO_URL_TEMPLATE": template,
            "HF_HUB_DISABLE_XET": True,
        }.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setattr(huggingface_hub.file_download, "HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)
        yield server


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command that is refused; returns the one line that it prints."""

    def run(*arguments: object) -> str:
        with pytest.raises(SystemExit) as ended:
            cli.main([str(argument) for argument in arguments])
        assert ended.value.code == 1
        output = capsys.readouterr()
        (line,) = [line for line in output.err.splitlines() if line.startswith("error:")]
        return line

    return run


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_timm_makes_the_model_and_the_transform_of_the_run(home: Path) -> None:
    assert set(files_of(home / "shared")) == FILES
    predictor = inlinevit.load(home / "run")
    model = timm.create_model(f"local-dir:{home / 'shared'}", pretrained=True).eval()
    inputs = predictor.transform(home / "photo.png")
    with torch.no_grad():
        assert torch.equal(model(inputs[None]), predictor.model(inputs[None]))
    image = Image.open(home / "photo.png").convert("L")
    transform = create_transform(**resolve_data_config({}, model=model))
    assert torch.allclose(transform(image), inputs, atol=1e-6)
    assert model.pretrained_cfg["label_names"] == predictor.classes


@pytest.mark.parametrize("prefix", ["", "local-dir:"])
def test_a_folder_predicts_as_its_run(prefix: str, home: Path) -> None:
    expected = inlinevit.load(home / "run")(home / "photo.png")
    assert inlinevit.load(f"{prefix}{home / 'shared'}")(home / "photo.png").result == expected.result


@pytest.mark.integration
def test_commands_take_a_folder(home: Path, tmp_path: Path) -> None:
    name, photo = f"local-dir:{home / 'shared'}", str(home / "photo.png")
    for model, output in ((str(home / "run"), "run"), (name, "shared")):
        cli.main(["predict", model, photo, "--output", str(tmp_path / f"{output}.json")])
        cli.main(["eval", model, "--output", str(tmp_path / output)])
    assert (tmp_path / "run.json").read_bytes() == (tmp_path / "shared.json").read_bytes()
    run, shared = (json.loads((tmp_path / one / "evaluation.json").read_text()) for one in ("run", "shared"))
    assert shared["model"] == name
    assert run["top1"] == shared["top1"]


def test_a_run_can_start_from_a_folder(home: Path, tmp_path: Path) -> None:
    output = tmp_path / "again"
    name = f"local-dir:{home / 'shared'}"
    arguments = ["train", "--config", "embedded", "--model.name", name, "--run.output", str(output), *SMALL[:6]]
    cli.main([*arguments, "--data.workers", "0", "--model.kwargs", "{}"])
    config = yaml.safe_load((output / "config.yaml").read_text())
    assert config["model"]["name"] == "inline_deit_tiny"
    assert config["model"]["checkpoint"] == str(home / "shared" / "model.safetensors")
    assert config["model"]["kwargs"]["embed_dim"] == 16


def test_the_card_says_what_to_know(home: Path) -> None:
    text = (home / "shared" / "README.md").read_text()
    metadata = yaml.safe_load(text.split("---\n")[1])
    assert metadata["license"] == "cc-by-4.0"
    assert metadata["library_name"] == "timm"
    assert metadata["pipeline_tag"] == "image-classification"
    results = json.loads((home / "run" / "results.json").read_text())
    assert f"| top1 | {results['metrics']['top1']:.4g} |" in text
    for part in ("Trained on `embedded`", "optimizer.lr", "ankle boot", "inlinevit predict", "timm.create_model("):
        assert part in text


def test_paths_of_the_machine_are_not_published(home: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for name in ("config.yaml", "task.json", "classes.json", "model.safetensors"):
        (run / name).write_bytes((home / "run" / name).read_bytes())
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["data"]["path"], config["run"]["trackers"] = "/home/someone/secret place/photos", ["tensorboard"]
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    cli.main(["hub", str(run), "--output", str(tmp_path / "shared")])
    content = b"".join(files_of(tmp_path / "shared").values())
    assert b"someone" not in content
    assert str(tmp_path).encode() not in content
    assert yaml.safe_load((tmp_path / "shared" / "config.yaml").read_text())["data"]["path"] == "photos"


@pytest.mark.parametrize("make_run", [make_detection_run, make_segmentation_run])
def test_detectors_and_segmenters_are_shared_for_inlinevit(make_run: Callable[..., Any], home: Path, tmp_path: Path):
    make_run(tmp_path / "run")
    cli.main(["hub", str(tmp_path / "run"), "--output", str(tmp_path / "shared")])
    assert not (tmp_path / "shared" / "config.json").exists()
    expected, found = (inlinevit.load(name) for name in (tmp_path / "run", f"local-dir:{tmp_path / 'shared'}"))
    assert type(expected) is type(found)
    assert expected.classes == found.classes
    assert "library_name: inlinevit" in (tmp_path / "shared" / "README.md").read_text()


def test_four_channels(tmp_path: Path) -> None:
    """timm does not convert the first convolution."""
    model = timm.create_model("inline_deit_tiny", depth=1, embed_dim=16, num_heads=2, img_size=32, in_chans=4)
    home = tmp_path / "shared"
    home.mkdir()
    safetensors.torch.save_file(model.state_dict(), home / "model.safetensors")
    arguments = {"depth": 1, "embed_dim": 16, "num_heads": 2, "img_size": 32, "in_chans": 4}
    cfg = {"input_size": [4, 32, 32], "mean": [0.5] * 4, "std": [0.5] * 4, "first_conv": None, "num_classes": 1000}
    content = {"architecture": "inline_deit_tiny", "model_args": arguments, "pretrained_cfg": cfg, "num_classes": 1000}
    (home / "config.json").write_text(json.dumps(content))
    again = timm.create_model(f"local-dir:{home}", pretrained=True)
    images = torch.randn(1, 4, 32, 32)
    assert torch.equal(again.eval()(images), model.eval()(images))
    assert inlinevit.load(home).spec.mean == (0.5,) * 4


def test_models_of_timm_in_its_format(tmp_path: Path, home: Path) -> None:
    """Published by others: no files of a run."""
    model = timm.create_model("vit_tiny_patch16_224", num_classes=3, depth=1, img_size=32).eval()
    names = ["cat", "dog", "owl"]
    args = {"depth": 1, "img_size": 32}
    model.pretrained_cfg.update(input_size=(3, 32, 32), num_classes=3, mean=(0.1, 0.2, 0.3), crop_pct=1.0)
    timm.models.save_for_hf(model, str(tmp_path), {"label_names": names}, args, safe_serialization=True)
    predictor = inlinevit.load(f"local-dir:{tmp_path}")
    assert predictor.classes == names
    assert predictor.spec.mean == (0.1, 0.2, 0.3)
    assert predictor.spec.size == 32
    images = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(predictor.model(images), model(images))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"architecture": "resnet_nine"}, "there is no model called 'resnet_nine'"),
        ({"architecture": "hf-hub:someone/else"}, "names a source"),
        ({"architecture": 7}, "architecture is not a name"),
        ({"num_classes": -1}, "num_classes"),
        ({"label_names": ["one"]}, "label_names does not have 10 names"),
        ({"label_names": {"0": 3}}, "label_names is not a list"),
        ({"model_args": {"pretrained_cfg": {"file": "evil.pth"}}}, "pretrained_cfg stands in model.kwargs"),
        ({"model_args": ["depth"]}, "model_args is not an object"),
        ({"pretrained_cfg": {"mean": ["a"]}}, "could not convert"),
        ({"pretrained_cfg": {"input_size": [3, 20, 30]}}, "input_size"),
        ({"pretrained_cfg": 3}, "pretrained_cfg is not an object"),
    ],
)
def test_descriptions_that_make_no_sense_are_refused(
    change: dict[str, Any], problem: str, home: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    content = json.loads((home / "shared" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | change))
    (tmp_path / "model.safetensors").write_bytes((home / "shared" / "model.safetensors").read_bytes())
    line = refused("predict", f"local-dir:{tmp_path}", home / "photo.png")
    assert problem in line
    assert line.startswith("error: ")


def test_pickles_are_not_read(home: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
    (tmp_path / "config.json").write_bytes((home / "shared" / "config.json").read_bytes())
    torch.save({"head.weight": torch.zeros(10, 16)}, tmp_path / "pytorch_model.bin")
    line = refused("predict", f"local-dir:{tmp_path}", home / "photo.png")
    assert "holds no config.yaml" in line


def test_a_folder_with_other_files_is_not_replaced(home: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    assert "holds other files" in refused("hub", home / "run", "--output", tmp_path)
    assert "is the run itself" in refused("hub", home / "run", "--output", home / "run")
    assert "is not the folder of a training run" in refused("hub", tmp_path, "--output", tmp_path / "new")
    assert "--private is about an upload" in refused("hub", home / "run", "--output", tmp_path / "new", "--private")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    # A folder that this command has written is replaced.
    before = files_of(home / "shared")
    cli.main(["hub", str(home / "run"), "--output", str(home / "shared"), "--license", "cc-by-4.0"])
    assert files_of(home / "shared") == before


def test_a_published_model_gives_the_results_of_the_run(home: Path, hub: Hub) -> None:
    hub.models["user/shared"] = {**files_of(home / "shared"), "pytorch_model.bin": b"never", "notes.json": b"[]"}
    expected = inlinevit.load(home / "run")(home / "photo.png").result
    assert inlinevit.load("hf-hub:user/shared")(home / "photo.png").result == expected
    assert inlinevit.load(f"hf-hub:user/shared@{COMMIT}")(home / "photo.png").result == expected
    fetched = {request.rpartition("/")[2] for request in hub.requests if re.match("GET .*/resolve/", request)}
    assert fetched == FILES - {"README.md"}
    # timm fetches it by itself.
    model = timm.create_model("hf-hub:user/shared", pretrained=True).eval()
    inputs = inlinevit.load(home / "run").transform(home / "photo.png")[None]
    with torch.no_grad():
        assert torch.equal(model(inputs), inlinevit.load(home / "run").model(inputs))
    # Without a connection, from the cache.
    folder = fetch_source("hf-hub:user/shared")
    hub.models.clear()
    huggingface_hub.constants.ENDPOINT = "http://127.0.0.1:1"
    huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE = "http://127.0.0.1:1/{repo_id}/resolve/{revision}/{filename}"
    assert fetch_source("hf-hub:user/shared") == folder


def test_names_of_files_in_task_json_stay_in_the_folder(home: Path, hub: Hub) -> None:
    files = files_of(home / "shared")
    task = json.loads(files["task.json"])
    names = ["classes.json", "../classes.json", "/etc/passwd", "a/b.json", "code.py", 7]
    hub.models["user/shared"] = {**files, "task.json": json.dumps({**task, "files": names}).encode(), "code.py": b"1"}
    inlinevit.load("hf-hub:user/shared")
    fetched = {re.sub(r".*/resolve/\w+/", "", request) for request in hub.requests if "/resolve/" in request}
    assert fetched == FILES - {"README.md"}


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("hf-hub:user/missing", "there is no model hf-hub:user/missing, or it is private"),
        ("hf-hub:user/shared@nowhere", "has no revision 'nowhere'"),
        ("hf-hub:user/pickled", "holds no model.safetensors"),
        ("hf-hub:shared", "is not the name of a model on the hub"),
        ("hf-hub:user/..", "is not the name of a model on the hub"),
        ("hf-hub:", "is not the name of a model on the hub"),
        ("local-dir:nowhere", "no folder at nowhere"),
    ],
)
def test_names_that_are_refused(name: str, problem: str, home: Path, hub: Hub, refused: Callable[..., str]) -> None:
    hub.models["user/shared"] = files_of(home / "shared")
    hub.models["user/pickled"] = {"config.json": b"{}", "pytorch_model.bin": b"x"}
    assert problem in refused("predict", name, home / "photo.png")


def test_no_connection(home: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]) -> None:
    nowhere = "http://127.0.0.1:1"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", nowhere)
    template = f"{nowhere}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(huggingface_hub.file_download, "HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)
    with pytest.raises(inlinevit.PretrainedWeightsError, match="or name a local copy of the model, local-dir:FOLDER"):
        inlinevit.load("hf-hub:user/shared")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    line = refused("hub", home / "run", "--output", home / "new", "--push", "user/new")
    assert "the hub cannot be reached" in line
    assert not (home / "new").exists()


def test_an_upload_is_refused_before_any_work(
    home: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]
) -> None:
    command = ("hub", home / "run", "--output", home / "new", "--push")
    assert "is not the name of a model on the hub: write --push USER/NAME" in refused(*command, "new")
    assert "there is no token for the hub: log in with `hf auth login`" in refused(*command, "user/new")
    assert hub.requests == []
    monkeypatch.setenv("HF_TOKEN", "wrong")
    assert "the hub refuses the token" in refused(*command, "user/new")
    assert not (home / "new").exists()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    line = refused(*command, "other/new")
    assert "other/new cannot be uploaded" in line
    assert "new is complete" in line


@pytest.mark.slow
def test_push_and_load_in_other_processes(home: Path, tmp_path: Path) -> None:
    """As users do it, with HF_ENDPOINT."""
    with serve_hub() as hub:
        environment = {
            **os.environ,
            "HF_ENDPOINT": hub.endpoint,
            "HF_HOME": str(tmp_path),
            "HF_TOKEN": TOKEN,
            "HF_HUB_DISABLE_XET": "1",
            "no_proxy": "127.0.0.1",
        }
        output: dict[str, str] = {}
        for name, arguments in {
            "push": ["hub", str(home / "run"), "--output", str(tmp_path / "shared"), "--push", "user/shared"],
            "predict": ["predict", "hf-hub:user/shared", str(home / "photo.png"), "--format", "json"],
            "run": ["predict", str(home / "run"), str(home / "photo.png"), "--format", "json"],
        }.items():
            command = [sys.executable, "-m", "inlinevit", *arguments]
            ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
            assert ended.returncode == 0, ended.stderr
            output[name] = ended.stdout
    assert f"{hub.endpoint}/user/shared: load it as hf-hub:user/shared" in output["push"]
    assert output["predict"] == output["run"]
    assert set(hub.models["user/shared"]) == FILES
