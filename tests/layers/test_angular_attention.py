"""Angular attention's own: the convolution over the tokens. Its numbers are in test_base_attention.py."""

import torch

from inlinevit import ops
from inlinevit.layers import AngularAttention, SquareWindows


def test_a_kernel_a_head_along_the_row_of_tokens(randomise):
    """The class token is in the row, before the map; nothing goes round its ends."""
    mixer = randomise(AngularAttention(8, 2)).requires_grad_(False)
    assert mixer.token_conv.weight.shape == (2, 1, 9, 1)
    assert mixer.token_conv.bias is None
    mixer.proj = torch.nn.Identity()
    x = torch.randn(1, 1 + 15, 8, dtype=torch.float64)
    with_taps = mixer(x, (3, 5))
    taps = mixer.token_conv.weight.clone()
    mixer.token_conv.weight.zero_()
    added = with_taps - mixer(x, (3, 5))
    v = mixer.qkv(x)[0, :, 16:]
    for token in range(16):
        for channel in range(8):
            there = [(tap, token + tap - 4) for tap in range(9) if 0 <= token + tap - 4 < 16]
            expected = sum(taps[channel // 4, 0, tap, 0] * v[place, channel] for tap, place in there)
            torch.testing.assert_close(added[0, token, channel], expected, rtol=0, atol=1e-12)


def test_without_taps_heads_have_unit_length(randomise):
    mixer = randomise(AngularAttention(8, 2, layout=SquareWindows(4, shifted=True))).requires_grad_(False)
    mixer.token_conv.weight.zero_()
    mixer.proj = torch.nn.Identity()
    x = torch.randn(2, 35, 8, dtype=torch.float64)
    length = mixer(x, (5, 7)).unflatten(-1, (2, 4)).norm(dim=-1)
    torch.testing.assert_close(length, torch.ones_like(length))


def test_rows_of_angular_attention_skip_taps_of_unseen_tokens_and_padding(randomise):
    """Padding is zero, so that no weight of it would be felt; but there is none."""
    mixer = randomise(AngularAttention(8, 2, layout=SquareWindows(4, shifted=False))).requires_grad_(False)
    x = torch.randn(2, 35, 8, dtype=torch.float64)
    ((q, k, v, windows),) = mixer.partition(x, (5, 7))
    rows = mixer.attention_weights(q, k, v, windows)
    padding = (v == 0).all(dim=-1)
    assert padding.any()
    assert torch.all(rows.transpose(2, 3)[padding] == 0)
    seen = torch.rand(1, 1, 16, 16) < 0.5
    query, token = 6, 9
    tap = mixer.token_conv.weight[:, 0, 4 + token - query, 0]
    for there in (True, False):
        seen[..., query, token] = there
        rows = mixer.attention_weights(q, k, v, windows, seen)[0, :, query, token]
        without = ops.angular_weights(q, k, v=v, mask=~padding[:, 0], attn_mask=seen)
        torch.testing.assert_close(rows - without[0, :, query, token], tap if there else torch.zeros_like(tap))
