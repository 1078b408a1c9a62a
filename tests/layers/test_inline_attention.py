"""InLine attention's own: what it sees in shifted windows, its options. Its numbers are in test_base_attention.py."""

import inspect

import pytest
import torch

from inlinevit import kernels, ops
from inlinevit.layers import Block, CrossStripes, InLineAttention, LinearAttention, SquareWindows
from inlinevit.ops.inline import PATHS, select_path


def test_shifted_windows_see_across_the_seam():
    """As the published weights do: there is no shift mask."""
    mixer = InLineAttention(8, 2, layout=SquareWindows(4, shifted=True))
    x = torch.randn(1, 64, 8)
    changed = x.clone()
    changed[:, :8] += torch.randn(8)
    moved = (mixer(changed, (8, 8)) - mixer(x, (8, 8))).abs().sum(dim=-1).view(8, 8)
    assert torch.all(moved[2:6] == 0)
    assert torch.all(moved[:2] > 0)
    assert torch.all(moved[6:] > 0)


@pytest.mark.parametrize("kind", [InLineAttention, LinearAttention])
def test_unknown_feature_map_is_refused_with_the_list(kind):
    with pytest.raises(ValueError, match="'elu'.*" + ", ".join(ops.FEATURE_MAPS)):
        kind(8, 2, feature_map="elu")


@pytest.mark.parametrize("kind", [InLineAttention, LinearAttention])
@pytest.mark.parametrize("name", ops.FEATURE_MAPS)
def test_every_feature_map_runs(kind, name):
    mixer, x = kind(8, 2, feature_map=name), torch.randn(1, 16, 8)
    learned = {parameter for parameter, _ in mixer.named_parameters() if parameter.startswith("feature_map")}
    assert learned == ({"feature_map.matrix", "feature_map.bias"} if name == "relu_affine" else set())
    assert mixer(x, (4, 4)).shape == x.shape


@pytest.mark.parametrize("kind", [InLineAttention, LinearAttention])
def test_relu_affine_starts_as_relu(kind):
    affine, plain = kind(8, 2, feature_map="relu_affine"), kind(8, 2, feature_map="relu")
    plain.load_state_dict({n: p for n, p in affine.state_dict().items() if not n.startswith("feature_map")})
    x = torch.randn(1, 16, 8)
    torch.testing.assert_close(affine(x, (4, 4)), plain(x, (4, 4)))
    assert affine.feature_map.matrix.shape == (2, 4, 4)


def test_without_local_residual_there_are_no_parameters_of_it():
    names = dict(InLineAttention(8, 2, local_residual=False).named_parameters())
    assert not any("local_residual" in name for name in names)
    assert any("local_residual" in name for name in dict(InLineAttention(8, 2).named_parameters()))


def test_prefix_tokens_get_no_residual(randomise):
    """They take part in the mean, which the map's tokens feel."""
    with_residual, without = randomise(InLineAttention(8, 2)), InLineAttention(8, 2, local_residual=False).double()
    state = {n: p for n, p in with_residual.state_dict().items() if not n.startswith("local_residual")}
    without.load_state_dict(state)
    x = torch.randn(1, 2 + 16, 8, dtype=torch.float64)
    difference = with_residual(x, (4, 4)) - without(x, (4, 4))
    torch.testing.assert_close(difference[:, :2], torch.zeros(1, 2, 8, dtype=torch.float64), rtol=0, atol=1e-12)
    assert torch.all(difference[:, 2:].abs().sum(dim=-1) > 1e-3)


FOLDED = {
    "plain": {},
    "no bias": {"qkv_bias": False},
    "no residual": {"local_residual": False},
    "LePE": {"lepe": True},
    "LePE alone": {"lepe": True, "local_residual": False},
    "covering windows": {"layout": SquareWindows(8, shifted=True)},
    "covering stripes": {"layout": CrossStripes(8)},
}


@pytest.mark.parametrize("prefix", [0, 1, 3])
@pytest.mark.parametrize("options", FOLDED.values(), ids=FOLDED)
def test_folded_is_the_slow_reference(randomise, reference, options, prefix):
    mixer = randomise(InLineAttention(8, 2, path="folded", **options))
    x = torch.randn(2, prefix + 35, 8, dtype=torch.float64, requires_grad=True)
    kernel_tokens = torch.randn_like(x)
    for given in (None, kernel_tokens):
        out, expected = mixer(x, (5, 7), given), reference(mixer, x, (5, 7), given)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-10)
        cotangent = torch.randn_like(out)
        leaves = [x, *mixer.parameters()]
        # Parameters that one of them does not need have no gradient: the key's bias drops out.
        folded = torch.autograd.grad(out, leaves, cotangent, allow_unused=True, materialize_grads=True)
        slow = torch.autograd.grad(expected, leaves, cotangent, allow_unused=True, materialize_grads=True)
        torch.testing.assert_close(folded, slow, rtol=0, atol=1e-10)


