"""Hydra attention's own. Its numbers are in test_base_attention.py."""

import torch

from inlinevit.layers import HydraAttention


def test_there_are_as_many_heads_as_channels_whatever_is_said():
    mixer, other = HydraAttention(8, 3), HydraAttention(8, 2)
    assert (mixer.num_heads, mixer.head_dim) == (8, 1)
    other.load_state_dict(mixer.state_dict())
    x = torch.randn(2, 1 + 15, 8)
    assert torch.equal(other(x, (3, 5)), mixer(x, (3, 5)))
