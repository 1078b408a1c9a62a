"""Models that are optimized for inference answer as those they are made from."""

import copy
import functools
import pickle
import time

import pytest
import timm
import torch
from torch import nn
from torch._dynamo.utils import counters

import inlinevit
from inlinevit.layers import ATTENTIONS, Block, InLineAttention, project_parameters
from inlinevit.layers._cached_pos_embed import CachedResamplePosEmbed
from inlinevit.layers._inference_block import InferenceBlock, compiled
from inlinevit.models.inference import CompiledForward
from tests.positions import LearnedPositions

SHALLOW = {
    "inline_deit_tiny": {"img_size": 64, "depth": 3, "embed_dim": 48},
    "inline_pvt_tiny": {"img_size": 64, "depths": (1, 1, 1, 1), "embed_dims": (16, 32, 40, 64)},
    "inline_swin_tiny": {"img_size": 64, "depths": (1, 1, 2, 1), "embed_dim": 24},
    "inline_cswin_tiny": {"img_size": 64, "depths": (1, 1, 1, 1), "embed_dim": 16},
}


def shallow(name: str, *, seed: int = 0, **options: object) -> nn.Module:
    torch.manual_seed(seed)
    model = timm.create_model(name, num_classes=7, **SHALLOW[name], **options).eval()
    # By default weights are so small that attention hardly counts.
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
    return model


def assert_same(optimized, model, *sizes) -> None:
    with torch.no_grad():
        for size in sizes:
            images = torch.randn(2, 3, *size)
            torch.testing.assert_close(optimized(images), model(images), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", SHALLOW)
def test_the_answers_are_the_same_at_any_size(name):
    model = shallow(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    optimized = inlinevit.optimize_for_inference(model, compile=False)
    assert type(optimized) is type(model)
    assert_same(optimized, model, (224, 224), (97, 130), (224, 224))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not any(parameter.requires_grad for parameter in optimized.parameters())
    assert not optimized.training


@pytest.mark.parametrize("pool", ["avg", "token", ""])
def test_any_pooling_of_a_plain_transformer(pool):
    model = shallow("inline_deit_tiny", global_pool=pool)
    assert_same(inlinevit.optimize_for_inference(model, compile=False), model, (64, 96))


@pytest.mark.parametrize("attention", ["softmax", "linear", "agent"])
def test_other_attentions(attention):
    model = shallow("inline_deit_tiny", attention=attention)
    assert_same(inlinevit.optimize_for_inference(model, compile=False), model, (64, 96))


@pytest.mark.parametrize("attention", ["vit3", "mhla", "circulant"])
@pytest.mark.parametrize("options", [{}, {"fc_norm": True}, {"pos_embed": "none"}], ids=str)
def test_other_attentions_without_a_class_token(attention, options):
    """Their blocks are not computed natively; the others are."""
    mixed = (attention, "inline", attention)
    model = shallow("inline_deit_tiny", attention=mixed, class_token=False, global_pool="avg", **options)
    project_parameters(model)
    optimized = inlinevit.optimize_for_inference(model, compile=False)
    assert_same(optimized, model, (64, 96), (97, 130))
    images = torch.randn(1, 3, 64, 64)
    packed = [block.packed.get(block, torch.zeros(1, 16, 48)) is not None for block in optimized.stages[0].blocks]
    assert optimized(images).shape == (1, 7)
    assert packed[0] is packed[2] is False


def test_only_the_class_token_is_computed_in_the_last_block():
    optimized = inlinevit.optimize_for_inference(shallow("inline_deit_tiny"), compile=False)
    shapes = []
    for block in optimized.stages[0].blocks:
        block.register_forward_hook(lambda module, arguments, output: shapes.append(tuple(output.shape)))
    optimized(torch.randn(1, 3, 64, 64))
    assert shapes == [(1, 17, 48), (1, 17, 48), (1, 1, 48)]
    assert optimized.forward_features(torch.randn(1, 3, 64, 64)).shape == (1, 17, 48)


@pytest.mark.parametrize("kind", [kind for kind in ATTENTIONS.values() if kind.supports_prefix_tokens])
@pytest.mark.parametrize("hooked", [False, True])
def test_the_prefix_alone_is_the_prefix(kind, hooked):
    """With a hook on the attention, which gets all tokens, too."""
    torch.manual_seed(0)
    block = Block(kind(8, 2), 8, dwconv_mlp=kind.wants_dwconv_mlp).double().eval()
    for parameter in block.parameters():
        parameter.data.add_(0.5 * torch.randn_like(parameter))
    x = torch.randn(2, 3 + 20, 8, dtype=torch.float64)
    expected = block(x, (4, 5))[:, :3]
    InferenceBlock.replace(block, compile_branches=False)
    shapes = []
    if hooked:
        block.attn.register_forward_hook(lambda module, arguments, output: shapes.append(tuple(output.shape)))
    torch.testing.assert_close(block(x, (4, 5), prefix_only=True), expected, rtol=0, atol=1e-12)
    assert shapes == [(2, 23, 8)] * hooked


def test_subclasses_of_modules_are_left_as_they_are():
    class Doubled(Block):
        def forward(self, x, feat_size):
            return 2 * super().forward(x, feat_size)

    model = shallow("inline_deit_tiny")
    model.stages[0].blocks[2] = Doubled(InLineAttention(48, 6), 48).eval()
    optimized = inlinevit.optimize_for_inference(model, compile=False)
    kinds = [type(block) for block in optimized.stages[0].blocks]
    assert kinds == [InferenceBlock, InferenceBlock, Doubled]
    assert_same(optimized, model, (64, 64))


def test_features():
    torch.manual_seed(0)
    model = timm.create_model("inline_pvt_tiny", features_only=True, depths=(1, 1, 1, 1)).eval()
    optimized = inlinevit.optimize_for_inference(model, compile=False)
    images = torch.randn(1, 3, 64, 96)
    with torch.no_grad():
        for ours, expected in zip(optimized(images), model(images), strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_compiled_as_a_whole_and_in_chunks(monkeypatch):
    model = shallow("inline_deit_tiny", attention="linear")
    optimized = inlinevit.optimize_for_inference(model)
    assert_same(optimized, model, (64, 64))
    monkeypatch.setattr("inlinevit.models.inference.FEW_PIXELS", 0)
    monkeypatch.setattr("inlinevit.layers._chunks.CHUNK", 2**13)
    assert_same(optimized, model, (64, 64))


def test_a_model_without_our_blocks_is_refused():
    with pytest.raises(ValueError, match="Linear has no block or attention of inlinevit: there is nothing to optimize"):
        inlinevit.optimize_for_inference(nn.Linear(2, 2))


SIZES = ((64, 64), (97, 130), (224, 224))


def answers(model: nn.Module, sizes=SIZES) -> list[torch.Tensor]:
    dtype = next(model.parameters()).dtype
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        return [model(torch.randn(2, 3, *size, generator=generator).to(dtype)) for size in sizes]


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


# One for each family.
PRECISIONS = (torch.float16, torch.bfloat16, torch.float64, torch.bfloat16)


def optimize(model: nn.Module) -> nn.Module:
    return inlinevit.optimize_for_inference(model, compile=False)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in SHALLOW),
        ("inline_deit_tiny", {"attention": "focused"}),
        ("inline_pvt_tiny", {"attention": "softmax"}),
        ("inline_swin_tiny", {"attention": "softmax"}),
    ],
    ids=str,
)
def test_weights_loaded_later_count(name, options):
    first, second = shallow(name, **options), shallow(name, seed=1, **options)
    optimized = optimize(first)
    before = answers(optimized)
    optimized.load_state_dict(second.state_dict())
    found = answers(optimized)
    assert_equal(found, answers(optimize(second)))
    assert (found[0] - before[0]).abs().max() > 0.1


