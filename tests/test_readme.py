"""What README and docs show runs, their tables are the catalog's, notebooks run, and links lead somewhere."""

import json
import re
import shlex
import socket
import tomllib

import numpy as np
import pytest
from PIL import Image

from inlinevit import cli
from inlinevit.cli.commands import Command, resolve
from inlinevit.models.catalog import CATALOG
from tests import ROOT, slow_except
from tests.engine.exported_files import write_model

from .tasks.detection.conftest import draw_coco
from .tasks.detection.runs import make_run as make_detection_run
from .tasks.segmentation.conftest import draw_ade
from .tasks.segmentation.runs import make_run as make_segmentation_run

README = (ROOT / "README.md").read_text()
# The commands of all tasks, which are run as well as parsed.
OVERVIEW = (ROOT / "docs" / "overview.md").read_text()
FILES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
DOCUMENTS = [path.read_text() for path in FILES]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
BLOCKS = [block for document in DOCUMENTS for block in re.findall(r"```python\n(.*?)```", document, re.DOTALL)]


def shell_lines(document):
    """The commands of a document's shell blocks, without their comments."""
    blocks = re.findall(r"```sh\n(.*?)```", document, re.DOTALL)
    return [shlex.split(line, comments=True) for block in blocks for line in block.splitlines() if line.strip()]


COMMANDS = [words for document in DOCUMENTS for words in shell_lines(document)]
# The same commands in a few seconds: less to train on, smaller models.
SMALLER = {
    "embedded": "--schedule.steps 2 --schedule.warmup 0 --data.max_train_samples 100 --data.workers 0 "
    "--model.kwargs.depth 1 --model.kwargs.embed_dim 16 --model.kwargs.num_heads 2",
    "finetune": "--schedule.epochs 1 --schedule.warmup 0 --data.batch_size 2 --data.workers 0 --model.img_size 32 "
    "--model.pretrained false",
    # A command that follows takes its weights by the name of the model, so it has its full size.
    "inline_swin_tiny": "--schedule.epochs 1 --schedule.warmup 0 --data.batch_size 4 --data.workers 0 "
    "--model.img_size 64 --run.ema_decay null",
    "multilabel_inline_swin_tiny": "--schedule.epochs 1 --schedule.warmup 0 --data.batch_size 2 --data.workers 0 "
    "--model.img_size 64 --model.kwargs.embed_dim 8 --model.kwargs.depths [1,1,1,1] "
    "--model.kwargs.num_heads [1,1,1,1]",
    "mask_rcnn_inline_pvt_tiny_1x": "--schedule.epochs 1 --schedule.warmup 0 --data.workers 0 "
    "--model.pretrained false --model.kwargs.depths [1,1,1,1] --model.channels 16 --model.box_channels 16 "
    "--model.min_size 64 --model.max_size 96 --augment.min_sizes [64] --augment.max_size 96",
    "semantic_fpn_inline_pvt_tiny": "--schedule.steps 1 --data.workers 0 --data.batch_size 2 "
    "--model.pretrained false --model.kwargs.depths [1,1,1,1] --model.channels 64 --model.num_classes 4 "
    "--augment.crop_size 64 --augment.min_size 64 --inference.min_size 64",
}


# A detector of full size on an image of 800 × 1067 pixels takes as long as all the others.
@pytest.mark.parametrize(
    "code", slow_except(BLOCKS, *(code for code in BLOCKS if "mask_rcnn(" not in code)), ids=range(len(BLOCKS))
)
def test_python_blocks_run(code, request, monkeypatch):
    if "inlinevit.load(" in code:
        monkeypatch.chdir(request.getfixturevalue("runs"))
    if "PretrainedWeightsError" in code:
        # It shows what happens without a connection.
        monkeypatch.setattr(socket, "getaddrinfo", unreachable)
    exec(compile(code, "block", "exec"), {})


def test_no_python_block_is_left_out():
    """`py` would be highlighted as well, but not run."""
    assert [path.name for path in FILES if "```py\n" in path.read_text()] == []


def unreachable(*arguments, **options):
    raise socket.gaierror("no connection")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with photos and the models that the documents load: a classifier, also to share, a detector, …."""
    folder = tmp_path_factory.mktemp("runs")
    generator = np.random.default_rng(0)
    (folder / "photos").mkdir()
    for name in ("photo.jpg", "photos/1.jpg", "photos/2.jpg"):
        Image.fromarray(generator.integers(0, 256, (70, 90, 3), dtype=np.uint8)).save(folder / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        cli.main(shortened(next(words for words in shell_lines(OVERVIEW) if words[:2] == ["inlinevit", "train"])))
        cli.main(["hub", "runs/first", "--output", "shared"])
    make_detection_run(folder / "runs/detector", box_score_thresh=0.0)
    make_segmentation_run(folder / "runs/segmenter")
    write_model(folder / "model.onnx")
    return folder


@pytest.mark.parametrize(
    ("file", "task"),
    [
        ("docs/models.md", "classification"),
        ("docs/detection.md", "detection"),
        ("docs/segmentation.md", "segmentation"),
    ],
)
def test_the_table_of_models_is_what_the_command_prints(file, task, capsys):
    cli.main(["models", "--task", task, "--markdown"])
    (table,) = re.findall(r"<!-- models -->\n(.*?)<!-- /models -->", (ROOT / file).read_text(), re.DOTALL)
    assert table == capsys.readouterr().out


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A folder with the files that the commands of the overview name."""
    folder = tmp_path_factory.mktemp("readme")
    generator = np.random.default_rng(0)
    names = [f"path/to/imagenet/{part}/{kind}/{i}.jpg" for part in ("train", "val") for kind in "ab" for i in range(2)]
    names += [f"my_photos/{kind}/{i}.jpg" for kind in "ab" for i in range(3)]
    for name in [*names, "photo.jpg", "photos/1.jpg", "photos/2.jpg"]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 256, (70, 90, 3), dtype=np.uint8)).save(folder / name)
    rows = [f"imagenet/{part}/{kind}/0.jpg,{kind},{part}" for part in ("train", "val") for kind in "ab"]
    (folder / "path/to/labels.csv").write_text("\n".join(["image,labels,split", *rows]))
    draw_coco(folder / "path/to/coco", {"train2017": 2, "val2017": 1})
    draw_ade(folder / "path/to/ade20k", {"training": 2, "validation": 1})
    return folder


