"""Published and own weights from files; and files that are damaged, dangerous or of another model."""

import argparse
import contextlib
import functools
import http.server
import io
import os
import pickle
import random
import re
import socketserver
import sys
import threading
import time
import types
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import timm
import torch
from timm.models import adapt_input_conv, get_pretrained_cfg
from torch import Tensor, nn

import inlinevit  # noqa: F401  registers the models
from inlinevit.layers.embed import resample_pos_embed
from inlinevit.models import InLineDeiT, load_checkpoint
from inlinevit.models._checkpoint import adapt_state_dict
from inlinevit.models._weight_files import CONFIG_CLASS, read_state_dict
from tests import slow_except

NAMES = [
    *(f"inline_deit_{size}" for size in ("tiny", "small", "base")),
    *(f"inline_pvt_{size}" for size in ("tiny", "small", "medium", "large")),
    *(f"inline_swin_{size}" for size in ("tiny", "small", "base", "base_384")),
    *(f"inline_cswin_{size}" for size in ("tiny", "small", "base", "base_384")),
]
FAMILIES = ["inline_deit_tiny", "inline_pvt_tiny", "inline_swin_tiny", "inline_cswin_tiny"]
# One block a stage, for tests that need no more. CSWin's InLine and softmax stages stay as they are.
SHALLOW: dict[str, dict[str, Any]] = {
    "inline_deit_tiny": {"depth": 1},
    **{name: {"depths": (1, 1, 1, 1)} for name in FAMILIES[1:]},
}
LINKS = {
    "inline_deit_tiny": "1d6b8191ad6d4114b291",
    "inline_deit_small": "2f3898b07e9247f3beb3",
    "inline_deit_base": "10bdd726d4b0435eb34e",
    "inline_pvt_tiny": "90ac52b1555b401eb5e6",
    "inline_pvt_small": "1ab953b2479d433080a3",
    "inline_pvt_medium": "a72aec31e6084bc0a280",
    "inline_pvt_large": "efd91318ba964f01b288",
    "inline_swin_tiny": "32810869fcc34410966b",
    "inline_swin_small": "e9657fd247c04c7cb1a1",
    "inline_swin_base": "bf23564bb64c420aafe1",
    "inline_cswin_tiny": "49fa2ecc543647c4b970",
    "inline_cswin_small": "59f4e65f776f4052b93c",
    "inline_cswin_base": "91e17121df284ae38521",
}

# ------------------------------------------------------------------------------------------------- files as published


class CfgNode(dict):
    """As in yacs, which is not installed: a dictionary with attributes of its own, pickled as yacs.config.CfgNode."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__({k: CfgNode(v) if isinstance(v, dict) else v for k, v in values.items()})
        self.__dict__["__immutable__"] = True
        self.__dict__["__deprecated_keys__"] = set()
        self.__dict__["__renamed_keys__"] = {}
        self.__dict__["__new_allowed__"] = False


CfgNode.__module__, CfgNode.__qualname__ = "yacs.config", "CfgNode"


@contextlib.contextmanager
def yacs_installed() -> Iterator[None]:
    """A package yacs with the class above, so that pickle finds it."""
    package, config = types.ModuleType("yacs"), types.ModuleType("yacs.config")
    config.CfgNode = CfgNode  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "yacs", package)
        patch.setitem(sys.modules, "yacs.config", config)
        yield


def save_published(path: Path, weights: dict[str, Tensor], key: str = "model", **more: Any) -> Path:
    """A file as the reference's training writes it."""
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([parameter])
    parameter.sum().backward()
    optimizer.step()
    content = {
        key: weights,
        "optimizer": optimizer.state_dict(),
        "lr_scheduler": {"base_values": [5e-4], "t_initial": 375300, "lr_min": 5e-6, "noise_range_t": None},
        "max_accuracy": 82.4,
        "epoch": 299,
        "config": CfgNode({"MODEL": {"TYPE": "swin", "SWIN": {"DEPTHS": [2, 2, 6, 2]}}, "BASE": [""], "LR": 5e-4}),
        **more,
    }
    with yacs_installed():
        torch.save(content, path)
    return path


def hollow(entry: dict[str, Any], value: float = 0.0) -> dict[str, Tensor]:
    """Weights of the published names and shapes that take no room: one number, repeated."""
    weights = {name: torch.tensor(value).expand(shape) for name, shape in entry["parameters"].items()}
    return {**weights, **{name: torch.arange(3) for name in entry["ignored_buffers"]}}


@pytest.fixture(scope="session")
def shallow(parameters: dict[str, Any]) -> Callable[[str], dict[str, Tensor]]:
    """Random published weights for a model with SHALLOW[name], different everywhere; drawn once: do not change them."""

    @functools.cache
    def draw(name: str) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(0)
        drawn = {}
        for key, shape in parameters[name]["parameters"].items():
            block = re.search(r"(?:blocks|block\d|stage\d)\.(\d+)\.", key)
            if block is None or block[1] == "0":
                drawn[key] = torch.randn(shape, generator=generator) * 0.05
        return drawn

    return lambda name: dict(draw(name))


def make(name: str, **kwargs: Any) -> Any:
    """A shallow model. Without other weights or devices, those of a normal distribution, which are drawn fast."""
    options = {**SHALLOW[name], **kwargs}
    if "pretrained" in options or "device" in options:
        return timm.create_model(name, **options).eval()
    model = timm.create_model(name, device="meta", **options).to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    return model.eval()


@functools.cache
def make_once(name: str, **kwargs: Any) -> Any:
    """The same for all tests in which it stays unchanged."""
    return make(name, **kwargs)


