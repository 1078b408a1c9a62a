"""Gate, LePE, RoPE and convolutions around attention: parameters, refusals, and every route that bypasses forward."""

from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.models import create_model
from timm.models._features_fx import create_feature_extractor
from torch import Tensor, nn

import inlinevit
from inlinevit import kernels
from inlinevit.analysis.hooks import run_masked, watch
from inlinevit.analysis.layer import Layer
from inlinevit.export.program import export_program
from inlinevit.layers import ATTENTIONS, AttentionAdapter, BaseAttention, InLineAttention, Surroundings, _chunks
from inlinevit.layers._inference_block import InferenceBlock, is_native
from inlinevit.layers.block import Block, DWConvMlp, ResidualConvMlp
from inlinevit.layers.surroundings import ResidualConv
from inlinevit.ops.inline import select_path
from tests import slow_except

ALL = {"gate": True, "lepe": 5, "rope": True, "cpe": True, "mlp_conv": True}
COMMON = {"gate": True, "lepe": 3}
NOTHING = {"gate": False, "lepe": 0, "rope": False, "cpe": False, "mlp_conv": False}
DEIT = {"depth": 2, "embed_dim": 32, "num_heads": 4, "img_size": 64, "num_classes": 5}
PYRAMID = {"depths": (1, 2), "num_heads": (2, 4), "img_size": 64, "num_classes": 5}
# All families, whole maps and windows, with softmax attention among them.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "deit": ("inline_deit_tiny", DEIT),
    "deit, pooling": ("inline_deit_tiny", {**DEIT, "class_token": False, "global_pool": "avg"}),
    "softmax deit": ("softmax_deit_tiny", DEIT),
    "linear deit": ("linear_deit_tiny", DEIT),
    "focused deit": ("focused_deit_tiny", DEIT),
    "mala deit": ("mala_deit_tiny", DEIT),
    "rala deit": ("rala_deit_tiny", DEIT),
    "polaformer deit": ("polaformer_deit_tiny", DEIT),
    "pvt": (
        "inline_pvt_tiny",
        {**PYRAMID, "embed_dims": (16, 32), "mlp_ratios": (2.0, 2.0), "window_size": 5},
    ),
    "swin": ("inline_swin_tiny", {**PYRAMID, "embed_dim": 16, "attention": ("inline", "softmax"), "window_size": 5}),
    "cswin": ("inline_cswin_tiny", {**PYRAMID, "embed_dim": 16, "attention": "inline", "window_size": 3}),
    "mala cswin": ("inline_cswin_tiny", {**PYRAMID, "embed_dim": 16, "attention": "mala", "window_size": 3}),
}
every_model = pytest.mark.parametrize("kind", MODELS)


def make(kind: str, surroundings: dict[str, Any], **options: Any) -> nn.Module:
    """A small model whose every part counts."""
    name, arguments = MODELS[kind]
    torch.manual_seed(0)
    model = create_model(name, **{**arguments, **options}, attn_kwargs=surroundings).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.5 / max(1, parameter[0].numel()) ** 0.5))
    return model


def images(*size: int, batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, *size, generator=torch.Generator().manual_seed(1))


