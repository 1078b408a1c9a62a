"""Building models, and opening those of training runs and of files."""

import json
import warnings
from pathlib import Path

import pytest
import safetensors.torch
import timm
import torch
import yaml
from torch import Tensor, nn

from inlinevit.engine.checkpoints import CheckpointFolder, Progress, pack_state, pack_weights
from inlinevit.engine.runs import run_weights
from inlinevit.models import factory
from inlinevit.tasks.classification.config import ModelConfig
from inlinevit.tasks.classification.model import build_model, check_model_name
from inlinevit.tasks.classification.predictor import imagenet_classes, load_classifier, wordnet_names
from tests import slow_except


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def save(model: nn.Module, path: Path) -> str:
    safetensors.torch.save_file(weights_of(model), path)
    return str(path)


def same(first: dict[str, Tensor], second: dict[str, Tensor], *, but: str = "-") -> bool:
    return all(torch.equal(value, second[name]) for name, value in first.items() if but not in name)


@pytest.mark.parametrize(
    "name", ["inline_deit_tiny", "test_vit", "resnet18", "vgg11", "mixer_s32_224", "test_efficientnet"]
)
def test_models_take_what_they_can(name: str) -> None:
    """Any size, number of classes and channels, whether or not the model has arguments for size and drop path."""
    # By default, the first layer of VGG's head has 100 million weights.
    kwargs = {"mlp_ratio": 0.02} if name == "vgg11" else {}
    config = ModelConfig(name, img_size=64, in_chans=1, drop_path_rate=0.1, kwargs=kwargs)
    model = build_model(config, num_classes=3).eval()
    assert model(torch.zeros(1, 1, 64, 64)).shape == (1, 3)


