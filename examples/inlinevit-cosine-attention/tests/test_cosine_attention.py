"""The attention keeps all promises of docs/attentions.md in inlinevit."""

import pytest
import torch
from inlinevit_cosine_attention import CosineAttention

from inlinevit.testing import ATTENTION_CHECKS, check_attention


@pytest.mark.parametrize("check", [name for name in ATTENTION_CHECKS if name != "compile"])
def test_promises(check):
    check_attention(CosineAttention, checks=[check])


def test_the_scale_is_bounded():
    layer = CosineAttention(8, 2, max_scale=1.0)
    x = torch.randn(1, 9, 8)
    with torch.no_grad():
        before = layer(x, (3, 3))
        layer.log_scale += 1
        assert torch.equal(layer(x, (3, 3)), before)
    with pytest.raises(ValueError, match="max_scale"):
        CosineAttention(8, 2, max_scale=0)
