"""The adapter has timm's arguments, honours the masks that an attention can have, and refuses others."""

import pytest
import torch
from timm.layers import Attention

from inlinevit.layers import (
    ATTENTIONS,
    AttentionAdapter,
    InLineAttention,
    SoftmaxAttention,
    SquareWindows,
)


def softmax_pair() -> tuple[Attention, AttentionAdapter]:
    """timm's attention, and ours with its weights."""
    theirs = Attention(32, num_heads=2, qkv_bias=True).eval()
    ours = AttentionAdapter(SoftmaxAttention(32, 2, num_prefix_tokens=1)).eval()
    ours.load_state_dict(theirs.state_dict())
    theirs.qkv.weight.data.mul_(5)
    ours.qkv.weight.data.mul_(5)
    return theirs, ours


@torch.no_grad()
def test_softmax_honours_every_mask_of_timm():
    theirs, ours = softmax_pair()
    x = torch.randn(3, 1 + 16, 32)
    keys = torch.rand(3, 1, 1, 17) > 0.3
    keys[..., 0] = True
    for options in (
        {},
        {"attn_mask": keys},
        {"attn_mask": torch.randn(17, 17)},
        {"attn_mask": torch.randn(3, 2, 17, 17)},
        {"is_causal": True},
    ):
        torch.testing.assert_close(ours(x, **options), theirs(x, **options), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours(x, keys), theirs(x, keys), rtol=1e-5, atol=1e-6)


# Those that learn the positions of the whole map, or depend on its size, are not here; ViT³ has no weights.
MOVABLE = [
    name
    for name, kind in ATTENTIONS.items()
    if not kind.learns_grid and name not in ("focused", "polaformer", "vit3", "mhla", "circulant")
]


@pytest.mark.parametrize("name", MOVABLE)
@pytest.mark.parametrize("prefix", [0, 2])
def test_masked_keys_do_not_exist(name, prefix, randomise):
    adapter = AttentionAdapter(randomise(ATTENTIONS[name](16, 2, num_prefix_tokens=prefix)), (5, 4))
    x = torch.randn(2, prefix + 20, 16, dtype=torch.float64, requires_grad=True)
    mask = torch.ones(1, 1, 1, prefix + 20, dtype=torch.bool)
    mask[..., prefix + 12 :] = False
    found = adapter(x, attn_mask=mask)[:, : prefix + 12]
    shorter = AttentionAdapter(adapter.attention, (3, 4))
    expected = shorter(x[:, : prefix + 12])
    torch.testing.assert_close(found, expected)
    (gradient,) = torch.autograd.grad(found.square().sum(), x)
    assert gradient[:, prefix + 12 :].abs().max() < 1e-9 * gradient.abs().max()


@pytest.mark.parametrize("name", ["agent", "mhla", "circulant"])
def test_masked_keys_are_not_heard_where_places_count(name, randomise):
    """What is masked has no influence; masked queries neither, of which agents and kernels are made."""
    adapter = AttentionAdapter(randomise(ATTENTIONS[name](16, 2)), (5, 4))
    x = torch.randn(2, 20, 16, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(2, 1, 1, 20) < 0.6
    found = adapter(x, attn_mask=mask).masked_fill(~mask.view(2, 20, 1), 0.0)
    (gradient,) = torch.autograd.grad(found.square().sum(), x)
    assert gradient[~mask.view(2, 20)].abs().max() < 1e-12 * gradient.abs().max()
    assert torch.all(gradient[mask.view(2, 20)].abs().amax(dim=-1) > 0)
    everything = torch.ones(1, 1, 1, 20, dtype=torch.bool)
    torch.testing.assert_close(adapter(x, attn_mask=everything), adapter(x), rtol=1e-9, atol=1e-9)


def test_masks_are_refused_without_weights():
    adapter = AttentionAdapter(ATTENTIONS["vit3"](16, 2), (5, 4))
    with pytest.raises(ValueError, match="ViT3Attention has no N×N weights, with which keys are masked: keep softmax"):
        adapter(torch.randn(1, 20, 16), attn_mask=torch.ones(1, 1, 1, 20, dtype=torch.bool))


@pytest.mark.parametrize("name", ["softmax", "inline"])
@torch.no_grad()
def test_masks_in_half_precision(name):
    adapter = AttentionAdapter(ATTENTIONS[name](16, 2), (3, 4))
    x, mask = torch.randn(2, 12, 16), torch.arange(12).view(1, 1, 1, 12) < 8
    expected = adapter(x, attn_mask=mask)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(adapter(x, attn_mask=mask).float(), expected, rtol=0.05, atol=0.05)
    out = adapter.bfloat16()(x.bfloat16(), attn_mask=mask)
    torch.testing.assert_close(out.float(), expected, rtol=0.05, atol=0.05)


@torch.no_grad()
def test_windows_take_the_mask_of_swin():
    attention = SoftmaxAttention(16, 2, relative_window=3)
    adapter = AttentionAdapter(attention, (3, 3))
    x, mask = torch.randn(2 * 4, 9, 16), torch.zeros(4, 9, 9)
    assert torch.equal(adapter(x, mask=mask), adapter(x, mask))
    torch.testing.assert_close(adapter(x, mask), attention(x, (3, 3)))
    # The third window of both images may see its first token only.
    mask[2, :, 1:] = -100.0
    changed = (adapter(x, mask) - adapter(x)).flatten(1).abs().amax(dim=1) > 1e-6
    assert changed.tolist() == [False, False, True, False] * 2
    with pytest.raises(ValueError, match="the mask is for 3 windows per image"):
        adapter(x, mask[:3])
    # Others attend across the border of the map, as in the published models.
    inline = AttentionAdapter(InLineAttention(16, 2), (3, 3))
    assert torch.equal(inline(x, mask), inline(x))


def test_masks_that_an_attention_cannot_have_are_refused():
    adapter, x = AttentionAdapter(InLineAttention(16, 2)), torch.randn(2, 9, 16)
    with pytest.raises(ValueError, match=r"InLineAttention cannot be causal.*: keep softmax attention"):
        adapter(x, is_causal=True)
    for mask in (torch.ones(9, 9, dtype=torch.bool), torch.zeros(2, 1, 1, 9), torch.zeros(2, 9, 9)):
        with pytest.raises(ValueError, match=r"give a boolean mask of keys, \(batch, 1, 1, 9\)"):
            adapter(x, attn_mask=mask)


def test_maps_of_unknown_size_and_other_attention_are_refused():
    adapter = AttentionAdapter(InLineAttention(16, 2, num_prefix_tokens=1))
    assert adapter(torch.randn(1, 1 + 9, 16)).shape == (1, 10, 16)
    with pytest.raises(ValueError, match="9 tokens, 1 of them prefix tokens, are no square map"):
        adapter(torch.randn(1, 9, 16))
    with pytest.raises(ValueError, match="not Attention: give it InLineAttention"):
        AttentionAdapter(Attention(16, num_heads=2))
    with pytest.raises(ValueError, match="leave layout out"):
        AttentionAdapter(InLineAttention(16, 2, layout=SquareWindows(3, shifted=False)))