def assert_equal(found: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    assert expected.std(dim=0).max() > 1e-3, "the images give the same, so that nothing can differ"
    assert (found - expected).norm() <= tolerance * expected.norm()


# What they are


def test_blocks_are_the_formula():
    """x + conv(x), x + proj(gate ⊙ attention), x + fc2(t + conv(t)); the class token has no convolution."""
    model = make("deit", ALL).double()
    block: Any = model.stages[0].blocks[0]
    x = torch.randn(2, 1 + 15, 32, dtype=torch.float64)

    def on_map(tokens: Tensor, conv: nn.Conv2d) -> Tensor:
        maps = tokens[:, 1:].transpose(1, 2).unflatten(2, (3, 5))
        convolved = F.conv2d(maps, conv.weight, conv.bias, padding=1, groups=len(maps[0]))
        return torch.cat([tokens[:, :1], tokens[:, 1:] + convolved.flatten(2).transpose(1, 2)], dim=1)

    with torch.no_grad():
        expected = on_map(x, block.cpe)
        normed = block.norm1(expected)
        attention = block.attn
        gate, attention.gate, proj = attention.gate, None, attention.proj
        attention.proj = nn.Identity()
        attended = attention(normed, (3, 5))
        attention.gate, attention.proj = gate, proj
        expected = expected + proj(attended * gate(normed))
        hidden = on_map(F.gelu(block.mlp.fc1(block.norm2(expected))), block.mlp.conv)
        expected = expected + block.mlp.fc2(hidden)
        torch.testing.assert_close(block(x, (3, 5)), expected)


@every_model
def test_each_of_them_counts_and_gets_gradients(kind):
    model = make(kind, ALL)
    # With a class token at the end, the last block's convolutions of the map count for nothing.
    x = images(64, 96)
    model(x).square().sum().backward()
    last = len(model.stages) - 1, len(model.stages[-1].blocks) - 1
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        if f"stages.{last[0]}.blocks.{last[1]}" not in name:
            assert parameter.grad.abs().max() > 0, name
    if kind in ("deit", "swin", "mala deit"):
        for name in ALL:
            assert not torch.allclose(make(kind, {**ALL, name: NOTHING[name]})(x), model(x)), name


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_every_attention_can_be_plain_and_have_the_common_surroundings(attention):
    kind = ATTENTIONS[attention]
    settings = {**DEIT, "attention": attention}
    if not kind.supports_prefix_tokens:
        settings |= {"class_token": False, "global_pool": "avg"}
    plain = create_model("inline_deit_tiny", **settings, attn_kwargs=NOTHING)
    for block in plain.stages[0].blocks:
        assert (block.attn.gate, block.attn.lepe, block.attn.rope, block.cpe) == (None, None, False, None)
        assert not isinstance(block.mlp, ResidualConvMlp)
    common = create_model("inline_deit_tiny", **settings, attn_kwargs={**NOTHING, **COMMON})
    added = sum(p.numel() for p in common.parameters()) - sum(p.numel() for p in plain.parameters())
    # The convolution of ViT³ is a further head.
    inner = common.stages[0].blocks[0].attn.proj.in_features
    assert inner == (40 if attention == "vit3" else 32)
    assert added == 2 * (32 * inner + inner + 9 * inner + inner)
    assert common(images(64, 64)).shape == (2, 5)


def test_defaults_of_attentions():
    assert {name: kind.surroundings for name, kind in ATTENTIONS.items() if kind.surroundings != Surroundings()} == {
        "mala": Surroundings(gate=True, lepe=5, rope=True),
        "rala": Surroundings(gate=True, lepe=5, rope=True),
        "polaformer": Surroundings(gate=True),
        "agent": Surroundings(lepe=3),
        "vit3": Surroundings(cpe=True),
        "mhla": Surroundings(lepe=5),
        "circulant": Surroundings(gate=True, cpe=True),
    }


@pytest.mark.parametrize("name", ["mala_deit_tiny", "rala_deit_tiny"])
@pytest.mark.parametrize(
    ("given", "parameters"),
    [
        (None, 6_337_192),
        ({}, 6_337_192),
        ({"mlp_conv": False}, 6_245_032),
        ({"cpe": False, "mlp_conv": False}, 6_221_992),
        (NOTHING, 5_717_416),
        ({**NOTHING, "gate": True}, 5_717_416 + 12 * 37_056),
        ({**NOTHING, "lepe": 5}, 5_717_416 + 12 * 4_992),
        ({**NOTHING, "rope": True}, 5_717_416),
    ],
)
def test_parameters_of_mala_and_rala(name, given, parameters):
    options = {} if given is None else {"attn_kwargs": given}
    model = create_model(name, device="meta", **options)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


@pytest.mark.parametrize(("heads", "parameters"), [(3, 6_640_552), (6, 6_630_568)])
def test_parameters_of_polaformer(heads, parameters):
    model = create_model("polaformer_deit_tiny", device="meta", num_heads=heads)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


def test_published_names_of_lepe_stay():
    model = create_model("inline_cswin_tiny", device="meta")
    assert model.state_dict()["stages.0.blocks.0.attn.lepe.weight"].shape == (64, 1, 3, 3)
    model = create_model("inline_cswin_tiny", device="meta", attn_kwargs={"lepe": 0})
    assert "stages.0.blocks.0.attn.lepe.weight" not in model.state_dict()


def test_weight_decay_and_initialisation():
    model = create_model("polaformer_deit_tiny", depth=1, attn_kwargs={"lepe": 3, "cpe": True, "mlp_conv": True})
    block = "stages.0.blocks.0.attn."
    assert model.no_weight_decay() >= {block + name for name in ("pos_embed", "spread", "power")}
    attn: Any = model.stages[0].blocks[0].attn
    assert 0.015 < attn.gate.weight.std() < 0.025
    assert torch.all(attn.gate.bias == 0)
    for parameter in (attn.pos_embed, attn.spread, attn.power):
        assert torch.all(parameter == 0)
    meta = create_model("mala_deit_tiny", depth=1, device="meta").to_empty(device="cpu")
    for parameter in meta.parameters():
        nn.init.constant_(parameter, float("nan"))
    meta.init_weights()
    assert all(parameter.isfinite().all() for parameter in meta.parameters())


# Routes


def assert_optimized(kind: str, surroundings: dict[str, Any]) -> None:
    model = make(kind, surroundings)
    optimized = inlinevit.optimize_for_inference(model, compile=False)
    with torch.no_grad():
        assert_equal(optimized(images(75, 98)), model(images(75, 98)))


@every_model
def test_optimized_for_inference(kind):
    """With a class token, the last block computes that alone."""
    assert_optimized(kind, ALL)


@pytest.mark.parametrize(
    "surroundings", [COMMON, *({name: value} for name, value in ALL.items()), {"lepe": 1}], ids=str
)
@pytest.mark.parametrize("kind", ["deit", "softmax deit", "cswin"])
def test_each_optimized_for_inference(kind, surroundings):
    assert_optimized(kind, surroundings)


@pytest.mark.slow
def test_compiled_for_inference():
    model = make("deit", ALL)
    optimized = inlinevit.optimize_for_inference(model)
    with torch.no_grad():
        for size in ((64, 64), (75, 98)):
            assert_equal(optimized(images(*size)), model(images(*size)), 1e-4)


def test_native_blocks_are_those_that_the_kernel_computes():
    if not kernels.available():
        pytest.skip("there are no native kernels")
    for surroundings, expected in (({}, True), ({"lepe": 3}, True), *(({name: ALL[name]}, False) for name in ALL)):
        block: Any = make("deit", surroundings).stages[0].blocks[0]
        InferenceBlock.replace(block)
        assert is_native(block) == expected, surroundings


@pytest.mark.parametrize("surroundings", [ALL, {"gate": True, "lepe": 3}])
def test_int8(surroundings):
    if not kernels.available():
        pytest.skip("there are no native kernels")
    for kind in ("deit", "swin", "mala deit"):
        model = make(kind, surroundings)
        with torch.no_grad():
            expected = model(images(64, 96))
            found = inlinevit.optimize_for_inference(model, dtype="int8", compile=False)(images(64, 96))
        assert_equal(found, expected, 0.05)
        assert not torch.equal(found, expected)


@every_model
def test_chunked_blocks(kind, monkeypatch):
    model, x = make(kind, ALL), images(64, 96, batch=3)
    with torch.no_grad():
        expected = model(x)
        monkeypatch.setattr(_chunks, "CHUNK", 2**9)
        calls = []
        forward_chunked = Block.forward_chunked
        monkeypatch.setattr(Block, "forward_chunked", lambda *a: calls.append(1) or forward_chunked(*a))
        assert_equal(model(x), expected)
    assert calls


@pytest.mark.parametrize("surroundings", [{"gate": True}, {"gate": True, "lepe": 3}, {"lepe": 1}, {"rope": True}])
@pytest.mark.parametrize("kind", ["deit", "swin", "cswin"])
def test_native_attention_keeps_its_path(kind, surroundings):
    if not kernels.available():
        pytest.skip("there are no native kernels")
    model = make(kind, surroundings)
    attn = next(module for module in model.modules() if isinstance(module, InLineAttention))
    size = (12, 9)
    x = torch.randn(2, attn.num_prefix_tokens + 108, attn.dim)
    assert select_path(attn.path_params(x, attn.windows(x, size))) == "native"
    with torch.no_grad():
        found = attn(x, size)
        attn.path = "covariance"
        assert_equal(found, attn(x, size))


@pytest.mark.parametrize(("surroundings", "path"), [({"gate": True, "lepe": 5}, "folded"), ({"lepe": 7}, "folded")])
def test_folded_attention(surroundings, path):
    attn: Any = make("deit", surroundings).stages[0].blocks[0].attn
    x = torch.randn(2, 1 + 135, 32)
    with torch.no_grad():
        attn.path = path
        found = attn(x, (9, 15))
        attn.path = "covariance"
        assert_equal(found, attn(x, (9, 15)))


def test_paths_that_cannot_have_them_are_refused():
    x = torch.randn(1, 15, 16)
    with pytest.raises(ValueError, match="'folded' is not possible here: rope rotates queries and keys"):
        InLineAttention(16, 4, rope=True, path="folded")(x, (3, 5))
    if kernels.available():
        with pytest.raises(ValueError, match="'native' is not possible here: lepe has a side of 5"):
            InLineAttention(16, 4, lepe=5, path="native")(x, (3, 5))


@every_model
def test_explicit_weights_and_hooks(kind):
    """The output of each layer, from its N×N weights and its convolution, gives the output of the model."""
    model, x = make(kind, ALL), images(64, 48)
    with torch.no_grad():
        expected = model(x)
        layers: list[Layer] = []
        assert_equal(watch(model, x, layers.append), expected)
        for layer in layers:
            assert layer.q.shape == layer.k.shape
            assert layer.v.shape[:3] == layer.k.shape[:3]
            assert layer.attention_weights(0, 1).shape == (*layer.q.shape[:2], 1, layer.k.shape[2])
        everything = run_masked(
            model, x, lambda layer, first, last: torch.ones(layer.windows, last - first, layer.k.shape[2], dtype=bool)
        )
        assert_equal(everything, expected, 1e-4)


@every_model
def test_fx_checkpointing_and_autocast(kind):
    model, x = make(kind, ALL), images(64, 64)
    expected = model(x)
    with torch.no_grad():
        assert_equal(create_feature_extractor(model, ["head"])(x)["head"], expected)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert_equal(model(x).float(), expected, 0.1)
    (gradient,) = torch.autograd.grad(expected.square().sum(), model.stages[0].blocks[0].cpe.weight)
    model.train().set_grad_checkpointing()
    (again,) = torch.autograd.grad(model(x).square().sum(), model.stages[0].blocks[0].cpe.weight)
    torch.testing.assert_close(again, gradient)


EXPORTED = ["deit", "mala deit", "rala deit", "polaformer deit", "swin"]


@pytest.mark.integration
@pytest.mark.parametrize("kind", slow_except(EXPORTED, "mala deit"))
def test_exported_programs_take_any_size(kind):
    model = make(kind, ALL, **({} if kind == "swin" else {"depth": 1}))
    module = export_program(model, 3).module(check_guards=False)
    for shape in ((2, 64, 64), (3, 97, 130), (1, 33, 40)):
        x = images(*shape[1:], batch=shape[0])
        with torch.no_grad():
            torch.testing.assert_close(module(x), model(x), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("attention", ["inline", "mala", "rala", "polaformer"])
def test_replaced_attention(attention):
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", depth=2, embed_dim=48, img_size=64, num_classes=5).eval()
    inlinevit.replace_attention(model, attention, gate=True, lepe=5, rope=True)
    x = torch.randn(2, 17, 48)
    for block in model.blocks:
        adapter = block.attn
        assert isinstance(adapter, AttentionAdapter)
        own: BaseAttention = adapter.attention
        assert own.gate is not None
        assert own.lepe.kernel_size == (5, 5)
        assert own.rope
        nn.init.normal_(own.gate.weight)
        with torch.no_grad():
            assert_equal(adapter(x), own(x, (4, 4)))
            keys = torch.ones(2, 1, 1, 17, dtype=torch.bool)
            assert_equal(adapter(x, attn_mask=keys), own(x, (4, 4)))
    assert model(images(64, 64)).shape == (2, 5)
    for name in ("cpe", "mlp_conv"):
        with pytest.raises(ValueError, match=f"{name} is a part of the block.*: use {name}=False"):
            inlinevit.replace_attention(timm.create_model("vit_tiny_patch16_224", depth=1), attention, **{name: True})


@pytest.mark.parametrize(
    "kind", ["deit", "deit, pooling", "softmax deit", "linear deit", "focused deit", "pvt", "cswin"]
)
@pytest.mark.parametrize("rows", [1, 3])
def test_streams(kind, rows):
    model = make(kind, {**ALL, "rope": False})
    image = images(70, 133, batch=1)
    with torch.no_grad():
        expected = model(image)
    out = inlinevit.stream(model, image, chunk_rows=rows)
    assert (out - expected).norm() <= 1e-5 * expected.norm()
    plain = make(kind, NOTHING if "softmax" not in kind else {})
    with torch.no_grad():
        assert (plain(image) - expected).norm() > 0.01 * expected.norm()


def test_what_cannot_be_streamed_is_refused():
    for kind, surroundings, problem in (
        ("deit", {"rope": True}, "attention with rope cannot be streamed.*: use a model without rope"),
        ("mala deit", NOTHING, "MALAAttention cannot be streamed: use a model with attention of"),
        ("polaformer deit", {}, "PolaFormerAttention cannot be streamed: use a model with attention of"),
    ):
        with pytest.raises(ValueError, match=problem):
            inlinevit.stream(make(kind, surroundings), images(64, 64, batch=1))


# Refusals


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"gate": 1}, "gate in attn_kwargs is 1: it should be true or false"),
        ({"rope": "yes"}, "rope in attn_kwargs is yes: it should be true or false"),
        ({"cpe": None}, "cpe in attn_kwargs is None: it should be true or false"),
        ({"mlp_conv": 3}, "mlp_conv in attn_kwargs is 3: it should be true or false"),
        ({"lepe": True}, "lepe in attn_kwargs is True: it should be a whole number"),
        ({"lepe": 2.0}, "lepe in attn_kwargs is 2.0: it should be a whole number"),
        ({"lepe": 4}, "lepe in attn_kwargs is 4: it should be an odd side of at most 63, or 0 for none"),
        ({"lepe": -3}, "lepe in attn_kwargs is -3: it should be an odd side"),
        ({"lepe": 10**9 + 1}, "lepe in attn_kwargs is 1000000001: it should be an odd side"),
        (
            {"gates": True},
            "inline attention has no argument 'gates' in attn_kwargs: choose one of cpe, feature_map, gate",
        ),
    ],
)
def test_values_that_make_no_sense_are_refused(given, sentence):
    with pytest.raises(ValueError, match=sentence):
        create_model("inline_deit_tiny", device="meta", attn_kwargs=given)


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("hydra_deit_tiny", {"attn_kwargs": {"rope": True}}, "HydraAttention does not rotate queries and keys"),
        ("enhanced_deit_tiny", {"attn_kwargs": {"mlp_conv": True}}, "mlp_conv is a second convolution in an MLP"),
        ("mala_deit_tiny", {"num_heads": 32}, "rope needs heads of a multiple of 4 channels, but 32 heads of 192"),
        ("pvt_tiny", {"attn_kwargs": {"rope": True}}, "sr_ratio=8 works on the whole map, without windows, lepe, rope"),
        ("polaformer_deit_tiny", {"num_heads": 64}, "halves the values of each head, but 64 heads of 192 channels"),
        ("mala_deit_tiny", {"attn_kwargs": 3}, "attn_kwargs is 3"),
    ],
)
def test_what_does_not_go_together_is_refused(name, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        create_model(name, device="meta", **options)


def test_an_attention_with_a_forward_of_its_own_refuses_what_it_might_ignore():
    class Free(BaseAttention):
        def forward(self, x, feat_size, kernel_tokens=None):
            return self.project_out(self.qkv(x)[..., : self.dim], x)

    class Gated(Free):
        supports_gate = True

    with pytest.raises(ValueError, match="Free has no gate: leave it out"):
        Free(16, 2, gate=True)
    with pytest.raises(ValueError, match="Free does not rotate"):
        Free(16, 2, rope=True)
    module, x = Gated(16, 2, gate=True), torch.randn(1, 15, 16)
    expected = module.proj(module.qkv(x)[..., :16] * module.gate(x))
    torch.testing.assert_close(module(x, (3, 5)), expected)
    with pytest.raises(ValueError, match="Gated does not rotate"):
        Gated(16, 2, rope=True)


def test_the_two_convolutions_of_mlps():
    """One before GELU, as enhanced attention has it, one after it, which is added."""
    blocks = [Block(InLineAttention(8, 2), 8, **{name: True}) for name in ("dwconv_mlp", "mlp_conv")]
    assert [type(block.mlp) for block in blocks] == [DWConvMlp, ResidualConvMlp]
    x = torch.randn(2, 2 + 15, 8)
    conv = ResidualConv(8)
    assert torch.equal(conv(x, (3, 5))[:, :2], x[:, :2])
    assert torch.equal(conv(x[:, :2], (0, 0)), x[:, :2])