@contextlib.contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    yield
    assert_same(model.state_dict(), before)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def blank(model: nn.Module) -> None:
    """Set all weights to NaN, so that none passes for loaded."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))


def assert_loaded(model: nn.Module, source: nn.Module, path: Path) -> None:
    """Loading the file makes the model equal to the source, bit by bit."""
    blank(model)
    load_checkpoint(model, path)
    assert_same(model.state_dict(), source.state_dict())


# ------------------------------------------------------------------------------------------------- published weights


@pytest.mark.parametrize("name", slow_except(NAMES, *FAMILIES))
def test_every_published_parameter_has_its_place(name: str, parameters: dict[str, Any], tmp_path: Path) -> None:
    entry = parameters[name]
    path = save_published(tmp_path / "published.pth", hollow(entry))
    model = timm.create_model(name, device="meta")
    assert model.pretrained_cfg["input_size"] == (3, entry["img_size"], entry["img_size"])
    adapted = adapt_state_dict(read_state_dict(path), model)
    assert {k: v.shape for k, v in adapted.items()} == {k: v.shape for k, v in model.state_dict().items()}
    assert sum(v.numel() for v in adapted.values()) == sum(p.numel() for p in model.parameters())
    # Once more, to see that the comparison can fail.
    lacking = hollow(entry)
    del lacking["head.bias"]
    assert adapt_state_dict(lacking, model).keys() != model.state_dict().keys()


def test_the_contract_holds_buffers_to_ignore(parameters: dict[str, Any]) -> None:
    assert list(parameters) == NAMES
    assert sum(len(entry["ignored_buffers"]) for entry in parameters.values()) > 80


@pytest.mark.parametrize("name", FAMILIES)
def test_published_files_load(
    name: str,
    parameters: dict[str, Any],
    published_weights: Callable[[str], dict[str, Tensor]],
    tmp_path: Path,
) -> None:
    weights = published_weights(name)
    buffers = {key: torch.arange(3) for key in parameters[name]["ignored_buffers"]}
    model = timm.create_model(name, device="meta").to_empty(device="cpu")
    blank(model)
    load_checkpoint(model, save_published(tmp_path / "published.pth", {**weights, **buffers}))
    own = model.state_dict()
    # The same numbers, none of them elsewhere twice.
    assert sum(value.double().sum() for value in own.values()).item() == pytest.approx(
        sum(value.double().sum() for value in weights.values()).item(), abs=1e-6
    )
    assert torch.equal(own["head.weight"], weights["head.weight"])


def test_averaged_weights_win(parameters: dict[str, Any], tmp_path: Path) -> None:
    entry = parameters["inline_cswin_tiny"]
    path = save_published(
        tmp_path / "ema.pth", hollow(entry, 2.0), "state_dict_ema", state_dict=hollow(entry), model=hollow(entry)
    )
    model = timm.create_model("inline_cswin_tiny", device="meta").to_empty(device="cpu")
    load_checkpoint(model, path)
    assert all((parameter == 2.0).all() for parameter in model.parameters())
    # Without averaging there is nothing under that name.
    save_published(path, hollow(entry, 3.0), state_dict_ema=None)
    load_checkpoint(model, path)
    assert all((parameter == 3.0).all() for parameter in model.parameters())


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("shuffled", [False, True])
def test_values_land_where_they_belong(
    name: str, shuffled: bool, shallow: Callable[[str], dict[str, Tensor]], tmp_path: Path
) -> None:
    weights = shallow(name)
    items = list(weights.items())
    if shuffled:
        random.Random(0).shuffle(items)
    model = make(name)
    blank(model)
    load_checkpoint(model, save_published(tmp_path / "published.pth", dict(items)))
    own = model.state_dict()
    assert not any(value.isnan().any() for value in own.values())
    for place, parts in PLACES[name].items():
        assert torch.equal(own[place], torch.cat([weights[part] for part in parts])), place


PLACES = {
    "inline_deit_tiny": {
        "stages.0.cls_token": ["cls_token"],
        "stages.0.pos_embed": ["pos_embed"],
        "stages.0.patch_embed.proj.weight": ["patch_embed.proj.weight"],
        "stages.0.blocks.0.attn.qkv.bias": ["blocks.0.attn.qkv.bias"],
        "stages.0.blocks.0.attn.local_residual.fc1.weight": ["blocks.0.attn.residual.0.weight"],
        "stages.0.blocks.0.attn.local_residual.fc2.bias": ["blocks.0.attn.residual.2.bias"],
        "norm.weight": ["norm.weight"],
    },
    "inline_pvt_tiny": {
        "stages.2.pos_embed": ["pos_embed3"],
        "stages.3.downsample.norm.weight": ["patch_embed4.norm.weight"],
        "stages.1.blocks.0.attn.qkv.weight": ["block2.0.attn.q.weight", "block2.0.attn.kv.weight"],
        "stages.1.blocks.0.attn.qkv.bias": ["block2.0.attn.q.bias", "block2.0.attn.kv.bias"],
        "stages.3.blocks.0.norm1.weight": ["block4.0.norm1.weight"],
        "stages.3.blocks.0.norm2.weight": ["block4.0.norm2.weight"],
    },
    "inline_swin_tiny": {
        "stages.0.patch_embed.proj.bias": ["patch_embed.proj.bias"],
        **{f"stages.{i + 1}.downsample.norm.weight": [f"layers.{i}.downsample.norm.weight"] for i in range(3)},
        "stages.2.downsample.reduction.weight": ["layers.1.downsample.reduction.weight"],
        "stages.3.blocks.0.attn.relative_position_bias_table": ["layers.3.blocks.0.attn.relative_position_bias_table"],
        "stages.2.blocks.0.mlp.fc1.weight": ["layers.2.blocks.0.mlp.fc1.weight"],
    },
    "inline_cswin_tiny": {
        "stages.0.patch_embed.proj.weight": ["stage1_conv_embed.0.weight"],
        "stages.0.patch_embed.norm.weight": ["stage1_conv_embed.2.weight"],
        "stages.3.downsample.proj.weight": ["merge3.conv.weight"],
        "stages.0.blocks.0.attn.qkv.weight": ["stage1.0.qkv.weight"],
        "stages.2.blocks.0.attn.lepe.weight": [f"stage3.0.attns.{i}.get_v.weight" for i in range(2)],
        "stages.2.blocks.0.attn.lepe.bias": [f"stage3.0.attns.{i}.get_v.bias" for i in range(2)],
        "stages.3.blocks.0.attn.lepe.weight": ["stage4.0.attns.0.get_v.weight"],
    },
}


def test_a_model_of_two_parts_takes_them_in_order(shallow: Callable[[str], dict[str, Tensor]]) -> None:
    weights = shallow("inline_cswin_tiny")
    halves = {name: value for name, value in weights.items() if ".attns.1." in name}
    assert any("residual" in name or "get_v" in name for name in halves)
    adapted = adapt_state_dict(dict(reversed(weights.items())), make("inline_cswin_tiny", device="meta"))
    for name, second in halves.items():
        first = weights[name.replace(".attns.1.", ".attns.0.")]
        assert any(torch.equal(torch.cat([first, second]), value) for value in adapted.values() if len(value.shape) > 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["inline_pvt_tiny"])
def test_other_precisions_load(
    name: str, dtype: torch.dtype, shallow: Callable[[str], dict[str, Tensor]], tmp_path: Path
) -> None:
    weights = {key: value.to(dtype) for key, value in shallow(name).items()}
    path = save_published(tmp_path / "published.pth", weights)
    # Another size, so that positions are resized too.
    model = make(name, img_size=256)
    blank(model)
    load_checkpoint(model, path)
    assert {value.dtype for value in model.state_dict().values()} == {torch.float32}
    assert torch.equal(model.head.weight, weights["head.weight"].float())
    assert not any(value.isnan().any() for value in model.state_dict().values())


def test_weights_that_are_not_numbers_are_loaded_as_they_are(
    shallow: Callable[[str], dict[str, Tensor]], tmp_path: Path
) -> None:
    weights = shallow("inline_deit_tiny")
    weights["norm.weight"] = weights["norm.weight"].index_fill(0, torch.tensor(3), float("nan"))
    model = make("inline_deit_tiny")
    load_checkpoint(model, save_published(tmp_path / "published.pth", weights))
    assert model.norm.weight.isnan().nonzero().tolist() == [[3]]


# --------------------------------------------------------------------------------------------------- through timm


@pytest.mark.parametrize("name", slow_except(FAMILIES, "inline_swin_tiny"))
def test_timm_loads_a_file(name: str, shallow: Callable[[str], dict[str, Tensor]], tmp_path: Path) -> None:
    weights = shallow(name)
    path = save_published(tmp_path / "published.pth", weights)
    whole = make(name)
    load_checkpoint(whole, path)

    def create(**kwargs: Any) -> Any:
        return make(name, pretrained=True, pretrained_cfg_overlay={"file": str(path)}, **kwargs)

    x = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert_same(create().state_dict(), whole.state_dict())

        five = create(num_classes=5)
        assert five.head.weight.shape[0] == 5
        assert_same(without_head(five), without_head(whole))

        none = create(num_classes=0)
        assert_same(none.state_dict(), without_head(whole))
        assert torch.equal(none(x), whole.forward_head(whole.forward_features(x), pre_logits=True))

        features = create(features_only=True, out_indices=(0,))
        expected = whole.forward_intermediates(x, indices=[0], intermediates_only=True)
        assert torch.equal(features(x)[0], expected[0])

        first_conv = whole.stages[0].patch_embed.proj.weight
        for in_chans in (1, 4):
            other = create(in_chans=in_chans)
            assert torch.equal(other.stages[0].patch_embed.proj.weight, adapt_input_conv(in_chans, first_conv))
            assert torch.equal(other.head.weight, whole.head.weight)


def without_head(model: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in model.state_dict().items() if not name.startswith("head.")}


@pytest.mark.parametrize("in_chans", [1, 3, 4])
def test_timm_loads_weights_at_hand(in_chans: int, shallow: Callable[[str], dict[str, Tensor]]) -> None:
    """timm adapts the first convolution itself on this way. Doing it before would make it give up and draw new ones."""
    weights = shallow("inline_pvt_tiny")
    overlay = {"state_dict": weights}
    model = make("inline_pvt_tiny", pretrained=True, pretrained_cfg_overlay=overlay, in_chans=in_chans, img_size=96)
    expected = adapt_input_conv(in_chans, weights["patch_embed1.proj.weight"])
    assert torch.equal(model.stages[0].patch_embed.proj.weight, expected)
    assert torch.equal(model.head.weight, weights["head.weight"])
    assert model.stages[3].pos_embed.shape == (1, 9, 512)


def test_our_own_head_for_other_classes_loads(tmp_path: Path) -> None:
    source = make("inline_pvt_tiny", num_classes=5)
    path = tmp_path / "five.pth"
    torch.save(source.state_dict(), path)
    model = make("inline_pvt_tiny", num_classes=5, pretrained=True, pretrained_cfg_overlay={"file": str(path)})
    assert_same(model.state_dict(), source.state_dict())


@pytest.mark.parametrize("name", NAMES)
def test_published_links(name: str) -> None:
    cfg = get_pretrained_cfg(name)
    assert cfg.custom_load
    if name in LINKS:
        assert tuple(cfg.url) == (f"https://cloud.tsinghua.edu.cn/f/{LINKS[name]}/?dl=1", f"{name}.pth")
        assert timm.is_model_pretrained(name)
    else:
        assert not cfg.url
        assert not timm.is_model_pretrained(name)


@contextlib.contextmanager
def serve(content: bytes) -> Iterator[tuple[str, list[str]]]:
    """A server on this machine that answers as the published links do; its address and the paths asked for."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

    with socketserver.TCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", asked
        finally:
            server.shutdown()
            thread.join()


