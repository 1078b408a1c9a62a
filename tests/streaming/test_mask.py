"""With a mask, background is treated as padding in every layer."""

import pytest
import torch

import inlinevit
from inlinevit import ops
from inlinevit.layers import SoftmaxAttention
from inlinevit.ops.local import add_convolution
from inlinevit.ops.windows import covers_map, merge_heads, partition_heads, window_partition, window_reverse
from inlinevit.streaming import TensorSink, blocks
from inlinevit.streaming.mask import stage_masks
from tests.streaming.models import make_image, make_model
from tests.streaming.test_stream import CountedSource, relative_error


def masked_attention(block, x, feat_size, mask):
    """Explicit attention of a block, N×N, in which background takes no part."""
    attn, normed = block.attn, block.norm1(x)
    kernel_tokens = x if block.kernels_before_norm else normed
    prefix = x.shape[1] - mask.numel()
    real = torch.cat([torch.ones(prefix, dtype=torch.bool), mask.flatten()])
    outputs = []
    for windows in attn.layout(feat_size):
        qkv = attn.qkv(normed)
        q, k, v = partition_heads(qkv, windows, attn.num_heads)
        window_real = real[None] if covers_map(windows) else window_partition(real.view(1, -1, 1), windows)[..., 0]
        v = v.masked_fill(~window_real[:, None, :, None], 0.0)
        if isinstance(attn, SoftmaxAttention):
            weights = ops.softmax_weights(q, k, bias=attn.score_bias(k, windows), mask=window_real)
            taps = None
        else:
            weights = ops.inline_weights(q, k, feature_map=attn.feature_map.name, mask=window_real)
            channels = attn.dim // windows.num_head_groups
            tokens = kernel_tokens[..., windows.head_group * channels :][..., :channels]
            tokens = tokens if covers_map(windows) else window_partition(tokens, windows)
            tokens = tokens.masked_fill(~window_real[:, :, None], 0.0)
            count = window_real.sum(dim=1, keepdim=True).clamp(min=1)
            taps = attn.local_residual(tokens.sum(dim=1) / count, windows)
        group = add_convolution(merge_heads(weights @ v), v, taps, attn.static_kernels(windows), windows)
        outputs.append(window_reverse(group, windows))
    return attn.proj(torch.cat(outputs, dim=-1))


def masked_forward(model, image, masks):
    """The forward pass of a model with explicit attention, in which background takes no part."""
    x = image
    for stage, mask in zip(model.stage_list(), masks, strict=True):
        tokens, feat_size = stage.embed_tokens(x)
        prefix = tokens.shape[1] - mask.numel()
        real = torch.cat([torch.ones(prefix, dtype=torch.bool), mask.flatten()])[None, :, None]
        tokens = tokens.masked_fill(~real, 0.0)
        for block in stage.blocks:
            tokens = tokens + masked_attention(block, tokens, feat_size, mask)
            tokens = (tokens + block.mlp(block.norm2(tokens))).masked_fill(~real, 0.0)
        x = tokens[:, prefix:].unflatten(1, feat_size).permute(0, 3, 1, 2)
    tokens = model.norm(tokens)
    if model.global_pool == "token":
        return model.head(tokens[:, 0]), x
    return model.head(tokens[:, prefix:][:, mask.flatten()].mean(dim=1)), x


def make_mask(height, width):
    """A mask of pixels with holes, and with whole rows of background."""
    mask = (torch.arange(height)[:, None] // 9 + torch.arange(width) // 13) % 3 > 0
    mask[height // 2 : height // 2 + 40] = False
    mask[:, -20:] = False
    return mask


KINDS = ["deit", "class token, avg", "pvt", "swin", "cswin", "inline windows", "inline stripes"]


@pytest.mark.parametrize(("kind", "native"), [*((kind, True) for kind in KINDS), ("deit", False), ("cswin", False)])
def test_background_is_padding(kind, native, monkeypatch):
    if not native:
        monkeypatch.setattr(blocks, "pack_block", lambda block, *, int8: None)
    model, image, mask = make_model(kind), make_image(110, 133), make_mask(110, 133)
    feat_sizes, sinks = [], {"norm": TensorSink()}
    size = image
    for stage in model.stage_list():
        tokens, feat_size = stage.embed_tokens(size)
        size = torch.zeros(1, tokens.shape[2], *feat_size)
        feat_sizes.append(feat_size)
    masks = stage_masks(mask, (110, 133), feat_sizes, model.reductions)
    assert all(0.1 < each.float().mean() < 1 for each in masks[:2])
    with torch.no_grad():
        expected, _ = masked_forward(model, image, masks)
        assert relative_error(model(image), expected) > 1e-3
    out = inlinevit.stream(model, image, mask=mask, chunk_rows=3, features=sinks)
    assert relative_error(out, expected) < 1e-5
    assert bool((sinks["norm"].map[~masks[-1]] == 0).all())
    # The mask of the tokens of the first stage says the same.
    assert torch.equal(inlinevit.stream(model, image, mask=masks[0], chunk_rows=3), out)


def test_pixels_of_background_do_not_matter():
    model, image = make_model("pvt"), make_image(96, 96)
    mask = torch.zeros(96, 96, dtype=torch.bool)
    mask[10:50, 33:90] = True
    inside = stage_masks(mask, (96, 96), [(24, 24)], [4])[0].repeat_interleave(4, 0).repeat_interleave(4, 1)
    other = torch.where(inside, image, 100 * torch.randn_like(image))
    assert torch.equal(inlinevit.stream(model, image, mask=mask), inlinevit.stream(model, other, mask=mask))
    assert not torch.equal(inlinevit.stream(model, image), inlinevit.stream(model, other))


def test_a_full_mask_changes_nothing():
    model, image = make_model("swin"), make_image(70, 90)
    full = torch.ones(70, 90, dtype=torch.bool)
    assert relative_error(inlinevit.stream(model, image, mask=full), inlinevit.stream(model, image)) < 1e-6


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(64, 64), "mask must be boolean"),
        (torch.ones(64, 63, dtype=torch.bool), "it should have those of the image, 64 × 64, or of its tokens, 4 × 4"),
        (torch.zeros(64, 64, dtype=torch.bool), "excludes the whole image"),
    ],
)
def test_masks_that_do_not_fit_are_refused(mask, message):
    source = CountedSource(make_image(64, 64))
    with pytest.raises(ValueError, match=message):
        inlinevit.stream(make_model("deit"), source, mask=mask)
    assert source.read == []


def test_a_mask_with_reduced_keys_is_refused():
    with pytest.raises(ValueError, match="leave out the mask"):
        inlinevit.stream(make_model("reduced softmax"), make_image(64, 64), mask=torch.ones(64, 64, dtype=torch.bool))


def test_a_token_is_real_if_any_pixel_of_its_cell_is():
    mask = torch.zeros(9, 6, dtype=torch.bool)
    mask[8, 5] = mask[0, 3] = True
    first, second = stage_masks(mask, (9, 6), [(3, 2), (2, 1)], [4, 8])
    assert first.tolist() == [[True, False], [False, False], [False, True]]
    assert second.tolist() == [[True], [True]]
    assert stage_masks(first, (9, 6), [(3, 2), (2, 1)], [4, 8])[1].tolist() == second.tolist()
