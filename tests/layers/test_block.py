"""The transformer block."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from inlinevit.layers import ATTENTIONS, Block, CrossStripes, EnhancedAttention, InLineAttention
from inlinevit.layers._chunks import is_chunked


@pytest.mark.parametrize("before", [False, True])
def test_block_is_its_formula(randomise, before):
    """x + attn(norm x), with x̄ from before or after the norm; then x + mlp(norm x)."""
    attn = InLineAttention(8, 2, layout=CrossStripes(2), lepe=True)
    block = randomise(Block(attn, 8, mlp_ratio=3, norm_eps=1e-3, kernels_before_norm=before)).eval()
    x = torch.randn(2, 20, 8, dtype=torch.float64)
    normed = F.layer_norm(x, (8,), block.norm1.weight, block.norm1.bias, 1e-3)
    middle = x + attn(normed, (4, 5), x if before else normed)
    normed = F.layer_norm(middle, (8,), block.norm2.weight, block.norm2.bias, 1e-3)
    assert block.mlp.fc1.weight.shape == (24, 8)
    expected = middle + block.mlp.fc2(F.gelu(block.mlp.fc1(normed)))
    torch.testing.assert_close(block(x, (4, 5)), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("prefix", [0, 1])
def test_block_with_a_dwconv_mlp_is_its_formula(randomise, prefix):
    attn = EnhancedAttention(8, 2)
    block = randomise(Block(attn, 8, mlp_ratio=3, dwconv_mlp=True)).eval()
    x = torch.randn(2, prefix + 20, 8, dtype=torch.float64)
    middle = x + attn(block.norm1(x), (4, 5))
    assert block.mlp.conv.weight.shape == (24, 1, 3, 3)
    expected = middle + block.mlp(block.norm2(middle), (4, 5))
    torch.testing.assert_close(block(x, (4, 5)), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ATTENTIONS.values(), ids=ATTENTIONS)
def test_gradients_reach_every_parameter(kind):
    block = Block(kind(8, 2), 8, dwconv_mlp=kind.wants_dwconv_mlp)
    block(torch.randn(2, 20, 8), (4, 5)).square().sum().backward()
    for name, parameter in block.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


def test_drop_path_drops_whole_images_in_training_alone():
    block = Block(InLineAttention(8, 2), 8, drop_path=0.9)
    x = torch.randn(64, 4, 8)
    untouched = (block.train()(x, (2, 2)) == x).flatten(1).all(dim=1)
    assert 0.6 < untouched.float().mean() < 1
    assert not (block.eval()(x, (2, 2)) == x).flatten(1).all(dim=1).any()


def test_no_drop_path_no_module():
    assert isinstance(Block(InLineAttention(8, 2), 8).drop_path1, nn.Identity)


@pytest.mark.parametrize("kind", ATTENTIONS.values(), ids=ATTENTIONS)
@pytest.mark.parametrize("before", [False, True])
def test_chunks_make_the_whole(monkeypatch, randomise, kind, before):
    """Several images and several tokens at a time, and one that is larger than a chunk."""
    block = (
        randomise(Block(kind(8, 2), 8, kernels_before_norm=before, dwconv_mlp=kind.wants_dwconv_mlp))
        .eval()
        .requires_grad_(False)
    )
    x = torch.randn(5, int(kind.supports_prefix_tokens) + 20, 8, dtype=torch.float64)
    kept = x.clone()
    monkeypatch.setattr("inlinevit.layers._chunks.CHUNK", 2**40)
    whole = block(x, (4, 5))
    assert not is_chunked(block, x, block.hidden_dim)
    for chunk in (1, 100, 1000, 1500):
        monkeypatch.setattr("inlinevit.layers._chunks.CHUNK", chunk)
        assert is_chunked(block, x, block.hidden_dim)
        torch.testing.assert_close(block(x, (4, 5)), whole, rtol=0, atol=1e-12)
    assert torch.equal(x, kept)


def test_no_chunks_where_someone_needs_what_is_in_between(monkeypatch):
    monkeypatch.setattr("inlinevit.layers._chunks.CHUNK", 1)
    block, x = Block(InLineAttention(8, 2), 8), torch.randn(2, 20, 8)
    assert not is_chunked(block, x, block.hidden_dim)
    with torch.no_grad():
        assert not is_chunked(block, x, block.hidden_dim)
        block.eval()
        assert is_chunked(block, x, block.hidden_dim)
        seen = []
        handle = block.mlp.fc1.register_forward_hook(lambda module, arguments, output: seen.append(output.shape))
        block(x, (4, 5))
        assert seen == [(2, 20, 32)]
        handle.remove()
        assert is_chunked(block, x, block.hidden_dim)
    assert not is_chunked(block, x, block.hidden_dim)
