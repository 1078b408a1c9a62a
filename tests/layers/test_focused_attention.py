"""Focused attention's own: positions of keys, the shared convolution. Its numbers are in test_base_attention.py."""

import pytest
import torch

from inlinevit.layers import CrossStripes, FocusedAttention, PolaFormerAttention


@pytest.mark.parametrize("size", [(4, 4), (3, 5)])
def test_positions_of_a_class_token(randomise, reference, size):
    """Its position is not resized."""
    mixer = randomise(FocusedAttention(8, 2, grid=(4, 4), num_prefix_tokens=1)).requires_grad_(False)
    assert mixer.pos_embed.shape == (1, 17, 8)
    x = torch.randn(2, 1 + size[0] * size[1], 8, dtype=torch.float64)
    torch.testing.assert_close(mixer(x, size), reference(mixer, x, size), rtol=0, atol=1e-10)


def test_positions_are_added_to_keys_before_they_are_focused(randomise):
    mixer = randomise(FocusedAttention(8, 2, grid=(3, 5))).requires_grad_(False)
    (windows,) = mixer.layout((3, 5))
    q, k, v = torch.randn(3, 2, 2, 15, 4, dtype=torch.float64)
    positions = mixer.pos_embed.clone().view(1, 15, 2, 4).transpose(1, 2)
    with_positions = mixer.attend(q, k, v, windows)
    mixer.pos_embed.zero_()
    torch.testing.assert_close(mixer.attend(q, k + positions, v, windows), with_positions, rtol=0, atol=1e-12)
    assert not torch.allclose(mixer.attend(q, k, v, windows), with_positions)


def test_an_unexpected_prefix_has_no_positions(randomise):
    mixer = randomise(FocusedAttention(8, 2, grid=(3, 5)))
    (windows,) = mixer.layout((3, 5))
    k = torch.randn(2, 2, 3 + 15, 4, dtype=torch.float64)
    moved = mixer.add_pos_embed(k, windows) - k
    assert torch.all(moved[:, :, :3] == 0)
    assert torch.all(moved[:, :, 3:] != 0)


@pytest.mark.parametrize("group", [0, 1])
def test_all_heads_share_the_convolution(randomise, group):
    mixer = randomise(FocusedAttention(8, 4, layout=CrossStripes(2)))
    weight, bias = mixer.static_kernels(mixer.layout((6, 6))[group])
    assert weight.shape == (4, 1, 5, 5)
    for head in range(2):
        assert torch.equal(weight[2 * head : 2 * head + 2], mixer.conv.weight)
        assert torch.equal(bias[2 * head : 2 * head + 2], mixer.conv.bias)


def test_prefix_tokens_are_not_convolved(randomise):
    mixer = randomise(FocusedAttention(8, 2)).requires_grad_(False)
    mixer.proj = torch.nn.Identity()
    x = torch.randn(1, 2 + 15, 8, dtype=torch.float64)
    before = mixer(x, (3, 5))
    mixer.conv.weight.zero_()
    mixer.conv.bias.zero_()
    moved = (mixer(x, (3, 5)) - before).abs().sum(dim=-1)[0]
    assert torch.all(moved[:2] == 0)
    assert torch.all(moved[2:] > 0)


def test_the_spread_is_even_to_begin_with():
    mixer = FocusedAttention(8, 2)
    torch.nn.init.ones_(mixer.spread)
    mixer.reset_parameters()
    (windows,) = mixer.layout((3, 5))
    torch.testing.assert_close(mixer.positive_spread(windows), torch.full((2, 4), 2.0).log())


@pytest.mark.parametrize("kind", [FocusedAttention, PolaFormerAttention])
def test_without_the_convolution(randomise, reference, kind):
    mixer = randomise(kind(8, 2, grid=(3, 5), value_conv=False, lepe=3)).requires_grad_(False)
    assert mixer.conv is None
    x = torch.randn(2, 15, 8, dtype=torch.float64)
    torch.testing.assert_close(mixer(x, (3, 5)), reference(mixer, x, (3, 5)), rtol=0, atol=1e-10)
    mixer.lepe = None
    (windows,) = mixer.layout((3, 5))
    assert mixer.static_kernels(windows) is None
