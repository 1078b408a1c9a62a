"""MHLA's own: its coefficients stay in [0, 1], and its norms. Its numbers are in test_base_attention.py."""

import pytest
import torch
from torch import nn

from inlinevit.layers import Block, LinearAttention, MHLAAttention, project_parameters
from inlinevit.layers.mhla_attention import RMSNorm
from inlinevit.ops.mhla import initial_mixing


def test_coefficients_are_clamped():
    model = nn.Sequential(Block(MHLAAttention(8, 2), 8), Block(LinearAttention(8, 2), 8))
    mixing = model[0].attn.mixing
    assert torch.equal(mixing, initial_mixing())
    with torch.no_grad():
        mixing[0, :3] = torch.tensor([-0.5, 0.25, 1.5])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    project_parameters(model)
    assert mixing[0, :3].tolist() == [0.0, 0.25, 1.0]
    for name, value in model.state_dict().items():
        assert name == "0.attn.mixing" or torch.equal(value, before[name])
    assert mixing.requires_grad
    assert mixing.is_leaf


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_norm_of_small_tokens_in_half_precision(dtype):
    """torch's norm adds the epsilon of half precision to their mean square."""
    norm, x = RMSNorm(16).to(dtype), (0.02 * torch.randn(5, 16)).to(dtype)
    exact = x.double() / x.double().square().mean(dim=-1, keepdim=True).sqrt()
    out = norm(x)
    assert out.dtype == dtype
    assert (out.double() - exact).norm() <= torch.finfo(dtype).eps * exact.norm()
    theirs = nn.RMSNorm(16).to(dtype)(x)
    assert (theirs.double() - exact).norm() > 0.1 * exact.norm()


def test_the_norm_is_torchs_in_float32():
    norm, theirs, x = RMSNorm(16), nn.RMSNorm(16), torch.randn(5, 16)
    nn.init.normal_(norm.weight)
    theirs.load_state_dict(norm.state_dict())
    torch.testing.assert_close(norm(x), theirs(x))
