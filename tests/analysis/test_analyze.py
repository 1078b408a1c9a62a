"""`inlinevit analyze`, from models and images to a page."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from rich.console import Console

from inlinevit import cli
from inlinevit.analysis.analyze import (
    AnalysisSettings,
    Subject,
    analyze,
    analyze_command,
    attention_of,
    labels_of,
    open_untrained,
    prepared_batches,
)
from inlinevit.engine.trainer import Trainer
from inlinevit.experiments.demo import demo_config
from inlinevit.report import Report, blocks
from inlinevit.tasks.classification.sources import ArraySource, embedded_fashion_mnist
from inlinevit.tasks.classification.task import Classification
from inlinevit.tasks.classification.transforms import InputSpec

pytestmark = pytest.mark.integration

TINY = "inline_deit_tiny:depth=2,embed_dim=16,num_heads=2,patch_size=8"
QUIET = Console(quiet=True)
SETTINGS = AnalysisSettings(images=4, confusion_images=2, batch_size=3)
GREY = InputSpec(size=28, mean=(0.5,), std=(0.5,), interpolation="bicubic", crop_pct=1.0, crop_mode="center")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training run of one step."""
    folder = tmp_path_factory.mktemp("analysis") / "tiny"
    config = demo_config("inline", output=str(folder), steps=1)
    config.model.kwargs.update(embed_dim=16, num_heads=2)
    Trainer(Classification(config), config).run()
    return folder


def read(folder: Path) -> dict:
    return json.loads((folder / "analysis.json").read_text())["sections"]


def test_a_trained_model_is_analyzed(run, tmp_path, capfd):
    cli.main(["analyze", str(run), "--images", "6", "--confusion_images", "2", "--output", str(tmp_path / "new")])
    sections = read(tmp_path / "new")
    assert list(sections) == ["models", "confusion", "locality", "masking", "maps"]
    (facts,) = sections["models"]["models"]
    assert (facts["name"], facts["attention"], facts["weights"]) == ("InLine", "inline", "of the run")
    confusion = sections["confusion"]["models"]["InLine"]
    assert [len(layer["pairs"]) for layer in confusion["layers"]] == [2, 2, 2]
    assert len(sections["locality"]["models"]["InLine"]) == 3
    masking = sections["masking"]["models"]["InLine"]
    # A map of 7×7 tokens leaves nothing to see beyond a neighbourhood of 7×7.
    assert masking["images"] == 6
    assert {one["side"] for one in masking["masked"]} == {3, 5}
    assert len(sections["maps"]["models"]["InLine"]) == 3
    figures = {path.name for path in (tmp_path / "new" / "figures").iterdir()}
    assert len(figures) == 2 * 6
    assert {"confusion.png", "locality.svg", "masking.png", "maps-3.svg"} <= figures
    said = capfd.readouterr().err
    assert "InLine: masking" in said
    assert "analysis.html" in said


@pytest.fixture
def no_figures(monkeypatch):
    """Do not write figures, which takes a while."""
    monkeypatch.setattr(Report, "save_figures", lambda report, folder: None)
    monkeypatch.setattr(blocks, "svg_bytes", lambda figure: b"")


@pytest.mark.usefixtures("no_figures")
def test_untrained_models_stand_side_by_side_with_a_warning(tmp_path, capfd):
    models = [f"{TINY},attention={word}" for word in ("linear", "inline")]
    path = analyze_command(models, SETTINGS, data="embedded", img_size=32, untrained=True, output=str(tmp_path))
    page = path.read_text()
    assert "The weights are random" in page
    assert "warning: The weights are random" in capfd.readouterr().err
    assert "linear is left out: it has random weights, so its accuracy is meaningless." in page
    sections = read(tmp_path)
    assert sections["masking"] == {"verdict": None, "models": {}}
    assert list(sections["locality"]["models"]) == ["linear", "InLine"]


def subject(**options) -> Subject:
    torch.manual_seed(0)
    model = timm.create_model(
        "inline_deit_tiny", img_size=28, patch_size=4, embed_dim=16, depth=1, num_heads=2, in_chans=1, num_classes=10
    )
    return Subject(
        **{"label": "tiny", "attention": "inline", "model": model.eval(), "spec": GREY, "num_classes": 10} | options
    )


def test_masking_needs_classes_that_match():
    source = embedded_fashion_mnist(training=False)
    assert analyze(subject(), source, SETTINGS, QUIET).masking.images == 4
    found = analyze(subject(no_accuracy="it knows other classes"), source, SETTINGS, QUIET)
    assert (found.masking, found.no_masking) == (None, "it knows other classes")
    unknown = ArraySource(source.images, source.labels + np.uint8(90), [], "images")
    found = analyze(subject(), unknown, SETTINGS, QUIET)
    assert found.masking is None
    assert "its 10 classes are not those of the images" in found.no_masking


