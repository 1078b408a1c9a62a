"""Published weights without a connection: one error, at once, that says what to do."""

import pickle
import re
import socket
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn
from urllib.error import URLError

import huggingface_hub
import pytest
import timm
import torch
from timm.models import get_pretrained_cfg

import inlinevit
from inlinevit.cli import main
from inlinevit.models._pretrained import TIMEOUT, find_download
from tests import ROOT

CLOUD = "https://cloud.tsinghua.edu.cn/f/"
HUB = "resolve/main/model.safetensors"


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port of this machine that refuses connections."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


@pytest.fixture
def offline(tmp_path: Path, closed_port: int, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without a connection and with an empty cache; the folder of the latter."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{closed_port}")
    monkeypatch.setattr(
        huggingface_hub.file_download,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        f"http://127.0.0.1:{closed_port}/{{repo_id}}/resolve/{{revision}}/{{filename}}",
        raising=False,
    )

    def unreachable(*arguments: Any, **options: Any) -> NoReturn:
        assert socket.getdefaulttimeout() == TIMEOUT
        raise URLError(socket.gaierror(-2, "Name or service not known"))

    monkeypatch.setattr("torch.hub.urlopen", unreachable)
    return tmp_path


def test_in_python_there_is_one_error_without_a_traceback_of_urllib(offline: Path) -> None:
    with pytest.raises(inlinevit.PretrainedWeightsError) as caught:
        timm.create_model("inline_pvt_tiny", pretrained=True)
    error = caught.value
    assert str(error) == (
        f"the published weights of inline_pvt_tiny cannot be fetched from {error.url} (Name or service not known): "
        f"save that file as {offline}/hub/checkpoints/inline_pvt_tiny.pth, or load a local file with "
        "inlinevit.load_checkpoint(model, FILE)"
    )
    assert error.url.startswith(CLOUD)
    assert error.model == "inline_pvt_tiny"
    assert "URLError" not in "".join(traceback.format_exception(error))
    assert socket.getdefaulttimeout() is None
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.url) == (str(error), error.url)


def test_the_example_of_the_guide(offline: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "finetuning.md").read_text(), re.DOTALL)
    exec(compile(code, "example", "exec"), {})
    assert capsys.readouterr().out.startswith(CLOUD)


def test_a_port_that_refuses_connections(closed_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    overlay = {"url": f"http://127.0.0.1:{closed_port}/weights.pth"}
    with pytest.raises(inlinevit.PretrainedWeightsError, match=rf"\(Connection refused\): save .*{tmp_path}/weights"):
        timm.create_model("inline_deit_tiny", pretrained=True, pretrained_cfg_overlay=overlay, cache_dir=tmp_path)


def test_the_file_that_the_message_names_is_loaded(offline: Path) -> None:
    saved = timm.create_model("inline_deit_tiny")
    place = offline / "hub" / "checkpoints" / "inline_deit_tiny.pth"
    place.parent.mkdir(parents=True)
    torch.save(saved.state_dict(), place)
    loaded = timm.create_model("inline_deit_tiny", pretrained=True)
    assert loaded.head.weight.equal(saved.head.weight)


def test_a_full_disk_is_no_missing_connection(offline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any, **options: Any) -> NoReturn:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torch.hub.urlopen", full)
    with pytest.raises(OSError, match="No space left") as caught:
        timm.create_model("inline_deit_tiny", pretrained=True)
    assert not isinstance(caught.value, inlinevit.PretrainedWeightsError)


EMBEDDED = "train --config embedded --model.in_chans 3 --data.max_train_samples 50"


@pytest.mark.parametrize(
    ("command", "address", "remedy"),
    [
        ("train --config finetune --model.name inline_pvt_tiny --data.path embedded", CLOUD, "--model.checkpoint FILE"),
        ("train --config finetune --model.name resnet18 --data.path embedded", HUB, "--model.checkpoint FILE"),
        (f"{EMBEDDED} --model.num_classes 1000 --distillation.teacher resnet18", HUB, "--distillation.checkpoint FILE"),
        ("eval resnet18.a1_in1k --data.path embedded", HUB, "--checkpoint FILE"),
        ("eval inline_pvt_tiny --data.path embedded", CLOUD, "--checkpoint FILE"),
    ],
)
def test_on_the_command_line_it_is_one_sentence_at_once(
    command: str, address: str, remedy: str, offline: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    started = time.monotonic()
    output = ["--run.output", str(offline / "run")] if command.startswith("train") else []
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), *output])
    assert ended.value.code == 1
    # Retries took 12 seconds and more.
    assert time.monotonic() - started < 10
    (line,) = [line for line in capfd.readouterr().err.splitlines() if not line.startswith("warning:")]
    assert line.startswith("error: the published weights of ")
    assert address in line
    assert str(offline) in line
    assert f"or name a local file with {remedy}" in line


@pytest.mark.parametrize("backbone", ["inline_pvt_tiny", "resnet18"])
def test_backbones_of_dense_tasks(backbone: str, offline: Path) -> None:
    from inlinevit.tasks.backbone import build_backbone
    from inlinevit.tasks.backbone_config import BackboneConfig

    with pytest.raises(inlinevit.PretrainedWeightsError, match=r"or name a local file with --model\.checkpoint FILE"):
        build_backbone(BackboneConfig(backbone, pretrained=True))


def test_weights_in_the_cache_of_the_hub_are_found(offline: Path) -> None:
    cfg = get_pretrained_cfg("resnet18.a1_in1k")
    before = find_download(cfg)
    assert before is not None
    assert not before.is_cached
    folder = offline / "hf" / "models--timm--resnet18.a1_in1k"
    assert str(folder) in before.cached_as
    (folder / "snapshots" / "abc").mkdir(parents=True)
    (folder / "snapshots" / "abc" / "model.safetensors").touch()
    after = find_download(cfg)
    assert after is not None
    assert after.is_cached