@pytest.mark.parametrize("mean", [0, 100])
def test_folded_survives_tokens_with_large_means(randomise, mean):
    mixer = randomise(InLineAttention(32, 4))
    x = torch.randn(2, 400, 32, dtype=torch.float64) + mean * torch.randn(32, dtype=torch.float64)
    mixer.path = "covariance"
    expected = mixer(x, (20, 20))
    mixer.float().path = "folded"
    error = (mixer(x.float(), (20, 20)).double() - expected).abs().max() / expected.abs().max()
    assert error < 2e-5


def test_all_paths_agree_without_gradients(randomise):
    """In place and in float32, as they are used."""
    mixer, x = randomise(InLineAttention(16, 2)).float().requires_grad_(False), torch.randn(3, 1 + 1024, 16)
    kept = x.clone()
    answers = []
    for path in (*PATHS, None):
        if path == "native" and not kernels.available():
            continue
        mixer.path = path
        answers.append(mixer(x, (32, 32)))
    for answer in answers:
        torch.testing.assert_close(answer, answers[0], rtol=0, atol=1e-4)
    assert torch.equal(x, kept)


def chosen_path(mixer: InLineAttention, x: torch.Tensor, size: tuple[int, int]) -> str:
    """The path that the layer takes."""
    return select_path(mixer.path_params(x, mixer.layout(size)), mixer.path)


def test_the_layer_folds_where_it_can():
    mixer, x = InLineAttention(8, 2).double(), torch.randn(1, 64, 8, dtype=torch.float64)
    assert chosen_path(mixer, x, (8, 8)) == "folded"
    assert chosen_path(mixer, x[:, :9], (3, 3)) == "covariance"
    assert chosen_path(mixer, x[:, :2], (1, 2)) == "explicit"
    assert chosen_path(InLineAttention(8, 2, feature_map="relu"), x, (8, 8)) == "covariance"
    assert chosen_path(InLineAttention(8, 2, layout=SquareWindows(4, shifted=False)), x, (8, 8)) == "covariance"
    assert chosen_path(InLineAttention(8, 2, layout=CrossStripes(2)), x, (8, 8)) == "covariance"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert chosen_path(mixer, x, (8, 8)) == "covariance"


def test_stripes_that_cover_the_map_for_one_head_group_are_not_folded(randomise, reference):
    mixer = randomise(InLineAttention(8, 2, layout=CrossStripes(5)))
    x = torch.randn(2, 35, 8, dtype=torch.float64)
    assert chosen_path(mixer, x, (7, 5)) == "covariance"
    torch.testing.assert_close(mixer(x, (7, 5)), reference(mixer, x, (7, 5)), rtol=0, atol=1e-10)


def test_windows_choose_their_own_path():
    """By the tokens of a window: few make the explicit form cheaper, unless some of them are padding."""
    mixer = InLineAttention(32, 2, layout=SquareWindows(3, shifted=False))
    assert chosen_path(mixer, torch.randn(1, 36, 32).double(), (6, 6)) == "explicit"
    assert chosen_path(mixer, torch.randn(1, 35, 32).double(), (5, 7)) == "covariance"


def test_few_frames_between_the_block_and_the_op(monkeypatch):
    """Block.forward and the op included, five functions of this library."""
    names = []

    def attention(x, *arguments, **options):
        frame = inspect.currentframe().f_back
        while frame is not None:
            if frame.f_globals["__name__"].startswith("inlinevit."):
                names.append(frame.f_code.co_name)
            frame = frame.f_back
        return torch.zeros_like(x)[..., :8]

    monkeypatch.setattr("inlinevit.ops.inline_attention", attention)
    monkeypatch.setattr("inlinevit.kernels.inline_attention", attention)
    monkeypatch.setattr("inlinevit.kernels.unavailable_reason", lambda: "")
    Block(InLineAttention(8, 2, feature_map="relu"), 8)(torch.randn(1, 35, 8), (5, 7))
    assert names == ["attend", "forward", "attention_branch", "forward"]
    if not kernels.available():
        return
    names.clear()
    Block(InLineAttention(8, 2), 8)(torch.randn(1, 35, 8), (5, 7))
    assert names == ["attend_fused", "forward", "attention_branch", "forward"]


def test_a_projection_that_is_more_than_its_weights_is_called():
    """Adapters and hooks on qkv must be felt."""

    class Adapted(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    x = torch.randn(1, 64, 8, dtype=torch.float64)
    adapted = InLineAttention(8, 2).double()
    adapted.qkv = Adapted(8, 24, dtype=torch.float64)
    assert chosen_path(adapted, x, (8, 8)) == "covariance"
    adapted.path = "folded"
    with pytest.raises(ValueError, match="'folded' is not possible here"):
        adapted(x, (8, 8))
    seen = []
    hooked = InLineAttention(8, 2).double()
    handle = hooked.qkv.register_forward_hook(lambda module, arguments, output: seen.append(output))
    hooked(x, (8, 8))
    assert len(seen) == 1
    handle.remove()
    assert chosen_path(hooked, x, (8, 8)) == "folded"


def test_an_unknown_path_is_refused():
    with pytest.raises(ValueError, match="unknown path 'quick': choose one of"):
        InLineAttention(8, 2, path="quick")(torch.randn(1, 64, 8), (8, 8))
