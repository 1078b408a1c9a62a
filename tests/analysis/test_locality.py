"""Locality, of rows whose answer is known."""

import pytest
import timm
import torch

from inlinevit.analysis import Convolution, measure_locality
from inlinevit.analysis import layer as layer_module
from inlinevit.analysis.locality import layer_locality


def neighbourhoods(height: int, width: int, reach: int = 1) -> torch.Tensor:
    """Which tokens of a map are neighbours, straight from their coordinates."""
    places = [(row, column) for row in range(height) for column in range(width)]
    near = [[max(abs(a - c), abs(b - d)) <= reach for c, d in places] for a, b in places]
    return torch.tensor(near)


def neighbours_of_map(height: int, width: int) -> int:
    """Pairs of neighbours, counted along each axis: 3 for a token inside, 2 at an end (1 if it is alone)."""
    along = [sum(1 for j in range(n) for i in range(n) if abs(i - j) <= 1) for n in (height, width)]
    return along[0] * along[1]


@pytest.mark.parametrize("size", [(4, 4), (5, 7), (1, 6), (3, 1)])
@pytest.mark.parametrize("prefix", [0, 1, 3])
def test_uniform_attention_gives_its_share_and_less_at_borders(layer_of_rows, size, prefix):
    tokens = prefix + size[0] * size[1]
    found = layer_locality(layer_of_rows(torch.full((tokens, tokens), 1 / tokens, dtype=torch.float64), size))
    expected = neighbours_of_map(*size) / (size[0] * size[1]) / tokens
    numbers = [found.uniform, found.attention, found.total, found.attention_share, found.total_share]
    assert numbers == pytest.approx([expected] * 5, rel=1e-12)


def test_far_from_borders_uniform_is_nine_in_n(layer_of_rows):
    """On a torus it would be so everywhere; here the middle of a large map alone."""
    rows = torch.full((625, 625), 1 / 625, dtype=torch.float64)
    layer = layer_of_rows(rows, (25, 25))
    assert int(layer.near(312, 313, 3).sum()) == 9
    assert int(layer.near(0, 1, 3).sum()) == 4
    assert int(layer.near(1, 2, 3).sum()) == 6
    assert layer_locality(layer).attention == pytest.approx((73 / 25) ** 2 / 625, rel=1e-12)


def test_a_model_that_sees_its_neighbours_alone_has_locality_one(layer_of_rows):
    near = neighbourhoods(5, 4).double()
    found = layer_locality(layer_of_rows(near / near.sum(dim=1, keepdim=True), (5, 4)))
    assert [found.attention, found.attention_share] == pytest.approx([1, 1], rel=1e-12)
    far = 1 - neighbourhoods(5, 4, 2).double()
    assert layer_locality(layer_of_rows(far, (5, 4))).attention == 0


def test_a_wider_neighbourhood(layer_of_rows):
    near = neighbourhoods(6, 6, 2).double()
    layer = layer_of_rows(near / near.sum(dim=1, keepdim=True), (6, 6))
    assert layer_locality(layer, side=5).attention == pytest.approx(1, rel=1e-12)
    assert layer_locality(layer, side=3).attention < 0.7
    with pytest.raises(ValueError, match="odd"):
        layer_locality(layer, side=4)


def test_the_convolution_counts_as_a_part_of_the_map(layer_of_rows):
    """Uniform rows, and a kernel whose taps are 0.1 on one channel and 0.3 on the other: 0.2 a neighbour."""
    kernels = torch.tensor([0.1, 0.3], dtype=torch.float64)[None, None, :, None].expand(1, 1, 2, 9)
    rows = torch.full((17, 17), 1 / 17, dtype=torch.float64)
    found = layer_locality(layer_of_rows(rows, (4, 4), Convolution(kernels, None, (4, 4))))
    per_query = neighbours_of_map(4, 4) / 16
    assert found.attention == pytest.approx(per_query / 17)
    assert found.total == pytest.approx(per_query / 17 + 0.2 * per_query)
    assert found.attention_share < found.total_share < 1


def test_negative_weights_count_as_negative(layer_of_rows):
    near = neighbourhoods(3, 3).double()
    rows = torch.where(near > 0, -0.5, 1.0)
    found = layer_locality(layer_of_rows(rows, (3, 3)))
    assert found.attention == pytest.approx(-0.5 * near.sum().item() / 9)
    assert found.attention_share == pytest.approx(
        float(((rows.abs() * near).sum(dim=1) / rows.abs().sum(dim=1)).mean())
    )


def test_pieces_change_nothing(layer_of_rows, monkeypatch):
    layer = layer_of_rows(torch.rand(21, 21, dtype=torch.float64), (4, 5))
    whole = layer_locality(layer)
    monkeypatch.setattr(layer_module, "CHUNK", 21 * 4)
    assert len(list(layer.chunks())) == 6
    pieces = layer_locality(layer)
    assert pieces.attention == pytest.approx(whole.attention, rel=1e-12)
    assert pieces.uniform == pytest.approx(whole.uniform, rel=1e-12)


def test_batches_are_averaged_by_their_images():
    model = timm.create_model(
        "inline_swin_tiny", depths=(1, 1), num_heads=(2, 2), embed_dim=16, window_size=4, attention="inline"
    )
    images = torch.randn(3, 3, 40, 56)
    together = measure_locality(model.eval(), [images])
    apart = measure_locality(model, [images[:1], images[1:]])
    assert len(together) == 2
    for one, other in zip(together, apart, strict=True):
        for name, value in vars(one).items():
            if name not in ("layer", "size"):
                assert vars(other)[name] == pytest.approx(value, rel=1e-5), name
        assert one.total != one.attention


def test_keys_of_a_reduced_map_have_no_neighbourhood():
    model = timm.create_model(
        "pvt_tiny", depths=(1, 1), num_heads=(1, 2), embed_dims=(16, 32), mlp_ratios=(1, 1), sr_ratios=(2, 1)
    )
    found = measure_locality(model.eval(), [torch.randn(1, 3, 64, 64)])
    assert [layer.layer for layer in found] == ["stages.1.blocks.0.attn"]