def shortened(words):
    """A command of the overview that takes seconds."""
    recipe = words[words.index("--config") + 1] if "--config" in words else None
    return [*words[1:], *(SMALLER[recipe].split() if recipe else [])]


def run_commands(chosen):
    """Run the commands of the overview with these first words."""
    commands = [words for words in shell_lines(OVERVIEW) if words[0] == "inlinevit" and words[1] in chosen]
    assert {words[1] for words in commands} == chosen
    for words in map(shortened, commands):
        cli.main(words)


@pytest.mark.slow
def test_the_commands_to_analyze_run(workplace, monkeypatch):
    """They draw many figures. Tests of these commands are in tests/analysis."""
    monkeypatch.chdir(workplace)
    cli.main(["train", "--config", "embedded", "--run.output", "runs/first", *SMALLER["embedded"].split()])
    run_commands({"figure1", "analyze"})
    assert (workplace / "runs/analysis/analysis.html").is_file()


@pytest.mark.integration
def test_the_commands_to_train_evaluate_and_predict_run(workplace, monkeypatch, capsys):
    monkeypatch.chdir(workplace)
    run_commands({"train", "eval", "predict", "models", "multilabel", "detect", "segment"})
    output = capsys.readouterr().out
    assert "done: top1" in output
    assert "done: map" in output
    assert "done: box_AP" in output
    assert "done: miou" in output
    assert "photo.jpg" in output


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_line_of_the_documents_is_understood(words, tmp_path, monkeypatch):
    """Launchers, loops and commands that need data or hours: their arguments are parsed, and nothing is run."""
    monkeypatch.chdir(tmp_path)
    if words[0] in ("make", "git"):
        return  # tests/test_packaging.py has the former
    # In the environment of a clone.
    words = [word.removeprefix(".venv/bin/") for word in words]
    if words[:2] == ["pip", "install"]:
        extras = [extra for word in words for extra in re.findall(r"(?:inlinevit|\.)\[([a-z,]+)\]", word)]
        assert extras
        assert {name for names in extras for name in names.split(",")} <= EXTRAS.keys()
        return
    if "inlinevit" not in words:
        assert words[0] in ("for", "do", "done", "python", "done;"), words
        return
    found = resolve(words[words.index("inlinevit") + 1 :])
    assert isinstance(found.target, Command)
    arguments = [argument for argument in found.arguments if argument != "--print_config"]
    # Variables of a loop around the command.
    found.target.make_parser().parse_args(
        [argument.replace("$seed", "0").replace("$attention", "inline") for argument in arguments]
    )


def test_the_readme_counts_the_models():
    assert f"[{len(CATALOG)} models]" in README


def test_the_readme_is_short():
    assert len(README.splitlines()) < 150


def test_the_readme_leads_to_a_clicked_patch_in_three_commands():
    (block,) = [block for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL) if "make demo" in block]
    commands = [line.partition("#")[0].split() for line in block.splitlines()]
    assert commands[0][:2] == ["git", "clone"]
    assert commands[1:3] == [["make", "demo"], [".venv/bin/inlinevit", "explore", "runs/demo"]]


@pytest.mark.parametrize("file", [*FILES[1:], *sorted(ROOT.glob("*.md"))], ids=lambda path: path.name)
def test_links_within_the_repository_lead_somewhere(file):
    """Files only: `make docs` checks anchors, too."""
    text = re.sub(r"```.*?```", "", file.read_text(), flags=re.DOTALL)
    targets = re.findall(r"\]\((?!https?://|#|mailto:)([^)#\s]+)", text)
    # The site has notebooks as pages, which the repository shows itself.
    generated = {f"{path.stem}.md" for path in NOTEBOOKS}
    lost = [one for one in targets if not (file.parent / one).exists() and one.rpartition("/")[2] not in generated]
    assert lost == []


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run(notebook, tmp_path):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    content = nbformat.read(notebook, as_version=4)
    nbformat.validate(content)
    nbclient.NotebookClient(content, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = json.dumps([cell.get("outputs") for cell in content.cells])
    assert "predicted as" in printed
    assert 'install \\"ipywidgets' not in printed
    assert "\\u001b" not in printed


def test_notebooks_store_their_output():
    """The site shows it."""
    assert len(NOTEBOOKS) == 2
    for notebook in NOTEBOOKS:
        cells = json.loads(notebook.read_text())["cells"]
        assert any(cell["outputs"] for cell in cells if cell["cell_type"] == "code")
        # Text: neither notices of missing widgets nor escape codes of a terminal.
        stored = json.dumps([cell["outputs"] for cell in cells if cell["cell_type"] == "code"])
        assert "ipywidgets" not in stored
        assert "\\u001b" not in stored
