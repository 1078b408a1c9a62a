"""InLine attention's own: what it sees in shifted windows, its options. Its numbers are in test_token_mixer.py."""

import pytest
import torch

from inlinevit import ops
from inlinevit.layers import InLineAttention, LinearAttention, SquareWindows


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
