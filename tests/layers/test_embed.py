"""Patch embedding, downsampling, position embedding and its cache."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from inlinevit.layers import ConvEmbed, PatchMerging
from inlinevit.layers.embed import resample_pos_embed
from tests.positions import LearnedPositions

# Patch embedding

# kernel, stride, padding: plain patches, and the overlapping ones of CSWin
PATCHES = [(4, 4, 0), (2, 2, 0), (16, 16, 0), (3, 2, 1), (7, 4, 2)]


@pytest.mark.parametrize("size", [(8, 8), (9, 8), (8, 11), (10, 13), (1, 1), (33, 18)])
@pytest.mark.parametrize(("kernel", "stride", "padding"), PATCHES)
def test_no_pixel_is_lost(kernel, stride, padding, size):
    embed = ConvEmbed(1, 2, kernel=kernel, stride=stride, padding=padding, norm=False)
    torch.nn.init.ones_(embed.proj.weight)
    x = torch.rand(1, 1, *size, requires_grad=True)
    out = embed(x)
    assert out.shape == (1, -(-size[0] // stride), -(-size[1] // stride), 2)
    out.sum().backward()
    assert torch.all(x.grad > 0)


@pytest.mark.parametrize("size", [(12, 8), (9, 11)])
def test_conv_embed(randomise, size):
    embed = randomise(ConvEmbed(3, 8, kernel=4, stride=4))
    x = torch.randn(2, 3, *size, dtype=torch.float64)
    padded = torch.zeros(2, 3, 12, 12, dtype=torch.float64)[:, :, :, : 8 if size[1] == 8 else 12]
    padded[:, :, : size[0], : size[1]] = x
    expected = F.conv2d(padded, embed.proj.weight, embed.proj.bias, stride=4).permute(0, 2, 3, 1)
    expected = F.layer_norm(expected, (8,), embed.norm.weight, embed.norm.bias, eps=1e-5)
    torch.testing.assert_close(embed(x), expected, rtol=0, atol=1e-12)


def test_overlapping_patches_are_those_of_their_convolution(randomise):
    embed = randomise(ConvEmbed(3, 8, kernel=7, stride=4, padding=2, norm=False))
    x = torch.randn(1, 3, 16, 20, dtype=torch.float64)
    expected = F.conv2d(x, embed.proj.weight, embed.proj.bias, stride=4, padding=2).permute(0, 2, 3, 1)
    torch.testing.assert_close(embed(x), expected, rtol=0, atol=1e-12)
    assert expected.shape == (1, 4, 5, 8)


# Patch merging


def test_patch_merging_order():
    """Four neighbours side by side: (0, 0), (1, 0), (0, 1), (1, 1) as (row, column)."""
    merging = PatchMerging(1, 4)
    merging.norm = torch.nn.Identity()
    with torch.no_grad():
        merging.reduction.weight.copy_(torch.eye(4))
    x = torch.arange(24.0).view(1, 1, 4, 6)  # 10·row + column would be as good
    out = merging(x)
    assert out.shape == (1, 2, 3, 4)
    for row in range(2):
        for column in range(3):
            neighbours = [(0, 0), (1, 0), (0, 1), (1, 1)]
            expected = [float(x[0, 0, 2 * row + r, 2 * column + c]) for r, c in neighbours]
            assert out[0, row, column].tolist() == expected


def test_patch_merging_keeps_channels_together(randomise):
    """As Swin writes it: four strided maps, concatenated along the channels."""
    merging = randomise(PatchMerging(3, 5))
    x = torch.randn(2, 3, 4, 6, dtype=torch.float64)
    y = x.permute(0, 2, 3, 1)
    y = torch.cat([y[:, 0::2, 0::2], y[:, 1::2, 0::2], y[:, 0::2, 1::2], y[:, 1::2, 1::2]], dim=-1)
    y = F.layer_norm(y, (12,), merging.norm.weight, merging.norm.bias) @ merging.reduction.weight.T
    torch.testing.assert_close(merging(x), y, rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", [(3, 4), (4, 3), (5, 5), (1, 1)])
def test_patch_merging_pads(size):
    merging = PatchMerging(2, 3)
    x = torch.randn(1, 2, *size)
    padded = F.pad(x, (0, size[1] % 2, 0, size[0] % 2))
    torch.testing.assert_close(merging(x), merging(padded))
    assert merging(x).shape == (1, -(-size[0] // 2), -(-size[1] // 2), 3)


# Positions


def positions(grid: tuple[int, int], prefix: int = 0, interpolation: str = "bicubic") -> LearnedPositions:
    embedding = LearnedPositions(3, grid, num_prefix_tokens=prefix, interpolation=interpolation)
    torch.nn.init.normal_(embedding.pos_embed)
    return embedding


def added(embedding: LearnedPositions, size: tuple[int, int]) -> torch.Tensor:
    """What the embedding adds to zeros, (prefix + H·W, dim)."""
    prefix = embedding.resample_pos_embed.num_prefix_tokens
    return embedding(torch.zeros(2, prefix + size[0] * size[1], 3), size)[0].detach()


modes = pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
prefixes = pytest.mark.parametrize("prefix", [0, 2])


@modes
@prefixes
@pytest.mark.parametrize("grid", [(4, 4), (2, 8), (5, 3)])
def test_positions_are_untouched_on_their_own_grid(grid, prefix, interpolation):
    embedding = positions(grid, prefix, interpolation)
    assert torch.equal(added(embedding, grid), embedding.pos_embed[0])


@modes
@prefixes
@pytest.mark.parametrize(("grid", "size"), [((4, 4), (2, 8)), ((2, 8), (4, 4)), ((2, 8), (8, 2)), ((4, 4), (7, 5))])
def test_positions_are_resized_to_another_grid(grid, size, prefix, interpolation):
    """Even where the number of tokens is the same."""
    embedding = positions(grid, prefix, interpolation)
    out = added(embedding, size)
    assert torch.equal(out[:prefix], embedding.pos_embed[0, :prefix])
    maps = embedding.pos_embed[:, prefix:].unflatten(1, grid).permute(0, 3, 1, 2)
    expected = F.interpolate(maps, size=size, mode=interpolation, antialias=interpolation == "bicubic")
    torch.testing.assert_close(out[prefix:], expected.flatten(2).transpose(1, 2)[0])
    if len(out) == embedding.pos_embed.shape[1]:
        assert not torch.allclose(out[prefix:], embedding.pos_embed[0, prefix:], atol=1e-2)


@modes
def test_a_gradient_of_rows_stays_one_when_resized(interpolation):
    """Positions that say their row, on a map twice as wide, still say their row."""
    embedding = positions((4, 4), 1, interpolation)
    with torch.no_grad():
        embedding.pos_embed[0, 1:] = torch.arange(4.0).repeat_interleave(4)[:, None]
    assert torch.allclose(added(embedding, (4, 8))[1:, 0], torch.arange(4.0).repeat_interleave(8), atol=1e-5)


@modes
@prefixes
def test_set_grid(prefix, interpolation):
    embedding = positions((4, 4), prefix, interpolation)
    expected, own = added(embedding, (3, 6)), embedding.pos_embed.detach().clone()
    embedding.set_grid((3, 6))
    assert embedding.resample_pos_embed.grid == (3, 6)
    assert isinstance(embedding.pos_embed, torch.nn.Parameter)
    assert embedding.pos_embed.requires_grad
    assert embedding.pos_embed.shape == (1, prefix + 18, 3)
    torch.testing.assert_close(embedding.pos_embed[0].detach(), expected)
    assert torch.equal(embedding.pos_embed[0, :prefix], own[0, :prefix])
    torch.testing.assert_close(added(embedding, (3, 6)), expected)


def test_positions_take_gradients_and_keep_dtype():
    embedding = LearnedPositions(3, (4, 4), num_prefix_tokens=1, dtype=torch.bfloat16)
    out = embedding(torch.zeros(1, 1 + 35, 3, dtype=torch.bfloat16), (5, 7))
    assert out.dtype == torch.bfloat16
    out.float().square().sum().backward()
    assert embedding.pos_embed.grad.abs().max() > 0


@pytest.mark.parametrize("in_chans", [1, 3])
@pytest.mark.parametrize("kernel", [8, 16])
def test_large_patches_are_those_of_the_convolution(in_chans, kernel):
    embed = ConvEmbed(in_chans, 12, kernel=kernel, stride=kernel).double()
    assert embed.patches_as_rows
    x = torch.randn(2, in_chans, 33, 40, dtype=torch.float64, requires_grad=True)
    out = embed(x)
    embed.patches_as_rows = False
    expected = embed(x)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    leaves = [x, *embed.parameters()]
    cotangent = torch.randn_like(out)
    gradients = torch.autograd.grad(out, leaves, cotangent)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, leaves, cotangent), rtol=0, atol=1e-10)


def test_frozen_positions_are_resized_once():
    positions = LearnedPositions(4, (3, 3), num_prefix_tokens=1)
    x = torch.randn(1, 1 + 20, 4)
    expected = positions(x, (4, 5))
    positions.freeze()
    assert torch.equal(positions(x, (4, 5)), expected)
    first = positions.at((4, 5))
    assert positions.at((4, 5)) is first
    assert torch.equal(positions(torch.zeros(1, 10, 4), (3, 3)), positions.pos_embed)


def frozen(dim: int = 4, grid: tuple[int, int] = (3, 3)) -> LearnedPositions:
    torch.manual_seed(0)
    positions = LearnedPositions(dim, grid, num_prefix_tokens=1)
    positions.freeze()
    return positions


def resized(positions: LearnedPositions, size: tuple[int, int]) -> torch.Tensor:
    """What the positions should be: resized from the learned ones as they are."""
    resample = positions.resample_pos_embed
    return resample_pos_embed(
        positions.pos_embed, resample.grid, size, resample.num_prefix_tokens, resample.interpolation
    ).detach()


def by_load(positions):
    positions.load_state_dict({"pos_embed": torch.randn_like(positions.pos_embed)})


def by_assignment(positions):
    positions.load_state_dict({"pos_embed": torch.randn_like(positions.pos_embed)}, assign=True)


def in_place(positions):
    with torch.no_grad():
        positions.pos_embed.mul_(3)


def by_data(positions):
    positions.pos_embed.data.mul_(3)


def by_numpy(positions):
    positions.pos_embed.detach().numpy()[0, 3] += 1


def by_new_data(positions):
    positions.pos_embed.data = torch.randn_like(positions.pos_embed)


def there_and_back(positions):
    positions.half().float()


CHANGES = {
    "load": by_load,
    "assign": by_assignment,
    "in place": in_place,
    "data": by_data,
    "numpy": by_numpy,
    "new data": by_new_data,
    "half and back": there_and_back,
    "half": lambda positions: positions.half(),
    "bfloat16": lambda positions: positions.to(torch.bfloat16),
    "double": lambda positions: positions.double(),
    "reset": lambda positions: positions.reset_parameters(),
    "grid": lambda positions: positions.set_grid((5, 2)),
    "parameter": lambda positions: setattr(positions, "pos_embed", nn.Parameter(torch.randn(1, 10, 4))),
    "interpolation": lambda positions: setattr(positions.resample_pos_embed, "interpolation", "bilinear"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_cached_positions_follow_the_learned_ones(change):
    positions = frozen()
    with torch.no_grad():
        before = positions.at((4, 5)).clone()
        CHANGES[change](positions)
        found = positions.at((4, 5))
    assert found.dtype == positions.pos_embed.dtype
    assert torch.equal(found, resized(positions, (4, 5)))
    assert not torch.equal(found.double(), before.double()) or change in ("bfloat16", "double")


def test_cached_positions_of_many_sizes_do_not_add_up():
    positions = frozen(64, (14, 14))
    with torch.no_grad():
        for side in range(20, 140):
            positions.at((side, side))
    assert 0 < positions.resample_pos_embed.cache.state.cache.nbytes <= 2**23
    assert len(positions.resample_pos_embed.cache.state.cache) <= 8


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_keep_positions_of_their_own(duplicate):
    positions = frozen(64, (14, 14))
    positions.at((40, 40))
    assert len(pickle.dumps(positions)) < 1.2 * positions.pos_embed.nbytes
    other = duplicate(positions)
    assert other.resample_pos_embed.cache.state is None
    with torch.no_grad():
        other.pos_embed.mul_(2)
    assert torch.equal(other.at((40, 40)), resized(other, (40, 40)))
    assert torch.equal(positions.at((40, 40)), resized(positions, (40, 40)))
    assert list(positions.state_dict()) == ["pos_embed"]


def test_positions_that_learn_again_get_gradients():
    positions = frozen()
    positions.at((4, 5))
    positions.requires_grad_(True)
    for _ in range(2):
        positions.pos_embed.grad = None
        positions.at((4, 5)).sum().backward()
        assert positions.pos_embed.grad.abs().sum() > 0


def test_positions_kept_in_inference_mode_serve_gradients_later():
    positions, x = frozen(), torch.randn(1, 21, 4, requires_grad=True)
    with torch.inference_mode():
        kept = positions.at((4, 5))
    assert positions.at((4, 5)) is kept
    assert not kept.is_inference()
    (positions(x, (4, 5)) ** 2).sum().backward()
    assert x.grad is not None


def test_a_table_made_in_inference_mode_is_not_trusted():
    with torch.inference_mode():
        positions = frozen()
        positions.at((4, 5))
        positions.pos_embed.mul_(2)
        assert torch.equal(positions.at((4, 5)), resized(positions, (4, 5)))


def test_another_grid_leaves_positions_frozen():
    positions = frozen()
    positions.set_grid((5, 5))
    assert not positions.pos_embed.requires_grad
    learning = LearnedPositions(4, (3, 3))
    learning.set_grid((5, 5))
    assert learning.pos_embed.requires_grad


def test_functional_calls_see_their_own_table():
    positions, x = frozen(), torch.zeros(1, 21, 4)
    positions.at((4, 5))
    table = torch.randn_like(positions.pos_embed)
    found = torch.func.functional_call(positions, {"pos_embed": table}, (x, (4, 5)))
    assert torch.equal(found, resample_pos_embed(table, (3, 3), (4, 5), 1, "bicubic"))
    batched = torch.func.vmap(lambda x: positions(x, (4, 5)))(torch.zeros(3, 1, 21, 4))
    assert torch.equal(batched[2], resized(positions, (4, 5)))
    gradient = torch.func.grad(lambda x: (positions(x, (4, 6)) ** 2).sum())(torch.zeros(1, 25, 4))
    torch.testing.assert_close(gradient, 2 * resized(positions, (4, 6)))
    assert torch.equal(positions.at((4, 6)), resized(positions, (4, 6)))


def test_graphs_hold_no_cached_positions():
    positions, x = frozen(), torch.zeros(1, 21, 4)
    positions.at((4, 5))

    class Fixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.positions = positions

        def forward(self, x):
            return self.positions(x, (4, 5))

    model = Fixed()
    graphs = {
        "export": torch.export.export(model, (x,)).module(),
        "trace": torch.jit.trace(model, x),
        "compile": torch.compile(model, backend="eager", fullgraph=True),
    }
    for name, graph in graphs.items():
        assert torch.equal(graph(x), resized(positions, (4, 5))), name
    with torch.no_grad():
        positions.pos_embed.mul_(2)
    # Exported programs and traces share the parameters.
    for name, graph in graphs.items():
        assert torch.equal(graph(x), resized(positions, (4, 5))), name


def test_threads_get_the_positions_of_their_sizes():
    positions = frozen(16, (7, 7))
    sizes = [(side, side + 1) for side in range(4, 16)]
    expected = {size: resized(positions, size) for size in sizes}

    def look(start):
        with torch.no_grad():
            return all(torch.equal(positions.at(size), expected[size]) for size in (sizes[start:] + sizes[:start]) * 20)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(look, range(8)))