@pytest.mark.parametrize(("name", "dtype"), zip(SHALLOW, PRECISIONS, strict=True))
def test_other_precisions_after_the_first_answer(name, dtype):
    model = shallow(name)
    optimized = optimize(model)
    answers(optimized)
    converted = optimized.to(dtype)
    found = answers(converted)
    assert {answer.dtype for answer in found} == {dtype}
    assert_equal(found, answers(optimize(model.to(dtype))))


@pytest.mark.parametrize("name", SHALLOW)
def test_a_hundred_and_twenty_sizes_take_no_more_memory_than_a_few(name):
    model = optimize(shallow(name))
    with torch.no_grad():
        for height in range(20, 30):
            for width in range(20, 32):
                for stage in model.stages:
                    if stage.pos_embed is not None:
                        stage.resample_pos_embed(stage.pos_embed, (height, width))
    kept = [module.cache.state.cache for module in model.modules() if isinstance(module, CachedResamplePosEmbed)]
    assert sum(one.nbytes for one in kept) <= len(kept) * 2**23
    assert all(len(one) <= 8 for one in kept)
    assert len(kept) == {"inline_deit_tiny": 1, "inline_pvt_tiny": 4}.get(name, 0)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert len(pickle.dumps(model)) < 1.1 * weights + 2**20


@pytest.mark.parametrize("name", SHALLOW)
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_models_of_their_own(name, duplicate):
    first, second = shallow(name), shallow(name, seed=1)
    optimized = optimize(first)
    expected = answers(optimized)
    other = duplicate(optimized)
    assert_equal(answers(other), expected)
    other.load_state_dict(second.state_dict())
    assert_equal(answers(other), answers(optimize(second)))
    assert_equal(answers(optimized), expected)


