"""Enhanced attention's own: the MLP of its block. Its numbers are in test_base_attention.py."""

import pytest
import torch

from inlinevit.layers import ATTENTIONS, EnhancedAttention, LinearAttention


def test_it_is_linear_attention_that_wants_another_mlp():
    enhanced, linear = EnhancedAttention(8, 2), LinearAttention(8, 2)
    linear.load_state_dict(enhanced.state_dict())
    x = torch.randn(2, 1 + 15, 8)
    assert torch.equal(enhanced(x, (3, 5)), linear(x, (3, 5)))
    assert [word for word, kind in ATTENTIONS.items() if kind.wants_dwconv_mlp] == ["enhanced"]


def test_in_float32(randomise):
    """In half precision nothing but the projections is."""
    mixer = EnhancedAttention(64, 2).bfloat16().eval()
    q, k, v = torch.randn(3, 1, 2, 500, 32).bfloat16() * 100
    (windows,) = mixer.layout((20, 25))
    with torch.no_grad():
        expected = mixer.attend(q.float(), k.float(), v.float(), windows)
        assert torch.equal(mixer.attend(q, k, v, windows), expected.bfloat16())


def test_its_feature_map_is_no_choice():
    assert EnhancedAttention.attn_kwargs_names == ()
    with pytest.raises(TypeError, match="feature_map"):
        EnhancedAttention(8, 2, feature_map="exp")