def test_drop_path_and_options_arrive() -> None:
    model = build_model(ModelConfig("inline_deit_tiny", drop_path_rate=0.3, kwargs={"attention": "softmax"}), 3)
    rates = [module.drop_prob for module in model.modules() if type(module).__name__ == "DropPath"]
    assert max(rates) == pytest.approx(0.3)
    assert "softmax" in {type(module).__name__.removesuffix("Attention").lower() for module in model.modules()}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ModelConfig("inline_deit_tinny"), "did you mean inline_deit_tiny"),
        (ModelConfig("resnet18.nothing"), "no published weights called 'nothing': choose among a1_in1k"),
        (ModelConfig("q"), "there is no model called 'q'"),
        (ModelConfig("inline_deit_tiny", kwargs={"atention": "softmax"}), "did you mean attention"),
        (ModelConfig("resnet18", kwargs={"zzz": 1}), "no option 'zzz'.*there are block"),
        (ModelConfig("resnet18", kwargs={"drop_path_rate": 1}), "set model.drop_path_rate instead"),
        (ModelConfig("hf-hub:timm/resnet18.a1_in1k"), "names a source, but a model is named by its architecture"),
        (ModelConfig("local-dir:/tmp"), "names a source, but a model is named by its architecture"),
        (ModelConfig("hf_hub:a/b"), "names a source, but a model is named by its architecture"),
        (ModelConfig("resnet18", kwargs={"pretrained_cfg": {"url": "http://h/x"}}), "with model.checkpoint instead"),
        (ModelConfig("resnet18", kwargs={"pretrained_cfg_overlay": {"file": "x"}}), "with model.checkpoint instead"),
        (ModelConfig("resnet18", kwargs={"cache_dir": "/tmp"}), "with model.checkpoint instead"),
        (ModelConfig("vit_tiny_patch16_224", img_size=100), "takes images of 224 pixels only"),
    ],
    ids=lambda value: value.name if isinstance(value, ModelConfig) else "",
)
def test_mistakes_are_named(config: ModelConfig, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if config.name == "vit_tiny_patch16_224":
        refuse_size(monkeypatch)
    with pytest.raises(ValueError, match=message):
        build_model(config, 3)


def refuse_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the class of a model seem to have no argument for its size."""
    known = factory.supported_arguments("vit_tiny_patch16_224")
    without = [argument for argument in known if argument != "img_size"]
    monkeypatch.setattr(factory, "supported_arguments", lambda name: without)


def test_published_names_are_known() -> None:
    check_model_name("resnet18.a1_in1k")
    check_model_name("inline_swin_tiny")


def test_unreachable_weights_are_told_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*args: object, **kwargs: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr("timm.models._builder.download_cached_file", unreachable)
    with pytest.raises(OSError, match=r"inline_deit_tiny cannot be fetched from .* \(no network\): .*checkpoint"):
        build_model(ModelConfig("inline_deit_tiny", pretrained=True), 10)


def test_a_file_takes_the_place_of_published_weights(tmp_path: Path) -> None:
    """As when --model.checkpoint is added to a recipe that starts from published weights."""
    there = timm.create_model("test_vit", num_classes=7)
    file = save(there, tmp_path / "weights.safetensors")
    loaded = build_model(ModelConfig("test_vit", pretrained=True, checkpoint=file), 7)
    assert same(weights_of(there), weights_of(loaded))


@pytest.mark.parametrize("name", ["inline_deit_tiny", "test_vit", "resnet18"])
def test_a_checkpoint_of_other_size_classes_and_channels(name: str, tmp_path: Path) -> None:
    """All but the head, the positions and the first convolution is in the file as in the model."""
    size = {} if name == "resnet18" else {"img_size": 64}
    there = timm.create_model(name, num_classes=7, **size)
    file = save(there, tmp_path / "weights.safetensors")
    exact = build_model(ModelConfig(name, img_size=64, checkpoint=file), 7)
    assert same(weights_of(there), weights_of(exact))
    other = build_model(ModelConfig(name, img_size=96, in_chans=1, checkpoint=file), 5).eval()
    assert other(torch.zeros(1, 1, 96, 96)).shape == (1, 5)
    loaded, before = weights_of(other), weights_of(there)
    kept = [key for key in before if loaded[key].shape == before[key].shape]
    assert len(kept) >= len(before) - 4
    assert all(torch.equal(loaded[key], before[key]) for key in kept if not key.startswith(("head", "fc.")))


@pytest.mark.parametrize("name", ["inline_deit_tiny", "test_vit"])
@pytest.mark.parametrize("classes", [3, 7])
def test_a_checkpoint_of_another_model_is_refused(name: str, classes: int, tmp_path: Path) -> None:
    file = save(timm.create_model("resnet18", num_classes=7), tmp_path / "weights.safetensors")
    with pytest.raises(ValueError, match="does not hold the weights of"):
        build_model(ModelConfig(name, checkpoint=file), classes)


def test_a_checkpoint_that_could_run_code_is_refused(tmp_path: Path) -> None:
    torch.save({"state_dict": {"a": torch.ones(1)}, "args": Path("x")}, tmp_path / "weights.pth")
    with pytest.raises(ValueError, match="could run code"):
        build_model(ModelConfig("resnet18", checkpoint=str(tmp_path / "weights.pth")), 3)


def test_opening_by_name_finds_classes_and_channels_in_the_file(tmp_path: Path) -> None:
    there = timm.create_model("inline_deit_tiny", num_classes=10, in_chans=1, img_size=32)
    opened = load_classifier("inline_deit_tiny", checkpoint=save(there, tmp_path / "w.safetensors"), img_size=32)
    assert (opened.num_classes, opened.label_names, opened.pixel_format.channels, opened.spec.size) == (10, None, 1, 32)
    assert opened.classes[3] == "3"
    assert not opened.model.training
    images = torch.randn(2, 1, 32, 32)
    assert torch.equal(opened.model(images), there.eval()(images))


def test_a_thousand_classes_are_those_of_imagenet(tmp_path: Path) -> None:
    opened = load_classifier("test_vit", checkpoint=save(timm.create_model("test_vit"), tmp_path / "w.safetensors"))
    assert opened.label_names is not None
    assert opened.label_names[1] == "n01443537"
    assert opened.classes[1] == "goldfish, Carassius auratus"
    assert opened.spec.size == 160


def test_words_for_wordnet_ids_only() -> None:
    assert imagenet_classes(10) is None
    assert wordnet_names(["n01440764", "n01443537"]) == ["tench, Tinca tinca", "goldfish, Carassius auratus"]
    assert wordnet_names(["n01440764", "cat"]) == ["n01440764", "cat"]
    assert wordnet_names(["n00000000"]) == ["n00000000"]


def make_run(folder: Path, classes: list[str] | None, *, seed: int = 0) -> nn.Module:
    """A training run that has its configuration and its classes, but no weights yet; its model."""
    folder.mkdir()
    config = {"model": {"name": "test_vit", "img_size": 32, "in_chans": 1}, "augment": {"scale": [0.5, 1.0]}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    if classes is not None:
        (folder / "classes.json").write_text(json.dumps(classes))
    torch.manual_seed(seed)
    return timm.create_model("test_vit", num_classes=3, in_chans=1, img_size=32)


def checkpoint(run: Path, step: int, models: dict[str, nn.Module], *, best: bool = False) -> Path:
    progress = Progress(step=step, best=1.0 if best else None, best_step=step if best else None)
    folder = CheckpointFolder(run / "checkpoints", keep=9)
    weights = {f"{name}.safetensors": pack_weights(weights_of(model)) for name, model in models.items()}
    path = folder.save(progress, {**weights, **pack_state({})})
    folder.mark_best(progress)
    return path


def test_opening_a_run(tmp_path: Path) -> None:
    there = make_run(tmp_path / "run", ["ant", "bee", "cow"])
    save(there, tmp_path / "run" / "model.safetensors")
    opened = load_classifier(str(tmp_path / "run"))
    assert (opened.classes, opened.name, opened.spec.size) == (["ant", "bee", "cow"], "test_vit", 32)
    assert same(weights_of(there), weights_of(opened.model))
    assert load_classifier(str(tmp_path / "run"), img_size=48, crop_pct=0.5).spec.crop_pct == 0.5
    assert load_classifier(str(tmp_path / "run"), img_size=48).model(torch.zeros(1, 1, 48, 48)).shape == (1, 3)


def test_an_unfinished_run_gives_its_newest_good_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "run"
    models = [make_run(run, None), *(timm.create_model("test_vit", num_classes=3) for _ in range(3))]
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor a good checkpoint"):
        load_classifier(str(run))
    checkpoint(run, 1, {"model": models[0]}, best=True)
    checkpoint(run, 2, {"model": models[1], "ema": models[2]})
    spoilt = checkpoint(run, 3, {"model": models[3]})
    (spoilt / "model.safetensors").write_bytes(b"spoilt")
    with pytest.warns(UserWarning, match="not finished: using its checkpoint step-00000002"):
        file = run_weights(run, None)
    # Averaged weights are preferred.
    assert same(weights_of(models[2]), safetensors.torch.load_file(file))
    assert same(weights_of(models[0]), weights_of(load_classifier(str(run), checkpoint="best").model))
    chosen = load_classifier(str(run), checkpoint=str(run / "checkpoints" / "step-00000001"))
    assert same(weights_of(models[0]), weights_of(chosen.model))


@pytest.mark.parametrize("name", ["hf-hub:timm/resnet18.a1_in1k", "hf_hub:a/b", "local-dir:.", "http://h/x", "a/b"])
def test_the_model_of_a_run_is_not_fetched(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """timm would download it, or read its configuration from a folder."""
    run = tmp_path / "run"
    save(make_run(run, ["ant", "bee", "cow"]), run / "model.safetensors")
    (run / "config.yaml").write_text(yaml.safe_dump({"model": {"name": name}}))
    monkeypatch.setattr(timm, "create_model", lambda *arguments, **options: pytest.fail("timm was asked"))
    with pytest.raises(ValueError, match=r"names a source|there is no model called"):
        load_classifier(str(run))


@pytest.mark.timeout(60)
def test_a_run_whose_configuration_never_ends_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    save(make_run(run, ["ant", "bee", "cow"]), run / "model.safetensors")
    lines = "".join(
        f"  {name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
        for before, name in zip("abcdefgh", "bcdefghi", strict=True)
    )
    (run / "config.yaml").write_text(f"model:\n  a: &a [x]\n{lines}")
    with pytest.raises(ValueError, match=r"config\.yaml is not the configuration of .*repeats itself"):
        load_classifier(str(run))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_not_finite_are_refused(tmp_path: Path, value: float) -> None:
    model = make_run(tmp_path / "run", None)
    with torch.no_grad():
        model.get_parameter("head.bias")[1] = value
    save(model, tmp_path / "run" / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"holds weights that are not finite numbers, such as head\.bias: choose others"
    ):
        load_classifier(str(tmp_path / "run"))


def test_what_is_wrong_with_a_run_is_told(tmp_path: Path) -> None:
    run = tmp_path / "run"
    save(make_run(run, ["ant", "bee"]), run / "model.safetensors")
    assert load_classifier(str(run)).classes == ["ant", "bee", "2"]
    with pytest.raises(ValueError, match="best cannot be used"):
        load_classifier(str(run), checkpoint="best")
    (run / "classes.json").write_text(json.dumps(["a", "b", "c", "d"]))
    with pytest.raises(ValueError, match="names 4 classes, but the weights are for 3"):
        load_classifier(str(run))
    (run / "classes.json").write_text("{")
    with pytest.raises(ValueError, match=r"classes\.json cannot be used .*: restore it"):
        load_classifier(str(run))
    (run / "config.yaml").write_text("modle: {}")
    with pytest.raises(ValueError, match=r"not the configuration of a classification run .*has no modle"):
        load_classifier(str(run))
    with pytest.raises(ValueError, match=r"holds no config\.yaml"):
        load_classifier(str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"no folder at .*nothing: name the folder of a training run"):
        load_classifier(str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match="no model called"):
        load_classifier("nothing")


# ------------------------------------------------------------------------------------------------- heads in files

NAMES = ["inline_deit_tiny", "test_vit", "resnet18"]
HEAD = {"inline_deit_tiny": "head", "test_vit": "head", "resnet18": "fc"}
MALFORMED: dict[str, dict[str, Tensor | None]] = {
    "scalar weight": {"weight": torch.tensor(1.0)},
    "two scalars": {"weight": torch.tensor(1.0), "bias": torch.tensor(1.0)},
    "no rows": {"weight": torch.ones(0, 64), "bias": torch.ones(0)},
    "flat weight": {"weight": torch.ones(7)},
    "bias of other classes": {"bias": torch.ones(5)},
    "scalar bias": {"bias": torch.tensor(1.0)},
    "integers": {"weight": torch.ones(7, 64, dtype=torch.int64)},
    "no weight": {"weight": None},
    "no head": {"weight": None, "bias": None},
}


@pytest.mark.parametrize("name", slow_except(NAMES, "test_vit"))
@pytest.mark.parametrize("malformed", MALFORMED)
def test_malformed_heads_are_refused(name: str, malformed: str, tmp_path: Path) -> None:
    weights = weights_of(timm.create_model(name, num_classes=7))
    for part, value in MALFORMED[malformed].items():
        if value is None:
            del weights[f"{HEAD[name]}.{part}"]
        else:
            weights[f"{HEAD[name]}.{part}"] = value
    file = tmp_path / "weights.safetensors"
    safetensors.torch.save_file(weights, file)
    refusal = r"malformed head|does not hold the weights"
    with pytest.raises(ValueError, match=refusal):
        load_classifier(name, checkpoint=str(file))
    for num_classes in (7, 3):
        with pytest.raises(ValueError, match=refusal):
            build_model(ModelConfig(name, checkpoint=str(file)), num_classes)


@pytest.mark.parametrize("name", NAMES)
def test_a_new_head_is_warned_of_once_or_refused(name: str, tmp_path: Path) -> None:
    file = save(timm.create_model(name, num_classes=7), tmp_path / "weights.safetensors")
    with pytest.warns(UserWarning, match="is for 7 classes and the model has 3: the head is not loaded") as warned:
        build_model(ModelConfig(name, checkpoint=file), 3)
    assert len([one for one in warned if "classes" in str(one.message)]) == 1
    with pytest.raises(ValueError, match="has a head for 7 classes, but 3 are needed"):
        build_model(ModelConfig(name, checkpoint=file), 3, new_head=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build_model(ModelConfig(name, checkpoint=file), 7, new_head=False)
        assert load_classifier(name, checkpoint=file).num_classes == 7


@pytest.mark.parametrize("missing", ["fc.weight", "level0.0.weight"])
def test_models_that_timm_loads_loosely_get_no_random_weights(missing: str, tmp_path: Path) -> None:
    weights = weights_of(timm.create_model("dla46_c", num_classes=7))
    assert missing in weights
    file = tmp_path / "weights.safetensors"
    safetensors.torch.save_file(weights, file)
    assert load_classifier("dla46_c", checkpoint=str(file)).num_classes == 7
    del weights[missing]
    safetensors.torch.save_file(weights, file)
    with pytest.raises(ValueError, match=r"malformed head|does not hold the weights of dla46_c"):
        load_classifier("dla46_c", checkpoint=str(file))


@pytest.mark.parametrize("name", ["test_vit", "resnet18"])
def test_timms_models_take_no_unusual_tensors(name: str, tmp_path: Path) -> None:
    weights = weights_of(timm.create_model(name, num_classes=7))
    first = next(iter(weights))
    weight = next(key for key, value in weights.items() if key.endswith("weight") and value.dim() == 4)
    changes = {
        weight: [torch.ones(weights[weight].shape, dtype=torch.int8), torch.tensor(1.0), torch.ones(1).expand(10**12)],
        first: [torch.ones(2, dtype=torch.complex64), torch.ones(2).to(torch.float8_e5m2), torch.ones(0)],
    }
    file = tmp_path / "weights.pth"
    for key, values in changes.items():
        for value in values:
            torch.save({**weights, key: value}, file)
            with pytest.raises(ValueError, match=r"holds no weights|does not hold the weights"):
                load_classifier(name, checkpoint=str(file))
    # Buffers are integers as ever.
    torch.save(weights, file)
    assert load_classifier(name, checkpoint=str(file)).num_classes == 7


def test_mistakes_in_options_are_not_blamed_on_the_file(tmp_path: Path) -> None:
    file = save(timm.create_model("test_vit", num_classes=7), tmp_path / "weights.safetensors")
    with pytest.raises(ValueError, match="no option 'zzz'"):
        build_model(ModelConfig("test_vit", checkpoint=file, kwargs={"zzz": 1}), 7)