@pytest.mark.parametrize("name", ["inline_deit_tiny", "inline_pvt_tiny"])
def test_an_optimized_model_can_learn_again(name):
    model = shallow(name)
    optimized = optimize(model)
    answers(optimized)
    images = torch.randn(2, 3, 96, 64)
    losses = []
    for trained in (optimized, model):
        trained.train().requires_grad_(True)
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.01)
        for _ in range(2):
            optimizer.zero_grad()
            loss = trained(images).square().sum()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
        trained.eval()
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert_same(optimized, model, (96, 64), (224, 224))


@pytest.mark.parametrize("name", ["inline_deit_tiny", "inline_pvt_tiny"])
def test_another_input_size_after_the_first_answer(name):
    model = shallow(name)
    optimized = optimize(model)
    answers(optimized)
    optimized.set_input_size((96, 160))
    model.set_input_size((96, 160))
    assert not any(parameter.requires_grad for parameter in optimized.parameters())
    assert_equal(answers(optimized), answers(optimize(model)))


@pytest.fixture
def quick_compiler(monkeypatch):
    """torch.compile that records graphs as ever, but generates no code, which takes minutes."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    compiled.cache_clear()
    torch._dynamo.reset()
    counters.clear()
    yield
    compiled.cache_clear()
    torch._dynamo.reset()


@pytest.mark.integration
@pytest.mark.parametrize("few_pixels", [0, 2**19], ids=["in chunks", "as a whole"])
def test_compiled_models_follow_their_weights(few_pixels, quick_compiler, monkeypatch):
    monkeypatch.setattr("inlinevit.models.inference.FEW_PIXELS", few_pixels)
    monkeypatch.setitem(SHALLOW, "inline_deit_tiny", {"depth": 1})
    # This attention is not computed natively.
    first, second = (shallow("inline_deit_tiny", attention="linear", seed=seed) for seed in (0, 1))
    optimized = inlinevit.optimize_for_inference(first)
    size = ((64, 64),)
    answers(optimized, size)
    assert counters["stats"]["unique_graphs"] > 0
    for other in (copy.deepcopy(optimized), pickle.loads(pickle.dumps(optimized)), optimized):
        other.load_state_dict(second.state_dict())
        torch.testing.assert_close(answers(other, size), answers(second, size), rtol=1e-4, atol=1e-4)
        if other is not optimized:
            assert_same(optimized, first, *size)
    torch.testing.assert_close(answers(optimized.double(), size), answers(second.double(), size))


def test_sizes_do_not_compile_again_and_again(quick_compiler):
    """One graph for the first size, one for any size; and perhaps one for the learned grid."""
    positions = LearnedPositions(8, (4, 4))
    positions.freeze()

    @torch.compile
    def embed(x: torch.Tensor) -> torch.Tensor:
        batch, height, width, dim = x.shape
        return positions(x.view(batch, height * width, dim), (height, width))

    for height, width in ((5, 6), (7, 8), (4, 4), *((side, side + 2) for side in range(6, 18))):
        x = torch.randn(1, height, width, 8)
        assert torch.equal(embed(x), positions(x.flatten(1, 2), (height, width)))
    assert counters["stats"]["unique_graphs"] <= 3
    assert not counters["graph_break"]


@pytest.mark.integration
def test_an_optimized_model_can_be_exported_compiled_and_optimized_again(quick_compiler, monkeypatch):
    monkeypatch.setitem(SHALLOW, "inline_deit_tiny", {"depth": 1})
    model = shallow("inline_deit_tiny")
    images = torch.randn(1, 3, 96, 96)
    for compile in (True, False):
        optimized = inlinevit.optimize_for_inference(model, compile=compile)
        with torch.no_grad():
            expected = optimized(images)
            torch.testing.assert_close(torch.export.export(optimized, (images,)).module()(images), expected)
            torch.testing.assert_close(torch.compile(optimized)(images), expected, rtol=1e-4, atol=1e-4)
        again = inlinevit.optimize_for_inference(optimized, compile=not compile)
        assert all(block.compile_branches is not compile for block in again.modules() if isinstance(block, Block))
        assert isinstance(again.forward.__self__, CompiledForward) is not compile
        assert_same(again, model, (96, 96))


def test_a_value_check_is_cheaper_than_resizing():
    """Kept positions are compared with the table at each call; that must not cost what it saves."""
    positions = LearnedPositions(384, (28, 28), num_prefix_tokens=1)

    def seconds() -> float:
        durations = []
        for _ in range(20):
            start = time.perf_counter()
            positions.at((32, 32))
            durations.append(time.perf_counter() - start)
        return min(durations)

    with torch.no_grad():
        plain = seconds()
        positions.freeze()
        positions.at((32, 32))
        assert seconds() < plain
