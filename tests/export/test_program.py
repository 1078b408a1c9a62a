"""torch.export of all families: nothing in the graph depends on the shape of the example."""

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

from inlinevit.export.program import AdaptivePoolByProducts, export_program, exportable
from inlinevit.layers.embed import resample_by_products, resample_pos_embed

# One block per stage, two where every second is shifted; the last windows of Swin cover its map at some sizes only.
SMALL = {
    "inline_deit_tiny": {"depth": 1},
    "inline_pvt_tiny": {"depths": (1, 1, 1, 1)},
    "inline_swin_tiny": {"depths": (1, 1, 1, 2)},
    "inline_cswin_tiny": {"depths": (1, 1, 1, 1)},
    "pvt_tiny": {"depths": (1, 1, 1, 1)},
    "cswin_tiny": {"depths": (1, 1, 1, 1)},
    **{
        f"{name}_deit_tiny": {"depth": 1}
        for name in ("softmax", "linear", "hydra", "efficient", "angular", "enhanced", "focused")
    },
}
FAST = ("inline_deit_tiny",)
SHAPES = ((2, 3, 224, 224), (3, 3, 97, 250), (2, 3, 40, 33), (2, 3, 256, 480))


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in SMALL]
)
def test_programs_take_any_batch_height_and_width(name: str) -> None:
    torch.manual_seed(0)
    model = timm.create_model(name, **SMALL[name], num_classes=10).eval()
    module = export_program(model, 3).module()
    for shape in SHAPES:
        images = torch.randn(*shape)
        with torch.no_grad():
            torch.testing.assert_close(module(images), model(images), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize("size", [(14, 14), (5, 23), (1, 1), (20, 19), (64, 100), (7, 9)])
def test_positions_are_resized_by_products_as_by_torch(interpolation: str, size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    for grid in ((14, 14), (7, 9)):
        positions = torch.randn(1, 1 + grid[0] * grid[1], 8)
        expected = resample_pos_embed(positions, grid, size, 1, interpolation)
        found = resample_by_products(positions, grid, size, 1, interpolation)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        if size == grid:
            assert torch.equal(found, positions)


@pytest.mark.parametrize("size", [(1, 1), (5, 7), (6, 6), (13, 40)])
def test_adaptive_pooling_by_products_equals_that_of_torch(size: tuple[int, int]) -> None:
    x = torch.randn(2, 3, *size)
    for count in (2, 3, 6):
        found = AdaptivePoolByProducts((count, count))(x)
        torch.testing.assert_close(found, F.adaptive_avg_pool2d(x, count), rtol=1e-5, atol=1e-6)


def test_only_pooling_to_several_bins_is_replaced() -> None:
    model = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.AdaptiveAvgPool2d(3))
    replaced = exportable(model)
    assert [type(module) for module in replaced.children()] == [nn.AdaptiveAvgPool2d, AdaptivePoolByProducts]
    assert type(model[1]) is nn.AdaptiveAvgPool2d
