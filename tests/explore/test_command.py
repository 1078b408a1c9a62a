"""The command: which models it opens, how it fails, and the folder that it writes."""

import base64
import json
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from inlinevit import cli
from inlinevit.explore import subjects as subjects_module
from inlinevit.explore.explorer import Explorer
from inlinevit.explore.site import check_site, chosen_queries, write_site
from inlinevit.explore.subjects import DEFAULT_MODELS, open_subjects
from tests.explore.conftest import SMALL, small_subjects

pytestmark = pytest.mark.integration

MODEL = f"inline_deit_tiny:{SMALL}"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a short training run on the embedded images."""
    words = (
        "train --config embedded --schedule.steps 2 --schedule.warmup 0 --run.eval_every 2 "
        f"--run.output {tmp_path}/runs/inline "
        "--data.max_train_samples 100 --model.kwargs.depth 1 --model.kwargs.embed_dim 16 --model.kwargs.num_heads 2"
    )
    cli.main(words.split())
    return tmp_path / "runs" / "inline"


def test_runs_and_folders_of_runs(run, recwarn):
    for given in (run, run.parent):
        (subject,) = open_subjects([str(given)])
        assert (subject.weights, subject.label) == ("run", "InLine")
        explorer = Explorer([subject])
        # One embedded test image of each class first.
        assert [sample.title for sample in explorer.samples][:2] == ["T-shirt", "trouser"]
        picture = explorer.open_sample(3)
        assert picture["models"][0]["layers"][0]["size"] == [7, 7]
        assert explorer.state()["notice"] == ""
    assert not [one for one in recwarn if "random" in str(one.message)]


def test_published_models(run, tmp_path, recwarn):
    shared = tmp_path / "shared"
    cli.main(["hub", str(run), "--output", str(shared)])
    for given in (f"local-dir:{shared}", str(shared)):
        (subject,) = open_subjects([given])
        assert (subject.weights, subject.given, subject.is_fashion_mnist) == ("run", given, True)
    # In timm's format alone, as models of others are.
    (shared / "config.yaml").unlink()
    (subject,) = open_subjects([f"local-dir:{shared}"])
    assert subject.weights == "published"
    assert Explorer([subject]).open_sample(0)["models"][0]["layers"][0]["size"] == [7, 7]
    assert not [one for one in recwarn if "random" in str(one.message)]
    with pytest.raises(FileNotFoundError, match="no folder at nowhere"):
        open_subjects(["local-dir:nowhere"])


def test_without_arguments(tmp_path, monkeypatch, run):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subjects_module, "DEFAULT_MODELS", (MODEL,))
    with pytest.warns(UserWarning, match="random"):
        (subject,) = open_subjects([])
    assert (subject.given, subject.weights) == (MODEL, "random")
    (tmp_path / "runs").rename(tmp_path / "demo")
    (tmp_path / "runs").mkdir()
    (tmp_path / "demo").rename(tmp_path / "runs" / "demo")
    (subject,) = open_subjects([])
    assert Path(subject.given) == Path("runs/demo/inline")
    assert len(DEFAULT_MODELS) == 3


def test_mistakes_are_one_sentence(tmp_path, capsys, monkeypatch):
    def refused(*words: str) -> str:
        with pytest.raises(SystemExit) as ended:
            cli.main(["explore", *words, "--no-browser"])
        assert ended.value.code in (1, 2)
        (line,) = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("warning")]
        return line

    assert "did you mean inline_deit_tiny" in refused("inline_deit_tny")
    assert "holds no config.yaml" in refused(str(tmp_path))
    assert "no folder at runs/nothing" in refused("runs/nothing")
    assert "too many to compare: name at most 6" in refused(*["inline_deit_tiny"] * 7)
    assert "checkpoint and pretrained exclude each other" in refused(MODEL, "--pretrained", "--checkpoint", "x.pth")
    assert "at most 65535" in refused(MODEL, "--port", "70000")
    (tmp_path / "text.png").write_text("text")
    assert "text.png cannot be used (it is not an image)" in refused(MODEL, "--images", str(tmp_path / "text.png"))
    assert "there is no such file or folder" in refused(MODEL, "--images", str(tmp_path / "none.png"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert refused(MODEL, "--port", port).endswith(
            f"port {port} is in use: choose another --port, or leave it out for a free one"
        )
    assert "is no name or address of this machine" in refused(MODEL, "--host", "no such host")
    (tmp_path / "file").write_text("mine")
    assert "has other files than those of an explorer" in refused(MODEL, "--static", str(tmp_path))
    assert (tmp_path / "file").read_text() == "mine"
    assert "has no attention that can be inspected" in refused("resnet18", "--img_size", "64")


def test_without_the_extra(monkeypatch, capsys):
    for name in [name for name in sys.modules if name.startswith("inlinevit.explore.command")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(SystemExit) as ended:
        cli.main(["explore", MODEL])
    assert ended.value.code == 1
    assert "pip install 'inlinevit[explore]'" in capsys.readouterr().err


def test_a_process_serves_the_page(tmp_path):
    command = [sys.executable, "-m", "inlinevit", "explore", MODEL, "--img_size", "64", "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            assert address.startswith("http://127.0.0.1:")
            with urllib.request.urlopen(f"{address}state.json", timeout=30) as answer:
                assert json.load(answer)["mode"] == "live"
            process.send_signal(2)
            assert process.wait(timeout=20) == 0
            assert process.stderr is not None
            errors = process.stderr.read()
            assert "Traceback" not in errors
            assert "weights of all models are random" in errors
        finally:
            process.kill()


def test_the_static_site(tmp_path, capsys):
    Image.effect_noise((50, 60), 90).save(tmp_path / "noise.png")
    cli.main(
        ["explore", MODEL, f"{MODEL},attention=softmax", "--img_size", "64", "--static", str(tmp_path / "site"),
         "--images", str(tmp_path / "noise.png")]
    )  # fmt: skip
    site = tmp_path / "site"
    state = json.loads((site / "state.json").read_text())
    assert state["mode"] == "static"
    assert [image["title"] for image in state["images"]] == ["noise.png"]
    assert (site / "index.html").is_file()
    assert (site / "web" / "app.js").is_file()
    assert (site / "data" / "0" / "sample.png").is_file()
    model = state["images"][0]["models"][0]
    assert (site / model["picture"]).is_file()
    assert model["hidden"]["3"]["near"]
    assert len(model["locality"]["layers"]) == 2
    rows = json.loads((site / "data" / "0" / "0-1.json").read_text())
    assert [one["query"] for one in rows] == model["layers"][1]["queries"]
    assert len(rows) == 16
    assert str(tmp_path) not in (site / "state.json").read_text()
    # It may be written again.
    check_site(site)


def test_quantized_rows_are_near_the_rows(tmp_path):
    from rich.console import Console

    explorer = Explorer(small_subjects(MODEL, img_size=64))
    write_site(explorer, tmp_path / "site", [0], Console(quiet=True))
    rows = json.loads((tmp_path / "site" / "data" / "0" / "0-0.json").read_text())
    picture = explorer.open_sample(0)
    for one in rows[:5]:
        live = explorer.rows(picture["image"], 0, 0, tuple(one["query"]))
        for column, exact in zip(one["columns"], live["columns"], strict=True):
            wanted = np.frombuffer(base64.b64decode(exact["weights"]), "<f4").reshape(2, 16)
            steps = np.frombuffer(base64.b64decode(column["weights"]), np.int8).reshape(2, 16)
            scales = np.array(column["scales"])[:, None]
            np.testing.assert_allclose(steps / 127 * scales, wanted, atol=1.01 * float(scales.max()) / 254)
            assert column["confused"] == exact["confused"]


def test_sites_are_small():
    explorer = Explorer(small_subjects(MODEL, img_size=64))
    layer = explorer.capture_of(explorer.open_sample(0)["image"], 0).layers[0]
    assert len(chosen_queries(layer)) == 16
    layer.size = (14, 14)
    assert len(chosen_queries(layer)) == 49
    layer.size = (56, 56)
    assert 4 <= len(chosen_queries(layer)) <= 9
