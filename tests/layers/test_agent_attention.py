"""Agent attention's own: biases of prefix tokens and other grids. Its numbers are in test_base_attention.py."""

import pytest
import torch
import torch.nn.functional as F

from inlinevit.layers import AgentAttention


def test_prefix_tokens_have_biases_of_their_own(randomise):
    mixer = randomise(AgentAttention(8, 2, grid=(3, 4), agent_side=2, num_prefix_tokens=1, lepe=0))
    x = torch.randn(2, 13, 8, dtype=torch.float64)
    q, k, v = (y.unflatten(2, (2, 4)).transpose(1, 2) for y in mixer.qkv(x).split(8, dim=2))
    pooled = F.adaptive_avg_pool2d(q[:, :, 1:].transpose(2, 3).reshape(4, 4, 3, 4), 2).flatten(2)
    agents = pooled.transpose(1, 2).view(2, 2, 4, 4)

    def full(maps, rows, columns, prefix):
        bias = F.interpolate(maps, (3, 4), mode="bilinear") + rows + columns
        return torch.cat([prefix, bias.flatten(2)], dim=2)

    # (heads, agents, tokens)
    of_keys = full(mixer.key_map_bias, mixer.key_row_bias, mixer.key_column_bias, mixer.key_prefix_bias)
    of_queries = full(
        mixer.query_map_bias,
        mixer.query_row_bias.permute(0, 3, 1, 2),
        mixer.query_column_bias.permute(0, 3, 1, 2),
        mixer.query_prefix_bias.transpose(1, 2),
    )
    first = (0.5 * q @ agents.transpose(2, 3) + of_queries.transpose(1, 2)).softmax(dim=3)
    second = (0.5 * agents @ k.transpose(2, 3) + of_keys).softmax(dim=3)
    expected = mixer.proj((first @ second @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(mixer(x, (3, 4)), expected, rtol=1e-10, atol=1e-10)


def test_another_grid_resizes_rows_and_columns(randomise):
    mixer = randomise(AgentAttention(8, 2, grid=(3, 4), agent_side=2))
    x = torch.randn(1, 40, 8, dtype=torch.float64)
    before = mixer(x, (5, 8))
    mixer.set_grid((5, 8))
    assert mixer.key_column_bias.shape == (2, 4, 1, 8)
    torch.testing.assert_close(mixer(x, (5, 8)), before, rtol=1e-10, atol=1e-10)


def test_rows_of_masked_queries_have_their_own_agents(randomise):
    """As if the tokens that a query does not see were padding."""
    mixer = randomise(AgentAttention(8, 2, grid=(3, 4), agent_side=2))
    ((q, k, v, windows),) = mixer.partition(torch.randn(1, 12, 8, dtype=torch.float64), (3, 4))
    mask = torch.rand(1, 1, 12, 12) < 0.6
    rows = mixer.attention_weights(q, k, v, windows, mask)
    for i in range(12):
        one = mixer.attention_weights(q, k, v, windows, mask[:, :, i : i + 1])
        torch.testing.assert_close(rows[:, :, i], one[:, :, i], rtol=0, atol=1e-12)
        hidden = ~mask[0, 0, i]
        changed = k.clone()
        changed[:, :, hidden] += 3
        same = mixer.attention_weights(q[:, :, i : i + 1], changed, v, windows, mask[:, :, i : i + 1], first=i)
        torch.testing.assert_close(same[:, :, 0], rows[:, :, i], rtol=0, atol=1e-10)


def test_wrong_sides_are_refused():
    with pytest.raises(ValueError, match="agent_side is 0: it should be from 1 to 64"):
        AgentAttention(8, 2, agent_side=0)