def test_masking_needs_a_map_and_keys_on_it():
    source = embedded_fashion_mnist(training=False)
    small = timm.create_model(
        "inline_deit_tiny", img_size=28, patch_size=14, embed_dim=16, depth=1, num_heads=2, in_chans=1, num_classes=10
    )
    found = analyze(subject(model=small.eval()), source, SETTINGS, QUIET)
    assert "its smallest map has a side of 2" in found.no_masking
    pvt = timm.create_model(
        "pvt_tiny",
        img_size=32,
        embed_dims=(8, 8, 8, 8),
        depths=(1, 1, 1, 1),
        num_heads=(1, 1, 1, 1),
        in_chans=1,
        num_classes=10,
    )
    found = analyze(subject(model=pvt.eval()), source, SETTINGS, QUIET)
    assert "reduced map" in found.no_masking
    assert len(found.locality) < len(found.confusion.layers) == 4


@pytest.mark.usefixtures("no_figures")
def test_a_model_for_other_classes_is_analyzed_without_masking(run, tmp_path):
    generator = np.random.default_rng(0)
    for kind in ("cat", "dog"):
        (tmp_path / "val" / kind).mkdir(parents=True)
        for number in range(2):
            pixels = generator.integers(0, 256, (30, 40, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "val" / kind / f"{number}.png")
    path = analyze_command([str(run)], SETTINGS, data=str(tmp_path), output=str(tmp_path / "out"))
    assert "InLine is left out: its 10 classes are not those of the images (2)." in path.read_text()
    assert len(read(tmp_path / "out")["locality"]["models"]["InLine"]) == 3


@pytest.mark.usefixtures("no_figures")
@pytest.mark.parametrize(("data", "images"), [(None, 4), ("embedded", 5)])
def test_the_images_are_those_that_are_named(data, images, run, tmp_path):
    """Even if they are the ones that would be taken without a run."""
    for name in ("T-shirt", "trouser"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(2):
            Image.effect_noise((30, 30), 50).save(tmp_path / "images" / name / f"{number}.png")
    copied = shutil.copytree(run, tmp_path / "run")
    config = (copied / "config.yaml").read_text()
    (copied / "config.yaml").write_text(config.replace("path: embedded", f"path: {tmp_path / 'images'}"))
    analyze_command(
        [str(copied)], AnalysisSettings(images=5, confusion_images=1), data=data, output=str(tmp_path / "out")
    )
    sections = read(tmp_path / "out")
    assert sections["models"]["data"] == (data or str(tmp_path / "images"))
    assert sections["masking"]["models"]["InLine"]["images"] == images


def test_images_are_what_the_model_wants_and_labels_are_its_own():
    source = embedded_fashion_mnist(training=False)
    images, labels = next(prepared_batches(subject(labels=list(range(9, -1, -1))), source, 5, "", QUIET))
    assert images.shape == (5, 1, 28, 28)
    assert -1 <= images.min() < 0 < images.max() <= 1
    assert labels.tolist() == [9 - int(label) for label in source.labels[:5]]


def test_images_that_cannot_be_read_are_left_out(tmp_path):
    class Broken(ArraySource):
        def read(self, index):
            if index == 1:
                raise OSError("it is damaged")
            return super().read(index)

    whole = embedded_fashion_mnist(training=False)
    source = Broken(whole.images[:3], whole.labels[:3], whole.classes, "images")
    with pytest.warns(UserWarning, match="it is damaged"):
        ((images, labels),) = prepared_batches(subject(), source, 3, "", QUIET)
    assert len(images) == len(labels) == 2


def test_words_for_attentions():
    assert attention_of(open_untrained(f"{TINY},attention=focused", 32).model) == "focused"
    mixed = timm.create_model("inline_pvt_tiny", attention=("inline", "inline", "softmax", "softmax"))
    assert attention_of(mixed) == "inline+softmax"
    assert attention_of(timm.create_model("vit_tiny_patch16_224", depth=1)) == "softmax"


def test_labels():
    assert labels_of(["runs/a", "runs/b"], ["inline", "softmax"]) == ["InLine", "softmax"]
    assert labels_of(["runs/a", "runs/b"], ["inline", "inline"]) == ["a", "b"]
    assert labels_of(["x/a", "y/a"], ["inline", "inline"]) == ["x/a", "y/a"]
    assert labels_of(["a", "a"], ["inline", "inline"]) == ["a", "a (2)"]
    assert labels_of(["a", "b"], ["inline+softmax", "softmax"]) == ["a", "b"]


def test_random_weights_are_the_same_each_time_and_leave_the_generator_alone():
    state = torch.get_rng_state()
    first, second = (open_untrained(TINY, 32).model.state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert torch.equal(state, torch.get_rng_state())


def test_mistakes_are_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match="images is 0: it should be at least 1"):
        AnalysisSettings(images=0)
    with pytest.raises(ValueError, match=r"epsilon is -1.0: it should be at least 0"):
        AnalysisSettings(epsilon=-1.0)
    with pytest.raises(ValueError, match="choose one of them"):
        analyze_command([TINY], SETTINGS, untrained=True, checkpoint="x", output=str(tmp_path / "new"))
    assert not (tmp_path / "new").exists()


def test_a_model_without_attention_is_refused(tmp_path):
    with pytest.raises(ValueError, match="has no attention that can be inspected"):
        analyze_command(["resnet10t"], SETTINGS, untrained=True, img_size=64, output=str(tmp_path))
