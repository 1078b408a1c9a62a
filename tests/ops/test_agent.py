"""Agent attention: what holds of it alone. Parity with the explicit form is in test_weights.py."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from inlinevit import ops
from inlinevit.ops.pooling import pool_maps

SIZES = [(7, 7), (14, 14), (5, 9), (16, 3), (1, 1), (1, 8), (20, 23)]


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("size", SIZES)
def test_pooling_is_torchs(size):
    maps = draw(2, *size, 3)
    expected = F.adaptive_avg_pool2d(maps.permute(0, 3, 1, 2), (7, 7)).permute(0, 2, 3, 1)
    torch.testing.assert_close(pool_maps(maps, (7, 7)), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("prefix", [0, 2])
def test_agents_are_pooled_from_the_map(prefix):
    q = draw(2, 3, prefix + 30, 4)
    agents, visible = ops.pool_agents(q, (5, 6), 7)
    assert visible is None
    for head in range(3):
        maps = q[:, head, prefix:].transpose(1, 2).reshape(2, 4, 5, 6)
        expected = F.adaptive_avg_pool2d(maps, (7, 7)).flatten(2).transpose(1, 2)
        torch.testing.assert_close(agents[:, head], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e300])
def test_agents_are_means_of_real_tokens(garbage):
    q = draw(2, 1, 1 + 36, 4)
    mask = torch.ones(2, 6, 6, dtype=torch.bool)
    # One row of image 0 and the lower right quarter of image 1, which is a whole cell, are padding.
    mask[0, 1] = False
    mask[1, 3:, 3:] = False
    mask = torch.cat([torch.ones(2, 1, dtype=torch.bool), mask.flatten(1)], dim=1)
    q = q.masked_fill(~mask[:, None, :, None], garbage).requires_grad_()
    agents, visible = ops.pool_agents(q, (6, 6), 2, mask.unsqueeze(1))
    assert visible.tolist() == [[[True] * 4], [[True, True, True, False]]]
    maps = q.detach()[:, 0, 1:].view(2, 6, 6, 4)
    torch.testing.assert_close(agents[0, 0, 0], maps[0, [0, 2], :3].mean(dim=(0, 1)))
    torch.testing.assert_close(agents[1, 0, 1], maps[1, :3, 3:].mean(dim=(0, 1)))
    assert torch.all(agents[1, 0, 3] == 0)
    (gradient,) = torch.autograd.grad(agents.sum(), q)
    assert gradient.isfinite().all()
    assert torch.all(gradient[:, 0][~mask] == 0)


def test_it_is_the_product_of_two_softmax_matrices():
    q, k, v, agents = draw(2, 3, 5, 4), draw(2, 3, 7, 4), draw(2, 3, 7, 2), draw(2, 3, 4, 4)
    query_bias, key_bias = draw(3, 5, 4), draw(3, 7, 4)
    out = ops.agent_attention(q, k, v, agents, query_bias, key_bias)
    rows = ops.agent_weights(q, k, agents=agents, query_bias=query_bias, key_bias=key_bias)
    for image in range(2):
        for head in range(3):
            a = agents[image, head]
            first = (0.5 * q[image, head] @ a.T + query_bias[head]).softmax(dim=-1)
            second = (0.5 * a @ k[image, head].T + key_bias[head].T).softmax(dim=-1)
            torch.testing.assert_close(rows[image, head], first @ second, rtol=0, atol=1e-12)
            torch.testing.assert_close(out[image, head], first @ second @ v[image, head], rtol=0, atol=1e-12)
    assert torch.linalg.matrix_rank(rows).max() <= 4


def test_gradients_reach_agents_and_biases():
    leaves = [draw(1, 2, 3, 4), draw(1, 2, 5, 4), draw(1, 2, 5, 2), draw(1, 2, 2, 4), draw(2, 3, 2), draw(2, 5, 2)]
    mask = torch.tensor([[True, True, False, True, True]])

    def attend(*tensors: Tensor) -> Tensor:
        return ops.agent_attention(*tensors, mask=mask)

    assert torch.autograd.gradcheck(attend, tuple(leaf.requires_grad_() for leaf in leaves))


def test_queries_do_not_attend_to_masked_agents():
    q, k, v, agents = draw(2, 1, 5, 4), draw(2, 1, 7, 4), draw(2, 1, 7, 2), draw(2, 1, 3, 4)
    agent_mask = torch.tensor([[[True, False, True]], [[True, True, True]]])
    out = ops.agent_attention(q, k, v, agents, agent_mask=agent_mask)
    expected = ops.agent_attention(q[:1], k[:1], v[:1], agents[:1, :, [0, 2]])
    torch.testing.assert_close(out[:1], expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(out[1:], ops.agent_attention(q[1:], k[1:], v[1:], agents[1:]), rtol=0, atol=1e-12)


def test_an_image_without_tokens_has_no_agents():
    q = draw(1, 1, 4, 2).requires_grad_()
    mask = torch.zeros(1, 4, dtype=torch.bool)
    agents, visible = ops.pool_agents(q, (2, 2), 2, mask.unsqueeze(1))
    out = ops.agent_attention(q, q, q, agents, mask=mask, agent_mask=visible)
    assert torch.all(out == 0)
    (gradient,) = torch.autograd.grad(out.sum(), q)
    assert gradient.isfinite().all()