def test_pretrained_weights_are_fetched_once(
    shallow: Callable[[str], dict[str, Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    path = save_published(tmp_path / "published.pth", shallow("inline_deit_tiny"))
    expected = make("inline_deit_tiny")
    load_checkpoint(expected, path)
    with serve(path.read_bytes()) as (address, asked):
        link = (f"{address}/f/{LINKS['inline_deit_tiny']}/?dl=1", "inline_deit_tiny.pth")
        fetched = make("inline_deit_tiny", pretrained=True, pretrained_cfg_overlay={"url": link})
    assert asked == [f"/f/{LINKS['inline_deit_tiny']}/?dl=1"]
    assert_same(fetched.state_dict(), expected.state_dict())
    cached = make("inline_deit_tiny", pretrained=True, pretrained_cfg_overlay={"url": link})
    assert_same(cached.state_dict(), expected.state_dict())
    [file] = (tmp_path / "torch").rglob("*.pth")
    assert file.name == "inline_deit_tiny.pth"


def test_an_error_page_instead_of_weights_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with serve(b"<!DOCTYPE html><html>link expired</html>") as (address, _):
        overlay = {"url": (f"{address}/f/x/?dl=1", "inline_deit_tiny.pth")}
        with pytest.raises(ValueError, match=r"inline_deit_tiny\.pth is not a whole PyTorch file .* fetch it again"):
            make("inline_deit_tiny", pretrained=True, pretrained_cfg_overlay=overlay)


# ------------------------------------------------------------------------------------------------- our own files


@pytest.mark.parametrize("name", FAMILIES)
def test_our_own_files_load(name: str, tmp_path: Path) -> None:
    source, model = make(name), make(name)
    safetensors.torch.save_model(source, tmp_path / "model.safetensors")
    assert_loaded(model, source, tmp_path / "model.safetensors")
    safetensors.torch.save_file(source.state_dict(), tmp_path / "file.safetensors")
    assert_loaded(model, source, tmp_path / "file.safetensors")
    torch.save(source.state_dict(), tmp_path / "plain.pth")
    assert_loaded(model, source, tmp_path / "plain.pth")
    torch.save(source.state_dict(), tmp_path / "legacy.pth", _use_new_zipfile_serialization=False)
    assert_loaded(model, source, tmp_path / "legacy.pth")


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.module."])
@pytest.mark.parametrize("own", [True, False])
def test_names_of_wrappers_are_dropped(
    prefix: str, own: bool, shallow: Callable[[str], dict[str, Tensor]], tmp_path: Path
) -> None:
    weights = shallow("inline_pvt_tiny")
    source = make("inline_pvt_tiny")
    load_checkpoint(source, save_published(tmp_path / "source.pth", weights))
    saved = source.state_dict() if own else weights
    torch.save({"model": {prefix + name: value for name, value in saved.items()}}, tmp_path / "wrapped.pth")
    assert_loaded(make("inline_pvt_tiny"), source, tmp_path / "wrapped.pth")


def test_wrapped_models_take_weights(shallow: Callable[[str], dict[str, Tensor]], tmp_path: Path) -> None:
    path = save_published(tmp_path / "published.pth", shallow("inline_deit_tiny"))
    source = make("inline_deit_tiny")
    load_checkpoint(source, path)
    for wrap in (torch.compile, nn.DataParallel):
        model = make("inline_deit_tiny")
        load_checkpoint(wrap(model), path)
        assert_same(model.state_dict(), source.state_dict())


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("out_indices", [None, (0,)])
def test_features_take_weights(
    name: str, out_indices: tuple[int, ...] | None, shallow: Callable[[str], dict[str, Tensor]], tmp_path: Path
) -> None:
    path = save_published(tmp_path / "published.pth", shallow(name))
    options: dict[str, Any] = {"features_only": True}
    if out_indices is not None:
        options["out_indices"] = out_indices
    if name == "inline_deit_tiny":
        # Two blocks, of which the second may be dropped.
        weights = shallow(name)
        weights |= {k.replace("blocks.0.", "blocks.1."): v + 1 for k, v in weights.items() if "blocks.0." in k}
        path = save_published(tmp_path / "published.pth", weights)
        options |= {"depth": 2, "out_indices": out_indices or (0, 1)}
    whole = make(name, **{k: v for k, v in options.items() if k == "depth"})
    load_checkpoint(whole, path)
    features = make(name, **options)
    blank(features)
    load_checkpoint(features, path)
    kept = features.model.state_dict()
    assert not any(name.startswith(("head.", "norm.")) for name in kept)
    assert_same(kept, {key: whole.state_dict()[key] for key in kept})

    # What they save goes back into features, not into a model that would keep a random norm or head.
    torch.save(features.state_dict(), tmp_path / "features.pth")
    assert_loaded(make(name, **options), features, tmp_path / "features.pth")
    with unchanged(whole), pytest.raises(ValueError, match=r"[1-9]\d* missing"):
        load_checkpoint(whole, tmp_path / "features.pth")


def test_a_classifier_does_not_keep_a_random_head_in_silence(tmp_path: Path) -> None:
    torch.save(make("inline_pvt_tiny", num_classes=0).state_dict(), tmp_path / "headless.pth")
    with pytest.raises(ValueError, match=r"2 missing \(head\.weight, head\.bias\); 0 unexpected"):
        load_checkpoint(make("inline_pvt_tiny"), tmp_path / "headless.pth")


def test_models_made_without_timm_take_weights(shallow: Callable[[str], dict[str, Tensor]], tmp_path: Path) -> None:
    path = save_published(tmp_path / "published.pth", shallow("inline_deit_tiny"))
    model = InLineDeiT(depth=1, in_chans=1)
    load_checkpoint(model, path)
    assert torch.equal(model.head.weight, shallow("inline_deit_tiny")["head.weight"])
    with pytest.raises(ValueError, match="of another shape"):
        load_checkpoint(InLineDeiT(depth=1, embed_dim=96, num_heads=3), path)


def test_other_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="models of this library, not Linear"):
        load_checkpoint(nn.Linear(2, 2), tmp_path / "any.pth")


# ------------------------------------------------------------------------------------------------- other input sizes


@pytest.mark.parametrize("name", ["inline_deit_tiny", "inline_pvt_tiny"])
@pytest.mark.parametrize("size", [(160, 160), (192, 288)])
def test_positions_are_resized_as_the_model_does_it(
    name: str, size: tuple[int, int], shallow: Callable[[str], dict[str, Tensor]], tmp_path: Path
) -> None:
    # 112 × 448 pixels make as many tokens as 224 × 224.
    weights = shallow(name)
    weights = {key: value * 40 if "pos_embed" in key else value for key, value in weights.items()}
    path = save_published(tmp_path / "published.pth", weights)
    model, resized = make(name), make(name, img_size=size)
    load_checkpoint(model, path)
    load_checkpoint(resized, path)
    x = torch.randn(1, 3, *size, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert (resized(x) - model(x)).abs().max() < 1e-5
        # The logits do depend on how positions are resized.
        pos_embed = resized.stages[0].pos_embed
        pos_embed.copy_(pos_embed.mean(dim=1, keepdim=True).expand_as(pos_embed))
        assert (resized(x) - model(x)).abs().max() > 1e-4


@pytest.mark.parametrize("name", ["inline_deit_tiny", "inline_pvt_tiny"])
def test_our_own_positions_are_resized(name: str, tmp_path: Path) -> None:
    source = make(name)
    torch.save(source.state_dict(), tmp_path / "own.pth")
    model = make(name, img_size=(96, 160))
    load_checkpoint(model, tmp_path / "own.pth")
    for stage, old in zip(model.stages, source.stages, strict=True):
        new, grid = stage.resample_pos_embed, old.resample_pos_embed.grid
        expected = resample_pos_embed(old.pos_embed, grid, new.grid, new.num_prefix_tokens, new.interpolation)
        assert stage.pos_embed.shape == expected.shape
        assert torch.equal(stage.pos_embed, expected)


@pytest.mark.parametrize("name", ["inline_deit_tiny", "inline_pvt_tiny"])
def test_constant_positions_stay_constant(name: str, parameters: dict[str, Any]) -> None:
    model = make(name, img_size=(96, 320), device="meta")
    adapted = adapt_state_dict(hollow(parameters[name], 0.5), model)
    for key, value in model.state_dict().items():
        if key.endswith("pos_embed"):
            assert adapted[key].shape == value.shape
            torch.testing.assert_close(adapted[key], torch.full(value.shape, 0.5))


def test_class_token_positions_are_kept(shallow: Callable[[str], dict[str, Tensor]]) -> None:
    weights = shallow("inline_deit_tiny")
    adapted = adapt_state_dict(weights, make("inline_deit_tiny", img_size=256, device="meta"))
    assert torch.equal(adapted["stages.0.pos_embed"][:, 0], weights["pos_embed"][:, 0])


def test_positions_of_an_unknown_grid(tmp_path: Path) -> None:
    """Our own files do not name their grid. One of the model's size may still be another: that is said."""
    source = make("inline_deit_tiny", img_size=(112, 448))
    torch.save(source.state_dict(), tmp_path / "wide.pth")
    with pytest.warns(UserWarning, match="196 positions are of a grid of 7 × 28, as the model's, or 14 × 14"):
        assert_loaded(make("inline_deit_tiny", img_size=(112, 448)), source, tmp_path / "wide.pth")
    # A grid that cannot be guessed is not resized.
    torch.save(make("inline_deit_tiny", img_size=(112, 224)).state_dict(), tmp_path / "half.pth")
    with pytest.raises(ValueError, match=r"pos_embed float32 \(1, 99, 192\) for float32 \(1, 197, 192\)"):
        load_checkpoint(make("inline_deit_tiny"), tmp_path / "half.pth")


def test_relative_positions_are_resized_to_larger_windows(parameters: dict[str, Any]) -> None:
    model = timm.create_model("inline_swin_base_384", device="meta")
    ramp = torch.arange(13.0)
    weights = hollow(parameters["inline_swin_base"], 0.25)
    [last, *others] = [name for name in weights if name.endswith("relative_position_bias_table")][::-1]
    # Heads that see a constant, a ramp over the rows, and one over the columns.
    table = torch.zeros(13, 13, weights[last].shape[1])
    table[..., 0], table[..., 1], table[..., 2] = 0.25, ramp[:, None], ramp[None, :]
    weights[last] = table.flatten(0, 1)
    adapted = adapt_state_dict(weights, model)
    assert {k: v.shape for k, v in adapted.items()} == {k: v.shape for k, v in model.state_dict().items()}
    larger = [value for name, value in adapted.items() if name.endswith("relative_position_bias_table")]
    assert len(larger) == len(others) + 1
    assert all(value.shape[0] == 23**2 for value in larger)
    for value in larger[:-1]:
        torch.testing.assert_close(value, torch.full_like(value, 0.25))
    resized = larger[-1].unflatten(0, (23, 23))
    torch.testing.assert_close(resized[..., 0], torch.full((23, 23), 0.25))
    assert (resized[1:, :, 1] > resized[:-1, :, 1]).all()
    torch.testing.assert_close(resized[..., 2], resized[..., 1].T)
    torch.testing.assert_close(resized[11, 11, 1], torch.tensor(6.0))


def test_relative_positions_of_our_own_files_are_resized(tmp_path: Path) -> None:
    source = make("inline_swin_tiny")
    torch.save(source.state_dict(), tmp_path / "own.pth")
    model = make("inline_swin_tiny", img_size=384)
    load_checkpoint(model, tmp_path / "own.pth")
    assert model.stages[3].blocks[0].attn.relative_position_bias_table.shape == (529, 24)
    with torch.no_grad():
        assert model(torch.zeros(1, 3, 64, 64)).isfinite().all()


# ------------------------------------------------------------------------------------------------- dangerous files


class Payload:
    """An object that is unpickled by a call."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


class Custom:
    """A class that reading must not build."""

    def __setstate__(self, state: dict[str, str]) -> None:
        Path(state["marker"]).touch()


def custom(marker: Path) -> Custom:
    made = Custom()
    made.marker = str(marker)  # type: ignore[attr-defined]
    return made


DANGERS: dict[str, Callable[[Path], Any]] = {
    "system": lambda marker: Payload(__import__("os").system, f"touch {marker}"),
    "eval": lambda marker: Payload(eval, f"open({str(marker)!r}, 'w')"),
    "open": lambda marker: Payload(open, str(marker), "w"),
    "Custom": custom,
    "Namespace": lambda marker: argparse.Namespace(marker=marker.name),
    "_reconstruct": lambda marker: np.array([Payload(eval, f"open({str(marker)!r}, 'w')")], dtype=object),
    "getattr": lambda marker: Payload(getattr, torch.Tensor, "shape"),
    "load": lambda marker: Payload(torch.load, str(marker)),
}


def save_dangerous(path: Path, danger: Any, weights: dict[str, Tensor], form: str) -> None:
    content = {"model": weights, "config": danger}
    if form == "pickle":
        path.write_bytes(pickle.dumps(content, protocol=2))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=form == "zip")


def assert_readable(error: BaseException, path: Path) -> None:
    """One sentence that names the file, without torch's wall of advice before it."""
    assert str(path) in str(error)
    assert "\n" not in str(error)
    assert len(str(error)) - len(str(path)) < 400
    assert "Weights only load failed" not in str(error)
    assert error.__cause__ is None
    assert error.__suppress_context__ or error.__context__ is None


@pytest.mark.parametrize("form", ["zip", "legacy", "pickle"])
@pytest.mark.parametrize("danger", DANGERS)
def test_dangerous_files_are_refused(danger: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marker, path = tmp_path / "marker", tmp_path / "danger.pth"
    save_dangerous(path, DANGERS[danger](marker), {"a": torch.ones(2)}, form)
    # Not even if the environment asks torch for it.
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    model = make_once("inline_deit_tiny")
    with unchanged(model), pytest.raises(ValueError, match=r"refused|not a whole PyTorch file") as caught:
        load_checkpoint(model, path)
    assert not marker.exists()
    assert_readable(caught.value, path)
    if form != "pickle":
        assert re.search(rf"was refused, because it holds \S*{danger}, which could run code", str(caught.value))


@pytest.mark.parametrize("danger", ["system", "eval", "open"])
def test_these_files_are_dangerous(danger: str, tmp_path: Path) -> None:
    """Read without care, they do run: the tests above see something."""
    marker, path = tmp_path / "marker", tmp_path / "danger.pth"
    save_dangerous(path, DANGERS[danger](marker), {"a": torch.ones(2)}, "zip")
    torch.load(path, weights_only=False)
    assert marker.exists()


def test_what_other_code_allows_is_not_allowed_here(tmp_path: Path) -> None:
    path = tmp_path / "namespace.pth"
    torch.save({"model": {"a": torch.ones(2)}, "args": argparse.Namespace(lr=1)}, path)
    with torch.serialization.safe_globals([argparse.Namespace]):
        torch.load(path, weights_only=True)
        with pytest.raises(ValueError, match=r"holds argparse\.Namespace"):
            read_state_dict(path)
        # And is again afterwards.
        torch.load(path, weights_only=True)


def test_another_class_under_the_name_of_the_config_does_not_matter(tmp_path: Path) -> None:
    path = save_published(tmp_path / "published.pth", {"a": torch.ones(2)})
    with torch.serialization.safe_globals([(CfgNode, CONFIG_CLASS)]):
        assert list(read_state_dict(path)) == ["a"]


@pytest.mark.parametrize("good", [True, False])
def test_the_config_class_is_allowed_for_the_moment(good: bool, tmp_path: Path) -> None:
    path = save_published(tmp_path / "published.pth", {"a": torch.ones(2)}, more=None if good else Payload(eval, "1"))
    before = set(torch.serialization.get_safe_globals())
    with contextlib.nullcontext() if good else pytest.raises(ValueError, match="refused"):
        read_state_dict(path)
    assert set(torch.serialization.get_safe_globals()) == before
    with pytest.raises(pickle.UnpicklingError):
        torch.load(path, weights_only=True)


def test_threads_do_not_disturb_each_other(tmp_path: Path) -> None:
    path = save_published(tmp_path / "published.pth", {"a": torch.ones(2)})
    failures: list[Exception] = []

    def read() -> None:
        for _ in range(50):
            try:
                read_state_dict(path)
            except ValueError as error:
                failures.append(error)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


# ------------------------------------------------------------------------------------------------- damaged files


def zip_without_data(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/readme.txt", "nothing here")


DAMAGES: dict[str, Callable[[Path, bytes], Any]] = {
    "truncated.pth": lambda path, good: path.write_bytes(good[: len(good) // 2]),
    "truncated_early.pth": lambda path, good: path.write_bytes(good[:100]),
    "corrupted.pth": lambda path, good: path.write_bytes(good[:40] + bytes(1000) + good[1040:]),
    "empty.pth": lambda path, good: path.touch(),
    "text.pth": lambda path, good: path.write_text("These are not the weights you are looking for."),
    "zip.pth": lambda path, good: zip_without_data(path),
    "really_safetensors.pth": lambda path, good: safetensors.torch.save_file({"a": torch.ones(2)}, path),
    "really_pth.safetensors": lambda path, good: path.write_bytes(good),
    "empty.safetensors": lambda path, good: path.touch(),
    "truncated.safetensors": lambda path, good: path.write_bytes(safetensors.torch.save({"a": torch.ones(100)})[:-50]),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_are_refused(damage: str, tmp_path: Path) -> None:
    path = tmp_path / damage
    DAMAGES[damage](path, save_published(tmp_path / "good.pth", {"a": torch.ones(2000)}).read_bytes())
    model = make_once("inline_deit_tiny")
    with unchanged(model), pytest.raises(ValueError, match=r"is not a whole \w+ file .*: delete it and") as caught:
        load_checkpoint(model, path)
    assert_readable(caught.value, path)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("form", ["zip", "legacy", "safetensors"])
def test_damage_anywhere_is_a_value_error(form: str, tmp_path: Path) -> None:
    path = tmp_path / ("some.safetensors" if form == "safetensors" else "some.pth")
    weights = {"norm.weight": torch.ones(3), "norm.bias": torch.ones(3, dtype=torch.float16)}
    buffer = io.BytesIO()
    with yacs_installed():
        content = {"model": weights, "config": CfgNode({"A": {"B": 1.5}})}
        torch.save(content, buffer, _use_new_zipfile_serialization=form == "zip")
    good = safetensors.torch.save(weights) if form == "safetensors" else buffer.getvalue()
    generator, refused = random.Random(0), 0
    for i in range(300):
        bad = bytearray(good)
        if i % 3 == 0:
            del bad[generator.randrange(len(good)) :]
        else:
            bad[generator.randrange(len(good))] = generator.randrange(256)
        path.write_bytes(bad)
        try:
            read_state_dict(path)
        except ValueError as error:
            assert_readable(error, path)
            refused += 1
    assert refused > 100


@pytest.mark.filterwarnings("ignore:.*TorchScript", "ignore:.*torch.jit", "ignore::DeprecationWarning")
def test_torchscript_programs_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "script.pth"
    torch.jit.save(torch.jit.script(nn.Linear(2, 2)), path)
    with pytest.raises(
        ValueError, match=r"is a TorchScript program, which holds code: save the weights alone"
    ) as caught:
        read_state_dict(path)
    assert_readable(caught.value, path)


def test_missing_files_and_directories(tmp_path: Path) -> None:
    model = make("inline_deit_tiny")
    with unchanged(model):
        with pytest.raises(FileNotFoundError, match=r"no file at .*missing\.pth"):
            load_checkpoint(model, tmp_path / "missing.pth")
        with pytest.raises(FileNotFoundError, match="is a directory: name a file in it"):
            load_checkpoint(model, str(tmp_path))


CONTENTS: dict[str, Any] = {
    "tensor": torch.ones(2),
    "number": 3,
    "nothing": {},
    "list": [torch.ones(2)],
    "numbered": {0: torch.ones(2)},
    "numbers": {"model": {"a": 1.0}},
    "one tensor": {"model": torch.ones(3)},
    "sparse": {"model": {"norm.weight": torch.eye(3).to_sparse()}},
    "meta": {"model": {"norm.weight": torch.ones(3, device="meta")}},
    "only leftovers": {"optimizer": {"state": {}}, "epoch": 3},
}


@pytest.mark.filterwarnings("ignore:Validating sparse tensor")
@pytest.mark.parametrize("content", CONTENTS)
def test_files_without_weights_are_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "some.pth"
    torch.save(CONTENTS[content], path)
    model = make_once("inline_deit_tiny")
    with unchanged(model), pytest.raises(ValueError, match=r"holds no weights|not hold the weights|refused") as caught:
        load_checkpoint(model, path)
    assert str(path) in str(caught.value)


# ------------------------------------------------------------------------------------------------- other models' files


def test_a_larger_model_of_the_family_is_refused(shallow: Callable[[str], dict[str, Tensor]], tmp_path: Path) -> None:
    path = save_published(tmp_path / "tiny.pth", shallow("inline_deit_tiny"))
    model = timm.create_model("inline_deit_small", depth=1)
    with unchanged(model), pytest.raises(ValueError, match="does not hold the weights of this model") as caught:
        load_checkpoint(model, path)
    # All but the head's bias.
    count = len(model.state_dict()) - 1
    assert f"0 missing; 0 unexpected; {count} of another shape or type (stages.0.cls_token " in str(caught.value)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 1200


@pytest.mark.parametrize(
    "name",
    slow_except(["inline_deit_base", "inline_pvt_large", "inline_swin_tiny", "inline_cswin_base"], "inline_swin_tiny"),
)
def test_other_models_files_are_refused_in_few_words(name: str, parameters: dict[str, Any], tmp_path: Path) -> None:
    path = save_published(tmp_path / "other.pth", hollow(parameters[name]))
    for other in FAMILIES:
        if other == name:
            continue
        model = make(other)
        with unchanged(model), pytest.raises(ValueError, match="Choose the model that the file was made for") as caught:
            load_checkpoint(model, path)
        assert re.search(r"\d+ missing.*\d+ unexpected.*\d+ of another shape", str(caught.value))
        assert len(str(caught.value)) < 1200


def test_numbers_of_missing_and_unexpected_names(shallow: Callable[[str], dict[str, Tensor]], tmp_path: Path) -> None:
    weights = shallow("inline_pvt_tiny")
    del weights["block1.0.norm1.weight"], weights["block1.0.attn.kv.bias"]
    weights |= {f"extra{i}": torch.ones(1) for i in range(7)}
    weights["x" * 5000] = torch.ones(1)
    model = make("inline_pvt_tiny")
    with unchanged(model), pytest.raises(ValueError, match="1 missing") as caught:
        load_checkpoint(model, save_published(tmp_path / "some.pth", weights))
    assert "1 missing (stages.0.blocks.0.norm1.weight)" in str(caught.value)
    assert "8 unexpected (extra0, extra1, extra2, …)" in str(caught.value)
    assert "1 of another shape or type (stages.0.blocks.0.attn.qkv.bias float32 (64,) for" in str(caught.value)
    weights = {key: value for key, value in weights.items() if not key.startswith("extra")}
    with pytest.raises(ValueError, match="1 unexpected") as caught:
        load_checkpoint(model, save_published(tmp_path / "some.pth", weights))
    assert len(str(caught.value)) < 1200


MISFITS: dict[str, dict[str, Tensor]] = {
    "scalars": {"block1.0.attn.q.weight": torch.tensor(1.0)},
    "scalar first conv": {"patch_embed1.proj.weight": torch.tensor(1.0)},
    "parts of other widths": {"block1.0.attn.q.weight": torch.ones(64, 32)},
    "no positions": {"pos_embed1": torch.ones(1, 0, 64)},
    "flat positions": {"pos_embed1": torch.ones(64)},
    "two sets of positions": {"pos_embed1": torch.ones(2, 3136, 64)},
    "whole numbers": {"block1.0.norm1.weight": torch.ones(64, dtype=torch.int8)},
    "sparse numbers": {"block1.0.norm1.weight": torch.ones(64).to_sparse()},
    "no numbers": {"block1.0.norm1.weight": torch.ones(64, device="meta")},
    "complex numbers": {"block1.0.norm1.weight": torch.ones(64, dtype=torch.complex64)},
    "twice": {"block1.0.attn.local_residual.fc1.bias": torch.ones(64)},
    "names of both kinds": {"stages.0.blocks.0.norm1.weight": torch.ones(64)},
    "joined and in parts": {"block1.0.attn.qkv.weight": torch.ones(192, 64)},
}


@pytest.mark.filterwarnings("ignore:Validating sparse tensor")
@pytest.mark.parametrize("misfit", MISFITS)
def test_misfits_are_refused(misfit: str, shallow: Callable[[str], dict[str, Tensor]], tmp_path: Path) -> None:
    path = save_published(tmp_path / "some.pth", {**shallow("inline_pvt_tiny"), **MISFITS[misfit]})
    model = make("inline_pvt_tiny", in_chans=4)
    refusal = r"not hold the weights|holds no weights|twice|do not fit together"
    with unchanged(model), pytest.raises(ValueError, match=refusal):
        load_checkpoint(model, path)


@pytest.mark.parametrize("table", [torch.ones(168, 24), torch.ones(0, 24), torch.ones(24), torch.ones(169, 12)])
def test_misfit_relative_positions_are_refused(
    table: Tensor, shallow: Callable[[str], dict[str, Tensor]], tmp_path: Path
) -> None:
    weights = {**shallow("inline_swin_tiny"), "layers.3.blocks.0.attn.relative_position_bias_table": table}
    model = make("inline_swin_tiny")
    with unchanged(model), pytest.raises(ValueError, match="1 of another shape or type"):
        load_checkpoint(model, save_published(tmp_path / "some.pth", weights))


@pytest.mark.parametrize("in_chans", [1, 2, 3])
def test_channels_that_cannot_be_adapted_are_refused(in_chans: int, tmp_path: Path) -> None:
    torch.save(make("inline_pvt_tiny", in_chans=5).state_dict(), tmp_path / "five.pth")
    model = make("inline_pvt_tiny", in_chans=in_chans)
    with (
        unchanged(model),
        pytest.raises(ValueError, match=r"stages\.0\.patch_embed\.proj\.weight float32 \(64, 5, 4, 4\)"),
    ):
        load_checkpoint(model, tmp_path / "five.pth")


# ------------------------------------------------------------------------------------------------- heads


def head(weight: Tensor | None, bias: Tensor | None) -> dict[str, Tensor]:
    return {f"head.{name}": value for name, value in (("weight", weight), ("bias", bias)) if value is not None}


HEADS: dict[str, dict[str, Tensor]] = {
    "scalar weight": head(torch.tensor(1.0), torch.ones(5)),
    "two scalars": head(torch.tensor(1.0), torch.tensor(1.0)),
    "no rows": head(torch.ones(0, 512), torch.ones(0)),
    "no columns": head(torch.ones(5, 0), torch.ones(5)),
    "flat weight": head(torch.ones(5), torch.ones(5)),
    "bias of other classes": head(torch.ones(5, 512), torch.ones(6)),
    "bias of the model's classes": head(torch.ones(5, 512), torch.ones(1000)),
    "weight of the model's classes": head(torch.ones(1000, 512), torch.ones(5)),
    "bias with two dimensions": head(torch.ones(5, 512), torch.ones(5, 1)),
    "scalar bias": head(torch.ones(5, 512), torch.tensor(1.0)),
    "other channels": head(torch.ones(5, 256), torch.ones(5)),
    "a convolution": head(torch.ones(5, 512, 1, 1), torch.ones(5)),
    "integers": head(torch.ones(5, 512, dtype=torch.int64), torch.ones(5)),
    "booleans": head(torch.ones(5, 512), torch.ones(5, dtype=torch.bool)),
    "no weight": head(None, torch.ones(5)),
    "no bias": head(torch.ones(5, 512), None),
    "none": head(None, None),
}


@pytest.mark.parametrize("form", slow_except(["pth", "safetensors"], "safetensors"))
@pytest.mark.parametrize("malformed", HEADS)
def test_malformed_heads_are_refused(
    malformed: str, form: str, shallow: Callable[[str], dict[str, Tensor]], tmp_path: Path
) -> None:
    weights = {name: value for name, value in shallow("inline_pvt_tiny").items() if not name.startswith("head.")}
    path = tmp_path / f"some.{form}"
    save = safetensors.torch.save_file if form == "safetensors" else torch.save
    save({**weights, **HEADS[malformed]}, path)
    for num_classes in (1000, 5):
        model = make_once("inline_pvt_tiny", num_classes=num_classes)
        with (
            unchanged(model),
            pytest.raises(ValueError, match=r"malformed head, head\.|not hold the weights") as caught,
        ):
            load_checkpoint(model, path)
        assert str(path) in str(caught.value)


def test_a_head_for_other_classes_is_left_out_with_a_warning(
    shallow: Callable[[str], dict[str, Tensor]], tmp_path: Path
) -> None:
    path = save_published(tmp_path / "published.pth", shallow("inline_pvt_tiny"))
    model = make("inline_pvt_tiny", num_classes=5)
    before = {name: value.clone() for name, value in model.head.state_dict().items()}
    with pytest.warns(UserWarning, match="is for 1000 classes and the model has 5: the head is not loaded") as warned:
        load_checkpoint(model, path)
    assert len(warned) == 1
    assert_same(model.head.state_dict(), before)
    assert torch.equal(model.stages[0].patch_embed.norm.weight, shallow("inline_pvt_tiny")["patch_embed1.norm.weight"])
    with unchanged(model), pytest.raises(ValueError, match="has a head for 1000 classes, but 5 are needed"):
        load_checkpoint(model, path, new_head=False)
    # Nothing to say where there is no head, or the right one.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_checkpoint(make("inline_pvt_tiny", num_classes=0), path)
        load_checkpoint(make("inline_pvt_tiny"), path, new_head=False)


# ------------------------------------------------------------------------------------------------- unusual tensors


def quantized(shape: tuple[int, ...]) -> Tensor:
    return torch.quantize_per_tensor(torch.ones(shape), 0.1, 0, torch.qint8)


UNUSUAL: dict[str, Callable[[], Tensor]] = {
    "quantized": lambda: quantized((512,)),
    "quantized by channel": lambda: torch.quantize_per_channel(
        torch.ones(512, 1), torch.ones(512), torch.zeros(512), 0, torch.qint8
    ),
    "sparse": lambda: torch.ones(512).to_sparse(),
    "sparse_csr": lambda: torch.eye(512).to_sparse_csr(),
    "meta": lambda: torch.ones(512, device="meta"),
    "complex": lambda: torch.ones(512, dtype=torch.complex64),
    "conjugated": lambda: torch.ones(512, dtype=torch.complex64).conj(),
    "float8": lambda: torch.ones(512).to(torch.float8_e4m3fn),
    "int64": lambda: torch.ones(512, dtype=torch.int64),
    "bool": lambda: torch.ones(512, dtype=torch.bool),
    "uint16": lambda: torch.ones(512).to(torch.uint16),
    "giant": lambda: torch.ones(1).expand(10**12),
    "giant matrix": lambda: torch.ones(1, 1).expand(10**9, 10**9),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(3), torch.ones(4)]),
    "empty": lambda: torch.ones(0),
    "scalar": lambda: torch.tensor(1.0),
}
PLACES_OF_UNUSUAL = [
    "patch_embed1.norm.weight",
    "head.weight",
    "pos_embed1",
    "block1.0.attn.q.weight",
    "patch_embed1.proj.weight",
]


@pytest.mark.filterwarnings("ignore:Validating sparse tensor", "ignore:Sparse CSR", "ignore:The PyTorch API of nested")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:.*quantiz")
@pytest.mark.parametrize("place", slow_except(PLACES_OF_UNUSUAL, "head.weight"))
@pytest.mark.parametrize("kind", UNUSUAL)
def test_unusual_tensors_are_refused(
    kind: str, place: str, shallow: Callable[[str], dict[str, Tensor]], tmp_path: Path
) -> None:
    path = tmp_path / "some.pth"
    try:
        value = UNUSUAL[kind]()
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"this build of torch cannot make one: {error}")
    torch.save({**shallow("inline_pvt_tiny"), place: value}, path)
    model = make_once("inline_pvt_tiny", in_chans=1, img_size=96)
    with unchanged(model), pytest.raises(ValueError, match=r"weights|malformed head|do not fit together") as caught:
        load_checkpoint(model, path)
    message = str(caught.value)
    assert "\n" not in message
    assert "weights_only" not in message
    assert len(message) < 1200


def test_tensors_that_need_no_values_of_their_own_may_stand_elsewhere(tmp_path: Path) -> None:
    """What is beside the weights is not read: it may be anything that runs no code."""
    path = tmp_path / "some.pth"
    beside = {"sparse": torch.eye(3).to_sparse(), "giant": torch.ones(1).expand(10**12), "set": {1, "a"}, "b": b"xyz"}
    torch.save(
        {"model": {"a": torch.ones(2)}, "optimizer": beside, "dtype": torch.float32, "size": torch.Size([3])}, path
    )
    assert torch.equal(read_state_dict(path)["a"], torch.ones(2))


def test_many_small_claims_on_one_storage_are_refused(tmp_path: Path) -> None:
    """Each is as large as the storage; copies of all of them would not fit into memory."""
    path = tmp_path / "some.pth"
    whole = torch.zeros(2**20)
    torch.save({f"weight{i}": whole.view(2**10, 2**10) for i in range(3000)}, path)
    assert path.stat().st_size < 2**23
    with pytest.raises(ValueError, match="by repeating numbers"):
        read_state_dict(path)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool]
)
@pytest.mark.parametrize("form", ["zip", "legacy", "protocol 4", "protocol 5", "safetensors"])
def test_tensors_are_read_as_they_were_written(dtype: torch.dtype, form: str, tmp_path: Path) -> None:
    whole = torch.randn(6, 8).mul(3).to(dtype)
    weights = {
        "whole": whole,
        "transposed": whole.t(),
        "part": whole[2:5, 1::3],
        "row": whole[3],
        "scalar": whole[1, 1],
        "empty": whole[:0],
        "repeated": whole[:1].expand(4, 8),
        "parameter": nn.Parameter(whole.clone(), requires_grad=False),
    }
    path = tmp_path / ("some.safetensors" if form == "safetensors" else "some.bin")
    if form == "safetensors":
        safetensors.torch.save_file({name: value.clone().contiguous() for name, value in weights.items()}, path)
    elif form.startswith("protocol"):
        torch.save(weights, path, pickle_protocol=int(form[-1]))
    else:
        torch.save(weights, path, _use_new_zipfile_serialization=form == "zip")
    found = read_state_dict(path)
    assert_same(found, weights)
    assert all(value.dtype == dtype for value in found.values())
    if form != "safetensors":
        assert found["row"].untyped_storage().data_ptr() == found["whole"].untyped_storage().data_ptr()
        assert found["transposed"].stride() == (1, 8)


def test_a_flipped_bit_in_a_tensor_is_warned_of(tmp_path: Path) -> None:
    path = tmp_path / "some.pth"
    torch.save({"a": torch.arange(4.0)}, path)
    content = bytearray(path.read_bytes())
    content[content.index(torch.arange(4.0).numpy().tobytes()) + 5] ^= 1
    path.write_bytes(content)
    with pytest.warns(UserWarning, match="do not match their checksums"):
        read_state_dict(path)


# ------------------------------------------------------------------------------------------------- hostile archives


def rezip(path: Path, change: Callable[[str, bytes], bytes | None], **options: Any) -> None:
    """Write the records of an archive again, changed or left out."""
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", **options) as archive:
        for name, content in records.items():
            changed = change(name, content)
            if changed is not None:
                archive.writestr(name, changed)


def add_twice(path: Path) -> None:
    with zipfile.ZipFile(path, "a") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        archive.writestr(archive.namelist()[0], b"")


ARCHIVES: dict[str, tuple[Callable[[Path], None], str]] = {
    "deflated": (lambda path: rezip(path, lambda _, old: old, compression=zipfile.ZIP_DEFLATED), "compressed records"),
    "no storage": (lambda path: rezip(path, lambda name, old: None if "/data/" in name else old), "lacks the record"),
    "short storage": (lambda path: rezip(path, lambda name, old: old[:8] if "/data/" in name else old), "another size"),
    "byte order": (lambda path: rezip(path, lambda name, old: b"big" if "byteorder" in name else old), "byte order"),
    "twice": (add_twice, "two records of one name"),
}


@pytest.mark.parametrize("archive", ARCHIVES)
def test_hostile_archives_are_refused(archive: str, tmp_path: Path) -> None:
    path = tmp_path / "some.pth"
    torch.save({"a": torch.zeros(2**20)}, path)
    change, message = ARCHIVES[archive]
    change(path)
    with pytest.raises(ValueError, match=rf"not a whole PyTorch file \(it .*{message}|{message}") as caught:
        read_state_dict(path)
    assert_readable(caught.value, path)


def test_lengths_that_lie_are_refused(tmp_path: Path) -> None:
    """A tensor that is larger than its record must not be read from other memory."""
    path = tmp_path / "some.pth"
    for old, new in (
        (b"K\x04t", b"J\x00\x00\x00\x10t"),
        (b"K\x04\x85", b"J\x00\x00\x00\x10\x85"),
        (b"K\x01\x85", b"K\x7f\x85"),
    ):
        torch.save({"a": torch.arange(4.0)}, path)
        rezip(path, lambda name, content: content.replace(old, new, 1) if "data.pkl" in name else content)  # noqa: B023
        with pytest.raises(ValueError, match=r"another size than the tensor|larger than its storage"):
            read_state_dict(path)


PROGRAMS: dict[str, bytes] = {
    "deeply nested": b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b".",
    "nested key": b"\x80\x02}" + b")" + b"\x85" * 200_000 + b"K\x01s.",
    "doubling key": b"\x80\x02})" + b"2\x86" * 60 + b"K\x01s.",
    "large number as a name": b"\x80\x02}\x8b" + (4000).to_bytes(4, "little") + b"\x7f" * 4000 + b"K\x01s.",
    "long name that is missing": b"\x80\x04\x8d" + (2**60).to_bytes(8, "little") + b"x.",
    "nothing left": b"\x80\x020.",
    "build on a function": b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n}b.",
    "call of a call": b"\x80\x02ccollections\nOrderedDict\n)R)R.",
    "attribute of a class": b"\x80\x04\x8c\x05torch\x8c\x0cTensor.shape\x93.",
    "extension": b"\x80\x02\x82\x01.",
    "object of a class": b"(itorch\nTensor\n.",
    "copies again and again": b"\x80\x02]("
    + b"K\x01" * 60_000
    + b"eq\x00"
    + b"cbuiltins\nset\nh\x00\x85R0" * 300
    + b"h\x00.",
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_hostile_programs_end_at_once(program: str, tmp_path: Path) -> None:
    path = tmp_path / "some.pth"
    torch.save({"a": torch.zeros(2)}, path)
    rezip(path, lambda name, old: PROGRAMS[program] if "data.pkl" in name else old)
    start = time.process_time()
    with pytest.raises(ValueError, match=r"not a whole|refused|holds no weights") as caught:
        read_state_dict(path)
    assert time.process_time() - start < 20
    assert_readable(caught.value, path)


def test_many_wrappers_end_at_once(tmp_path: Path) -> None:
    path = tmp_path / "some.pth"
    torch.save({"module." * 100_000 + "a": torch.zeros(2)}, path)
    start = time.process_time()
    read_state_dict(path)
    assert time.process_time() - start < 20


def test_names_do_not_break_messages(shallow: Callable[[str], dict[str, Tensor]], tmp_path: Path) -> None:
    path = tmp_path / "some.pth"
    torch.save({**shallow("inline_pvt_tiny"), "evil\n\x1b[31mname": torch.ones(1)}, path)
    with pytest.raises(ValueError, match=r"evil \?\[31mname"):
        load_checkpoint(make("inline_pvt_tiny"), path)


def test_marks_of_parts_are_not_taken_from_files(shallow: Callable[[str], dict[str, Tensor]], tmp_path: Path) -> None:
    weights = shallow("inline_pvt_tiny")
    weights["head.bias#3"] = weights.pop("head.bias")
    torch.save(weights, tmp_path / "some.pth")
    with pytest.raises(ValueError, match=r"1 missing \(head\.bias\); 1 unexpected \(head\.bias#3\)"):
        load_checkpoint(make("inline_pvt_tiny"), tmp_path / "some.pth")


@pytest.mark.parametrize("ending", [".pth", ".safetensors"])
def test_only_regular_files_are_read(ending: str, tmp_path: Path) -> None:
    pipe, loop = tmp_path / f"pipe{ending}", tmp_path / f"loop{ending}"
    os.mkfifo(pipe)
    loop.symlink_to(loop)
    with pytest.raises(OSError, match="is a named pipe, not a regular file"):
        read_state_dict(pipe)
    with pytest.raises(OSError, match="symbolic links"):
        read_state_dict(loop)
    link = tmp_path / f"link{ending}"
    link.symlink_to("/dev/zero")
    with pytest.raises(OSError, match="is a character device, not a regular file"):
        read_state_dict(link)


def test_reading_leaves_torchs_list_of_allowed_classes_alone(tmp_path: Path) -> None:
    """Other threads use it at the same time."""
    published = save_published(tmp_path / "published.pth", {"a": torch.ones(2)})
    other = tmp_path / "namespace.pth"
    torch.save(argparse.Namespace(lr=1), other)
    stop, failures = threading.Event(), []

    def use() -> None:
        while not stop.is_set():
            try:
                torch.load(other, weights_only=True)
            except pickle.UnpicklingError as error:
                failures.append(error)

    with torch.serialization.safe_globals([argparse.Namespace]):
        thread = threading.Thread(target=use)
        thread.start()
        for _ in range(200):
            read_state_dict(published)
        stop.set()
        thread.join()
    assert failures == []
