"""The attention of ViT³ as a module, against autograd, image by image and head by head."""

import pytest
import torch
import torch.nn.functional as F

from inlinevit.layers import SquareWindows, ViT3Attention


@pytest.mark.parametrize("size", [(3, 5), (1, 1), (1, 4)])
@pytest.mark.parametrize("options", [{}, {"gate": True, "lepe": 3, "qkv_bias": False}], ids=["plain", "surrounded"])
def test_each_head_takes_a_step(randomise, size, options):
    mixer = randomise(ViT3Attention(8, 2, **options))
    count = size[0] * size[1]
    x = torch.randn(2, count, 8, dtype=torch.float64)
    # Three heads of four channels: two, and the convolution.
    q, k, v = (y.unflatten(2, (3, 4)) for y in mixer.qkv(x).split(12, dim=2))
    images = []
    for image in range(2):
        heads = []
        for head in range(2):
            weights = [weight[head].detach().requires_grad_() for weight in (mixer.weight1, mixer.weight2)]

            def apply(t: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
                return (t @ weights[0]) * F.silu(t @ weights[1])

            loss = -(apply(k[image, :, head], weights) * v[image, :, head]).sum() / (3 * count)
            gradients = torch.autograd.grad(loss, weights)
            trained = [w - g / (1 + g.norm(dim=0)) for w, g in zip(weights, gradients, strict=True)]
            heads.append(apply(q[image, :, head], trained))
        kernel = mixer.conv_weight.detach().requires_grad_()
        maps = [y[image, :, 2].T.reshape(1, 4, *size).detach() for y in (q, k, v)]
        loss = -(F.conv2d(maps[1], kernel, padding=1, groups=4) * maps[2]).sum() / (3 * count)
        (gradient,) = torch.autograd.grad(loss, kernel)
        kernel = kernel - gradient / (1 + gradient.flatten(1).norm(dim=1)[:, None, None, None])
        heads.append(F.conv2d(maps[0], kernel, padding=1, groups=4)[0].flatten(1).T)
        images.append(torch.cat(heads, dim=1))
    out = torch.stack(images)
    if mixer.lepe is not None:
        values = v.flatten(2).transpose(1, 2).unflatten(2, size)
        out = out + mixer.lepe(values).flatten(2).transpose(1, 2)
    if mixer.gate is not None:
        out = out * mixer.gate(x)
    torch.testing.assert_close(mixer(x, size), mixer.proj(out), rtol=1e-10, atol=1e-10)


def test_windows_and_weights_are_refused():
    with pytest.raises(ValueError, match="ViT3Attention attends to the whole map"):
        ViT3Attention(8, 2, layout=SquareWindows(3, shifted=False))
    mixer = ViT3Attention(8, 2)
    ((q, k, v, windows),) = mixer.partition(torch.randn(1, 6, 8), (2, 3))
    with pytest.raises(NotImplementedError):
        mixer.attention_weights(q, k, v, windows)
